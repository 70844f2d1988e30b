// Log-probability of one token, and entropy, of softmax(logits / temperature): one pass over a row, which may be
// processed in parts.
//
//   log pi(y) = z_y - log sum_i exp(z_i),   H = log Z - sum_i pi_i z_i,   z = logits / temperature
//
// The row is read in chunks that fit in L1: first a chunk's maximum, then its exponentials, with the running sums
// rescaled when the maximum grows (online softmax; Milakov & Gimelshein 2018). Exponents are in base 2 relative to the
// maximum; sums are float64. The token itself is excluded from the sum S: its log-probability is -log1p(S / exp(z_y)),
// which is accurate close to 0.
//
// NaN or +inf in a row, or a row of only -inf, gives NaN; a token with -inf in another row gives -inf.
#pragma once
#include "kernels/rows.h"
#include "kernels/token_sums.h"
#include "simd/dot.h"
#include "simd/math.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

WHET_INLINE f32x16 load_logits(const float* x) { return load(x); }
WHET_INLINE f32x16 load_logits(const uint16_t* x) { return load_bf16(x); }
WHET_INLINE float logit(const float* x) { return *x; }
WHET_INLINE float logit(const uint16_t* x) { return bit_cast<float>(static_cast<uint32_t>(*x) << 16); }

WHET_INLINE float base2_scale(double temperature) { return static_cast<float>(0x1.71547652b82fep+0 / temperature); }

WHET_INLINE void raise_maximum(TokenSums& row, float maximum, float scale) {
    const double shift = (static_cast<double>(row.maximum) - maximum) * scale;
    const double factor = __builtin_exp2(shift);
    if (row.weights > 0.0) {
        row.weighted_u = factor > 0.0 ? factor * (row.weighted_u + shift * row.weights) : 0.0;
        row.weights *= factor;
    }
    row.maximum = maximum;
}

template <bool with_entropy, class T>
WHET_SHARED void add_chunk(TokenSums& row, const T* logits, int n_vectors, float scale) {
    // Two independent maxima: one would be bound by latency.
    f32x16 even(-__builtin_inff()), odd(-__builtin_inff());
    for (int i = 0; i + 1 < n_vectors; i += 2) {
        even = max(load_logits(logits + 16 * i), even);
        odd = max(load_logits(logits + 16 * i + 16), odd);
    }
    if (n_vectors % 2 != 0) even = max(load_logits(logits + 16 * (n_vectors - 1)), even);
    const float chunk_maximum = max_lane(max(even, odd));
    if (chunk_maximum > row.maximum) raise_maximum(row, chunk_maximum, scale);

    const f32x16 maximum(row.maximum), per_logit(scale), lowest(-126.0f);
    f64x8 weights(0.0), weighted_u(0.0);
    constexpr int run = 8;
    for (int begin = 0; begin < n_vectors; begin += run) {
        const int end = begin + run < n_vectors ? begin + run : n_vectors;
        f32x16 run_weights(0.0f), run_weighted_u(0.0f);
        for (int i = begin; i < end; ++i) {
            // Prefetch the next chunk; prefetching beyond the row is harmless.
            __builtin_prefetch(logits + 16 * (n_vectors + i));
            const f32x16 u = max(lowest, (load_logits(logits + 16 * i) - maximum) * per_logit);
            const f32x16 weight = exp2_fast(u);
            run_weights += weight;
            if constexpr (with_entropy) run_weighted_u = fma(weight, u, run_weighted_u);
        }
        const F64Pair w = widen(run_weights);
        weights += w.low + w.high;
        if constexpr (with_entropy) {
            const F64Pair wu = widen(run_weighted_u);
            weighted_u += wu.low + wu.high;
        }
    }
    row.weights += segment_sum<8>(weights)[0];
    if constexpr (with_entropy) row.weighted_u += segment_sum<8>(weighted_u)[0];
}

// Adds logits [0, n) of a row, or of a part of it, which includes the token if token < n.
template <bool with_entropy, class T>
WHET_INLINE void add_logits(TokenSums& row, const T* logits, size_t n, size_t token, float scale) {
    constexpr int chunk_vectors = 64;
    constexpr size_t chunk = 16 * chunk_vectors;
    for (size_t begin = 0; begin < n; begin += chunk) {
        const size_t length = n - begin < chunk ? n - begin : chunk;
        const bool holds_token = begin <= token && token < begin + length;
        if (length == chunk && !holds_token) {
            add_chunk<with_entropy>(row, logits + begin, chunk_vectors, scale);
        } else {
            float copy[chunk];
            for (size_t i = 0; i < length; ++i) copy[i] = logit(logits + begin + i);
            for (size_t i = length; i % 16 != 0; ++i) copy[i] = -__builtin_inff();
            if (holds_token) copy[token - begin] = -__builtin_inff();
            add_chunk<with_entropy>(row, copy, static_cast<int>((length + 15) / 16), scale);
        }
    }
    if (token < n) row.token_logit = logit(logits + token);
}

