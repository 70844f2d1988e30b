// A small random model for tests of the engine, prompts with a common prefix, and their results.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace whet {

// Llama-like; a mix of GPT-J, Mistral and LFM2: layer norm, interleaved RoPE, parallel residual, windows and a
// convolution; a mix of Qwen3.5 and Granite 4 H, with states of several pages; with mixtures of experts; Gemma-4-like,
// with heads of two sizes, shared keys and values, and inputs of layers; or Nemotron-like, with one mixer or MLP a
// layer.
enum Kind : int { kLlama, kOther, kDelta, kMixture, kSizes, kBlocks };

inline ModelConfig config_of(int kind) {
    ModelConfig c;
    c.n_layers = 2, c.n_heads = 6, c.n_kv_heads = 2, c.head_dim = 20, c.hidden_dim = 64, c.ffn_dim = 72;
    c.vocab_size = 97, c.max_position = 1024, c.norm_eps = 1e-5;
    c.rotary_dim = 12;
    for (size_t i = 0; i < 6; ++i) c.inv_freq.push_back(std::pow(1000.0, -static_cast<double>(i) / 6));
    c.windows = {0, 0};
    c.attention_scale = 1 / std::sqrt(20.0);
    if (kind == kOther) {
        c.norm = Norm::kLayer, c.is_neox = false, c.parallel_residual = true, c.gated = false;
        c.activation = Activation::kGeluTanh, c.windows = {0, 50, 0}, c.n_layers = 3;
        c.mixers = {Mixer::kAttention, Mixer::kAttention, Mixer::kConv}, c.conv_length = 4;
    } else if (kind == kDelta) {
        c.qk_norm = c.output_gate = true, c.windows = {0, 0, 0}, c.n_layers = 3;
        c.mixers = {Mixer::kDelta, Mixer::kAttention, Mixer::kMamba}, c.conv_length = 4;
        c.n_delta_key_heads = 2, c.n_delta_heads = 4, c.delta_dim = 36, c.delta_key_dim = 40;
    } else if (kind == kMixture) {
        c.windows = {0, 0, 0}, c.n_layers = 3, c.moe_layers = {false, true, true};
        c.n_experts = 7, c.n_used_experts = 3, c.expert_dim = 40, c.shared_dim = 24, c.shared_gate = true;
        c.router_normalised = true, c.router_scale = 1.5, c.activation = Activation::kClampedSwiglu;
    } else if (kind == kSizes) {
        c.n_layers = 4, c.windows = {50, 0, 50, 0}, c.local_layers = {true, false, true, false};
        c.local_head_dim = 12, c.local_inv_freq = c.inv_freq, c.n_shared_kv_layers = 2, c.ffn_dims = {72, 72, 88, 88};
        c.qk_norm = c.v_norm = c.layer_scale = true, c.layer_input_dim = 10, c.activation = Activation::kGeluTanh;
    } else if (kind == kBlocks) {
        c.n_layers = 4, c.windows = {0, 0, 0, 0}, c.gated = false, c.activation = Activation::kRelu2;
        c.mixers = {Mixer::kMamba, Mixer::kNone, Mixer::kAttention, Mixer::kNone}, c.ffn_dims = {0, 72, 0, 0};
        c.conv_length = 4, c.n_delta_key_heads = 2, c.n_delta_heads = 4, c.delta_dim = 36, c.delta_key_dim = 40;
        c.delta_step_min = 0.5, c.moe_layers = {false, false, false, true}, c.router = Router::kSigmoid;
        c.n_experts = 7, c.n_used_experts = 3, c.expert_dim = 40, c.shared_dim = 24, c.router_normalised = true;
    }
    return c;
}

struct Model {
    const std::shared_ptr<Weights> weights;
    Transformer transformer;

    Model(int kind, WeightFormat format, size_t max_rows)
        : Model(config_of(kind), format, max_rows, kind == kOther ? KvType::kBFloat16 : KvType::kFloat32) {}

