// Tasks that need memory, and the pool that runs them: what the bindings of attention share.
#pragma once
#include <nanobind/nanobind.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

#include "runtime/thread_pool.h"

namespace whet {

// Memory of a thread, kept between calls: one buffer for the task at hand, one for what a call's tasks leave.
struct Buffer {
    std::unique_ptr<void, decltype(&std::free)> memory{nullptr, &std::free};
    size_t n_bytes = 0;

    // Null if there is no more memory.
    void* at_least(size_t n) {
        if (n > n_bytes) {
            n_bytes = (n + 4095) / 4096 * 4096;
            memory.reset(std::aligned_alloc(64, n_bytes));
            if (memory == nullptr) n_bytes = 0;
        }
        return memory.get();
    }
};
inline thread_local Buffer task_scratch, call_scratch;

// Runs body(i) for i in [0, n), over the pool and without the GIL where `work`, in nanoseconds on one core, is worth
// it. A body answers whether it had the memory it needed.
template <class F>
void for_each(size_t n, double work, F&& body) {
    std::atomic<bool> complete{true};
    auto run = [&](size_t i) {
        if (!body(i)) complete.store(false, std::memory_order_relaxed);
    };
    if (n < 2 || work < 8000.0) {
        for (size_t i = 0; i < n; ++i) run(i);
    } else {
        const nanobind::gil_scoped_release release;
        parallel_for(n, run);
    }
    if (!complete.load()) throw std::bad_alloc();
}

}  // namespace whet
