// Dot products of bfloat16 pairs and of int8 quadruples, and rounding to bfloat16, on the 64-byte vectors of vec.h.
//
// The int8 product is exact, and the rounding is to nearest even: the same bits on every instruction set. avx512bf16
// has an instruction for the bfloat16 product (vdpbf16ps) and neon_i8mm two (bfmlalt, bfmlalb); elsewhere two fma in
// the same order give the same bits, except for subnormal numbers on avx512bf16: see dot_bf16.
#pragma once
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

using u16x32 = Vec<uint16_t>;
using u8x64 = Vec<uint8_t>;
using i8x64 = Vec<int8_t>;

typedef int16_t NativeI16 __attribute__((vector_size(kNativeBytes)));
typedef uint16_t NativeU16 __attribute__((vector_size(kNativeBytes)));
typedef uint32_t NativeU32 __attribute__((vector_size(kNativeBytes)));

// 16 plus twice the E2M1 number of each nibble: its lowest 3 bits are 0, 1, 2, 3, 4, 6, 8 or 12, and the highest its
// sign.
WHET_INLINE u8x64 look_up_e2m1(u8x64 nibbles) {
#if defined(__AVX512BW__) || defined(__AVX2__) || defined(__aarch64__)
    alignas(16) static constexpr uint8_t kTable[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
#endif
#if defined(__AVX512BW__)
    const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kTable)));
    nibbles.part[0] = (u8x64::Native)_mm512_shuffle_epi8(table, (__m512i)nibbles.part[0]);
#elif defined(__AVX2__)
    const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kTable)));
    WHET_EACH_PART(p) nibbles.part[p] = (u8x64::Native)_mm256_shuffle_epi8(table, (__m256i)nibbles.part[p]);
#elif defined(__aarch64__)
    WHET_EACH_PART(p) nibbles.part[p] = vqtbl1q_u8(vld1q_u8(kTable), nibbles.part[p]);
#else
    WHET_EACH_PART(p) {
        const auto code = nibbles.part[p], size = code & 7;
        const auto sign = (u8x64::Native)(code > 7);
        const auto twice = size + ((u8x64::Native)(size > 4) & (size - 4)) + ((u8x64::Native)(size > 6) & 2);
        nibbles.part[p] = (twice ^ sign) - sign + 16;
    }
#endif
    return nibbles;
}

// ---------------------------------------------------------------- bfloat16

// The bfloat16 numbers of lanes 2i, or 2i + 1, as floats.
WHET_INLINE f32x16 even_bf16(u16x32 x) {
    f32x16 v;
    WHET_EACH_PART(p) v.part[p] = (f32x16::Native)((NativeU32)x.part[p] << 16);
    return v;
}
WHET_INLINE f32x16 odd_bf16(u16x32 x) {
    f32x16 v;
    WHET_EACH_PART(p) v.part[p] = (f32x16::Native)((NativeU32)x.part[p] & 0xffff0000u);
    return v;
}

// sum[i] + a[2i+1] b[2i+1] + a[2i] b[2i], added from the left, one rounding to nearest even per addition (a product of
// two bfloat16 numbers has at most 16 bits: it is exact).
//
// vdpbf16ps flushes subnormals, |x| < 2^-126, in a, b and sum, and in the result (rounded to 24 bits), to a zero of the
// same sign; the other instruction sets keep them. No other finite result differs. NaN payloads are unspecified.
WHET_INLINE f32x16 dot_bf16(f32x16 sum, u16x32 a, u16x32 b) {
#if defined(__AVX512BF16__)
    sum.part[0] = _mm512_dpbf16_ps(sum.part[0], (__m512bh)a.part[0], (__m512bh)b.part[0]);
    return sum;
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    // bfdot, which adds a pair in one instruction, rounds its sum to odd first: other bits.
    WHET_EACH_PART(p) {
        const auto x = (bfloat16x8_t)a.part[p], y = (bfloat16x8_t)b.part[p];
        sum.part[p] = vbfmlalbq_f32(vbfmlaltq_f32(sum.part[p], x, y), x, y);
    }
    return sum;
#else
    return fma(even_bf16(a), even_bf16(b), fma(odd_bf16(a), odd_bf16(b), sum));
#endif
}

