// Configuration of a decoder-only transformer (engine/transformer.cpp), validated by the caller.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "kernels/delta_task.h"

namespace whet {

// kIsComplete: whether scores are cached, hidden states returned, and keys and values stored as integers: not in
// WebAssembly builds, which stay small. kHasDevices: whether a Device can compute.
#if defined(__wasm__)
constexpr bool kIsComplete = false;
#else
constexpr bool kIsComplete = true;
#endif
#if defined(__wasm__) && !defined(WHET_GPU)
constexpr bool kHasDevices = false;
#else
constexpr bool kHasDevices = true;
#endif

enum class Norm { kRms, kLayer };
enum class KvType { kFloat32, kBFloat16, kInt8 };                           // of keys and values in the cache
enum class Activation { kSilu, kGelu, kGeluTanh, kRelu2, kClampedSwiglu };  // the last only with gates
enum class Router { kSoftmax, kSigmoid };  // probabilities of experts from their logits
// Mixers of the tokens; kNone: the layer has only an MLP. Those after it have a state per sequence, from kDelta on a
// matrix per head.
enum class Mixer { kAttention, kNone, kConv, kDelta, kMamba };

constexpr size_t kMaxConvLength = 16;

struct ModelConfig {
    size_t n_layers = 0, n_heads = 0, n_kv_heads = 0, head_dim = 0, hidden_dim = 0, ffn_dim = 0, vocab_size = 0;
    size_t max_position = 0;
    Norm norm = Norm::kRms;
    double norm_eps = 0.0;
    size_t rotary_dim = 0;  // 0: no rotation
    bool is_neox = true;
    std::vector<double> inv_freq;  // rotary_dim / 2
    double attention_factor = 1.0;
    size_t learned_positions = 0;    // rows of the position embedding; 0: none
    bool parallel_residual = false;  // x + attention(norm1(x)) + mlp(norm2(x))
    bool shared_norm = false;        // with parallel_residual: norm1 for both
    bool pre_norm = true;            // norm the inputs of attention and MLP
    bool post_norm = false;          // norm the outputs of attention and MLP
    bool qk_norm = false;
    bool qk_norm_whole = false;    // one norm over all query heads, one over all key heads
    bool qk_norm_rotated = false;  // of rotated heads
    bool v_norm = false;           // RMS norm of every value head, without a weight
    double query_log_scale = 0.0;  // queries are multiplied by 1 + query_log_scale log(1 + floor(position / length))
    size_t query_scale_length = 1;
    bool sinks = false;  // a logit per head, without a value, is in the softmax of its scores
    Activation activation = Activation::kSilu;
    bool gated = true;            // activation(gate) * up
    std::vector<size_t> windows;  // per layer; 0: all keys
    double attention_scale = 0.0;
    double attention_softcap = 0.0;      // of scores: softcap tanh(score / softcap); 0: none
    std::vector<bool> rope_layers;       // layers with RoPE; empty: all
    std::vector<bool> local_layers;      // layers that use local_inv_freq; empty: none
    std::vector<double> local_inv_freq;  // half of the elements that are rotated in a head of a local layer
    size_t local_head_dim = 0;           // of local layers; 0: head_dim
    size_t n_shared_kv_layers = 0;       // the last layers read keys and values of the last one before of their kind
    std::vector<size_t> ffn_dims;        // per layer, 0: no MLP; empty: ffn_dim in all
    size_t layer_input_dim = 0;          // of a token's inputs to the layers, from its embeddings; 0: none
    bool layer_scale = false;            // the output of a layer is multiplied by a number
    bool output_gate = false;            // a query head is followed by a gate: outputs are multiplied by its sigmoid
    std::vector<Mixer> mixers;           // per layer; empty: attention in all
    size_t conv_length = 0;              // taps of short convolutions (of all other mixers), at most kMaxConvLength
    // Gated delta rule and Mamba-2: value heads of delta_dim, key heads of delta_key_dim. Value head h reads key head
    // h / (n_delta_heads / n_delta_key_heads), or h % n_delta_key_heads if they are tiled.
    size_t n_delta_heads = 0, n_delta_key_heads = 0, delta_dim = 0, delta_key_dim = 0;
    bool delta_tiled = false;
    double delta_step_min = 0.0;  // of Mamba-2's steps softplus(a + dt_bias)
    // Mixture of experts in place of an MLP: n_used_experts MLPs of expert_dim a token, and one of shared_dim for all
    // tokens (0: none), with shared_gate times a sigmoid. Chosen by probability, plus a correction if there is one.
    size_t n_experts = 0, n_used_experts = 0, expert_dim = 0, shared_dim = 0;
    std::vector<bool> moe_layers;  // empty: all, if there are experts
    bool shared_gate = false;
    Router router = Router::kSoftmax;
    bool router_normalised = false;  // probabilities of the chosen experts are divided by their sum + router_eps
    double router_eps = 0.0, router_scale = 1.0;
    float embedding_scale = 1.0f;  // multiplies embeddings
    float residual_scale = 1.0f;   // multiplies the outputs of attention (or another mixer) and MLP
    float logits_scale = 1.0f;
    float logits_softcap = 0.0f;  // softcap tanh(logit / softcap); 0: none