    size_t page_bytes() const { return KvMemory::page_bytes(transformer.config(), transformer.kv_type()); }
    // Size of a cache of n_pages, and two states.
    size_t kv_bytes(size_t n_pages) const {
        const KvMemory page(transformer.config(), transformer.kv_type(), page_bytes());
        return (n_pages + 2 * page.n_state_pages()) * page_bytes();
    }

    Model(const ModelConfig& config, WeightFormat format, size_t max_rows, KvType kv_type)
        : weights(std::make_shared<Weights>(config)), transformer(weights, max_rows, kv_type) {
        const ModelConfig& c = transformer.config();
        const bool has_biases = c.norm == Norm::kLayer;
        std::mt19937 bits(7);
        std::normal_distribution<float> normal;
        Weights& w = *weights;
        std::vector<std::function<void()>> fill;  // run after all matrices are allocated
        const auto matrix = [&](const std::string& slot, WeightFormat f, size_t n, size_t k) {
            std::vector<float> x(n * k);
            for (float& value : x) value = normal(bits) / std::sqrt(static_cast<float>(k));
            w.add_matrix(slot, k % traits(f).block_length == 0 ? f : WeightFormat::kInt8, n, k);
            fill.push_back([&w, slot, n, k, x] {
                w.pack(slot, 0, {StoredType::kFloat32, x.data(), n, k, static_cast<ptrdiff_t>(k), 1});
            });
        };
        const auto put_vector = [&](const std::string& slot, const std::vector<float>& values) {
            w.add_vector(slot, values.size());
            w.pack(slot, 0, {StoredType::kFloat32, values.data(), 1, values.size(), 0, 1});
        };
        const auto vector = [&](const std::string& slot, size_t n, float value) {
            put_vector(slot, std::vector<float>(n, value));
        };
        const auto random_vector = [&](const std::string& slot, size_t n) {
            std::vector<float> values(n);
            for (float& value : values) value = 3.0f * normal(bits);
            put_vector(slot, values);
        };
        if (c.layer_input_dim > 0) {
            const size_t k = c.layer_inputs();
            std::vector<float> table(c.vocab_size * k);
            for (float& value : table) value = normal(bits);
            w.add_vector("layer_embedding", c.vocab_size);
            w.pack("layer_embedding", 0,
                   {StoredType::kFloat32, table.data(), c.vocab_size, k, static_cast<ptrdiff_t>(k), 1});
            matrix("layer_inputs", format, k, c.hidden_dim);
            vector("layer_inputs_norm.weight", c.layer_input_dim, 1.2f);
        }
        matrix("embedding", WeightFormat::kBFloat16, c.vocab_size, c.hidden_dim);
        for (size_t i = 0; i < c.n_layers; ++i) {
            const std::string layer = "layers." + std::to_string(i) + ".";
            for (const char* norm : {"norm1", "norm2"}) {
                if (!(norm[4] == '1' ? c.mixes(i) : c.has_mlp(i))) continue;
                vector(layer + norm + ".weight", c.hidden_dim, 1.0f);
                if (has_biases) vector(layer + norm + ".bias", c.hidden_dim, 0.1f);
            }
            const Mixer mixer = c.mixer(i);
            const bool attends = c.attends(i);
            constexpr const char* kNames[][2] = {{"qkv", "o"}, {"conv_in", "conv_out"}, {"delta_in", "delta_out"}};
            const auto& [in, out] = kNames[c.is_delta(i) ? 2 : attends ? 0 : 1];
            if (c.qk_norm && attends) {
                const size_t d = c.head_dim_of(i);
                vector(layer + "q_norm.weight", (c.qk_norm_whole ? c.n_heads : 1) * d, 1.1f);
                if (c.kv_layer(i) == i) vector(layer + "k_norm.weight", (c.qk_norm_whole ? c.n_kv_heads : 1) * d, 0.9f);
            }
            if (c.layer_scale) vector(layer + "scale", 1, 0.8f);
            if (c.layer_input_dim > 0) {
                matrix(layer + "input_gate", format, c.layer_input_dim, c.hidden_dim);
                matrix(layer + "input_out", format, c.hidden_dim, c.layer_input_dim);
                vector(layer + "input_norm.weight", c.hidden_dim, 0.9f);
            }
            if (c.sinks && attends) vector(layer + "sinks", c.n_heads, 0.7f);
            if (c.is_recurrent(i)) matrix(layer + "conv", WeightFormat::kFloat32, c.conv_length, c.conv_dim(i));
            if (c.is_delta(i)) {
                vector(layer + "decay", c.n_delta_heads, -0.3f), vector(layer + "dt_bias", c.n_delta_heads, 0.2f);
                vector(layer + "delta_norm.weight", mixer == Mixer::kDelta ? c.delta_dim : c.delta_values(), 1.1f);
            }
            if (mixer == Mixer::kMamba) {
                vector(layer + "conv_bias", c.conv_dim(i), 0.1f), vector(layer + "skip", c.n_delta_heads, 0.6f);
            }
            if (c.mixes(i)) {
                matrix(layer + in, format, c.mixer_in(i), c.hidden_dim);
                matrix(layer + out, format, c.hidden_dim, c.mixer_out(i));
            }
            const char* up = c.gated ? "gate_up" : "up";
            if (c.is_moe(i)) {
                matrix(layer + "router", WeightFormat::kFloat32, c.n_experts, c.hidden_dim);
                matrix(layer + "experts_" + up, format, c.n_experts * c.expert_up_dim(), c.hidden_dim);
                matrix(layer + "experts_down", format, c.n_experts * c.hidden_dim, c.expert_dim);
                if (c.activation == Activation::kClampedSwiglu) {  // gpt-oss
                    random_vector(layer + "experts_" + up + ".bias", c.n_experts * c.expert_up_dim());
                    random_vector(layer + "experts_down.bias", c.n_experts * c.hidden_dim);
                }
                if (c.shared_gate) matrix(layer + "shared_router", WeightFormat::kFloat32, 1, c.hidden_dim);
            }
            if (c.mlp_dim(i) > 0) {
                matrix(layer + up, format, c.up_dim(i), c.hidden_dim);
                matrix(layer + "down", format, c.hidden_dim, c.mlp_dim(i));
            }
            if (has_biases) vector(layer + "down.bias", c.hidden_dim, 0.2f);
        }
        vector("final_norm.weight", c.hidden_dim, 1.0f);
        w.allocate();
        for (const auto& pack : fill) pack();
    }
};

