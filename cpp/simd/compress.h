// Compression of lanes by a mask: the mask as bits, and contiguous stores of the selected lanes.
#pragma once
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

// Bit i of the result is lane i of the mask.
WHET_INLINE uint32_t lane_bits(i32x16 mask) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)mask.part[0]);
#else
    uint32_t bits = 0;
    WHET_EACH_PART(p) {
#if defined(__AVX2__)
        const auto part = static_cast<uint32_t>(_mm256_movemask_ps((__m256)mask.part[p]));
#elif defined(__x86_64__)
        const auto part = static_cast<uint32_t>(_mm_movemask_ps((__m128)mask.part[p]));
#elif defined(__aarch64__)
        typedef uint32_t Word __attribute__((vector_size(16)));
        const Word weights = {1, 2, 4, 8};
        const uint32_t part = vaddvq_u32((uint32x4_t)((Word)mask.part[p] & weights));
#elif defined(__wasm__)
        const auto part = static_cast<uint32_t>(__builtin_wasm_bitmask_i32x4(mask.part[p]));
#else
        uint32_t part = 0;
        for (int i = 0; i < i32x16::kPartLanes; ++i) part |= (mask.part[p][i] & 1u) << i;
#endif
        bits |= part << (p * i32x16::kPartLanes);
    }
    return bits;
#endif
}

// Stores the lanes of v whose bit is set to values[0 ...], and first + lane to ids[0 ...]; returns their number.
// Overwrites up to 16 elements of both.
WHET_INLINE int store_compressed(float* values, int32_t* ids, f32x16 v, int32_t first, uint32_t bits) {
#if defined(__AVX512F__)
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const auto mask = static_cast<__mmask16>(bits);
    _mm512_storeu_ps(values, _mm512_maskz_compress_ps(mask, v.part[0]));
    _mm512_storeu_si512(ids, _mm512_maskz_compress_epi32(mask, _mm512_add_epi32(lane, _mm512_set1_epi32(first))));
    return __builtin_popcount(bits);
#else
    float lanes[16];
    store(lanes, v);
    int n = 0;
    for (; bits != 0; bits &= bits - 1) {
        const int lane = __builtin_ctz(bits);
        values[n] = lanes[lane];
        ids[n++] = first + lane;
    }
    return n;
#endif
}

}  // namespace
}  // namespace whet::WHET_ISA
