// Mixture of experts: each token is given to the experts that the router chooses for it.
//
// The rows of an expert are multiplied together, in the order of the tokens, and a token's results are added up in the
// order of its experts, the most probable first: the result of a token does not depend on the others.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/config.h"
#include "engine/linear.h"
#include "engine/weights.h"
#include "runtime/arena.h"

namespace whet {

class Experts {
public:
    Experts(const ModelConfig& config, size_t max_rows);

    // Adds to out (n, hidden_dim) the results of the experts of x (n, hidden_dim).
    void add(const LayerWeights& w, const float* x, size_t n, float* out);

    // The experts of token i of the last add(), the most probable first.
    const int32_t* chosen(size_t i) const { return chosen_ + i * config_.n_used_experts; }

    size_t workspace_bytes() const { return arena_.size_bytes(); }
    void release_workspace() { arena_.release(); }

private:
    const ModelConfig& config_;
    Arena arena_;
    float *logits_, *weights_, *up_, *down_;  // of experts; of a token's experts; of the rows of experts
    int32_t *chosen_, *x_rows_, *rows_;       // a token's experts; see linear_groups(); the row of a token's expert
    int32_t *counts_, *own_rows_;             // by expert; x_rows of down
    std::vector<RowGroup> groups_;

    void choose(const LayerWeights& w, float* logits, int32_t* chosen, float* weights) const;
    void group(const LayerWeights& w, size_t n);
    size_t most_rows(size_t n) const;
};

}  // namespace whet
