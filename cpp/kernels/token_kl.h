// Sums over tokens of two estimators of KL(policy || reference), from log-probabilities.
//
//   token_kl           exp(p) (p - q)         p = log policy, q = log reference
//   token_kl_schulman  exp(r) - r - 1         r = q - p         (k3; Schulman 2020, "Approximating KL divergence")
//
// A token of zero policy probability (p = -inf) adds 0 to token_kl: x log x -> 0. Masked tokens are ignored. Each
// kernel adds its sum to total[0] and its rounding error to total[1]. float32 terms are summed in fours in float32,
// then in float64.
#pragma once
#include "simd/math.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

template <class T, class Term>
WHET_INLINE void sum_over_tokens(const T* p, const T* q, const uint8_t* mask, size_t n, double total[2], Term term) {
    constexpr int lanes = Vec<T>::kLanes;
    CompensatedSum sum;
    size_t i = 0;
    auto term_at = [&](size_t at) WHET_INLINE_LAMBDA {
        const Vec<T> x = term(load(p + at), load(q + at));
        return mask == nullptr ? x : select(load_mask<T>(mask + at), x, Vec<T>(T(0)));
    };
    for (; i + 4 * lanes <= n; i += 4 * lanes) {
        sum.add((term_at(i) + term_at(i + lanes)) + (term_at(i + 2 * lanes) + term_at(i + 3 * lanes)));
    }
    for (; i + lanes <= n; i += lanes) sum.add(term_at(i));
    if (i < n) {
        const int rest = static_cast<int>(n - i);
        // p = q = 0 makes both terms 0.
        Vec<T> x = term(load_first(p + i, rest, T(0)), load_first(q + i, rest, T(0)));
        if (mask != nullptr) {
            uint8_t last[lanes] = {};
            for (int k = 0; k < rest; ++k) last[k] = mask[i + k];
            x = select(load_mask<T>(last), x, Vec<T>(T(0)));
        }
        sum.add(x);
    }
    sum.add_to(total);
}

template <class T>
WHET_INLINE void token_kl(const T* p, const T* q, const uint8_t* mask, size_t n, double total[2]) {
    sum_over_tokens(p, q, mask, n, total, [](Vec<T> p, Vec<T> q) WHET_INLINE_LAMBDA {
        const Vec<T> zero(T(0));
        return select(p == Vec<T>(-__builtin_inff()), zero, exp(p) * (p - q));
    });
}

template <class T>
WHET_INLINE void token_kl_schulman(const T* p, const T* q, const uint8_t* mask, size_t n, double total[2]) {
    sum_over_tokens(p, q, mask, n, total, [](Vec<T> p, Vec<T> q) WHET_INLINE_LAMBDA {
        const Vec<T> r = q - p;
        const Vec<T> k3 = exp_minus_1_minus_x(r);
        if constexpr (sizeof(T) == 4) return k3;
        // The rounding error of q - p changes k3 by its derivative, exp(r) - 1 = k3 + r: up to 2 ULP near r = 0.
        const Vec<T> back = r - q;
        const Vec<T> lost = (q - (r - back)) - (p + back);
        const Vec<T> corrected = fma(lost, k3 + r, k3);
        return select(corrected - corrected == Vec<T>(T(0)), corrected, k3);
    });
}

constexpr auto token_kl_f32 = token_kl<float>;
constexpr auto token_kl_f64 = token_kl<double>;
constexpr auto token_kl_schulman_f32 = token_kl_schulman<float>;
constexpr auto token_kl_schulman_f64 = token_kl_schulman<double>;

}  // namespace
}  // namespace whet::WHET_ISA
