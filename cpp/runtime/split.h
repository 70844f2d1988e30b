// Work split over the pool in pieces whose size does not depend on the number of threads: the same bits on any number.
#pragma once
#include <algorithm>
#include <cstddef>

#include "runtime/ceil_div.h"
#include "runtime/thread_pool.h"

namespace whet {

// body(begin, end) for pieces of [0, count), each of `per_task` or fewer; all at once where the work is small. As in
// parallel_for, without the host's lock where it is not.
template <class F>
void parallel_split(size_t count, size_t per_task, double work_ns, F&& body) {
    if (count == 0) return;
    if (!is_worth_threads(work_ns)) return body(size_t{0}, count);
    parallel_for(ceil_div(count, per_task), work_ns,
                 [&](size_t i) { body(i * per_task, std::min(count, (i + 1) * per_task)); });
}

}  // namespace whet
