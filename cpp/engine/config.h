// A decoder-only transformer as data: what engine/transformer.cpp runs. The caller has checked it.
#pragma once
#include <cstddef>
#include <vector>

namespace whet {

enum class Norm { kRms, kLayer };
enum class Activation { kSilu, kGelu, kGeluTanh };

struct ModelConfig {
    size_t n_layers = 0, n_heads = 0, n_kv_heads = 0, head_dim = 0, hidden_dim = 0, ffn_dim = 0, vocab_size = 0;
    size_t max_position = 0;
    Norm norm = Norm::kRms;
    double norm_eps = 0.0;
    size_t rotary_dim = 0;  // 0: no rotation
    bool is_neox = true;
    std::vector<double> inv_freq;  // rotary_dim / 2
    double attention_factor = 1.0;
    size_t learned_positions = 0;    // rows of the table; 0: none
    bool parallel_residual = false;  // x + attention(norm1(x)) + mlp(norm2(x))
    bool shared_norm = false;        // there, norm1 serves both
    bool pre_norm = true;            // attention and MLP read norms of x, not x
    bool post_norm = false;          // what they add to x is normed before
    bool qk_norm = false;
    bool qk_norm_whole = false;  // over all query heads at once, and all key heads
    Activation activation = Activation::kSilu;
    bool gated = true;            // activation(gate) * up
    std::vector<size_t> windows;  // per layer; 0: all keys
    double attention_scale = 0.0;
    double attention_softcap = 0.0;      // of scores: softcap tanh(score / softcap); 0: none
    std::vector<bool> rope_layers;       // whether a layer rotates; empty: all do
    std::vector<bool> local_layers;      // whether it does by local_inv_freq; empty: none
    std::vector<double> local_inv_freq;  // rotary_dim / 2
    float embedding_scale = 1.0f;        // of embeddings, before the first layer
    float residual_scale = 1.0f;         // of what attention and MLP add to the residual stream
    float logits_scale = 1.0f;
    float logits_softcap = 0.0f;  // of logits, in the same way

    bool rotates(size_t layer) const { return rotary_dim > 0 && (rope_layers.empty() || rope_layers[layer]); }
    bool is_local(size_t layer) const { return !local_layers.empty() && local_layers[layer]; }
    size_t group() const { return n_heads / n_kv_heads; }
    size_t qkv_dim() const { return (n_heads + 2 * n_kv_heads) * head_dim; }
    size_t up_dim() const { return gated ? 2 * ffn_dim : ffn_dim; }
};

}  // namespace whet
