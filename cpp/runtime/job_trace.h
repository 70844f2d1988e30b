// The processor time of every task of the thread pool's jobs, for tests and measurements.
#pragma once
#include <vector>

namespace whet {

using TracedJob = std::vector<double>;  // seconds of each task, in the order in which the pool claims them

struct JobTrace {
    std::vector<TracedJob> jobs;
    double clock_s = 0.0;  // processor time of reading the clock, which no task includes
};

// Until end_job_trace(), jobs are divided as for this number of threads, and every task runs on the thread that calls
// parallel_for.
void begin_job_trace(int threads);
JobTrace end_job_trace();

}  // namespace whet
