// The head of a learner that returns log-probs of given tokens, entropies and mean log-probs, and their gradient with
// respect to the final hidden states. Logits exist for some outputs of the vocabulary at a time.
//
//   log pi(y) = z_y - log sum_v exp(z_v),   H = -sum_v pi_v log pi_v,   M = sum_v log pi_v / V
//
// with z = logits / T at temperature T, and
//
//   dlogit_v = (sum_j g_j ([v = y_j] - pi_v) - e pi_v (log pi_v + H) + h (1 / V - pi_v)) / T
//
// for the gradients g of the log-probs of k tokens y, e of H and h of M. With kept tokens, pi is the distribution over
// them: z_v of other tokens is -infinity, and there is no M.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/kept_tokens.h"
#include "learner/head_logits.h"

namespace whet {

// Results of each row, or their gradients; null: not computed, or 0.
template <class Float>
struct OfTokens {
    Float* logprobs;           // (rows, k)
    Float* entropy = nullptr;  // (rows,)
    Float* mean = nullptr;     // (rows,)
};
using TokenValues = OfTokens<float>;
using TokenGradients = OfTokens<const float>;

class TokenLogprobsHead {
public:
    TokenLogprobsHead(const Weights& weights, ProductType type) : head_(weights, type) {}

    // Values for tokens (rows, k) given hidden (rows, hidden_dim). `kept` is empty, or one checked set for each row.
    void forward(const float* hidden, const int64_t* tokens, size_t rows, size_t k, const TokenSets& kept,
                 double temperature, const TokenValues& values);
    // Gradient of the hidden states of the last forward(), which must be unchanged, from the gradients of its values:
    // of those that it computed.
    void backward(const float* hidden, const TokenGradients& grads, float* grad_hidden);

    size_t rows() const { return lse_.size(); }
    size_t k() const { return k_; }
    bool has_entropy() const { return !entropy_.empty(); }
    bool has_mean() const { return has_mean_; }

private:
    HeadLogits head_;
    double temperature_ = 1.0;
    size_t k_ = 1;
    bool has_mean_ = false;
    std::vector<int64_t> tokens_;
    std::vector<int64_t> kept_offsets_;
    std::vector<int32_t> kept_words_;
    std::vector<float> logprobs_, lse_, entropy_;  // logprobs_: of the first of the k tokens

    void compute_logits(const OutputRange& range, ProductRows hidden, size_t rows, float* logits) const;
};

}  // namespace whet