template <class T>
WHET_INLINE void add_logits(TokenSums& row, const T* logits, size_t n, size_t token, double temperature,
                            bool with_entropy) {
    if (with_entropy) {
        add_logits<true>(row, logits, n, token, base2_scale(temperature));
    } else {
        add_logits<false>(row, logits, n, token, base2_scale(temperature));
    }
}

// lse = log sum_v exp(z_v), including the token. entropy may be null.
void token_logprobs_end(TokenSums row, double temperature, float* logprob, float* lse, float* entropy) {
    constexpr double kLn2 = 0x1.62e42fefa39efp-1;
    const float scale = base2_scale(temperature);
    if (row.token_logit > row.maximum) raise_maximum(row, row.token_logit, scale);
    if (row.maximum == kInitialMax) row.weights = __builtin_nan("");
    const double token_u = (static_cast<double>(row.token_logit) - row.maximum) * scale;
    const double token_weight = __builtin_exp2(token_u), total = row.weights + token_weight;
    const double log2_total = __builtin_log2(total);
    *logprob = static_cast<float>(token_u > -1.0 ? -__builtin_log1p(row.weights / token_weight)
                                                 : (token_u - log2_total) * kLn2);
    *lse = static_cast<float>(row.maximum / temperature + log2_total * kLn2);
    if (entropy == nullptr) return;
    const double token_part = token_weight > 0.0 ? token_weight * token_u : 0.0;
    const double h = (log2_total - (row.weighted_u + token_part) / total) * kLn2;
    *entropy = static_cast<float>(h < 0.0 ? 0.0 : h);  // rounding may give h < 0 if one token is certain; NaN stays NaN
}

void token_logprobs_add_f32(const float* logits, size_t n, size_t token, double temperature, bool with_entropy,
                            TokenSums* row) {
    add_logits(*row, logits, n, token, temperature, with_entropy);
}

template <class T>
WHET_INLINE void token_logprobs(const T* logits, size_t n, size_t token, double temperature, float* logprob,
                                float* entropy) {
    TokenSums row;
    float lse;
    add_logits(row, logits, n, token, temperature, entropy != nullptr);
    token_logprobs_end(row, temperature, logprob, &lse, entropy);
}

constexpr auto token_logprobs_f32 = token_logprobs<float>;
constexpr auto token_logprobs_bf16 = token_logprobs<uint16_t>;

// The gradient of grad * logprob with respect to a row's logits, or a part of them, from lse = log sum_v exp(z_v / T):
//
//   d z_v = grad / T ([v = token] - exp(z_v / T - lse))
//
// `token` is relative to the first of these logits, and >= n if it is not among them. out may be the logits.
template <class Out>
WHET_INLINE void token_logprobs_backward(const float* logits, size_t n, size_t token, double temperature, float lse,
                                         float logprob, float grad, Out* out) {
    const auto weight = static_cast<float>(-grad / temperature);
    const f32x16 scale(static_cast<float>(1.0 / temperature)), weights(weight), shift(-lse);
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        rows::put(out + at, weights * exp(fma(rows::read(logits + at, count), scale, shift)), count);
    });
    if (token >= n) return;
    // expm1 computes 1 - p without cancellation if p is close to 1.
    const auto token_grad = static_cast<float>(weight * __builtin_expm1(logprob));
    if constexpr (sizeof(Out) == sizeof(float)) {
        out[token] = token_grad;
    } else {
        out[token] = bf16_of(token_grad);
    }
}
// Adds the gradient of grad * entropy with respect to a row's logits, or a part of them:
//
//   d z_v = -grad / T p_v (log p_v + H),   log p_v = z_v / T - lse
//
// A token with p_v = 0 gets 0.
void token_entropy_backward_f32(const float* logits, size_t n, double temperature, float lse, float entropy, float grad,
                                float* out) {
    const f32x16 scale(static_cast<float>(1.0 / temperature)), shift(-lse), h(entropy), lowest(-1e4f);
    const f32x16 factor(static_cast<float>(-grad / temperature));
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        const f32x16 logprob = max(lowest, fma(rows::read(logits + at, count), scale, shift));
        rows::put(out + at, fma(factor * exp(logprob), logprob + h, rows::read(out + at, count)), count);
    });
}

constexpr auto token_logprobs_backward_f32 = token_logprobs_backward<float>;
constexpr auto token_logprobs_backward_bf16 = token_logprobs_backward<uint16_t>;

}  // namespace
}  // namespace whet::WHET_ISA
