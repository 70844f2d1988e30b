// softmax and log_softmax of a row, times a scale above 0.
//
//   softmax       y_i = exp(scale x_i) / sum_j exp(scale x_j)
//   log_softmax   y_i = scale x_i - log sum_j exp(scale x_j)
//
// Exponents are relative to the maximum of x. The rounding error of scale (x - maximum) is passed to the exponential as
// a correction, and sums are float64. The two terms of a log have the same sign, because the sum is at least 1: nothing
// cancels. Both results are within about 2 ULP of float64, for any length and spread of the row. A row with NaN or inf,
// or of only -inf, gives NaN; -inf in other rows gives 0 and -inf. out may be x.
#pragma once
#include "kernels/rows.h"
#include "simd/activation_math.h"
#include "simd/math.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

namespace softmax_row {

template <class T>
WHET_INLINE float max_of(const T* x, size_t n) {
    constexpr float lowest = -__builtin_inff();
    f32x16 even(lowest), odd(lowest);  // one maximum would be bound by latency
    size_t at = 0;
    for (; at + 32 <= n; at += 32) {
        even = max(rows::read(x + at, 16), even);
        odd = max(rows::read(x + at + 16, 16), odd);
    }
    rows::each(at, n,
               [&](size_t i, int count) WHET_INLINE_LAMBDA { even = max(rows::read(x + i, count, lowest), even); });
    return max_lane(max(even, odd));
}

// exp(scale (x - maximum)).
WHET_INLINE f32x16 weight_of(f32x16 x, f32x16 maximum, f32x16 scale) {
    const f32x16 difference = x - maximum, back = difference - x;
    const f32x16 dropped = (x - (difference - back)) - (maximum + back);
    const f32x16 exponent = difference * scale;
    return exp(exponent, fma(dropped, scale, fma(difference, scale, -exponent)));
}

// Calls use(weights, at, count) for each vector; returns the sum of all weights.
template <class T, class Use>
WHET_INLINE double sum_weights(const T* x, size_t n, float maximum, float scale, Use use) {
    f64x8 low(0.0), high(0.0);
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        const f32x16 weights = weight_of(rows::read(x + at, count, -__builtin_inff()), f32x16(maximum), f32x16(scale));
        const F64Pair wide = widen(weights);
        low += wide.low;
        high += wide.high;
        use(weights, at, count);
    });
    return segment_sum<8>(low + high)[0];
}

}  // namespace softmax_row

template <class T>
WHET_INLINE void softmax(const T* x, size_t n, float scale, T* out) {
    const float maximum = softmax_row::max_of(x, n);
    if constexpr (sizeof(T) == sizeof(float)) {
        const double total = softmax_row::sum_weights(x, n, maximum, scale,
                                                      [&](f32x16 v, size_t at, int count)
                                                          WHET_INLINE_LAMBDA { rows::put(out + at, v, count); });
        const f32x16 inverse(static_cast<float>(1.0 / total));
        rows::write(n, out, false,
                    [&](size_t at, int count) WHET_INLINE_LAMBDA { return rows::read(out + at, count) * inverse; });
    } else {
        // Weights stored in out would be rounded to bfloat16 twice, so they are recomputed.
        const double total =
            softmax_row::sum_weights(x, n, maximum, scale, [](f32x16, size_t, int) WHET_INLINE_LAMBDA {});
        const f32x16 inverse(static_cast<float>(1.0 / total));
        rows::write(n, out, false, [&](size_t at, int count) WHET_INLINE_LAMBDA {
            return softmax_row::weight_of(rows::read(x + at, count), f32x16(maximum), f32x16(scale)) * inverse;
        });
    }
}

template <class T>
WHET_INLINE void log_softmax(const T* x, size_t n, float scale, T* out) {
    const float maximum = softmax_row::max_of(x, n);
    const double total = softmax_row::sum_weights(x, n, maximum, scale, [](f32x16, size_t, int) WHET_INLINE_LAMBDA {});
    const f32x16 log_total(static_cast<float>(__builtin_log(total)));
    rows::write(n, out, false, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        return fma(rows::read(x + at, count) - f32x16(maximum), f32x16(scale), -log_total);
    });
}

constexpr auto softmax_f32 = softmax<float>;
constexpr auto softmax_bf16 = softmax<uint16_t>;
constexpr auto log_softmax_f32 = log_softmax<float>;
constexpr auto log_softmax_bf16 = log_softmax<uint16_t>;

}  // namespace
}  // namespace whet::WHET_ISA
