// Exact int8 products of several rows with one 16-byte part of a vector: 4 outputs, 4 inputs each.
//
// AArch64's dot products take the inputs of a row from a lane, so that one load serves all parts, and its matrix
// product multiplies two rows at once; with 32 registers, a tile of many rows needs parts of a panel. Both factors are
// signed. Other architectures do not use this file.
#pragma once
#include "simd/dot.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

#if defined(__aarch64__)
constexpr bool kMultipliesParts = true;
#else
constexpr bool kMultipliesParts = false;
#endif

// The matrix product takes 8 inputs of two rows from one register: rows are stored in pairs that alternate by 8 inputs.
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr size_t kPairedRows = 2;
#else
constexpr size_t kPairedRows = 1;
#endif

// Offset of the inputs of a row, in rows of `width`. Inputs [8 i, 8 i + 8) follow at 8 kPairedRows i.
WHET_INLINE size_t inputs_offset(size_t row, size_t width) {
    return row / kPairedRows * kPairedRows * width + row % kPairedRows * 8;
}

// Stores the low bytes of v as inputs [at, at + 16) of the row that begins at `row`.
WHET_INLINE void store_inputs(int8_t* row, size_t at, i32x16 v) {
    if constexpr (kPairedRows == 1) return store_low_bytes(row + at, v);
    int8_t bytes[16];
    store_low_bytes(bytes, v);
    for (size_t half = 0; half < 2; ++half) {
        __builtin_memcpy(row + kPairedRows * (at + 8 * half), bytes + 8 * half, 8);
    }
}

// The number that read_bytes adds to a byte.
template <class Byte>
constexpr float kByteZero = static_cast<Byte>(-1) < 0 ? 32768 + 128 : 32768;

#if defined(__aarch64__)

using f32x4 = f32x16::Native;
using i32x4 = i32x16::Native;

// Reads 4 float16 numbers.
WHET_INLINE void read_f16(const uint16_t* x, f32x4& out) { out = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x))); }

// Reads 4 n_parts bytes as kByteZero plus their numbers. A float16 number times kByteZero or a byte is exact as a
// float.
template <class Byte, int n_parts>
WHET_INLINE void read_bytes(const Byte* x, f32x4 (&out)[n_parts]) {
    uint8x16_t bytes = {};
    __builtin_memcpy(&bytes, x, 4 * n_parts);
    if constexpr (static_cast<Byte>(-1) < 0) bytes = veorq_u8(bytes, vdupq_n_u8(128));
    const uint8x16_t zeros = vdupq_n_u8(0);
    const uint16x8_t exponent = vdupq_n_u16(0x4700);  // of 32768, above 16 bits with the byte in their upper half
    const uint16x8_t low = (uint16x8_t)vzip1q_u8(zeros, bytes), high = (uint16x8_t)vzip2q_u8(zeros, bytes);
    out[0] = (f32x4)vzip1q_u16(low, exponent);
    if constexpr (n_parts > 1) out[1] = (f32x4)vzip2q_u16(low, exponent);
    if constexpr (n_parts > 2) out[2] = (f32x4)vzip1q_u16(high, exponent), out[3] = (f32x4)vzip2q_u16(high, exponent);
}

WHET_INLINE f32x4 fma(f32x4 a, f32x4 b, f32x4 c) { return vfmaq_f32(c, a, b); }

// A copy of a vector in memory, to be overwritten by the sum of products. The compilers would load it once and copy the
// register, which takes a vector pipe; pipes for loads are idle here.
template <class Part>
WHET_INLINE Part load_copy(const float* x) {
    Part copy;
    __asm__ volatile("ldr %q0, %1" : "=w"(copy) : "m"(*reinterpret_cast<const char (*)[sizeof copy]>(x)));
    return copy;
}

// Integer sums, of products times `factor`, begin at the bits of kRounder / factor: as floats they are that plus the
// sum of products, if the integer is in (-2^22, 2^22). Conversion instructions are slow: on Neoverse N1 one takes as
// long as four multiply-adds.
template <int factor>
constexpr float kZero = kRounder<float> / factor;
template <int factor>
alignas(16) constexpr float kZeroSums[4] = {kZero<factor>, kZero<factor>, kZero<factor>, kZero<factor>};
template <int factor>
WHET_INLINE f32x4 to_f32(i32x4 sum) {
    return (f32x4)sum - kZero<factor>;
}

