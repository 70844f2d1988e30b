// The head of a learner that returns log-probs of given tokens, and entropies, and their gradient with respect to the
// final hidden states. Logits exist for some outputs of the vocabulary at a time.
//
//   log pi(y) = z_y - log sum_v exp(z_v),   H = -sum_v pi_v log pi_v,   z = softcap(hidden W^T + bias) / temperature
//   d z_v = (g [v = y] - g pi_v - e pi_v (log pi_v + H)) / temperature   for the gradients g of log pi(y) and e of H
//
// With kept tokens, pi is the distribution over them: z_v of other tokens is -infinity.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/kept_tokens.h"
#include "engine/weights.h"
#include "learner/products.h"

namespace whet {

class TokenLogprobsHead {
public:
    TokenLogprobsHead(const Weights& weights, ProductType type);

    // Log-probs of `tokens` (rows,) given hidden (rows, hidden_dim), and entropies unless null, both (rows,). `kept` is
    // empty, or one checked set for each token.
    void forward(const float* hidden, const int64_t* tokens, size_t rows, const TokenSets& kept, double temperature,
                 float* logprobs, float* entropy);
    // Gradient of the hidden states of the last forward(), which must be unchanged, from the gradients of its results.
    // grad_entropy may be null, and must be null after a forward() without entropies.
    void backward(const float* hidden, const float* grad_logprobs, const float* grad_entropy, float* grad_hidden);

    bool has_entropy() const { return entropy_.size() == tokens_.size(); }

private:
    const Weights& weights_;
    const ProductType type_;
    std::vector<OutputRange> ranges_;
    double temperature_ = 1.0;
    std::vector<int64_t> tokens_;
    std::vector<int64_t> kept_offsets_;
    std::vector<int32_t> kept_words_;
    std::vector<float> logprobs_, lse_, entropy_;

    void compute_logits(const OutputRange& range, ProductRows hidden, size_t rows, float* logits) const;
};

}  // namespace whet
