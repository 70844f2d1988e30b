// Learns low-rank adapters, and weights and biases of norms, of a transformer whose packed weights stay frozen: the
// forward pass over a packed batch, and the backward pass to the gradients.
//
//   y = W x + scale B^T (A d(x))      of a linear layer with an adapter, A (rank, k) and B (rank, n)
//   u = scale B dy,  dA += u d(x)^T,  dB += scale (A d(x)) dy^T,  dx = W^T dy + d(A^T u)
//
// d is the adapter's dropout (learner/dropout.cpp): the identity unless forward() is given one. With DoRA the rows of
// W + B A are scaled to trained lengths (learner/dora.cpp).
//
// Between forward and backward the inputs of all layers are kept, and as many layers' activations as fit into given
// memory; the backward pass computes the other layers again, with the same bits.
//
// Products are float32 or bfloat16 (learner/products.h); norms and sums are float32. With bfloat16 products the input
// of a layer is rounded to the upper 24 bits of a float, a 256th of the error of a product's operand, and kept in
// these.
//
// Gradients are sums over the groups of a batch in their order, and within a group over its tokens in order: they
// depend neither on the number of threads nor on how the groups are distributed to batches.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/experts.h"
#include "engine/lora.h"
#include "engine/training_attention.h"
#include "engine/training_delta.h"
#include "engine/weights.h"
#include "learner/products.h"
#include "runtime/zeroed.h"

namespace whet {

// Tokens of groups end to end. A group is a prompt and its completions: its tokens attend to no other group. Sequences
// and their keys are as in engine/training_attention.h.
struct TrainingBatch {
    std::vector<int64_t> tokens, positions;        // (n,)
    std::vector<int64_t> group_offsets;            // group g is the tokens [group_offsets[g], group_offsets[g + 1])
    std::vector<int64_t> q_offsets, k_offsets;     // (sequences + 1,)
    std::vector<int64_t> key_rows;                 // (k_offsets.back(),)
    std::vector<int64_t> reader_offsets, readers;  // (n + 1,), (k_offsets.back(),)
    std::vector<int64_t> predictors;               // tokens whose final hidden states are computed; may repeat
    // (n, mixtures, n_used_experts): experts that replace a token's own choice, unless the first is kOwnChoice. Empty:
    // the own choice of all tokens.
    std::vector<uint16_t> experts{};
    std::vector<float> noise{};  // (n, hidden_dim), added to the inputs of the first layer; empty: none

    size_t n_tokens() const { return tokens.size(); }
};

// Gradients of an adapter's factors, A (rank, k) and B (rank, n), and of its magnitudes (n,), if it has any, to which a
// backward pass adds.
struct FactorGradients {
    float *a, *b, *magnitude = nullptr;
};

// Dropout of the adapters' inputs: elements become 0 with this probability, in [0, 1), and the others are divided by
// 1 - probability. The mask of a token depends on the seed, the adapter, and the tokens up to it in its sequence.
struct Dropout {
    double probability = 0.0;
    uint64_t seed = 0;
};

class Learner {
public:
    // is_merged: whether the weights contain the sums W + scale B A, so that only gradients are computed of adapters:
    // y = W x and dx = W^T dy. They have no magnitudes and no dropout then.
    Learner(std::shared_ptr<const Weights> weights, ProductType type, bool is_merged = false);

    ProductType type() const { return type_; }
    size_t hidden_dim() const { return config_.hidden_dim; }
    size_t vocab_size() const { return config_.vocab_size; }
    size_t n_adapters() const { return factors_.size(); }
    const size_t* shape(size_t adapter) const { return factors_.at(adapter).shape; }

