#include "runtime/processors.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "runtime/system.h"

namespace whet {
namespace {

namespace fs = std::filesystem;

constexpr double kNoQuota = std::numeric_limits<double>::infinity();

// Version 2: "200000 100000", or "max 100000". Version 1: two files; -1: no limit.
double quota_of_group(const fs::path& group) {
    double quota = 0.0, period = 0.0;
    if (std::ifstream both(group / "cpu.max"); both) {
        both >> quota >> period;
    } else {
        std::ifstream(group / "cpu.cfs_quota_us") >> quota;
        std::ifstream(group / "cpu.cfs_period_us") >> period;
    }
    return quota > 0.0 && period > 0.0 ? quota / period : kNoQuota;
}

// The minimum quota of a group and its parents, up to `top`. In a container the path may be the host's, with the
// container's group at the top.
double quota_up_to(const fs::path& top, fs::path path) {
    double least = quota_of_group(top);
    for (; !path.empty(); path = path.parent_path()) least = std::min(least, quota_of_group(top / path));
    return least;
}

bool names_cpu(const std::string& controllers) { return ("," + controllers + ",").find(",cpu,") != std::string::npos; }

double granted() { return std::min<double>(n_schedulable_processors(), cpu_quota()); }

}  // namespace

double cpu_quota(const std::string& root) {
    const fs::path groups = fs::path(root) / "sys/fs/cgroup";
    std::ifstream file(fs::path(root) / "proc/self/cgroup");
    double least = kNoQuota;
    for (std::string number, controllers, path;
         std::getline(file, number, ':') && std::getline(file, controllers, ':') && std::getline(file, path);) {
        const fs::path relative = fs::path(path).relative_path();
        if (controllers.empty()) least = std::min(least, quota_up_to(groups, relative));
        if (names_cpu(controllers)) least = std::min(least, quota_up_to(groups / "cpu", relative));
    }
    return least;
}

int n_processors() { return std::max(1, static_cast<int>(granted())); }
int max_processors() { return std::max(1, static_cast<int>(std::ceil(granted()))); }

}  // namespace whet
