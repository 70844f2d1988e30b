// Splits work over the pool into chunks whose size does not depend on the number of threads, so that results are
// bit-identical for any number.
#pragma once
#include <algorithm>
#include <cstddef>
#include <utility>

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

// Cuts [0, n) into tasks of decreasing size, for work whose results do not depend on the cuts: rounds of one task per
// thread, each round half of the rest, down to tasks of about `least`. The first are long; the last, of which a slow
// processor gets fewer, even out the threads.
class DecreasingTasks {
public:
    DecreasingTasks(size_t n, size_t n_threads, size_t least) : n_(n), n_threads_(n_threads) {
        size_t rest = n;
        for (; rest > 2 * n_threads * least; rest -= n_threads * size_of(rest)) ++n_rounds_;
        n_last_ = std::min(rest, n_threads * std::clamp<size_t>(ceil_div(rest, n_threads * least), 1, 2));
    }

    size_t count() const { return n_rounds_ * n_threads_ + n_last_; }

    // The range of a task. The pool claims the task with the highest index first.
    std::pair<size_t, size_t> operator[](size_t i) const {
        const size_t at = count() - 1 - i;
        size_t begin = 0, round = 0;
        for (; round < std::min(at / n_threads_, n_rounds_); ++round) begin += n_threads_ * size_of(n_ - begin);
        const size_t j = at - round * n_threads_, size = size_of(n_ - begin);
        if (round < n_rounds_) return {begin + j * size, begin + (j + 1) * size};
        return {begin + (n_ - begin) * j / n_last_, begin + (n_ - begin) * (j + 1) / n_last_};
    }

private:
    size_t n_, n_threads_, n_rounds_ = 0, n_last_;

    size_t size_of(size_t rest) const { return ceil_div(rest, 2 * n_threads_); }
};

}  // namespace whet