    // The factor of the queries at a position.
    float query_scale(size_t position) const {
        const auto steps = static_cast<double>(position / query_scale_length);
        return static_cast<float>(1.0 + query_log_scale * std::log1p(steps));
    }
    bool rotates(size_t layer) const { return rotary_dim > 0 && (rope_layers.empty() || rope_layers[layer]); }
    bool is_local(size_t layer) const { return !local_layers.empty() && local_layers[layer]; }
    size_t rotary_dim_of(size_t layer) const { return is_local(layer) ? 2 * local_inv_freq.size() : rotary_dim; }
    size_t head_dim_of(size_t layer) const { return is_local(layer) && local_head_dim > 0 ? local_head_dim : head_dim; }
    size_t widest_head() const { return std::max(head_dim, local_head_dim); }
    // The layer whose keys and values a layer reads.
    size_t kv_layer(size_t layer) const {
        size_t own = n_layers - n_shared_kv_layers;
        if (layer < own) return layer;
        while (own-- > 0 && is_local(own) != is_local(layer)) {
        }
        return own;
    }
    bool shares_kv(size_t layer) const {  // whether other layers read its keys and values
        for (size_t reader = n_layers - n_shared_kv_layers; reader < n_layers; ++reader) {
            if (kv_layer(reader) == layer) return true;
        }
        return false;
    }
    // Key heads that a layer computes, and as many value heads.
    size_t n_own_kv_heads(size_t layer) const { return kv_layer(layer) == layer ? n_kv_heads : 0; }
    Mixer mixer(size_t layer) const { return mixers.empty() ? Mixer::kAttention : mixers[layer]; }
    bool mixes(size_t layer) const { return mixer(layer) != Mixer::kNone; }
    bool attends(size_t layer) const { return mixer(layer) == Mixer::kAttention; }
    bool is_recurrent(size_t layer) const { return mixer(layer) > Mixer::kNone; }
    bool is_recurrent() const {
        return std::any_of(mixers.begin(), mixers.end(), [](Mixer mixer) { return mixer > Mixer::kNone; });
    }
    bool is_delta(size_t layer) const { return mixer(layer) >= Mixer::kDelta; }
    size_t delta_values() const { return n_delta_heads * delta_dim; }
    size_t kv_group() const { return n_heads / n_kv_heads; }
    size_t query_stride(size_t layer) const { return (output_gate ? 2 : 1) * head_dim_of(layer); }
    size_t qkv_dim(size_t layer) const {
        return n_heads * query_stride(layer) + 2 * n_own_kv_heads(layer) * head_dim_of(layer);
    }
    // Channels of the short convolution of a layer.
    size_t conv_dim(size_t layer) const {
        return is_delta(layer) ? 2 * n_delta_key_heads * delta_key_dim + delta_values() : hidden_dim;
    }
    // Outputs of the first matrix of a layer's mixer, and inputs of the last one.
    size_t mixer_in(size_t layer) const {
        switch (mixer(layer)) {
            case Mixer::kAttention:
                return qkv_dim(layer);
            case Mixer::kConv:
                return 3 * hidden_dim;
            case Mixer::kDelta:
                return conv_dim(layer) + delta_values() + 2 * n_delta_heads;  // and z, b and a
            case Mixer::kMamba:
                return conv_dim(layer) + delta_values() + n_delta_heads;  // and z and a
            case Mixer::kNone:
                return 0;
        }
        __builtin_unreachable();
    }
    size_t mixer_out(size_t layer) const {
        switch (mixer(layer)) {
            case Mixer::kAttention:
                return n_heads * head_dim_of(layer);
            case Mixer::kConv:
                return hidden_dim;
            case Mixer::kDelta:
            case Mixer::kMamba:
                return delta_values();
            case Mixer::kNone:
                return 0;
        }
        __builtin_unreachable();
    }
    // Numbers of the state of a value head (kernels/delta_task.h).
    size_t delta_state_size() const { return state_size(delta_dim, delta_key_dim); }
    static size_t state_size(size_t dim, size_t key_dim) {
        return (dim + kDeltaSlice - 1) / kDeltaSlice * kDeltaSlice * key_dim;
    }
    // Elements of the queries, keys and values that a layer computes.
    size_t heads_dim(size_t layer) const { return (n_heads + 2 * n_own_kv_heads(layer)) * head_dim_of(layer); }
    size_t widest_heads() const { return widest(&ModelConfig::heads_dim); }
    size_t widest_mixer_in() const { return widest(&ModelConfig::mixer_in); }
    size_t widest_mixer_out() const { return widest(&ModelConfig::mixer_out); }
    bool is_moe(size_t layer) const { return n_experts > 0 && (moe_layers.empty() || moe_layers[layer]); }
    // Layers before this one that are mixtures.
    size_t n_moe_layers(size_t layer) const {
        size_t n = 0;
        for (size_t i = 0; i < layer; ++i) n += is_moe(i) ? 1 : 0;
        return n;
    }
    // Recorded numbers of a token's experts, in all layers.
    size_t n_token_experts() const { return kIsComplete ? n_moe_layers(n_layers) * n_used_experts : 0; }
    // Width of a layer's MLP, or of its shared expert; 0: none.
    size_t mlp_dim(size_t layer) const {
        return is_moe(layer) ? shared_dim : ffn_dims.empty() ? ffn_dim : ffn_dims[layer];
    }
    bool has_mlp(size_t layer) const { return is_moe(layer) || mlp_dim(layer) > 0; }
    bool has_layer_inputs() const { return layer_input_dim > 0; }
    size_t layer_inputs() const { return n_layers * layer_input_dim; }  // of a token
    size_t up_dim(size_t layer) const { return (gated ? 2 : 1) * mlp_dim(layer); }
    size_t widest_mlp() const { return widest(&ModelConfig::mlp_dim); }
    size_t widest_up() const { return widest(&ModelConfig::up_dim); }
    size_t expert_up_dim() const { return (gated ? 2 : 1) * expert_dim; }

private:
    size_t widest(size_t (ModelConfig::*size)(size_t) const) const {
        size_t most = 0;
        for (size_t layer = 0; layer < n_layers; ++layer) most = std::max(most, (this->*size)(layer));
        return most;
    }
};

}  // namespace whet
