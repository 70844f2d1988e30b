#include "runtime/processor_features.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>

#include <cstddef>
#elif defined(__aarch64__) && defined(_WIN32)
#include <windows.h>
#endif

namespace whet {

#if defined(__x86_64__)

namespace {

bool has_bit(uint32_t word, int bit) { return (word >> bit & 1) != 0; }

// The register states that the operating system saves (XCR0).
uint32_t saved_states() {
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

}  // namespace

ProcessorFeatures read_processor_features() {
    constexpr uint32_t ymm = 0x06, zmm = 0xe6;  // SSE and AVX; also the masks and both halves of AVX-512
    ProcessorFeatures has;
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has_bit(c, 27)) return has;  // no xgetbv
    const uint32_t states = saved_states();
    if ((states & ymm) != ymm) return has;
    has.fma = has_bit(c, 12);
    has.f16c = has_bit(c, 29);
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return has;
    has.avx2 = has_bit(b, 5);
    if ((states & zmm) != zmm) return has;
    has.avx512f = has_bit(b, 16);
    has.avx512dq = has_bit(b, 17);
    has.avx512bw = has_bit(b, 30);
    has.avx512vl = has_bit(b, 31);
    has.avx512vnni = has_bit(c, 11);
    if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) has.avx512bf16 = has_bit(a, 5);
    return has;
}

#elif defined(__aarch64__) && defined(__linux__)

// The bits are written out, because headers older than the extensions lack them.
ProcessorFeatures read_processor_features() {
    const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    return {.dotprod = (first & 1ul << 20) != 0, .i8mm = (second & 1ul << 13) != 0, .bf16 = (second & 1ul << 14) != 0};
}

#elif defined(__aarch64__) && defined(__APPLE__)

namespace {

// Systems older than an extension do not know its name.
bool is_set(const char* name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}

}  // namespace

ProcessorFeatures read_processor_features() {
    return {.dotprod = is_set("hw.optional.arm.FEAT_DotProd"),
            .i8mm = is_set("hw.optional.arm.FEAT_I8MM"),
            .bf16 = is_set("hw.optional.arm.FEAT_BF16")};
}

#elif defined(__aarch64__) && defined(_WIN32)

// The numbers are PF_ARM_V82_DP, _I8MM and _BF16_INSTRUCTIONS_AVAILABLE; the last two are missing before Windows 11
// 24H2, which returns false for them.
ProcessorFeatures read_processor_features() {
    return {.dotprod = IsProcessorFeaturePresent(43) != 0,
            .i8mm = IsProcessorFeaturePresent(66) != 0,
            .bf16 = IsProcessorFeaturePresent(68) != 0};
}

#else

ProcessorFeatures read_processor_features() { return {}; }

#endif

}  // namespace whet