    // Adds an adapter of outputs [first_row, first_row + n) of a matrix, or of an expert's, and returns its index; it
    // is zero until set_factors(). Throws std::invalid_argument.
    size_t add_adapter(size_t layer, Target target, size_t first_row, size_t n, size_t rank);
    // Packs A (rank, k) and scale B (rank, n).
    void set_factors(size_t adapter, const float* a, const float* b, float scale);
    // Lengths (n,) of the rows of W + scale B A, and scales each row to a magnitude (n,) until the next call. An
    // adapter has magnitudes always or never: with them it is of a matrix, not of an expert's, and has no dropout.
    std::vector<double> row_lengths(size_t adapter, const float* a, const float* b, float scale) const;
    void set_magnitude(size_t adapter, const float* magnitude, const std::vector<double>& lengths);
    bool has_magnitude(size_t adapter) const { return !factors_.at(adapter).inverse_lengths.empty(); }

    // Trains the weight or the bias of a norm, by its slot, and returns its index among the trained vectors of norms.
    // Throws std::invalid_argument.
    size_t add_norm(const std::string& slot, std::span<const float> values);
    size_t n_norms() const { return norms_.size(); }
    size_t norm_size(size_t norm) const { return norms_.at(norm).vector->size(); }
    void set_norm(size_t norm, const float* values);

    // Returns the final hidden states (predictors, hidden_dim), normed for the head; valid until the next call;
    // without adapters, the base's. For backward(), keeps the inputs of all layers, and further values of layers in up
    // to `activation_bytes` until set_factors(). Throws std::invalid_argument for a batch that does not fit the model
    // or itself, and std::bad_alloc.
    const float* forward(TrainingBatch batch, bool with_adapters, bool keep, size_t activation_bytes,
                         Dropout dropout = {});
    // Tokens times mixtures whose given experts the last forward() would not have chosen.
    size_t n_replaced() const { return n_replaced_; }
    // Number of layers whose activations the last forward() kept.
    size_t n_kept_layers() const { return config_.n_layers - first_kept_; }
    // Bytes of the activations of a layer and n tokens, which are kept, or computed again for the backward pass.
    size_t layer_bytes(size_t layer, size_t n, bool keeps) const {
        Activations unused;
        return divide(layer, n, keeps, nullptr, unused);
    }
    // Memory that kept activations occupy.
    size_t kept_bytes() const { return kept_bytes_; }
    // Throws std::logic_error unless the last call was a forward() with `keep`, which backward() must follow.
    void check_kept() const;
    // Adds to the gradients of all adapters and trained vectors of norms, in the order of their indices, from the
    // gradient of the hidden states.
    void backward(const float* grad_hidden, std::span<const FactorGradients> grads, std::span<float* const> norm_grads);

private:
    struct Factors {
        LowRank* low;
        size_t index;     // in `low`
        size_t shape[3];  // rank, k, n
        float scale;
        size_t layer;
        Target target;
        size_t matrix_row;                     // the first output in the matrix
        std::vector<float> inverse_lengths{};  // of the rows of W + scale B A, if there are magnitudes

        size_t first_row() const { return low->first_rows[index]; }
        std::span<const PackedWeight> a() const { return {&low->a[index], 1}; }
        std::span<const PackedWeight> b() const { return {&low->b[index], 1}; }
    };
    struct TrainedVector {  // of a norm
        std::vector<float>* vector;
        float* grad;  // during backward()
    };
    using Groups = std::vector<std::pair<size_t, size_t>>;  // rows [first, end) of each group
    // Rows that are computed at once: whole groups, or a part of a large one.
    struct RowTile {
        size_t begin, end;
        Groups groups;  // relative to `begin`

        size_t n() const { return end - begin; }
    };
    using Floats = std::unique_ptr<float[]>;
    using Bytes = std::unique_ptr<uint8_t[]>;
    struct DeltaInputs {  // of the gated delta rule (engine/training_delta.h)
        Floats qkv, decay, beta;
    };
    // Values of a layer that its backward pass reads, for all tokens.
    struct Activations {
        uint8_t *qkv, *attended;  // heads after norms and rotation, and the results of the mixer before their gates
        float* lse;
        float* raw;           // results of the mixer's first matrix; what follows may overwrite them with gradients
        float* attended_out;  // W_o attended, before its norm
        float* middle;        // x + residual_scale norm(W_o attended)
        float* up;            // W_up norm(input of the MLP); null: computed tile by tile
    };

