// Soft-capping, element-wise: y = cap tanh(x / cap), close to x for small x and bounded by cap (Gemma 2, 2024), and its
// gradient: dx = dy (1 - (y / cap)^2).
//
// inf gives cap, NaN gives NaN. out may be x.
#pragma once
#include "kernels/rows.h"
#include "simd/activation_math.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

WHET_INLINE f32x16 softcap(f32x16 x, f32x16 cap, f32x16 inverse) { return cap * tanh(x * inverse); }

template <class T>
WHET_INLINE void softcap(const T* x, size_t n, float cap, bool streaming, T* out) {
    const f32x16 caps(cap), inverse(1.0f / cap);
    rows::write(n, out, streaming, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        return softcap(rows::read(x + at, count), caps, inverse);
    });
}

// Converts grad in place from the gradient of y to the gradient of x.
template <class T>
WHET_INLINE void softcap_backward(const float* y, size_t n, float cap, T* grad) {
    const f32x16 one(1.0f), inverse(1.0f / cap);
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        const f32x16 t = rows::read(y + at, count) * inverse;
        rows::put(grad + at, rows::read(grad + at, count) * fma(-t, t, one), count);
    });
}

constexpr auto softcap_f32 = softcap<float>;
constexpr auto softcap_bf16 = softcap<uint16_t>;
constexpr auto softcap_backward_f32 = softcap_backward<float>;
constexpr auto softcap_backward_bf16 = softcap_backward<uint16_t>;

}  // namespace
}  // namespace whet::WHET_ISA
