// The processors that this process may use.
#pragma once
#include <string>

namespace whet {

// Those of its affinity, and no more than the CPU time that its control groups grant it: a quota of 2.5 is 2
// processors. At least 1.
int n_processors();

// CPU time per time that the control groups of this process grant it (version 1 and 2; the least of its own group and
// those around it); infinity without a limit. Docker's --cpus and Kubernetes' limits are such quotas, and leave the
// affinity as it is. `root` is the directory of proc and sys, for tests.
double cpu_quota(const std::string& root = "/");

}  // namespace whet
