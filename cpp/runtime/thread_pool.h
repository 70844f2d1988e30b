// The thread pool of the process.
//
// Workers spin for a few tens of microseconds after a job and then sleep, so they start quickly within a step and leave
// the processors to other libraries' threads between steps. The calling thread works too and never waits for a sleeping
// worker: tasks are claimed one by one, so that a slow processor gets fewer. Workers are woken one by one while tasks
// are left. A nested call, or a call while another thread's job runs, runs serially on the calling thread.
#pragma once
#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "runtime/host_lock.h"

namespace whet {

// Number of threads of a job, including the caller. Default: WHET_NUM_THREADS; else OMP_NUM_THREADS; else 1 in a
// worker, which is a forked process or one that expects siblings; else n_processors(). At most max_processors().
int num_threads();
// More threads than processors share time slices, and every job waits for those without one: `oversubscribe` is for
// tests of many threads on few processors.
void set_num_threads(int n, bool oversubscribe = false);

// Declares this process a worker of a pool of processes, which share the processors.
void expect_siblings();

// Runs body(context) on n_threads threads, including the caller, and returns when all are done: GOMP_parallel in OpenMP
// runtimes.
using Fork = void (*)(void (*body)(void*), void* context, unsigned n_threads, unsigned flags);

// Runs jobs on the threads of `fork`; null restores the pool's threads. Otherwise the threads of another library, which
// spin for a while after their work, would compete with the pool for the processors.
void borrow_threads(Fork fork);

// Calls task(context, i) for every i in [0, n_tasks), in any order and on any thread. Rethrows the first exception of a
// task after all tasks have ended.
void parallel_for(size_t n_tasks, void (*task)(void* context, size_t i), void* context);

// Receives every job of parallel_for in place of the pool, and runs its tasks; null restores the pool. Until then
// num_threads() is `threads`. For runtime/job_trace.h.
using JobHook = void (*)(size_t n_tasks, void (*task)(void* context, size_t i), void* context);
void set_job_hook(JobHook hook, int threads);

template <class F>
void parallel_for(size_t n_tasks, F& f) {
    parallel_for(n_tasks, [](void* context, size_t i) { (*static_cast<F*>(context))(i); }, &f);
}

// Whether work of this many nanoseconds on one core outweighs the cost of waking other threads. Rough.
constexpr bool is_worth_threads(double work_ns) { return work_ns >= 4000.0; }

// Number of consecutive tasks that a thread claims at once: claiming takes a cache line from another processor, about
// 100 ns.
constexpr size_t tasks_per_claim(size_t n_tasks, double work_ns) {
    constexpr double kClaimNs = 3000.0;  // of work
    return std::max<size_t>(1, static_cast<size_t>(kClaimNs * static_cast<double>(n_tasks) / work_ns));
}

// Calls run(context, begin, end) for ranges that together are [0, n_tasks), see parallel_for. Not a template: a copy in
// every caller adds 7 KB to a WebAssembly build.
inline void parallel_ranges(size_t n_tasks, double work_ns, void (*run)(void* context, size_t begin, size_t end),
                            void* context) {
    const bool worth_threads = is_worth_threads(work_ns);
    const ReleasedHostLock released(worth_threads);
    const size_t claimed = worth_threads ? tasks_per_claim(n_tasks, work_ns) : n_tasks;
    if (claimed >= n_tasks) return run(context, 0, n_tasks);
    auto task = [&](size_t i) { run(context, i * claimed, std::min(n_tasks, (i + 1) * claimed)); };
    parallel_for((n_tasks + claimed - 1) / claimed, task);
}

// parallel_for if the total work is worth threads, else a loop on the calling thread. The former runs without the
// host's lock, so `f` must not touch the host's objects.
template <class F>
void parallel_for(size_t n_tasks, double work_ns, F&& f) {
    const auto run = [](void* context, size_t begin, size_t end) {
        auto& task = *static_cast<std::remove_reference_t<F>*>(context);
        for (size_t i = begin; i < end; ++i) task(i);
    };
    parallel_ranges(n_tasks, work_ns, run, const_cast<void*>(static_cast<const void*>(&f)));
}

// Calls f(i) for n rows of `width` elements, for work that reads and writes each element about once.
template <class F>
void for_rows(size_t n, size_t width, F&& f) {
    constexpr double element_ns = 0.125;
    parallel_for(n, element_ns * static_cast<double>(n * width), f);
}

}  // namespace whet
