// The vectors of simd/, compiled once per instruction set, whose name is WHET_ISA: dot.h against scalar C, bit by bit.
// No STL (see kernels/isa_unit.cpp). Exit code 77: this machine lacks the instruction set.
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/dispatch.h"
#include "simd/dot.h"
#include "simd/math.h"
#include "simd/vec.h"

using namespace whet::WHET_ISA;

namespace {

int failures = 0;

void expect_bits(const char* what, int lane, uint32_t got, uint32_t expected) {
    if (got == expected || ++failures > 20) return;
    printf("%s, lane %d: got %08x, expected %08x\n", what, lane, got, expected);
}

// splitmix64 (Steele, Lea & Flood 2014).
uint64_t random_bits() {
    static uint64_t state = 7;
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

float as_float(uint32_t bits) { return bit_cast<float>(bits); }

// Subnormal numbers are flushed to zero if the instruction set has vdpbf16ps.
float flushed(float x) {
#if defined(__AVX512BF16__)
    return fpclassify(x) == FP_SUBNORMAL ? copysignf(0.0f, x) : x;
#else
    return x;
#endif
}

float plain_dot_bf16(float sum, const uint16_t a[2], const uint16_t b[2]) {
    sum = flushed(sum);
    for (int i = 1; i >= 0; --i) {
        const float x = flushed(as_float(uint32_t(a[i]) << 16)), y = flushed(as_float(uint32_t(b[i]) << 16));
        sum = flushed(fmaf(x, y, sum));
    }
    return sum;
}

// `exponent`: 0 for random bits, else for numbers of about that binary exponent, whose sums cancel and round.
void test_dot_bf16(int exponent) {
    uint16_t a[32], b[32];
    float sum[16], got[16];
    for (int i = 0; i < 32; ++i) {
        a[i] = static_cast<uint16_t>(random_bits()), b[i] = static_cast<uint16_t>(random_bits());
        if (exponent == 0) continue;
        a[i] = static_cast<uint16_t>((a[i] & 0x807f) | (uint64_t(exponent) + random_bits() % 16) << 7);
        b[i] = static_cast<uint16_t>((b[i] & 0x807f) | (uint64_t(254 - exponent) + random_bits() % 16 - 8) << 7);
    }
    for (int i = 0; i < 16; ++i) {
        auto bits = static_cast<uint32_t>(random_bits());
        if (exponent != 0) bits = (bits & 0x807fffffu) | uint32_t(117 + random_bits() % 30) << 23;
        sum[i] = as_float(bits);
    }
    store(got, dot_bf16(load(sum), load(a), load(b)));
    for (int i = 0; i < 16; ++i) {
        const float expected = plain_dot_bf16(sum[i], a + 2 * i, b + 2 * i);
        if (isnan(expected) && isnan(got[i])) continue;
        expect_bits("dot_bf16", i, bit_cast<uint32_t>(got[i]), bit_cast<uint32_t>(expected));
    }
}

// `extreme`: only bytes with the largest products, which would overflow a 16-bit sum.
void test_dot_int8(bool extreme) {
    uint8_t a[64];
    int8_t b[64];
    int32_t sum[16], got[16];
    for (int i = 0; i < 64; ++i) {
        const uint64_t bits = random_bits();
        a[i] = extreme ? 255 : static_cast<uint8_t>(bits);
        b[i] = extreme ? (i / 4 % 2 ? -128 : 127) : static_cast<int8_t>(bits >> 8);
    }
    for (int i = 0; i < 16; ++i) sum[i] = static_cast<int32_t>(random_bits());
    store(got, dot_int8(load(sum), load(a), load(b)));
    for (int i = 0; i < 16; ++i) {
        int64_t expected = sum[i];
        for (int k = 4 * i; k < 4 * i + 4; ++k) expected += int64_t(a[k]) * b[k];
        expect_bits("dot_int8", i, static_cast<uint32_t>(got[i]), static_cast<uint32_t>(expected));
    }
}

// One factor has seven bits. `extreme`: pairs whose sum just fits in 16 bits.
void test_dot_int7(bool extreme) {
    uint8_t a[64];
    int8_t b[64];
    int16_t pair_sums[32], got_pairs[32];
    int32_t sum[16], got[16];
    for (int i = 0; i < 64; ++i) {
        const uint64_t bits = random_bits();
        a[i] = extreme ? 127 : static_cast<uint8_t>(bits & 127);
        b[i] = extreme ? (i / 4 % 2 ? -128 : 127) : static_cast<int8_t>(bits >> 8);
    }
    for (int i = 0; i < 32; ++i) pair_sums[i] = static_cast<int16_t>(random_bits() & 127);
    for (int i = 0; i < 16; ++i) sum[i] = static_cast<int32_t>(random_bits());
    const i16x32 pairs = dot_pairs(load(pair_sums), load(a), load(b));
    store(got_pairs, pairs);
    store(got, dot_int7(load(sum), load(a), load(b)));
    int32_t below = 0;
    for (int i = 0; i < 32; ++i) {
        const int expected = pair_sums[i] + a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
        expect_bits("dot_pairs", i, static_cast<uint16_t>(got_pairs[i]), static_cast<uint16_t>(expected));
        below -= b[i] < 0 ? b[i] : 0;
    }
    expect_bits("minus_sum_of_negatives", 0, static_cast<uint32_t>(minus_sum_of_negatives(b)),
                static_cast<uint32_t>(below));
    int32_t added[16];
    store(added, add_pairs(load(sum), pairs));
    for (int i = 0; i < 16; ++i) {
        int64_t expected = sum[i];
        for (int k = 4 * i; k < 4 * i + 4; ++k) expected += int64_t(a[k]) * b[k];
        expect_bits("dot_int7", i, static_cast<uint32_t>(got[i]), static_cast<uint32_t>(expected));
        const int64_t of_pairs = int64_t(sum[i]) + got_pairs[2 * i] + got_pairs[2 * i + 1];
        expect_bits("add_pairs", i, static_cast<uint32_t>(added[i]), static_cast<uint32_t>(of_pairs));
    }
}

// All 2^16 numbers, including the payload of NaN.
void test_load_f16() {
    for (uint32_t first = 0; first < 65536; first += 16) {
        uint16_t halves[16];
        float got[16];
        for (uint32_t i = 0; i < 16; ++i) halves[i] = static_cast<uint16_t>(first + i);
        store(got, load_f16(halves));
        for (int i = 0; i < 16; ++i) {
            const bool is_nan = (halves[i] & 0x7fff) > 0x7c00;  // the instruction sets the quiet bit
            const uint32_t quiet = is_nan ? 0x400000 : 0;
            expect_bits("load_f16", i, bit_cast<uint32_t>(got[i]) | quiet,
                        bit_cast<uint32_t>(f16_as_float(halves[i])) | quiet);
        }
    }
}

// The nearest bfloat16 of x, ties to even, computed in double, where the differences are exact.
uint16_t plain_bf16(float x) {
    const auto bits = bit_cast<uint32_t>(x);
    if (isnan(x)) return static_cast<uint16_t>(bits >> 16 | 0x40);
    const uint32_t below = bits >> 16, above = below + 1;
    if (isinf(x)) return static_cast<uint16_t>(below);
    const double low = as_float(below << 16);
    const double high = (above & 0x7fff) == 0x7f80 ? copysign(0x1p128, x) : double(as_float(above << 16));
    const double to_low = fabs(x - low), to_high = fabs(high - x);
    return static_cast<uint16_t>(to_low < to_high || (to_low == to_high && below % 2 == 0) ? below : above);
}

void test_store_bf16(const uint32_t bits[16]) {
    float x[16];
    uint16_t got[16];
    for (int i = 0; i < 16; ++i) x[i] = as_float(bits[i]);
    store_bf16(got, load(x));
    for (int i = 0; i < 16; ++i) {
        expect_bits("store_bf16", i, got[i], plain_bf16(x[i]));
        expect_bits("bf16_of", i, bf16_of(x[i]), plain_bf16(x[i]));
    }
}

}  // namespace

int main() {
    try {
        whet::kernels();
    } catch (...) {
        return 77;
    }
    const int exponents[] = {0, 60, 119, 190};
    for (int round = 0; round < 20000; ++round) {
        for (const int exponent : exponents) test_dot_bf16(exponent);
        test_dot_int8(round % 2 == 0);
        test_dot_int7(round % 2 == 0);
        uint32_t bits[16];
        for (uint32_t& b : bits) b = static_cast<uint32_t>(random_bits());
        test_store_bf16(bits);
    }
    test_load_f16();
    // Zeros, subnormals, ties in both directions, the largest numbers, infinities, and a NaN with a payload of low
    // bits.
    const uint32_t corners[16] = {0x00000000, 0x80000000, 0x00000001, 0x00018000, 0x80008000, 0x007fffff,
                                  0x3f808000, 0x3f818000, 0x3f808001, 0x7f7fffff, 0xff7f8000, 0x7f7f7fff,
                                  0x7f800000, 0xff800000, 0x7f800001, 0xffffffff};
    test_store_bf16(corners);
    printf("%s: %d failures\n", whet::kernels().isa, failures);
    return failures == 0 ? 0 : 1;
}
