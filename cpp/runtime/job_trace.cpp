#include "runtime/job_trace.h"

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <utility>

#include "runtime/system.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

std::mutex jobs_mutex;
JobTrace trace;
double reading_s = 0.0;                // processor time of a reading of the clock: a system call
thread_local bool is_in_task = false;  // the time of a nested job is part of its task's

void trace_job(size_t n_tasks, void (*task)(void*, size_t), void* context) {
    if (is_in_task) {
        for (size_t i = n_tasks; i-- > 0;) task(context, i);
        return;
    }
    struct InTask {
        InTask() { is_in_task = true; }
        ~InTask() { is_in_task = false; }
    } in_task;
    TracedJob job;
    job.reserve(n_tasks);
    double before = thread_time_s();
    for (size_t i = n_tasks; i-- > 0;) {
        task(context, i);
        const double after = thread_time_s();
        job.push_back(std::max(0.0, after - before - reading_s));
        before = after;
    }
    const std::lock_guard lock(jobs_mutex);
    trace.jobs.push_back(std::move(job));
    trace.clock_s += reading_s * static_cast<double>(n_tasks + 1);
}

}  // namespace

void begin_job_trace(int threads) {
    constexpr int n_readings = 1000;
    const double before = thread_time_s();
    for (int i = 1; i < n_readings; ++i) thread_time_s();
    reading_s = (thread_time_s() - before) / n_readings;
    trace = {};
    set_job_hook(trace_job, threads);
}

JobTrace end_job_trace() {
    set_job_hook(nullptr, 0);
    const std::lock_guard lock(jobs_mutex);
    return std::exchange(trace, {});
}

}  // namespace whet
