// The thread pool of the process.
//
// Workers spin for a few tens of microseconds after a job and then sleep, so they start quickly within a step and leave
// the processors to other libraries' threads between steps. The calling thread works too and never waits for a sleeping
// worker: tasks are claimed one by one. A call while another thread's job runs, or from within a task, runs on its own
// thread.
#pragma once
#include <cstddef>

#include "runtime/host_lock.h"

namespace whet {

// Threads used by a job, the caller included. Starts as WHET_NUM_THREADS, else as n_processors().
int num_threads();
void set_num_threads(int n);

// Runs body(context) on n_threads threads, the caller's among them, and returns when all are done: OpenMP's runtimes
// call it GOMP_parallel.
using Fork = void (*)(void (*body)(void*), void* context, unsigned n_threads, unsigned flags);

// Jobs run on the threads behind `fork` until it is called with null. Otherwise another library's threads, which spin
// for a while after its own work, would compete with the pool's for the processors.
void borrow_threads(Fork fork);

// task(context, i) for every i in [0, n_tasks), in any order and on any thread. The first exception of a task is thrown
// again when all tasks are over.
void parallel_for(size_t n_tasks, void (*task)(void* context, size_t i), void* context);

template <class F>
void parallel_for(size_t n_tasks, F& f) {
    parallel_for(n_tasks, [](void* context, size_t i) { (*static_cast<F*>(context))(i); }, &f);
}

// Whether so many nanoseconds of work on one core, roughly, are more than it costs to share them with other threads.
constexpr bool is_worth_threads(double work_ns) { return work_ns >= 4000.0; }

// The same where all tasks together are worth it, else on the calling thread. Work that is worth threads runs without
// the host's lock, so `f` must not touch the host's objects.
template <class F>
void parallel_for(size_t n_tasks, double work_ns, F&& f) {
    const bool worth_threads = is_worth_threads(work_ns);
    const ReleasedHostLock released(worth_threads);
    if (worth_threads && n_tasks > 1) return parallel_for(n_tasks, f);
    for (size_t i = 0; i < n_tasks; ++i) f(i);
}

// f(i) for n rows of `width` elements, each of which is read and written, or little more.
template <class F>
void for_rows(size_t n, size_t width, F&& f) {
    constexpr double element_ns = 0.125;
    parallel_for(n, element_ns * static_cast<double>(n * width), f);
}

}  // namespace whet
