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
WHET_UNIT(avx512bf16)
#elif defined(__aarch64__)
WHET_UNIT(neon)
#endif
#undef WHET_UNIT

const Unit* units(size_t& count) {
    // Each test names every feature in the unit's compile flags (CMakeLists.txt).
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool avx512bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
#endif
    static const Unit all[] = {
#if defined(__x86_64__)
        {&avx512bf16::table, avx512bf16},
        {&avx512::table, avx512},
        {&avx2::table, avx2},
#elif defined(__aarch64__)
        {&neon::table, true},
#endif
        {&scalar::table, true},
    };
    count = sizeof all / sizeof *all;
    return all;
}

namespace {

const Kernels& pick() {
    const char* wanted = std::getenv("WHET_ISA");
    std::string usable;
    size_t count;
    const Unit* unit = units(count);
    for (const Unit* end = unit + count; unit != end; ++unit) {
        const char* isa = unit->table->isa;
        if (!unit->usable) continue;
        if (wanted == nullptr || *wanted == '\0' || std::strcmp(wanted, isa) == 0) return *unit->table;
        usable += usable.empty() ? isa : std::string(", ") + isa;
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