// x rounded to the nearest bfloat16, ties to even; keeps subnormals, NaN stays (quiet) NaN, overflow gives infinity.
WHET_INLINE uint16_t bf16_of(float x) {
    const auto bits = bit_cast<uint32_t>(x);
    if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// bf16_of for the lanes of a register, in the upper half of each lane.
WHET_INLINE NativeU32 rounded_bf16(f32x16::Native x) {
    const NativeU32 bits = (NativeU32)x;
    return x == x ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000;
}

#if defined(__AVX512BF16__)
// Whether a lane is subnormal: the instructions that round to bfloat16 would flush it to zero.
WHET_INLINE bool any_subnormal(__m512 x) { return __builtin_expect(_mm512_fpclass_ps_mask(x, 0x20) != 0, 0); }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// bf16_of for the lanes of two registers; the instructions keep subnormals.
WHET_INLINE NativeU16 join_bf16(f32x16::Native low, f32x16::Native high) {
    return (NativeU16)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high);
}
#endif

typedef uint16_t HalfU16 __attribute__((vector_size(kNativeBytes / 2)));
WHET_INLINE HalfU16 narrow_bf16(f32x16::Native x) {
#if defined(__AVX512BF16__)
    if (!any_subnormal(x)) return (HalfU16)_mm512_cvtneps_pbh(x);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (HalfU16)vcvt_bf16_f32(x);
#endif
    const NativeU32 word = rounded_bf16(x) >> 16;
#if defined(__AVX512F__)
    return (HalfU16)_mm512_cvtepi32_epi16((__m512i)word);
#else
    return __builtin_convertvector(word, HalfU16);
#endif
}

// Stores 16 floats rounded to bfloat16.
WHET_INLINE void store_bf16(uint16_t* out, f32x16 v) {
    WHET_EACH_PART(p) {
        const HalfU16 half = narrow_bf16(v.part[p]);
        __builtin_memcpy(out + p * f32x16::kPartLanes, &half, sizeof half);
    }
}

// 32 bfloat16 numbers: `even` rounded in lanes 2i, `odd` in lanes 2i + 1. The inverse of even_bf16 and odd_bf16.
WHET_INLINE u16x32 zip_bf16(f32x16 even, f32x16 odd) {
    u16x32 out;
    [[maybe_unused]] constexpr auto zipped_lane = [](int i) { return i / 2 + i % 2 * f32x16::kPartLanes; };
#if defined(__AVX512BF16__)
    if (!any_subnormal(even.part[0]) && !any_subnormal(odd.part[0])) {
        const NativeU16 joined = (NativeU16)_mm512_cvtne2ps_pbh(odd.part[0], even.part[0]);
        out.part[0] = shuffle<zipped_lane>(joined, joined);
        return out;
    }
#endif
    WHET_EACH_PART(p) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
        const NativeU16 joined = join_bf16(even.part[p], odd.part[p]);
        out.part[p] = shuffle<zipped_lane>(joined, joined);
#else
        const NativeU32 word = (rounded_bf16(even.part[p]) >> 16) | (rounded_bf16(odd.part[p]) & 0xffff0000u);
        out.part[p] = (NativeU16)word;
#endif
    }
    return out;
}

// 32 bfloat16 numbers: `low` rounded, then `high` rounded.
WHET_INLINE u16x32 join_bf16(f32x16 low, f32x16 high) {
    u16x32 out;
#if defined(__AVX512BF16__)
    if (!any_subnormal(low.part[0]) && !any_subnormal(high.part[0])) {
        out.part[0] = (NativeU16)_mm512_cvtne2ps_pbh(high.part[0], low.part[0]);
        return out;
    }
#endif
    WHET_EACH_PART(p) {
        const int first = 2 * p % kParts;
        const f32x16& from = 2 * p < kParts ? low : high;
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
        out.part[p] = join_bf16(from.part[first], from.part[first + 1]);
#else
        const HalfU16 halves[2] = {narrow_bf16(kParts == 1 ? low.part[0] : from.part[first]),
                                   narrow_bf16(kParts == 1 ? high.part[0] : from.part[first + 1])};
        __builtin_memcpy(&out.part[p], halves, sizeof out.part[p]);
#endif
    }
    return out;
}

// ---------------------------------------------------------------- int8

