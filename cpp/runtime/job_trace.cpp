#include "runtime/job_trace.h"

#include <cstddef>
#include <mutex>
#include <utility>

#include "runtime/system.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

std::mutex jobs_mutex;
std::vector<TracedJob> jobs;
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
    for (size_t i = n_tasks; i-- > 0;) {
        const double start = thread_time_s();
        task(context, i);
        job.push_back(thread_time_s() - start);
    }
    const std::lock_guard lock(jobs_mutex);
    jobs.push_back(std::move(job));
}

}  // namespace

void begin_job_trace(int threads) {
    jobs.clear();
    set_job_hook(trace_job, threads);
}

std::vector<TracedJob> end_job_trace() {
    set_job_hook(nullptr, 0);
    const std::lock_guard lock(jobs_mutex);
    return std::exchange(jobs, {});
}

}  // namespace whet
