// The forward pass of a decoder-only transformer over a ragged batch of tokens of any sequences.
//
// Prefill passes consecutive tokens of a prompt, decoding one token per sequence. Within a layer the keys and values of
// all tokens are written to the cache before the first token attends, so that tokens of one sequence attend to each
// other. The result of a token depends only on its sequence, to the bit: not on the rest of the batch, the chunking of
// prompts or the number of threads. No allocation after warm-up.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/config.h"
#include "engine/experts.h"
#include "engine/kv_memory.h"
#include "engine/linear.h"
#include "engine/lora.h"
#include "engine/recurrent.h"
#include "engine/weights.h"
#include "runtime/arena.h"

namespace whet {

// A token of the batch.
struct InputToken {
    int32_t token, position;
    const int32_t* pages;    // of its sequence, up to the position
    const Adapter* adapter;  // null: none
};

class Transformer {
public:
    Transformer(std::shared_ptr<const Weights> weights, size_t max_rows, KvType kv_type);

    const ModelConfig& config() const { return config_; }
    const Weights& weights() const { return *weights_; }
    size_t max_rows() const { return max_rows_; }
    KvType kv_type() const { return kv_type_; }
    void release_workspace() {  // its memory is committed again by the next forward()
        arena_.release(), experts_.release_workspace();
    }
    size_t workspace_bytes() const {
        return arena_.size_bytes() + adapter_hidden_.size() * sizeof(float) + recurrent_.workspace_bytes() +
               experts_.workspace_bytes();
    }

    // Reserves memory for adapters up to this rank, summed over the adapters of a matrix.
    void reserve_adapters(size_t rank);

    // Computes the final hidden states (n, hidden_dim) of n <= max_rows tokens, normed for the head; valid until the
    // next call.
    // `runs`: with recurrent mixers, the runs of all tokens.
    const float* forward(const InputToken* rows, size_t n, std::span<const StateRun> runs, KvMemory& memory);

    // Computes the logits (n, vocab_size) of hidden states.
    void logits(const float* hidden, size_t n, float* out) const;

private:
    struct PrefixGroup {  // consecutive tokens with pages [0, shared) in common
        size_t first, n;
        int64_t shared;
    };
    struct Part {
        size_t index, count;
    };
    struct Cache {  // the kernels of its type
        KvType type;
        void (*attend)(const CachedTask& task);
        void (*write_query)(const float* query, int64_t head_dim, void* out);
        void (*write_kv)(const float* key, const float* value, int64_t head_dim, int64_t slot, void* page);
        void (*output)(const float* state, float sink, int64_t head_dim, float* out);

        explicit Cache(KvType type);
        size_t query_bytes(size_t head_dim) const;
    };
    struct Units {  // of the outputs of a product; see Epilogue
        size_t width, count;
    };
    static Units activation_units(size_t dim);

    const std::shared_ptr<const Weights> weights_;
    const ModelConfig& config_;
    size_t max_rows_;
    KvType kv_type_;
    Cache cache_;
    Recurrent recurrent_;
    Experts experts_;
    Arena arena_;
    float *x_, *h_, *qkv_, *attended_, *delta_, *up_, *cos_sin_, *local_cos_sin_, *query_scales_, *state_,
        *layer_inputs_;
    uint8_t* queries_;
    int32_t* positions_;
    std::atomic<uint32_t>* missing_;  // counters of an epilogue
    std::vector<PrefixGroup> groups_;
    std::vector<float> adapter_hidden_;

    void embed(const InputToken* rows, size_t n);
    void group_by_prefix(const InputToken* rows, size_t n);
    void add_and_norm(const InputToken* rows, NormId id, float* delta, size_t n);
    void norm(const NormWeight& w, const float* x, float* residual, float* out) const;
    void post_norm(const InputToken* rows, NormId id, float* delta, size_t n) const;
    void attention(const InputToken* rows, size_t n, size_t layer, KvMemory& memory);
    void finish_head(const InputToken& row, size_t i, size_t unit, size_t layer, KvMemory& memory);
    void attend(const InputToken* rows, const PrefixGroup& group, size_t kv_head, Part part, size_t layer,
                const KvMemory& memory);
    void recurrence(const InputToken* rows, size_t n, size_t layer, std::span<const StateRun> runs,
                    const KvMemory& memory);
    void mlp(const InputToken* rows, size_t n, size_t layer, float* out);
    void feed_forward(const InputToken* rows, size_t n, size_t layer, KvMemory& memory, float* out);
    void product(const Matrix& w, const float* x, size_t n, float* y) const;
    template <class Finish>
    void project(const InputToken* rows, size_t n, size_t layer, Target target, float* y, Units units, bool by_unit,
                 Finish&& finish);
    void project(const InputToken* rows, size_t n, size_t layer, Target target, float* y, const Epilogue& epilogue,
                 bool by_unit);
    void adapt(const InputToken* rows, size_t n, size_t layer, Target target, const float* x, size_t ldx, float* y,
               size_t ldy);
    void read_layer_inputs(const InputToken* rows, size_t n);
    void end_layer(const InputToken* rows, size_t n, size_t layer, float* delta);
    static size_t state_size(size_t head_dim) { return (head_dim + 15) / 16 * 16 + 16; }
};

}  // namespace whet
