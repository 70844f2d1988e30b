// Number of processors available to this process.
#pragma once
#include <string>

namespace whet {

// Processors on which the system schedules this process, at most the CPU quota of the control groups: a quota of 2.5
// gives 2 processors. At least 1.
int n_processors();

// The same, with a quota of 2.5 rounded up to 3: more threads than this cannot run at once.
int max_processors();

// CPU quota of this process's control groups (version 1 and 2; the minimum of its group and the parent groups), in
// processors; infinity without a limit. Docker's --cpus and Kubernetes' limits set such quotas and do not change the
// affinity. `root` is the directory of proc and sys, for tests.
double cpu_quota(const std::string& root = "/");

}  // namespace whet
