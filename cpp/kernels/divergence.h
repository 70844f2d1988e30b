// Generalised Jensen-Shannon divergence of the distributions p (student) and q (teacher) of two rows of logits, which
// may be processed in parts, and its gradient with respect to the logits of p (Agarwal et al. 2024, GKD).
//
//   log p_v = z_v / T - lse_p,   r_v = log q_v - log p_v,   m = (1 - beta) p + beta q,   L_v = log m_v - log p_v
//   D = KL(q || p) for beta = 0,   KL(p || q) for beta = 1,   else beta KL(q || m) + (1 - beta) KL(p || m)
//   d D / d z_v = (p_v - q_v) / T,   p_v (-r_v - D) / T,   (1 - beta) p_v (-L_v - S) / T with S = sum_v -p_v L_v
#pragma once
#include "kernels/divergence_row.h"
#include "kernels/rows.h"
#include "simd/dot.h"
#include "simd/math.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

namespace divergence {

// log(x) for normal x > 0, within 2 ULP or 1e-7: x = 2^e m with m around 1, log m = 2 artanh((m - 1) / (m + 1)).
WHET_INLINE f32x16 log(f32x16 x) {
    constexpr float kArtanh[] = {1.0f, 0.33333333f, 0.2f, 0.14285714f, 0.11111111f};
    const i32x16 bits = bit_cast<i32x16>(x);
    const i32x16 exponent = (bits - i32x16(0x3f3504f3)) & i32x16(~0x7fffff);  // in units of 2^23
    const f32x16 m = bit_cast<f32x16>(bits - exponent);
    const f32x16 s = (m - f32x16(1.0f)) / (m + f32x16(1.0f));
    const f32x16 log_m = (s + s) * polynomial(s * s, kArtanh);
    return fma(to_f32(exponent), f32x16(0x1.62e43p-24f), log_m);
}

struct Logprobs {
    f32x16 p, q;
};

// Below, a probability is 0, and its products with log-probs are negligible.
WHET_INLINE Logprobs logprobs(const float* zp, const float* zq, size_t at, int count, const DivergenceRow& row) {
    const f32x16 scale(static_cast<float>(1.0 / row.temperature)), lowest(-1e4f);
    return {max(lowest, fma(rows::read(zp + at, count, -1e30f), scale, f32x16(-row.lse_p))),
            max(lowest, fma(rows::read(zq + at, count, -1e30f), scale, f32x16(-row.lse_q)))};
}

// log((1 - beta) + beta exp(r))
WHET_INLINE f32x16 log_mixture(f32x16 r, float beta) {
    const f32x16 zero(0.0f), of_p(1.0f - beta), of_q(beta);
    const auto q_is_larger = r > zero;
    const f32x16 larger = select(q_is_larger, of_q, of_p), smaller = select(q_is_larger, of_p, of_q);
    return max(r, zero) + log(fma(smaller, exp(-max(r, -r)), larger));
}

}  // namespace divergence

// Adds logits [0, n) of both rows.
void divergence_add_f32(const float* zp, const float* zq, size_t n, const DivergenceRow& row, DivergenceSums* sums) {
    f64x8 total(0.0), ratio(0.0);
    const auto add = [&](f64x8& sum, f32x16 x) WHET_INLINE_LAMBDA {
        const F64Pair wide = widen(x);
        sum += wide.low + wide.high;
    };
    const float beta = row.beta;
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        const auto [lp, lq] = divergence::logprobs(zp, zq, at, count, row);
        const f32x16 r = lq - lp;
        if (beta == 0.0f) {
            add(total, exp(lq) * r);
        } else if (beta == 1.0f) {
            add(total, exp(lp) * -r);
        } else {
            const f32x16 l = divergence::log_mixture(r, beta), of_p = exp(lp) * -l;
            add(total, fma(f32x16(beta) * exp(lq), r - l, f32x16(1.0f - beta) * of_p));
            add(ratio, of_p);
        }
    });
    sums->divergence += segment_sum<8>(total)[0];
    sums->mean_log_ratio += segment_sum<8>(ratio)[0];
}

// Writes the gradient of grad * D with respect to logits [0, n) of p, given the sums over the whole rows.
void divergence_backward_f32(const float* zp, const float* zq, size_t n, const DivergenceRow& row, DivergenceSums sums,
                             float grad, float* out) {
    const float beta = row.beta;
    const bool is_mixture = beta != 0.0f && beta != 1.0f;
    const f32x16 factor(static_cast<float>(grad / row.temperature * (is_mixture ? 1.0 - beta : 1.0)));
    const f32x16 mean(static_cast<float>(is_mixture ? sums.mean_log_ratio : sums.divergence));
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        const auto [lp, lq] = divergence::logprobs(zp, zq, at, count, row);
        const f32x16 r = lq - lp, p = exp(lp);
        f32x16 g;
        if (beta == 0.0f) {
            g = p - exp(lq);
        } else if (beta == 1.0f) {
            g = p * (-r - mean);
        } else {
            g = p * (-divergence::log_mixture(r, beta) - mean);
        }
        rows::put(out + at, factor * g, count);
    });
}

}  // namespace
}  // namespace whet::WHET_ISA
