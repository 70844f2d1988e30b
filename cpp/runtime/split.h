// Splits work over the pool into chunks whose size does not depend on the number of threads, so that results are
// bit-identical for any number.
#pragma once
#include <algorithm>
#include <cstddef>

#include "runtime/ceil_div.h"
#include "runtime/thread_pool.h"

namespace whet {

// Calls body(begin, end) for chunks of [0, count) of at most `per_task`; for a small amount of work, once on the
// calling thread. Releases the host's lock as parallel_for does.
template <class F>
void parallel_split(size_t count, size_t per_task, double work_ns, F&& body) {
    if (count == 0) return;
    if (!is_worth_threads(work_ns)) return body(size_t{0}, count);
    parallel_for(ceil_div(count, per_task), work_ns,
                 [&](size_t i) { body(i * per_task, std::min(count, (i + 1) * per_task)); });
}

}  // namespace whet
