// The forward pass of a decoder-only transformer over a ragged batch: rows of any sequences, one new token each.
//
// A row knows its token, its position and the pages of its sequence; a prompt is rows of following positions, decoding
// one row per sequence. Within a layer all rows' keys and values are written to the cache before the first row
// attends, so that rows of one sequence attend to each other. A row's result depends only on its own sequence, to the
// bit: not on the rows beside it, nor on how a prompt was cut, nor on the number of threads. Nothing is allocated after
// the first calls of a size.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/config.h"
#include "engine/kv_cache.h"
#include "engine/lora.h"
#include "engine/weights.h"
#include "runtime/arena.h"

namespace whet {

struct Row {
    int32_t token, position;
    const int32_t* pages;    // of the sequence, as far as the position
    const Adapter* adapter;  // null: none
};

class Transformer {
public:
    Transformer(std::shared_ptr<const Weights> weights, size_t max_rows, bool bf16_cache);

    const ModelConfig& config() const { return config_; }
    const Weights& weights() const { return *weights_; }
    size_t max_rows() const { return max_rows_; }
    bool bf16_cache() const { return bf16_cache_; }
    void release_workspace() { arena_.release(); }  // to the system, until the next forward()
    size_t workspace_bytes() const { return arena_.size_bytes() + adapter_hidden_.size() * sizeof(float); }

    // Room for adapters up to this rank, of a matrix together.
    void reserve_adapters(size_t rank);

    // The last hidden states (n, hidden_dim) of n <= max_rows rows, normed for the head; valid until the next call.
    const float* forward(const Row* rows, size_t n, KvCache& cache);

    // (n, vocab_size) of hidden states.
    void logits(const float* hidden, size_t n, float* out) const;

private:
    struct Group {  // rows that share pages [0, shared); further pages are each row's own
        size_t first, n;
        int64_t shared;
    };

    const std::shared_ptr<const Weights> weights_;
    const ModelConfig& config_;
    size_t max_rows_;
    bool bf16_cache_;
    Arena arena_;
    float *x_, *h_, *qkv_, *attended_, *delta_, *up_, *cos_sin_, *local_cos_sin_, *state_;
    uint8_t* queries_;
    int32_t* positions_;
    std::vector<Group> groups_;
    std::vector<float> adapter_hidden_;

    void embed(const Row* rows, size_t n);
    void group(const Row* rows, size_t n);
    void add_and_norm(const NormWeight& w, float* delta, size_t n);
    void norm(const NormWeight& w, const float* x, float* residual, float* out) const;
    void post_norm(const NormWeight& w, float* delta, size_t n) const;
    void attention(const Row* rows, size_t n, size_t layer, KvCache& cache);
    void place(const Row& row, size_t i, size_t layer, KvCache& cache);
    void attend(const Row* rows, const Group& group, size_t kv_head, size_t layer, const KvCache& cache);
    void mlp(const Row* rows, size_t n, size_t layer, float* out);
    void product(const Matrix& w, const float* x, size_t n, float* y) const;
    void adapt(const Row* rows, size_t n, size_t layer, Target target, const float* x, size_t ldx, float* y,
               size_t ldy);
    size_t query_bytes() const { return bf16_cache_ ? (config_.head_dim + 1) / 2 * 4 : config_.head_dim * 4; }
    size_t state_size() const { return (config_.head_dim + 15) / 16 * 16 + 16; }
};

}  // namespace whet
