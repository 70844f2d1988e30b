// Log-probability of one token, and the entropy, of softmax(logits / temperature): one pass over a row.
//
//   log pi(y) = z_y - log sum_i exp(z_i),   H = log Z - sum_i pi_i z_i,   z = logits / temperature
//
// The row is read in chunks that stay in the first-level cache: a chunk's maximum first, then its exponentials, with
// the running sums rescaled when the maximum grows (online softmax; Milakov & Gimelshein 2018). Exponents are in base
// 2 relative to the maximum; sums are float64. The token itself stays out of the sum, S: its log-probability is
// -log1p(S / exp(z_y)), which keeps its digits when it is close to 0.
//
// A NaN logit, an infinite one, or a row of -inf gives NaN; a -inf token in a proper row gives -inf.

WHET_INLINE f32x16 load_logits(const float* x) { return load(x); }
WHET_INLINE f32x16 load_logits(const uint16_t* x) { return load_bf16(x); }
WHET_INLINE float logit(const float* x) { return *x; }
WHET_INLINE float logit(const uint16_t* x) { return bit_cast<float>(static_cast<uint32_t>(*x) << 16); }

struct RowSums {
    float top = kNothing;     // the greatest logit so far
    double weights = 0.0;     // sum of 2^u, u = (logit - top) * scale
    double weighted_u = 0.0;  // sum of 2^u u

    void raise_top(float new_top, float scale) {
        const double shift = (static_cast<double>(top) - new_top) * scale;
        const double factor = __builtin_exp2(shift);
        if (weights > 0.0) {
            weighted_u = factor > 0.0 ? factor * (weighted_u + shift * weights) : 0.0;
            weights *= factor;
        }
        top = new_top;
    }
};

template <bool with_entropy, class T>
WHET_INLINE void add_chunk(RowSums& row, const T* logits, int n_vectors, float scale) {
    // Two maxima side by side: one would wait for itself.
    f32x16 even(-__builtin_inff()), odd(-__builtin_inff());
    for (int i = 0; i + 1 < n_vectors; i += 2) {
        even = max(load_logits(logits + 16 * i), even);
        odd = max(load_logits(logits + 16 * i + 16), odd);
    }
    if (n_vectors % 2 != 0) even = max(load_logits(logits + 16 * (n_vectors - 1)), even);
    const float chunk_top = max_lane(max(even, odd));
    if (chunk_top > row.top) row.raise_top(chunk_top, scale);

    const f32x16 top(row.top), per_logit(scale), lowest(-126.0f);
    f64x8 weights(0.0), weighted_u(0.0);
    constexpr int run = 8;
    for (int begin = 0; begin < n_vectors; begin += run) {
        const int end = begin + run < n_vectors ? begin + run : n_vectors;
        f32x16 run_weights(0.0f), run_weighted_u(0.0f);
        for (int i = begin; i < end; ++i) {
            // The next chunk comes in while this one is computed on: reading past the row's end is only asked for.
            __builtin_prefetch(logits + 16 * (n_vectors + i));
            const f32x16 u = max(lowest, (load_logits(logits + 16 * i) - top) * per_logit);
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

template <bool with_entropy, class T>
WHET_INLINE void token_logprobs_row(const T* logits, size_t n, size_t token, double temperature, float* logprob,
                                    float* entropy) {
    constexpr double kLn2 = 0x1.62e42fefa39efp-1;
    constexpr int chunk_vectors = 64;
    constexpr size_t chunk = 16 * chunk_vectors;
    const float scale = static_cast<float>(0x1.71547652b82fep+0 / temperature);  // log2(e) / temperature
    RowSums row;
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
    const float token_logit = logit(logits + token);
    if (token_logit > row.top) row.raise_top(token_logit, scale);
    if (row.top == kNothing) row.weights = __builtin_nan("");
    const double token_u = (static_cast<double>(token_logit) - row.top) * scale;
    const double token_weight = __builtin_exp2(token_u), total = row.weights + token_weight;
    *logprob = static_cast<float>(token_u > -1.0 ? -__builtin_log1p(row.weights / token_weight)
                                                 : (token_u - __builtin_log2(total)) * kLn2);
    if constexpr (with_entropy) {
        const double token_part = token_weight > 0.0 ? token_weight * token_u : 0.0;
        const double h = (__builtin_log2(total) - (row.weighted_u + token_part) / total) * kLn2;
        *entropy = static_cast<float>(h < 0.0 ? 0.0 : h);  // rounding may take a certain row below 0; NaN stays
    }
}

template <class T>
WHET_INLINE void token_logprobs(const T* logits, size_t n, size_t token, double temperature, float* logprob,
                                float* entropy) {
    if (entropy == nullptr) {
        token_logprobs_row<false>(logits, n, token, temperature, logprob, entropy);
    } else {
        token_logprobs_row<true>(logits, n, token, temperature, logprob, entropy);
    }
}

void token_logprobs_f32(const float* logits, size_t n, size_t token, double temperature, float* logprob,
                        float* entropy) {
    token_logprobs(logits, n, token, temperature, logprob, entropy);
}
void token_logprobs_bf16(const uint16_t* logits, size_t n, size_t token, double temperature, float* logprob,
                         float* entropy) {
    token_logprobs(logits, n, token, temperature, logprob, entropy);
}

// The gradient of grad * logprob in logits, of which these may be a part, from the row's lse = log sum_v exp(z_v / T):
//
//   d z_v = grad / T ([v = token] - exp(z_v / T - lse))
//
// `token` counts from the first of these logits; one that is not among them is n or more. out may be the logits.
template <class Out>
WHET_INLINE void token_logprobs_backward_row(const float* logits, size_t n, size_t token, double temperature, float lse,
                                             float logprob, float grad, Out* out) {
    const auto weight = static_cast<float>(-grad / temperature);
    const f32x16 scale(static_cast<float>(1.0 / temperature)), weights(weight), shift(-lse);
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        rows::put(out + at, weights * exp(fma(rows::read(logits + at, count), scale, shift)), count);
    });
    if (token >= n) return;
    // Where p is close to 1, expm1 keeps the digits of 1 - p.
    const auto own = static_cast<float>(weight * __builtin_expm1(logprob));
    if constexpr (sizeof(Out) == sizeof(float)) {
        out[token] = own;
    } else {
        out[token] = bf16_of(own);
    }
}
void token_logprobs_backward_f32(const float* logits, size_t n, size_t token, double temperature, float lse,
                                 float logprob, float grad, float* out) {
    token_logprobs_backward_row(logits, n, token, temperature, lse, logprob, grad, out);
}
void token_logprobs_backward_bf16(const float* logits, size_t n, size_t token, double temperature, float lse,
                                  float logprob, float grad, uint16_t* out) {
    token_logprobs_backward_row(logits, n, token, temperature, lse, logprob, grad, out);
}