    const std::shared_ptr<const Weights> weights_;
    const ModelConfig& config_;
    const bool is_merged_;
    const ProductType type_, head_type_;  // head_type_: of queries, keys, values and the results of attention
    const size_t head_bytes_, tile_rows_;
    const std::vector<float> ones_;  // weights of the norm of values
    Adapter adapter_;
    std::vector<Factors> factors_;
    std::map<const LowRank*, std::vector<size_t>> adapters_of_;  // indices in factors_
    bool adapts_experts_ = false;
    size_t widest_scaled_ = 0;  // outputs of the widest matrix with magnitudes
    std::vector<TrainedVector> norms_;

    // The batch.
    TrainingBatch batch_;
    bool with_adapters_ = false, is_kept_ = false;
    Dropout dropout_;
    std::vector<int64_t> before_;       // for convolutions: (n, conv_length), the token i places before; -1: none
    std::vector<size_t> next_offsets_;  // (n + 1,): the tokens that a convolution takes a token to, in next_
    std::vector<std::pair<size_t, size_t>> next_;  // their index, and the places in between
    std::vector<uint64_t> paths_;  // for dropout: of each token, a hash of the tokens up to it in its sequence
    std::vector<RowTile> tiles_;
    Floats cos_sin_, local_cos_sin_, last_, hidden_;  // last_: before the final norm
    Bytes inputs_;                                    // of the layers
    size_t first_kept_;                               // the first layer whose activations are kept
    std::vector<size_t> kept_at_;                     // where in kept_ the activations of a layer begin
    size_t kept_bytes_ = 0;
    Zeroed kept_;
    size_t n_replaced_ = 0;

    // One layer, all tokens.
    Floats x_, raw_;
    // (n, n_layers, layer_input_dim): the inputs of layers, and if their norm is trained or their projection has
    // adapters, the projections before the norm; the backward pass replaces these by their gradients.
    Floats layer_inputs_, projected_inputs_;
    std::array<Bytes, 2> shared_kv_;         // keys and values that other layers read, of full and of local ones
    std::array<Floats, 2> shared_kv_grads_;  // during backward(): sums over these layers
    Bytes shared_;                           // activations of the layers that keep none
    Activations now_;                        // of the current layer
    // One tile of rows.
    Floats h_, up_, activated_, grad_activated_, delta_, t_, u_;  // grad_activated_: of float32 products only
    Floats result_, input_out_, input_gate_;  // of a layer before its input, W_out of it, and see input_out
    Floats grad_dropped_;                     // for dropout: A^T u
    Bytes dropped_, mask_;                    // for dropout: inputs, and their mask
    Floats unscaled_;                         // for DoRA: outputs before their scales, then their gradients
    Arena choice_memory_;
    Choice choice_;
    Floats expert_rows_, expert_up_, gates_;       // of the tokens of an expert; of the shared expert
    Floats expert_inputs_;                         // likewise, if experts have adapters
    std::vector<std::vector<float>> shared_sums_;  // of a norm that attention and MLP share, by tile

    size_t n() const { return batch_.n_tokens(); }
    size_t index_of(const RowTile& tile) const { return static_cast<size_t>(&tile - tiles_.data()); }
    bool keeps(size_t layer) const { return layer >= first_kept_; }
    size_t input_bytes() const { return n() * config_.hidden_dim * (type_ == ProductType::kFloat32 ? 4 : 3); }
    void release_kept();
    void cut_tiles();
    void allocate();
    void allocate_kept(size_t most_bytes);
    size_t divide(size_t layer, size_t n, bool keeps, uint8_t* memory, Activations& arrays) const;
    void select(size_t layer);
    void embed(float* x);
    void store(const float* x, size_t rows, size_t width, uint8_t* numbers) const;
    void load(const uint8_t* numbers, size_t n, float* x) const;
    void begin_layer(size_t layer, bool keep);
    void begin_layer_backward(size_t layer);
    const float* cos_sin(size_t layer, size_t token) const;