WHET_INLINE u8x64 low_nibbles(u8x64 x) { return x & u8x64(15); }
// Shifts 32-bit words by n bits to the right (left if n < 0): the caller masks the bits that cross into other bytes.
template <int n>
WHET_INLINE u8x64 shift_right(u8x64 x) {
    auto words = bit_cast<Vec<uint32_t>>(x);
    WHET_EACH_PART(p) {
        if constexpr (n < 0) {
            words.part[p] = words.part[p] << -n;
        } else {
            words.part[p] = words.part[p] >> n;
        }
    }
    return bit_cast<u8x64>(words);
}
WHET_INLINE u8x64 high_nibbles(u8x64 x) {
#if defined(__aarch64__)
    WHET_EACH_PART(p) x.part[p] = x.part[p] >> 4;  // shifts bytes
    return x;
#else
    return shift_right<4>(x) & u8x64(15);
#endif
}

// sum[i] + x[2i] y[2i] + x[2i+1] y[2i+1], modulo 2^32, for products that fit in 16 bits.
WHET_INLINE NativeU32 add_products(NativeU32 sum, NativeI16 x, NativeI16 y) {
#if defined(__AVX512F__)
    return sum + (NativeU32)_mm512_madd_epi16((__m512i)x, (__m512i)y);
#elif defined(__AVX2__)
    return sum + (NativeU32)_mm256_madd_epi16((__m256i)x, (__m256i)y);
#elif defined(__aarch64__)
    return (NativeU32)vpadalq_s16((int32x4_t)sum, x * y);
#elif defined(__wasm__)
    return sum + (NativeU32)__builtin_wasm_dot_s_i32x4_i16x8(x, y);
#else
    const i32x16::Native products = (i32x16::Native)(x * y);
    return sum + (NativeU32)(products >> 16) + (NativeU32)((i32x16::Native)((NativeU32)products << 16) >> 16);
#endif
}

// sum[i] + a[4i] b[4i] + ... + a[4i+3] b[4i+3], exact modulo 2^32. A product is in [-32640, 32385].
WHET_INLINE i32x16 dot_int8(i32x16 sum, u8x64 a, i8x64 b) {
#if defined(__AVX512VNNI__)
    sum.part[0] = (i32x16::Native)_mm512_dpbusd_epi32((__m512i)sum.part[0], (__m512i)a.part[0], (__m512i)b.part[0]);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    WHET_EACH_PART(p) sum.part[p] = vusdotq_s32(sum.part[p], (uint8x16_t)a.part[p], (int8x16_t)b.part[p]);
#else
    // Even and odd bytes separately, each widened to 16 bits in place: vpmaddubsw would saturate at 32767.
    WHET_EACH_PART(p) {
        const NativeU16 x = (NativeU16)a.part[p], y = (NativeU16)b.part[p];
        const NativeU32 even = add_products((NativeU32)sum.part[p], (NativeI16)(x & 0xff), (NativeI16)(y << 8) >> 8);
        sum.part[p] = (i32x16::Native)add_products(even, (NativeI16)(x >> 8), (NativeI16)y >> 8);
    }
#endif
    return sum;
}

// Whether there is an instruction for 7 bits of one factor, but not for 8.
#if defined(__wasm_relaxed_simd__) || defined(WHET_AVX2)
constexpr bool kOnlyDotInt7 = true;
#else
constexpr bool kOnlyDotInt7 = false;
#endif

// Keeps the compiler from adding the terms of an integer sum in another order: GCC would add all products of a tile as
// a tree, which has more intermediate results than there are registers.
template <class Native>
WHET_INLINE void keep_order([[maybe_unused]] Native& sum) {
#if defined(WHET_AVX2)
    __asm__("" : "+x"(sum));
#endif
}

#if defined(WHET_AVX2)
// a[2i] b[2i] + a[2i+1] b[2i+1] for a in [0, 127].
WHET_INLINE NativeI16 pair_products(u8x64::Native a, i8x64::Native b) {
    return (NativeI16)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
}
#endif

// dot_int8 for a in [0, 127]. Relaxed SIMD leaves only the result of larger values unspecified; vpmaddubsw saturates.
WHET_INLINE i32x16 dot_int7(i32x16 sum, u8x64 a, i8x64 b) {
#if defined(__wasm_relaxed_simd__)
    typedef signed char Bytes __attribute__((vector_size(16)));
    WHET_EACH_PART(p) {
        sum.part[p] = (i32x16::Native)__builtin_wasm_relaxed_dot_i8x16_i7x16_add_s_i32x4((Bytes)b.part[p],
                                                                                         (Bytes)a.part[p], sum.part[p]);
    }
    return sum;
#elif defined(WHET_AVX2)
    WHET_EACH_PART(p) {
        const NativeI16 ones = NativeI16{} + 1;
        sum.part[p] = (i32x16::Native)add_products((NativeU32)sum.part[p], pair_products(a.part[p], b.part[p]), ones);
    }
    return sum;
#else
    return dot_int8(sum, a, b);
#endif
}

