// Mixture of experts: each token is given to the experts that the router chooses for it.
//
// The rows of an expert are multiplied together, in the order of the tokens, and a token's results are added up in the
// order of its experts, the most probable first: the result of a token does not depend on the others.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/config.h"
#include "engine/linear.h"
#include "engine/lora.h"
#include "engine/weights.h"
#include "runtime/arena.h"

namespace whet {

struct InputToken;

constexpr uint16_t kOwnChoice = 0xffff;  // in place of a token's first expert: the experts are not given

// The parts of an expert.
inline std::span<const PackedWeight> parts_of(const Matrix& w, size_t expert, size_t n_experts) {
    const size_t n = w.parts.size() / n_experts;
    return {w.parts.data() + expert * n, n};
}

// The bias of an expert's rows of a matrix, or null.
inline const float* bias_of(const Matrix& w, size_t expert, size_t n_experts) {
    return w.bias.empty() ? nullptr : w.bias.data() + expert * (w.bias.size() / n_experts);
}

// The experts of tokens, and the rows of experts: the rows of one follow each other, in the order of the tokens, from
// the start of a block of rows on.
class Choice {
public:
    struct Group {
        size_t expert, first, rows;
    };

    explicit Choice(const ModelConfig& config) : config_(config) {}
    // Takes the arrays for up to max_tokens tokens; called twice, see Arena::take().
    void take(Arena& arena, size_t max_tokens);
    static size_t most_rows(const ModelConfig& config, size_t n_tokens);

    // Chooses the experts of x (n, hidden_dim), the most probable first. `given`, unless null, has experts of each
    // token, ld apart, which replace those: their weights are from the same probabilities.
    void choose(const LayerWeights& w, const float* x, size_t n, const uint16_t* given = nullptr, size_t ld = 0);

    float *probabilities, *weights;  // (n, n_experts); (n, n_used_experts)
    int32_t *chosen, *rows;          // (n, n_used_experts): the expert, and its row for the token
    int32_t *pairs, *tokens;         // of a row, the index in `rows`, and the token; negative between groups
    std::vector<Group> groups;
    size_t expert_of(size_t row) const { return static_cast<size_t>(chosen[pairs[row]]); }
    std::atomic<size_t> n_replaced = 0;  // tokens whose given experts are others than the chosen

private:
    const ModelConfig& config_;
    int32_t* next_;  // by expert

    void choose_of_token(const LayerWeights& w, size_t token, const uint16_t* given);
    void group(size_t n);
};

class Experts {
public:
    Experts(const ModelConfig& config, size_t max_rows);

    // Adds to out (n, hidden_dim) the results of the experts of x (n, hidden_dim), with the adapters of the tokens.
    void add(const LayerWeights& w, const InputToken* tokens, size_t layer, const float* x, size_t n, float* out);

    // The experts of token i of the last add(), the most probable first.
    const int32_t* chosen(size_t i) const { return choice_.chosen + i * config_.n_used_experts; }

    size_t workspace_bytes() const { return arena_.size_bytes(); }
    void release_workspace() { arena_.release(); }

private:
    const ModelConfig& config_;
    Arena arena_;
    Choice choice_;
    float *up_, *down_;  // of the rows of experts
    int32_t* own_rows_;  // rows of up_; negative between groups
    std::vector<RowGroup> groups_;

    void group(const Matrix& w);
    void adapt(const InputToken* tokens, size_t layer, Target target, const int32_t* x_rows, const float* x, size_t ldx,
               float* y, size_t ldy) const;
};

}  // namespace whet
