// Configuration of a decoder-only transformer (engine/transformer.cpp), validated by the caller.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace whet {

// Whether scores are cached, hidden states returned, and keys and values stored as integers: not in WebAssembly builds,
// which stay small.
#if defined(__wasm__)
constexpr bool kIsComplete = false;
#else
constexpr bool kIsComplete = true;
#endif

enum class Norm { kRms, kLayer };
enum class KvType { kFloat32, kBFloat16, kInt8 };  // of keys and values in the cache
enum class Activation { kSilu, kGelu, kGeluTanh, kRelu2 };

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
    std::vector<double> local_inv_freq;  // rotary_dim / 2
    std::vector<bool> conv_layers;       // layers with a short convolution in place of attention; empty: none
    size_t conv_length = 0;              // taps of these convolutions, at most kMaxConvLength
    float embedding_scale = 1.0f;        // multiplies embeddings
    float residual_scale = 1.0f;         // multiplies the outputs of attention and MLP
    float logits_scale = 1.0f;
    float logits_softcap = 0.0f;  // softcap tanh(logit / softcap); 0: none

    // The factor of the queries at a position.
    float query_scale(size_t position) const {
        const auto steps = static_cast<double>(position / query_scale_length);
        return static_cast<float>(1.0 + query_log_scale * std::log1p(steps));
    }
    bool rotates(size_t layer) const { return rotary_dim > 0 && (rope_layers.empty() || rope_layers[layer]); }
    bool is_local(size_t layer) const { return !local_layers.empty() && local_layers[layer]; }
    bool is_conv(size_t layer) const { return !conv_layers.empty() && conv_layers[layer]; }
    size_t kv_group() const { return n_heads / n_kv_heads; }
    size_t qkv_dim() const { return (n_heads + 2 * n_kv_heads) * head_dim; }
    // Outputs of the first matrix of a layer's attention or convolution, and inputs of the last one.
    size_t mixer_in(size_t layer) const { return is_conv(layer) ? 3 * hidden_dim : qkv_dim(); }
    size_t mixer_out(size_t layer) const { return is_conv(layer) ? hidden_dim : n_heads * head_dim; }
    size_t widest_mixer_in() const { return conv_layers.empty() ? qkv_dim() : std::max(qkv_dim(), 3 * hidden_dim); }
    size_t widest_mixer_out() const {
        return conv_layers.empty() ? n_heads * head_dim : std::max(n_heads * head_dim, hidden_dim);
    }
    size_t up_dim() const { return gated ? 2 * ffn_dim : ffn_dim; }
};

}  // namespace whet
