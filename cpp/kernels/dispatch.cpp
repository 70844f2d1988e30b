// Compiled without -m flags: it runs before anything is known about the processor.
#include "kernels/dispatch.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace whet {

#define WHET_UNIT(isa)          \
    namespace isa {             \
    extern const Kernels table; \
    }
WHET_UNIT(scalar)
#if defined(__x86_64__)
WHET_UNIT(avx2)
WHET_UNIT(avx512)
#elif defined(__aarch64__)
WHET_UNIT(neon)
#endif
#undef WHET_UNIT

namespace {

struct Candidate {
    const Kernels* table;
    bool supported;
};

const Kernels& pick() {
    // Widest first. Each test names every feature in the unit's compile flags (CMakeLists.txt).
    const Candidate candidates[] = {
#if defined(__x86_64__)
        {&avx512::table, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                             __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                             __builtin_cpu_supports("f16c")},
        {&avx2::table,
         __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")},
#elif defined(__aarch64__)
        {&neon::table, true},
#endif
        {&scalar::table, true},
    };
    const char* wanted = std::getenv("WHET_ISA");
    std::string usable;
    for (const Candidate& c : candidates) {
        if (!c.supported) continue;
        if (wanted == nullptr || *wanted == '\0' || std::strcmp(wanted, c.table->isa) == 0) return *c.table;
        usable += usable.empty() ? c.table->isa : std::string(", ") + c.table->isa;
    }
    throw std::runtime_error("WHET_ISA=" + std::string(wanted) +
                             " is not available: this build on this processor has " + usable +
                             ". Unset it to take the first.");
}

}  // namespace

const Kernels& kernels() {
    static const Kernels& table = pick();
    return table;
}

}  // namespace whet
