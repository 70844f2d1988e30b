// The kernels of a training step over the pool, except attention (training_attention.h).
//
// Arrays are contiguous; uint16_t is bfloat16. Sums are split into chunks that do not depend on the number of threads,
// so gradients are bit-identical for any number.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/adamw_step.h"
#include "kernels/token_sums.h"

namespace whet {

void bf16_from_f32(const float* x, size_t n, uint16_t* out);

// out (m, n) = x (m, k) bf16(weight)^T + bias for a few rows; weight is (n, k), or (k, n) with by_columns. bias may be
// null.
void rounded_linear(bool by_columns, const float* weight, size_t n, size_t k, const uint16_t* x, size_t m,
                    const float* bias, uint16_t* out);

void rms_norm_to_bf16(const float* x, const float* weight, size_t rows, size_t n, double eps, uint16_t* out);

// T and Grad: float or uint16_t, but not a float Grad of a bfloat16 T.

// Gradients of x (rows, n) and weight (n,), from the gradient of the result.
template <class T, class Grad>
void rms_norm_backward(const T* x, const float* weight, const Grad* grad, size_t rows, size_t n, double eps, T* grad_x,
                       float* grad_weight);

template <class T>
void swiglu_backward(const T* gate, const T* up, const T* grad, size_t n, T* grad_gate, T* grad_up);

// In place: grad of y = cap tanh(x / cap) becomes grad of x.
template <class T>
void softcap_backward(const float* y, size_t n, float cap, T* grad);

// Log-probs of tokens, from logits passed in tiles: [first, first + n) of the vocabulary for a chunk of rows.
class TokenLogprobs {
public:
    TokenLogprobs(const int64_t* tokens, size_t rows, double temperature, bool with_entropy);

    size_t rows() const { return tokens_.size(); }
    void add(const float* logits, size_t first_row, size_t rows, size_t first, size_t n);
    // All (rows(),); entropy is not written without with_entropy.
    void end(float* logprobs, float* lse, float* entropy) const;

private:
    std::vector<int64_t> tokens_;
    double temperature_;
    bool with_entropy_;
    std::vector<TokenSums> sums_;
};

// Gradient of a tile of logits (rows, n), from lse, logprobs and the gradients of logprobs.
struct TokenLogprobsTile {
    const float* logits;
    size_t rows, n;
    const int64_t* tokens;
    size_t first;  // token id of column 0
    double temperature;
    const float *lse, *logprobs, *grads;
};
template <class T>
void token_logprobs_backward(const TokenLogprobsTile& tile, T* out);

// AdamW (Loshchilov & Hutter 2019), as torch.optim.AdamW; t is the step, starting at 1.
struct AdamW {
    double lr, beta1, beta2, eps, weight_decay, t;
    double grad_scale;  // multiplies every gradient
};
void adamw(const AdamW& settings, size_t n, float* p, const float* grad, float* m, float* v);

// Moments in 8 bits: codes (n,), and the largest magnitude of each block of kMomentBlock elements; see
// kernels/adamw_8bit.h.
struct Moments8 {
    uint8_t *m, *v;
    float *m_scales, *v_scales;
};
// AdamW in float32 on the decoded moments, which are encoded again. The random numbers depend on the seed and the
// element.
void adamw_8bit(const AdamW& settings, size_t n, float* p, const float* grad, const Moments8& moments, uint64_t seed);

}  // namespace whet
