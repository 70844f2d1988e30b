// exp of a sum of two floats, the tail of the normal distribution, and tanh, on vectors of float32: for softmax,
// activations and soft-caps, accurate for large exponents and close to 0.
#pragma once
#include "simd/math.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

// exp(x + low), within 1 ULP; `low` is a correction of at most an ULP of x. low is ignored outside exp's range, and if
// it is NaN.
WHET_SHARED f32x16 exp(f32x16 x, f32x16 low) {
    using C = ExpConstants<float>;
    low = select(low * low < f32x16(1e-9f), low, f32x16(0.0f));
    x = min(f32x16(C::kHighest), max(f32x16(C::kLowest), x));
    const f32x16 n = Rounded<float>(x, f32x16(C::kLog2E)).value();
    const f32x16 t = fma(n, f32x16(-C::kLn2Low), fma(n, f32x16(-C::kLn2High), x)) + low;
    const f32x16 y = fma(t * t, polynomial(t, C::kQ), t) + f32x16(1.0f);
    return scale_exp2(y, n);
}

// P(N > a) for a >= 0, the tail of the normal distribution, within 4 ULP: exp(-a^2 / 2) t p(t) with
// t = 1 / (1 + 0.35 a) and p minimax in relative error (4e-8) for a <= 14.6; beyond, the tail is 0.
WHET_SHARED f32x16 normal_tail(f32x16 a) {
    constexpr float kP[] = {0.13962129378647622f, 0.1398637361656891f,    0.11981973311388595f,
                            0.10555848080306243f, -0.023226136407297808f, 0.1593392721562159f,
                            -0.2558557921013152f, 0.1440388922371874f,    -0.029159495745136425f};
    const f32x16 half(-0.5f), square = a * a;
    const f32x16 t = f32x16(1.0f) / fma(a, f32x16(0.35f), f32x16(1.0f));
    return exp(square * half, fma(a, a, -square) * half) * (t * polynomial(t, kP));
}

// tanh(x), within 4 ULP, also close to 0: m / (m + 2) with m = exp(2 |x|) - 1. Beyond 20 it is 1.
WHET_SHARED f32x16 tanh(f32x16 x) {
    const f32x16 a = magnitude(x), twice = min(f32x16(40.0f), a + a);
    const f32x16 m = exp_minus_1_minus_x(twice) + twice, y = m / (m + f32x16(2.0f));
    return select(x < f32x16(0.0f), -y, y);
}

}  // namespace
}  // namespace whet::WHET_ISA
