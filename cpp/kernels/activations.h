// Activations, element-wise.
//
//   silu        x / (1 + exp(-x))
//   gelu        x P(N <= x) for a normal N                                (Hendrycks & Gimpel 2016)
//   gelu_tanh   x / (1 + exp(-2 u)),  u = sqrt(2 / pi) (x + 0.044715 x^3),  which is x (1 + tanh u) / 2
//   relu2       max(x, 0)^2                                               (So et al. 2021)
//   swiglu      silu(gate) up                                             (Shazeer 2020)
//   sigmoid_gate  x / (1 + exp(-gate))
//   clamped_swiglu  g / (1 + exp(-1.702 g)) (u + 1), g = min(gate, 7), u = up in [-7, 7] (OpenAI 2025)
//
// and their gradients, of f(gate) up, or of f(gate) if up is null: with d the gradient of the result,
// d gate = d up f'(gate) and d up = d f(gate), where with s = 1 / (1 + exp(-x)) and phi the density of the normal
// distribution
//
//   silu'(x)       s (1 + x (1 - s))
//   gelu'(x)       P(N <= x) + x phi(x)
//   gelu_tanh'(x)  t + x t (1 - t) 2 u'(x),  t = 1 / (1 + exp(-2 u)),  u' = sqrt(2 / pi) (1 + 3 * 0.044715 x^2)
//   relu2'(x)      2 max(x, 0)
//
// Where 1 + f(x) would cancel, the small part is computed directly: relative precision is kept for negative x. -inf
// gives -0 (relu2: 0), inf gives inf, NaN gives NaN. out may be x, gate or up.
#pragma once
#include "kernels/rows.h"
#include "simd/activation_math.h"
#include "simd/math.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

// x / (1 + exp(-z)); z has the sign of x.
WHET_INLINE f32x16 times_sigmoid(f32x16 x, f32x16 z) {
    const f32x16 zero(0.0f);
    const auto negative = z < zero;
    const f32x16 e = exp(select(negative, z, -z));
    // exp is 0 far above -200, and 0 times -inf would be NaN.
    return select(negative, max(f32x16(-200.0f), x) * e, x) / (f32x16(1.0f) + e);
}

WHET_INLINE f32x16 silu(f32x16 x) { return times_sigmoid(x, x); }

WHET_INLINE f32x16 gelu(f32x16 x) {
    const auto negative = x < f32x16(0.0f);
    const f32x16 tail = normal_tail(select(negative, -x, x));
    return select(negative, max(f32x16(-200.0f), x) * tail, x * (f32x16(1.0f) - tail));
}

constexpr float kGeluTwice = 1.5957691216057308f, kGeluCubic = 0.044715f;  // 2 sqrt(2 / pi)

WHET_INLINE f32x16 gelu_tanh(f32x16 x) {
    return times_sigmoid(x, x * f32x16(kGeluTwice) * fma(x * x, f32x16(kGeluCubic), f32x16(1.0f)));
}

WHET_INLINE f32x16 rectified(f32x16 x) { return select(x < f32x16(0.0f), f32x16(0.0f), x); }  // keeps NaN

WHET_INLINE f32x16 relu2(f32x16 x) {
    const f32x16 y = rectified(x);
    return y * y;
}

WHET_INLINE f32x16 relu2_slope(f32x16 x) { return f32x16(2.0f) * rectified(x); }

WHET_INLINE f32x16 silu_slope(f32x16 x) {
    const f32x16 one(1.0f), sigmoid = times_sigmoid(one, x);
    return sigmoid * fma(x, one - sigmoid, one);
}

WHET_INLINE f32x16 gelu_slope(f32x16 x) {
    constexpr float kDensity = 0.3989422804014327f;  // 1 / sqrt(2 pi)
    const auto negative = x < f32x16(0.0f);
    const f32x16 tail = normal_tail(select(negative, -x, x));
    return fma(x * f32x16(kDensity), exp(x * x * f32x16(-0.5f)), select(negative, tail, f32x16(1.0f) - tail));
}

WHET_INLINE f32x16 gelu_tanh_slope(f32x16 x) {
    const f32x16 one(1.0f), square = x * x;
    const f32x16 z = x * f32x16(kGeluTwice) * fma(square, f32x16(kGeluCubic), one), sigmoid = times_sigmoid(one, z);
    const f32x16 slope = f32x16(kGeluTwice) * fma(square, f32x16(3.0f * kGeluCubic), one);
    return sigmoid * fma(x * slope, one - sigmoid, one);
}

template <f32x16 (*f)(f32x16), class T>
WHET_INLINE void map_row(const T* x, size_t n, bool streaming, T* out) {
    rows::write(n, out, streaming,
                [&](size_t at, int count) WHET_INLINE_LAMBDA { return f(rows::read(x + at, count)); });
}

template <class T>
WHET_INLINE void swiglu(const T* gate, const T* up, size_t n, bool streaming, T* out) {
    rows::write(n, out, streaming, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        return silu(rows::read(gate + at, count)) * rows::read(up + at, count);
    });
}