// Whether rows are multiplied in pairs. The sums of two rows are then mixed in two registers, until separate_rows.
template <int n_rows>
constexpr bool kInPairs = kPairedRows == 2 && n_rows % 2 == 0;

template <int factor, int n_rows, int n_parts>
WHET_INLINE void set_zero(i32x4 (&sums)[n_rows][n_parts]) {
#pragma GCC unroll 8
    for (int r = 0; r < n_rows; ++r) {
#pragma GCC unroll 4
        for (int p = 0; p < n_parts; ++p) {
            sums[r][p] = load_copy<i32x4>(kZeroSums<factor>);
        }
    }
}

// Arranges two vectors, each with 4 inputs of 4 outputs, for add_eight_inputs: with 8 inputs of 2 outputs each, if rows
// are multiplied in pairs.
template <int n_rows>
WHET_INLINE void arrange(u8x64::Native& first, u8x64::Native& second) {
    if constexpr (!kInPairs<n_rows>) return;
    const auto a = (uint32x4_t)first, b = (uint32x4_t)second;
    first = (u8x64::Native)vzip1q_u32(a, b), second = (u8x64::Native)vzip2q_u32(a, b);
}

// Adds the products of 8 inputs of each row, which begin at q, with part p of two vectors of signed weights.
template <int n_rows, int n_parts>
WHET_INLINE void add_eight_inputs(i32x4 (&sums)[n_rows][n_parts], int p, u8x64::Native first, u8x64::Native second,
                                  const int8_t* q, size_t width) {
    const auto a = (int8x16_t)first, b = (int8x16_t)second;
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if constexpr (kInPairs<n_rows>) {
#pragma GCC unroll 4
        for (int r = 0; r < n_rows; r += 2) {
            const int8x16_t x = vld1q_s8(q + inputs_offset(r, width));
            sums[r][p] = (i32x4)vmmlaq_s32(sums[r][p], a, x);
            sums[r + 1][p] = (i32x4)vmmlaq_s32(sums[r + 1][p], b, x);
        }
        return;
    }
#endif
#pragma GCC unroll 8
    for (int r = 0; r < n_rows; ++r) {
        const int8x8_t x = vld1_s8(q + inputs_offset(r, width));
#if defined(__ARM_FEATURE_DOTPROD)
        sums[r][p] = (i32x4)vdotq_lane_s32(vdotq_lane_s32(sums[r][p], a, x, 0), b, x, 1);
#else
        // Two products fit in 16 bits: inputs are in [-127, 127].
        const auto x0 = (int8x16_t)vdupq_lane_s32((int32x2_t)x, 0), x1 = (int8x16_t)vdupq_lane_s32((int32x2_t)x, 1);
        const int16x8_t low = vmlal_s8(vmull_s8(vget_low_s8(a), vget_low_s8(x0)), vget_low_s8(b), vget_low_s8(x1));
        const int16x8_t high = vmlal_high_s8(vmull_high_s8(a, x0), b, x1);
        sums[r][p] += (i32x4)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#endif
    }
}

// Gives every row its sums.
template <int n_rows, int n_parts>
WHET_INLINE void separate_rows(i32x4 (&sums)[n_rows][n_parts]) {
    if constexpr (!kInPairs<n_rows>) return;
#pragma GCC unroll 4
    for (int r = 0; r + 1 < n_rows; r += 2) {
#pragma GCC unroll 4
        for (int p = 0; p < n_parts; ++p) {
            const int32x4_t low = sums[r][p], high = sums[r + 1][p];
            sums[r][p] = (i32x4)vuzp1q_s32(low, high);
            sums[r + 1][p] = (i32x4)vuzp2q_s32(low, high);
        }
    }
}

#endif

}  // namespace
}  // namespace whet::WHET_ISA
