// Instruction-set extensions of this processor, read from the processor or the operating system.
//
// __builtin_cpu_supports is not used: it needs data of the compiler's run-time library, which zig's leaves empty.
#pragma once

namespace whet {

// Extensions that both the processor and the operating system support; false on other architectures.
struct ProcessorFeatures {
    // x86-64
    bool avx2 = false, fma = false, f16c = false;
    bool avx512f = false, avx512bw = false, avx512dq = false, avx512vl = false, avx512bf16 = false, avx512vnni = false;
    // AArch64
    bool dotprod = false, i8mm = false, bf16 = false;
};

ProcessorFeatures read_processor_features();

}  // namespace whet
