// The GIL, given up where the work is worth it.
#pragma once
#include <nanobind/nanobind.h>

#include <optional>

#include "runtime/split.h"

namespace whet {

// Releases the GIL for its lifetime, unless the work is so small that this would cost more than it saves.
class ReleaseGil {
public:
    explicit ReleaseGil(double work_ns) {
        if (work_ns >= kWorthThreadsNs) release_.emplace();
    }

private:
    std::optional<nanobind::gil_scoped_release> release_;
};

}  // namespace whet
