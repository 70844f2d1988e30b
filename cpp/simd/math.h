// exp and exp(x) - 1 - x on vectors, and compensated sums.
//
// Both exponentials reduce x = n ln2 + t with |t| <= ln2 / 2 (Cody & Waite: ln2 in two parts, the first short
// enough that n times it is exact) and share one polynomial q(t) = (exp(t) - 1 - t) / t^2, minimax in relative
// error (Remez): 1.2e-7 in float32, 2.8e-18 in float64.
#pragma once
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

template <class T>
struct ExpConstants;

template <>
struct ExpConstants<float> {
    static constexpr float kLog2E = 0x1.715476p+0f;
    static constexpr float kLn2High = 0x1.62p-1f, kLn2Low = 0x1.c85fdep-10f;
    // exp is 0 below and infinite above; x is clamped to this range.
    static constexpr float kLowest = -105.0f, kHighest = 89.0f;
    // Below, exp(x) is negligible: exp(x) - 1 - x is -1 - x.
    static constexpr float kNegligible = -30.0f;
    static constexpr float kQ[] = {0.49999999550171115f, 0.16666576962234522f, 0.041666854094309765f,
                                   0.008363200057304449f, 0.0013901309818487393f};
};

template <>
struct ExpConstants<double> {
    static constexpr double kLog2E = 0x1.71547652b82fep+0;
    static constexpr double kLn2High = 0x1.62e42feep-1, kLn2Low = 0x1.a39ef35793c76p-33;
    static constexpr double kLowest = -746.0, kHighest = 710.0;
    static constexpr double kNegligible = -50.0;
    static constexpr double kQ[] = {0.50000000000000000012,     0.16666666666666671006,   0.04166666666666661796,
                                    0.0083333333333261099777,   0.0013888888888918191153, 0.00019841269874921896185,
                                    0.000024801587245405564513, 2.755725525908846065e-6,  2.755734974269336215e-7,
                                    2.5105279821690307782e-8,   2.0889398572061417871e-9};
};

// c[0] + c[1] t + c[2] t^2 + ...
template <class T, int n>
WHET_INLINE Vec<T> polynomial(Vec<T> t, const T (&c)[n]) {
    Vec<T> sum(c[n - 1]);
#pragma GCC unroll 16
    for (int i = n - 2; i >= 0; --i) sum = fma(sum, t, Vec<T>(c[i]));
    return sum;
}

// exp(x), within 1 ULP; correct for subnormal results, 0, infinity and NaN.
template <class T>
WHET_SHARED Vec<T> exp(Vec<T> x) {
    using C = ExpConstants<T>;
    x = min(Vec<T>(C::kHighest), max(Vec<T>(C::kLowest), x));
    const Vec<T> n = Rounded<T>(x, Vec<T>(C::kLog2E)).value();
    const Vec<T> t = fma(n, Vec<T>(-C::kLn2Low), fma(n, Vec<T>(-C::kLn2High), x));
    const Vec<T> y = fma(t * t, polynomial(t, C::kQ), t) + Vec<T>(T(1));
    return scale_exp2(y, n);
}

// 2^x for -126 <= x <= 1, within 2e-7 relative; 2^0 is exact.
WHET_SHARED f32x16 exp2_fast(f32x16 x) {
    constexpr float kExp2[] = {0x1.62e42ep-1f, 0x1.ebfa4cp-3f, 0x1.c6b27p-5f, 0x1.3cbf26p-7f, 0x1.5d87dcp-10f};
    const Rounded<float> n(x, f32x16(1.0f));
    const f32x16 fraction = x - n.value();
    return fma(polynomial(fraction, kExp2), fraction, f32x16(1.0f)) * n.exp2<0>();
}

// Initial value of a running maximum: finite, so that a chunk of -inf gives weights of 0 instead of NaN.
constexpr float kInitialMax = -0x1.fffffep+127f;

// exp(x) - 1 - x, within 2 ULP also where the terms cancel: near 0 it is x^2 / 2.
//
// With h = 2^(n-1) (so that n = 1024 does not overflow early),
//   exp(x) - 1 - x = 2 [(h - 1/2) (1 + t) + h t^2 q(t) - n ln2 / 2],
// and the low part of the reduction, n ln2_low, is added once, times h.
template <class T>
WHET_SHARED Vec<T> exp_minus_1_minus_x(Vec<T> x) {
    using C = ExpConstants<T>;
    const Vec<T> clamped = min(Vec<T>(C::kHighest), max(Vec<T>(C::kNegligible), x));
    const Rounded<T> exponent(clamped, Vec<T>(C::kLog2E));
    const Vec<T> n = exponent.value();
    const Vec<T> t_high = fma(n, Vec<T>(-C::kLn2High), clamped);
    const Vec<T> t = fma(n, Vec<T>(-C::kLn2Low), t_high);
    const Vec<T> h = exponent.template exp2<-1>();
    const Vec<T> m = h - Vec<T>(T(0.5));
    const Vec<T> constant = fma(n, Vec<T>(T(-0.5) * C::kLn2High), m);
    const Vec<T> rest = fma(t * t, polynomial(t, C::kQ), n * Vec<T>(-C::kLn2Low));
    const Vec<T> y = fma(h, rest, fma(m, t_high, constant));
    return select(x < Vec<T>(C::kNegligible), Vec<T>(T(-1)) - x, y + y);
}

// sum + x, adding the rounding error to `error` (Knuth's TwoSum).
template <class V>
WHET_INLINE V two_sum(V sum, V x, V& error) {
    const V total = sum + x;
    const V back = total - sum;
    error = error + ((sum - (total - back)) + (x - back));
    return total;
}

// Every lane becomes the sum over its segment of `width` lanes (a butterfly; all lanes of a segment agree).
template <int width>
WHET_SHARED f64x8 segment_sum(f64x8 x) {
    if constexpr (width >= 2) x = x + swap_lanes<1>(x);
    if constexpr (width >= 4) x = x + swap_lanes<2>(x);
    if constexpr (width >= 8) x = x + swap_lanes<4>(x);
    return x;
}

// segment_sum of a sum and its error.
template <int width>
WHET_SHARED f64x8 segment_two_sum(f64x8 x, f64x8& error) {
    if constexpr (width >= 2) {
        error += swap_lanes<1>(error);
        x = two_sum(x, swap_lanes<1>(x), error);
    }
    if constexpr (width >= 4) {
        error += swap_lanes<2>(error);
        x = two_sum(x, swap_lanes<2>(x), error);
    }
    if constexpr (width >= 8) {
        error += swap_lanes<4>(error);
        x = two_sum(x, swap_lanes<4>(x), error);
    }
    return x;
}

// A running sum of doubles with its rounding error.
struct CompensatedSum {
    f64x8 sum = f64x8(0.0), error = f64x8(0.0);

    WHET_INLINE void add(f64x8 x) { sum = two_sum(sum, x, error); }
    WHET_SHARED void add(f32x16 x) {
        const F64Pair wide = widen(x);
        add(wide.low + wide.high);
    }

    // Adds all lanes to total[0], and the rounding error to total[1].
    WHET_SHARED void add_to(double total[2]) {
        const f64x8 all = segment_two_sum<8>(sum, error);
        double dropped = error[0];
        total[0] = two_sum(total[0], all[0], dropped);
        total[1] += dropped;
    }
};

}  // namespace
}  // namespace whet::WHET_ISA