    void scale(const float* x, float factor, size_t rows, float* out) const;
    void add(const float* x, const float* y, float factor, size_t rows, float* sum) const;
    ProductRows convert(const float* x, size_t ldx, size_t rows, size_t k) const;

    const NormWeight& norm_at(size_t layer, NormWeight LayerNorms::* norm) const {
        return norm_of(*weights_, with_adapters_ ? &adapter_ : nullptr, {layer, norm});
    }
    const NormWeight& final_norm() const { return norm_of(*weights_, with_adapters_ ? &adapter_ : nullptr, {}); }
    float* gradient_of(const std::vector<float>& vector) const;
    Groups predictor_groups() const;
    void norm(const NormWeight& w, const float* x, size_t rows, float* out) const;
    void norm_backward(const NormWeight& w, const float* x, float* grad, const Groups& groups,
                       std::vector<float>* sums = nullptr, bool is_last = true) const;
    void add_norm_terms(Norm kind, const float* x, const float* grad, size_t width, bool has_bias, float* sums) const;

    float kept_scale() const { return static_cast<float>(1.0 / (1.0 - dropout_.probability)); }
    bool drops() const { return with_adapters_ && dropout_.probability > 0.0; }
    void hash_paths();
    void draw_mask(size_t adapter, size_t k, const RowTile& tile);
    ProductRows drop(ProductRows x, size_t rows, size_t k);
    void add_kept(size_t rows, size_t k, float* x, size_t ldx) const;

    void project(size_t layer, Target target, ProductRows x, const RowTile& tile, float* y, size_t ldy);
    ProductRows input_of(size_t adapter, ProductRows x, const RowTile& tile);
    void project_down(const Factors& f, ProductRows x, size_t rows);
    void add_adapters(const LowRank* low, ProductRows x, const RowTile& tile, float* y, size_t ldy);
    void scale_outputs(const LowRank* low, size_t rows, float* y, size_t ldy) const;
    const float* unscale(size_t layer, Target target, const LowRank* low, ProductRows x, const RowTile& tile,
                         const float* grad_y, size_t& ldy, std::span<const FactorGradients> grads);
    void adapters_backward(const LowRank* low, ProductRows x, const RowTile& tile, const float* grad_y, size_t ldy,
                           float* grad_x, size_t ldx, std::span<const FactorGradients> grads,
                           const float* row_weights = nullptr);
    const LowRank* adapters_at(size_t layer, Target target, size_t expert = 0) const {
        return with_adapters_ ? adapter_.find(layer, target, expert) : nullptr;
    }
    void project_backward(size_t layer, Target target, ProductRows x, const RowTile& tile, const float* grad_y,
                          size_t ldy, float* grad_x, size_t ldx, std::span<const FactorGradients> grads,
                          bool add = false);
    void accumulate(const float* hidden, size_t rank, const void* x, bool bf16, size_t ldx, const RowTile& tile,
                    size_t n, float scale, float* grad) const;

