// Conversion between float32 and bfloat16, and c = alpha sums + beta c: the prologue and epilogue of products.
#pragma once
#include "simd/dot.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

void bf16_from_f32(const float* x, size_t n, uint16_t* out) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) store_bf16(out + i, load(x + i));
    for (; i < n; ++i) out[i] = bf16_of(x[i]);
}

void f32_from_bf16(const uint16_t* x, size_t n, float* out) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) store(out + i, load_bf16(x + i));
    for (; i < n; ++i) out[i] = bit_cast<float>(static_cast<uint32_t>(x[i]) << 16);
}

// alpha sums + beta c; c is ignored if beta = 0.
WHET_INLINE f32x16 blend(f32x16 sums, float alpha, float beta, f32x16 c) {
    const f32x16 scaled = f32x16(alpha) * sums;
    return beta == 0.0f ? scaled : fma(f32x16(beta), c, scaled);
}

void blend_f32(const float* sums, size_t n, float alpha, float beta, float* c) {
    for (size_t i = 0; i < n; i += 16) {
        const int count = n - i < 16 ? static_cast<int>(n - i) : 16;
        const f32x16 old = beta == 0.0f ? f32x16(0.0f) : load_first(c + i, count, 0.0f);
        store_first(c + i, blend(load_first(sums + i, count, 0.0f), alpha, beta, old), count);
    }
}

void blend_bf16(const float* sums, size_t n, float alpha, float beta, uint16_t* c) {
    for (size_t i = 0; i < n; i += 16) {
        const int count = n - i < 16 ? static_cast<int>(n - i) : 16;
        uint16_t lanes[16] = {};
        if (beta != 0.0f) __builtin_memcpy(lanes, c + i, sizeof(uint16_t) * count);
        store_bf16(lanes, blend(load_first(sums + i, count, 0.0f), alpha, beta, load_bf16(lanes)));
        __builtin_memcpy(c + i, lanes, sizeof(uint16_t) * count);
    }
}

}  // namespace
}  // namespace whet::WHET_ISA