inline std::vector<int32_t> tokens(size_t n, unsigned seed) {
    std::mt19937 bits(seed);
    std::vector<int32_t> out(n);
    for (int32_t& token : out) token = static_cast<int32_t>(bits() % 97);
    return out;
}

inline Request prompt(size_t length, size_t n, size_t max_new, uint64_t index) {
    Request r;
    r.tokens = tokens(length, 1);  // all prompts have a common prefix
    r.n = n, r.max_new_tokens = max_new, r.prompt_index = index, r.seed = 3;
    return r;
}

// Rank 3, on some rows of the first layer's o and on all rows of another matrix.
inline std::unique_ptr<Adapter> adapter_of(const Weights& weights) {
    const ModelConfig& c = weights.config();
    auto adapter = std::make_unique<Adapter>(c.n_layers);
    const auto add = [&](size_t layer, Target target, size_t first, size_t n, size_t k) {
        const std::vector<float> values(3 * std::max(n, k), 0.05f);
        adapter->add(weights, layer, target, first, values.data(), values.data(), 3, k, n);
    };
    add(0, Target::kQkv, 20, 40, c.hidden_dim);
    add(1, Target::kDown, 0, c.hidden_dim, c.mlp_dim(1));
    return adapter;
}

inline void run(Engine& s) {
    while (s.step()) {
    }
}

using Outputs = std::vector<std::pair<std::vector<int32_t>, std::vector<float>>>;

inline Outputs outputs_of(const Engine& s, uint64_t id) {
    Outputs out;
    for (const Sample& sample : s.job(id).samples) out.emplace_back(sample.tokens, sample.logprobs);
    return out;
}

}  // namespace whet