    TrainingAttention attention_of(size_t layer);
    void attention_half(size_t layer);
    void attention_backward_half(size_t layer, const float* grad_out, float* grad,
                                 std::span<const FactorGradients> grads);
    void find_neighbours();
    std::vector<float> taps_of(size_t layer) const;
    Floats conv_inputs() const;
    void find_rows(const float* inputs, size_t stride, size_t token, const float** rows) const;
    void add_readers(const float* grad, const std::vector<float>& taps, size_t token, float* sum) const;
    void convolve(size_t layer);
    void convolve_backward(size_t layer, const float* grad);
    DeltaInputs delta_inputs(size_t layer) const;
    TrainingDelta delta_of(size_t layer, const DeltaInputs& inputs) const;
    void convolve_channels(size_t layer, size_t token, const std::vector<float>& taps, float* out) const;
    template <class Visit>
    void for_groups(size_t layer, Visit&& visit) const;
    void delta_rule(size_t layer);
    void delta_rule_backward(size_t layer, const float* grad);
    void gate_delta(size_t layer, size_t token, float* row) const;
    void gate_delta_backward(size_t layer, const RowTile& tile, float* grad) const;
    void rotate(size_t layer, size_t token, float* heads, bool inverse) const;
    void scale_queries(size_t layer, size_t token, float* heads) const;
    bool is_gated(size_t layer) const {
        return config_.is_delta(layer) || (config_.attends(layer) && config_.output_gate);
    }
    size_t shared_kv_dim(size_t layer) const { return 2 * config_.n_kv_heads * config_.head_dim_of(layer); }
    uint8_t* shared_kv(size_t layer) const { return shared_kv_[config_.is_local(layer)].get(); }
    float* shared_kv_grads(size_t layer) const { return shared_kv_grads_[config_.is_local(layer)].get(); }
    void add_shared_kv_grads(size_t layer, const uint8_t* grad_k, const uint8_t* grad_v);
    ProductRows gated_rows(size_t layer, const RowTile& tile);
    void gate_backward(size_t layer, const RowTile& tile, float* grad);
    void read_heads(size_t layer, const float* raw, float* heads) const;
    void finish_heads(size_t layer, size_t token);
    void heads_backward(size_t layer, size_t token, const uint8_t* grad_q, const uint8_t* grad_k, const uint8_t* grad_v,
                        float* sums);
    const NormWeight& mlp_norm(size_t layer) const;
    const float* mlp_input() const { return config_.parallel_residual ? x_.get() : now_.middle; }
    float* up_of(size_t layer, const RowTile& tile) {
        return now_.up == nullptr ? up_.get() : now_.up + tile.begin * config_.up_dim(layer);
    }
    // Rows in bfloat16 are a copy, so that those they were converted from may be overwritten.
    float* grad_activated() { return (type_ == ProductType::kFloat32 ? grad_activated_ : activated_).get(); }
    void mlp_up(size_t layer, const RowTile& tile);
    ProductRows mlp_activate(size_t layer, const RowTile& tile);
    void mlp_down(size_t layer, const RowTile& tile);
    void activation_backward(float* row, const float* grad, size_t n) const;
    void shared_gates(size_t layer, size_t rows, float* gates) const;
    void shared_gate_backward(size_t layer, size_t rows, const float* result, float* grad_result, float* grad);
    void choose_experts(size_t layer, const RowTile& tile);
    void gather_expert_rows(const Choice::Group& group, const float* x, float* rows) const;
    RowTile tile_of(const Choice::Group& group, const RowTile& tile) const;
    void add_expert_rows(const Choice::Group& group, bool weighted, float* y);
    void expert_up(size_t layer, const Choice::Group& group, const RowTile& rows);
    void add_experts(size_t layer, const RowTile& tile, float* y);
    void experts_backward(size_t layer, const RowTile& tile, const float* grad_y, float* grad,
                          std::span<const FactorGradients> grads);
    void router_backward(size_t token, const double* grad_weights);
    bool has_ends() const { return config_.has_layer_inputs() || config_.layer_scale; }
    void read_layer_inputs();
    const NormWeight& layer_inputs_norm() const {
        return norm_of(*weights_, with_adapters_ ? &adapter_ : nullptr, {.is_of_inputs = true});
    }
    void layer_inputs_norm_backward(size_t layer, const RowTile& tile, float* gates);
    void layer_inputs_backward(std::span<const FactorGradients> grads);
    void input_out(size_t layer, const RowTile& tile, const float* x);
    void input_half(size_t layer, const RowTile& tile, const float* x, float* out);
    void input_backward_half(size_t layer, const RowTile& tile, float* grad, std::span<const FactorGradients> grads);
    void mlp(size_t layer, const RowTile& tile);
    void mlp_backward(size_t layer, const RowTile& tile, const float* grad_out, float* grad,
                      std::span<const FactorGradients> grads);
};

}  // namespace whet