// grad_gate and grad_up may be gate and up, or grad.
template <f32x16 (*f)(f32x16), f32x16 (*slope)(f32x16)>
WHET_INLINE void activation_backward(const float* gate, const float* up, const float* grad, size_t n, float* grad_gate,
                                     float* grad_up) {
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        const f32x16 g = rows::read(gate + at, count), d = rows::read(grad + at, count), by_gate = d * slope(g);
        if (up == nullptr) return rows::put(grad_gate + at, by_gate, count);
        const f32x16 u = rows::read(up + at, count);
        rows::put(grad_up + at, d * f(g), count);
        rows::put(grad_gate + at, by_gate * u, count);
    });
}

// out may be x.
void sigmoid_gate_f32(const float* x, const float* gate, size_t n, float* out) {
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        const f32x16 sigmoid = times_sigmoid(f32x16(1.0f), rows::read(gate + at, count));
        rows::put(out + at, rows::read(x + at, count) * sigmoid, count);
    });
}

// grad_x may be grad, and grad_gate may be gate.
void sigmoid_gate_backward_f32(const float* x, const float* gate, const float* grad, size_t n, float* grad_x,
                               float* grad_gate) {
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        const f32x16 one(1.0f), sigmoid = times_sigmoid(one, rows::read(gate + at, count));
        const f32x16 by_x = rows::read(grad + at, count) * sigmoid;
        rows::put(grad_gate + at, by_x * rows::read(x + at, count) * (one - sigmoid), count);
        rows::put(grad_x + at, by_x, count);
    });
}

constexpr float kClamp = 7.0f, kClampedSlope = 1.702f;

WHET_INLINE f32x16 clamp_gate(f32x16 gate) { return min(f32x16(kClamp), gate); }  // keeps NaN
WHET_INLINE f32x16 clamp_up(f32x16 up) { return max(f32x16(-kClamp), min(f32x16(kClamp), up)); }

// out may be gate.
void clamped_swiglu_f32(const float* gate, const float* up, size_t n, float* out) {
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        const f32x16 g = clamp_gate(rows::read(gate + at, count)), u = clamp_up(rows::read(up + at, count));
        rows::put(out + at, times_sigmoid(g, f32x16(kClampedSlope) * g) * (u + f32x16(1.0f)), count);
    });
}

// grad_gate and grad_up may be gate and up.
void clamped_swiglu_backward_f32(const float* gate, const float* up, const float* grad, size_t n, float* grad_gate,
                                 float* grad_up) {
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        const f32x16 zero(0.0f), one(1.0f), limit(kClamp);
        const f32x16 all = rows::read(gate + at, count), u = rows::read(up + at, count);
        const f32x16 g = clamp_gate(all), z = f32x16(kClampedSlope) * g, sigmoid = times_sigmoid(one, z);
        const f32x16 d = rows::read(grad + at, count), slope = sigmoid * fma(z, one - sigmoid, one);
        rows::put(grad_up + at, select((u > limit) | (u < -limit), zero, d * g * sigmoid), count);
        rows::put(grad_gate + at, select(all > limit, zero, d * (clamp_up(u) + one) * slope), count);
    });
}

// grad_gate and grad_up from `grad`, the gradient of the result; grad_up may be grad.
template <class T>
WHET_INLINE void swiglu_backward(const T* gate, const T* up, const T* grad, size_t n, T* grad_gate, T* grad_up) {
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        const f32x16 g = rows::read(gate + at, count), u = rows::read(up + at, count), d = rows::read(grad + at, count);
        const f32x16 one(1.0f), sigmoid = times_sigmoid(one, g), activation = silu(g);
        rows::put(grad_up + at, d * activation, count);
        rows::put(grad_gate + at, d * u * fma(activation, one - sigmoid, sigmoid), count);
    });
}

constexpr auto silu_f32 = map_row<silu, float>;
constexpr auto silu_bf16 = map_row<silu, uint16_t>;
constexpr auto gelu_f32 = map_row<gelu, float>;
constexpr auto gelu_bf16 = map_row<gelu, uint16_t>;
constexpr auto gelu_tanh_f32 = map_row<gelu_tanh, float>;
constexpr auto gelu_tanh_bf16 = map_row<gelu_tanh, uint16_t>;
constexpr auto relu2_f32 = map_row<relu2, float>;
constexpr auto relu2_bf16 = map_row<relu2, uint16_t>;
constexpr auto swiglu_f32 = swiglu<float>;
constexpr auto swiglu_bf16 = swiglu<uint16_t>;
constexpr auto silu_backward_f32 = activation_backward<silu, silu_slope>;
constexpr auto gelu_backward_f32 = activation_backward<gelu, gelu_slope>;
constexpr auto gelu_tanh_backward_f32 = activation_backward<gelu_tanh, gelu_tanh_slope>;
constexpr auto relu2_backward_f32 = activation_backward<relu2, relu2_slope>;
constexpr auto swiglu_backward_f32 = swiglu_backward<float>;
constexpr auto swiglu_backward_bf16 = swiglu_backward<uint16_t>;

}  // namespace
}  // namespace whet::WHET_ISA