using i16x32 = Vec<int16_t>;

// sum[i] + a[2i] b[2i] + a[2i+1] b[2i+1] for a in [0, 127], modulo 2^16: one instruction less than dot_int7.
WHET_INLINE i16x32 dot_pairs(i16x32 sum, u8x64 a, i8x64 b) {
    WHET_EACH_PART(p) {
#if defined(__wasm_relaxed_simd__)
        typedef signed char Bytes __attribute__((vector_size(16)));
        sum.part[p] += (NativeI16)__builtin_wasm_relaxed_dot_i8x16_i7x16_s_i16x8((Bytes)b.part[p], (Bytes)a.part[p]);
#elif defined(WHET_AVX2)
        sum.part[p] += pair_products(a.part[p], b.part[p]);
        keep_order(sum.part[p]);
#else
        const NativeU16 x = (NativeU16)a.part[p], y = (NativeU16)b.part[p];
        sum.part[p] += (NativeI16)(x & 0xff) * ((NativeI16)(y << 8) >> 8) + (NativeI16)(x >> 8) * ((NativeI16)y >> 8);
#endif
    }
    return sum;
}

// Whether products of bytes are products of 16-bit integers.
#if defined(WHET_AVX2)
constexpr bool kWidensBytes = true;
#else
constexpr bool kWidensBytes = false;
#endif

// Widens the even and the odd ones of 32 numbers to 16 bits.
WHET_INLINE void widen_pairs(const int8_t* x, int32_t even[8], int32_t odd[8]) {
    typedef int16_t Pairs __attribute__((vector_size(32)));
    Pairs pairs;
    __builtin_memcpy(&pairs, x, sizeof pairs);
    const Pairs low = pairs << 8 >> 8, high = pairs >> 8;
    __builtin_memcpy(even, &low, sizeof low);
    __builtin_memcpy(odd, &high, sizeof high);
}

// dot_int8 for signed numbers b that are widened: x = b[4i] and b[4i+2], y = b[4i+1] and b[4i+3].
WHET_INLINE i32x16 dot_widened(i32x16 sum, u8x64 a, i16x32 x, i16x32 y) {
    WHET_EACH_PART(p) {
        const NativeU16 bytes = (NativeU16)a.part[p];
        NativeU32 total = add_products((NativeU32)sum.part[p], (NativeI16)(bytes & 0xff), x.part[p]);
        keep_order(total);
        total = add_products(total, (NativeI16)(bytes >> 8), y.part[p]);
        keep_order(total);
        sum.part[p] = (i32x16::Native)total;
    }
    return sum;
}

// sum[i] + pairs[2i] + pairs[2i+1].
WHET_INLINE i32x16 add_pairs(i32x16 sum, i16x32 pairs) {
    WHET_EACH_PART(p) {
        const NativeI16 ones = NativeI16{} + 1;
        sum.part[p] = (i32x16::Native)add_products((NativeU32)sum.part[p], pairs.part[p], ones);
    }
    return sum;
}

// Minus the sum of the negative ones of 32 numbers.
WHET_INLINE int32_t minus_sum_of_negatives(const int8_t* x) {
#if defined(__wasm__)
    typedef signed char Bytes __attribute__((vector_size(16)));
    Bytes low, high;
    __builtin_memcpy(&low, x, sizeof low);
    __builtin_memcpy(&high, x + 16, sizeof high);
    const NativeI16 pairs = (NativeI16)__builtin_wasm_extadd_pairwise_i8x16_s_i16x8(low & (low < 0)) +
                            (NativeI16)__builtin_wasm_extadd_pairwise_i8x16_s_i16x8(high & (high < 0));
    const auto sums = __builtin_wasm_extadd_pairwise_i16x8_s_i32x4(pairs);
    return -(sums[0] + sums[1] + sums[2] + sums[3]);
#else
    int32_t sum = 0;
    for (int i = 0; i < 32; ++i) sum -= x[i] < 0 ? x[i] : 0;
    return sum;
#endif
}

}  // namespace
}  // namespace whet::WHET_ISA
