// Compiled without -m flags, because it runs before the processor is detected.
#include "kernels/dispatch.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "runtime/errors.h"
#include "runtime/processor_features.h"

namespace whet {

// WHET_UNITS lists the instruction sets of this build, the widest first: UNIT(avx512) UNIT(avx2) ...
#define UNIT(isa)               \
    namespace isa {             \
    extern const Kernels table; \
    }
WHET_UNITS
#undef UNIT

const Unit* units(size_t& count) {
    // Each line checks every feature of the unit's compile flags (CMakeLists.txt).
    [[maybe_unused]] static const ProcessorFeatures has = read_processor_features();
    [[maybe_unused]] constexpr bool scalar = true;
#if defined(__x86_64__)
    const bool avx2 = has.avx2 && has.fma && has.f16c;
    const bool avx512 = avx2 && has.avx512f && has.avx512bw && has.avx512dq && has.avx512vl;
    const bool avx512bf16 = avx512 && has.avx512bf16 && has.avx512vnni;
#elif defined(__aarch64__)
    constexpr bool neon = true;
    const bool neon_dot = has.dotprod, neon_i8mm = has.dotprod && has.i8mm && has.bf16;
#endif
#define UNIT(isa) {&isa::table, isa},
    static const Unit all[] = {WHET_UNITS};
#undef UNIT
    count = sizeof all / sizeof *all;
    return all;
}

namespace {

const Kernels& select_kernels() {
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
    throw VariableError("WHET_ISA=" + std::string(wanted) +
                        " is not available: this build on this processor supports " + usable +
                        ". Unset it to use the first.");
}

// WHET_BFMMLA=1 selects AArch64's matrix products for bfloat16.
Kernels choose_products(Kernels table) {
    const char* wanted = std::getenv("WHET_BFMMLA");
    if (wanted == nullptr || *wanted == '\0' || std::strcmp(wanted, "0") == 0) return table;
    if (std::strcmp(wanted, "1") != 0 || table.linear_bfmmla == nullptr) {
        throw VariableError("WHET_BFMMLA=" + std::string(wanted) +
                            " is not available: it is 0, or 1 on processors of the "
                            "instruction set neon_i8mm, and this one has " +
                            table.isa + ". Unset it.");
    }
    table.linear_bf16 = table.linear_bfmmla;
    return table;
}

}  // namespace

const Kernels& kernels() {
    static const Kernels table = choose_products(select_kernels());
    return table;
}

}  // namespace whet
