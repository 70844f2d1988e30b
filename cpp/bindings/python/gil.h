// Work over the pool, without the GIL where that is worth it.
#pragma once
#include <nanobind/nanobind.h>

#include <optional>

#include "runtime/split.h"

namespace whet {

// Releases the GIL for its lifetime, unless the work is so small that this would cost more than it saves.
class ReleaseGil {
public:
    explicit ReleaseGil(double work_ns) {
        if (is_worth_threads(work_ns)) release_.emplace();
    }

private:
    std::optional<nanobind::gil_scoped_release> release_;
};

// parallel_split and parallel_for without the GIL.
template <class F>
void split(size_t count, size_t per_task, double work_ns, F&& body) {
    const ReleaseGil release(work_ns);
    parallel_split(count, per_task, work_ns, body);
}
template <class F>
void for_each(size_t n, double work_ns, F&& body) {
    const ReleaseGil release(work_ns);
    parallel_for(n, work_ns, body);
}

}  // namespace whet
