// The gated delta rule, or Mamba-2 (kernels/delta_rule.h), over a packed training batch, and its gradient, over the
// pool.
//
// Sequences are as in engine/training_attention.h: one without keys before its own tokens starts from zeros; one with
// such keys continues the last sequence without, from whose last token it takes the state. The gradients of these
// states are added up in a fixed order: results are bit-identical for any number of threads.
#pragma once
#include <cstddef>
#include <cstdint>

namespace whet {

struct TrainingDelta {
    size_t n_heads, n_key_heads, dim, key_dim;  // of values, and of q and k
    bool is_tiled;                              // value head h reads key head h % n_key_heads, as in ModelConfig
    size_t n_sequences;
    const int64_t *q_offsets, *k_offsets, *key_rows;
    const float* qkv;             // (tokens, channels): n_key_heads of q, as many of k, n_heads of v
    const float *decay, *beta;    // (tokens, n_heads)
    bool corrects = true;         // as in DeltaTask
    bool values_first = false;    // v, k, q instead
    const float* skip = nullptr;  // of the heads, as in DeltaTask; null: 0

    size_t keys() const { return n_key_heads * key_dim; }
    size_t first_value() const { return values_first ? 0 : 2 * keys(); }
    size_t first_key() const { return values_first ? n_heads * dim : keys(); }
    size_t first_query() const { return values_first ? n_heads * dim + keys() : 0; }
    size_t channels() const { return 2 * keys() + n_heads * dim; }
};

struct TrainingDeltaGradients {
    const float* out;     // (tokens, n_heads, dim): gradient of the result
    float* qkv;           // may be qkv itself
    float *decay, *beta;  // (tokens, n_heads), of log(decay) and of beta
};

// out: (tokens, n_heads, dim), tokens `stride` numbers apart; may be the values in qkv. Throws std::bad_alloc, and
// std::invalid_argument if a sequence continues another token than the last of the sequence before.
void delta_forward(const TrainingDelta& d, float* out, size_t stride);

// Throws as delta_forward().
void delta_backward(const TrainingDelta& d, const TrainingDeltaGradients& grads);

}  // namespace whet
