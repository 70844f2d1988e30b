// Conversion between float32 and bfloat16, and c = alpha sums + beta c: the prologue and epilogue of products.
#pragma once
#include "kernels/rows.h"
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

template <class T>
WHET_INLINE void blend(const float* sums, size_t n, float alpha, float beta, T* c) {
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        const f32x16 old = beta == 0.0f ? f32x16(0.0f) : rows::read(c + at, count);
        rows::put(c + at, blend(rows::read(sums + at, count), alpha, beta, old), count);
    });
}

constexpr auto blend_f32 = blend<float>;
constexpr auto blend_bf16 = blend<uint16_t>;

}  // namespace
}  // namespace whet::WHET_ISA
