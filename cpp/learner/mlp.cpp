// The MLP of a layer, or its mixture of experts, in both directions, in tiles of rows.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "engine/activation.h"
#include "engine/scratch.h"
#include "kernels/dispatch.h"
#include "learner/learner.h"
#include "learner/sums.h"
#include "runtime/thread_pool.h"

namespace whet {

const NormWeight& Learner::mlp_norm(size_t layer) const {
    return norm_at(layer, config_.shared_norm ? &LayerNorms::norm1 : &LayerNorms::norm2);
}

// From the input of the MLP: its norm, and W_up of it.
void Learner::mlp_up(size_t layer, const RowTile& tile) {
    const size_t d = config_.hidden_dim;
    norm(mlp_norm(layer), mlp_input() + tile.begin * d, tile.n(), h_.get());
    project(layer, Target::kUp, convert(h_.get(), d, tile.n(), d), tile, up_of(layer, tile), config_.up_dim(layer));
}

// The activation of up_of(layer, tile), converted.
ProductRows Learner::mlp_activate(size_t layer, const RowTile& tile) {
    const size_t ffn = config_.mlp_dim(layer), width = config_.up_dim(layer);
    for_rows(tile.n(), 4 * width, [&](size_t i) {
        const float* gate = up_of(layer, tile) + i * width;
        activate(config_, gate, gate + ffn, ffn, activated_.get() + i * ffn);
    });
    return convert(activated_.get(), ffn, tile.n(), ffn);
}

// delta_ = W_down act(W_up h), or of a mixture the shared expert, times its gate, and the others.
void Learner::mlp_down(size_t layer, const RowTile& tile) {
    const size_t d = config_.hidden_dim, rows = tile.n();
    if (config_.mlp_dim(layer) > 0) {
        project(layer, Target::kDown, mlp_activate(layer, tile), tile, delta_.get(), d);
    } else {
        std::fill_n(delta_.get(), rows * d, 0.0f);
    }
    if (!config_.is_moe(layer)) return;
    if (config_.shared_gate) {
        shared_gates(layer, rows, gates_.get());
        for_rows(rows, d, [&](size_t i) {
            kernels().blend_f32(delta_.get() + i * d, d, gates_[i], 0.0f, delta_.get() + i * d);
        });
    }
    add_experts(layer, tile, delta_.get());
}

// The inputs of the layers, of all tokens.
void Learner::read_layer_inputs() {
    const size_t d = config_.hidden_dim, width = config_.layer_inputs();
    const StoredTable& table = weights_->layer_embedding;
    for (const int64_t token : batch_.tokens) {
        if (!table.is_finite(static_cast<size_t>(token))) {
            throw std::runtime_error("the second embedding of a token holds NaN or infinity");
        }
    }
    for (const RowTile& tile : tiles_) {
        float* inputs = layer_inputs_.get() + tile.begin * width;
        const ProductRows x = convert(x_.get() + tile.begin * d, d, tile.n(), d);
        project(0, Target::kLayerInputs, x, tile, inputs, width);
        for_rows(tile.n(), 8 * width, [&](size_t i) {
            float *embedded = scratch<float>(width, Scratch::kSums), *row = inputs + i * width;
            if (projected_inputs_ != nullptr) {
                std::copy_n(row, width, projected_inputs_.get() + (tile.begin + i) * width);
            }
            table.read(static_cast<size_t>(batch_.tokens[tile.begin + i]), embedded);
            combine_layer_inputs(config_, layer_inputs_norm(), embedded, row);
        });
    }
}

// input_out_ = W_out (act(W_gate x) * input); keeps gate, input and their product of each row in input_gate_.
void Learner::input_out(size_t layer, const RowTile& tile, const float* x) {
    const size_t d = config_.hidden_dim, p = config_.layer_input_dim, rows = tile.n();
    float *gates = input_gate_.get(), *activated = gates + rows * 2 * p;
    project(layer, Target::kInputGate, convert(x, d, rows, d), tile, gates, 2 * p);
    for_rows(rows, 4 * p, [&](size_t i) {
        float* gate = gates + i * 2 * p;
        const float* input = layer_inputs_.get() + (tile.begin + i) * config_.layer_inputs() + layer * p;
        std::copy_n(input, p, gate + p);
        activate(config_, gate, gate + p, p, activated + i * p);
    });
    project(layer, Target::kInputOut, convert(activated, p, rows, p), tile, input_out_.get(), d);
}

// out = layer_scale (x + input_norm(input_out_)), or layer_scale x without inputs; out may be x.
void Learner::input_half(size_t layer, const RowTile& tile, const float* x, float* out) {
    const size_t d = config_.hidden_dim, rows = tile.n();
    const float factor = config_.layer_scale ? weights_->layers[layer].scale[0] : 1.0f;
    if (!config_.has_layer_inputs()) return scale(x, factor, rows, out);
    input_out(layer, tile, x);
    float* normed = scratch<float>(rows * d, Scratch::kRuns);
    norm(norm_at(layer, &LayerNorms::input_norm), input_out_.get(), rows, normed);
    add(x, normed, 1.0f, rows, out);
    scale(out, factor, rows, out);
}

// Replaces the gradient of the layer's output by the gradient of result_, which the layer would have without its input,
// from the MLP's output before its norm, in delta_.
void Learner::input_backward_half(size_t layer, const RowTile& tile, float* grad,
                                  std::span<const FactorGradients> grads) {
    const size_t d = config_.hidden_dim, p = config_.layer_input_dim, rows = tile.n();
    if (config_.layer_scale) scale(grad, weights_->layers[layer].scale[0], rows, grad);
    if (!config_.has_layer_inputs()) return;
    float* normed = scratch<float>(rows * d, Scratch::kRuns);
    if (config_.post_norm) {
        norm(norm_at(layer, &LayerNorms::post_norm2), delta_.get(), rows, normed);
    } else {
        std::copy_n(delta_.get(), rows * d, normed);
    }
    add(now_.middle + tile.begin * d, normed, config_.residual_scale, rows, result_.get());
    float *gates = input_gate_.get(), *activated = gates + rows * 2 * p, *grad_activated = gates + rows * 3 * p;
    float* grad_out = normed;
    input_out(layer, tile, result_.get());
    std::copy_n(grad, rows * d, grad_out);
    norm_backward(norm_at(layer, &LayerNorms::input_norm), input_out_.get(), grad_out, tile.groups);
    project_backward(layer, Target::kInputOut, convert(activated, p, rows, p), tile, grad_out, d, grad_activated, p,
                     grads);
    for_rows(rows, 4 * p, [&](size_t i) { activation_backward(gates + i * 2 * p, grad_activated + i * p, p); });
    if (projected_inputs_ != nullptr) layer_inputs_norm_backward(layer, tile, gates);
    project_backward(layer, Target::kInputGate, convert(result_.get(), d, rows, d), tile, gates, 2 * p, grad, d, grads,
                     true);
}

// Replaces the projections of a layer's inputs by their gradients, from the gradients of the inputs after the gates of
// each row in `gates`; adds to the gradient of the norm between them if it is trained.
void Learner::layer_inputs_norm_backward(size_t layer, const RowTile& tile, float* gates) {
    const size_t p = config_.layer_input_dim, width = config_.layer_inputs();
    const auto factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config_.hidden_dim)));
    const std::vector<float>& weight = layer_inputs_norm().weight;
    float* const grad_weight = gradient_of(weight);
    std::vector<float> sums;
    sum_blocks(tile.groups, p, sums, [&](size_t i, float* to) {
        float *grad = gates + i * 2 * p + p, *x = projected_inputs_.get() + (tile.begin + i) * width + layer * p;
        kernels().blend_f32(grad, p, static_cast<float>(std::sqrt(0.5)), 0.0f, grad);
        kernels().blend_f32(x, p, factor, 0.0f, x);
        if (grad_weight != nullptr) add_norm_terms(Norm::kRms, x, grad, p, false, to);
        kernels().rms_norm_backward_f32(x, weight.data(), grad, p, config_.norm_eps, grad, nullptr);
        kernels().blend_f32(grad, p, factor, 0.0f, x);
    });
    add_sums(sums, p, 0, p, grad_weight);
}

// Adds to the gradients of the adapters of the projection, whose result's gradients replace projected_inputs_.
void Learner::layer_inputs_backward(std::span<const FactorGradients> grads) {
    const LowRank* const low = adapters_at(0, Target::kLayerInputs);
    if (low == nullptr) return;
    const size_t d = config_.hidden_dim, width = config_.layer_inputs();
    begin_layer_backward(0);  // x_: the embeddings
    for (const RowTile& tile : tiles_) {
        const ProductRows x = convert(x_.get() + tile.begin * d, d, tile.n(), d);
        const float* grad = projected_inputs_.get() + tile.begin * width;
        size_t ld = width;
        if constexpr (kIsComplete) grad = unscale(0, Target::kLayerInputs, low, x, tile, grad, ld, grads);
        adapters_backward(low, x, tile, grad, ld, h_.get(), d, grads);
    }
}

// x = middle + residual_scale norm(W_down act(W_up norm(input))), and what follows with the layer's input.
void Learner::mlp(size_t layer, const RowTile& tile) {
    const size_t d = config_.hidden_dim, at = tile.begin * d, rows = tile.n();
    if (!config_.has_mlp(layer)) {
        std::copy_n(now_.middle + at, rows * d, x_.get() + at);
        return;
    }
    mlp_up(layer, tile);
    mlp_down(layer, tile);
    if (config_.post_norm) norm(norm_at(layer, &LayerNorms::post_norm2), delta_.get(), rows, delta_.get());
    add(now_.middle + at, delta_.get(), config_.residual_scale, rows, x_.get() + at);
    if (has_ends()) input_half(layer, tile, x_.get() + at, x_.get() + at);
}

// Replaces gate and up of a row, n each, by their gradients.
void Learner::activation_backward(float* row, const float* grad, size_t n) const {
    constexpr decltype(&Kernels::silu_backward_f32) kBackward[] = {
        &Kernels::silu_backward_f32, &Kernels::gelu_backward_f32, &Kernels::gelu_tanh_backward_f32,
        &Kernels::relu2_backward_f32, &Kernels::clamped_swiglu_backward_f32};
    float* up = config_.gated ? row + n : nullptr;
    (kernels().*kBackward[static_cast<size_t>(config_.activation)])(row, up, grad, n, row, up);
}

// Adds to `grad`, the gradient of the MLP's input, what comes through the MLP, from the gradient of its result.
void Learner::mlp_backward(size_t layer, const RowTile& tile, const float* grad_out, float* grad,
                           std::span<const FactorGradients> grads) {
    const size_t d = config_.hidden_dim, ffn = config_.mlp_dim(layer), width = config_.up_dim(layer);
    const size_t at = tile.begin * d, rows = tile.n();
    if (!config_.has_mlp(layer)) return;
    if (keeps(layer)) {
        norm(mlp_norm(layer), mlp_input() + at, rows, h_.get());
    } else {
        mlp_up(layer, tile);
    }
    if (config_.post_norm || config_.has_layer_inputs()) mlp_down(layer, tile);
    if (has_ends()) input_backward_half(layer, tile, grad + at, grads);
    float* delta = scratch<float>(rows * d, Scratch::kRuns);  // gradient of W_down's result
    scale(grad_out + at, config_.residual_scale, rows, delta);
    if (config_.post_norm) {
        norm_backward(norm_at(layer, &LayerNorms::post_norm2), delta_.get(), delta, tile.groups);
    }
    const bool is_moe = config_.is_moe(layer);
    if (is_moe) {
        std::fill_n(delta_.get(), rows * d, 0.0f);
        experts_backward(layer, tile, delta, delta_.get(), grads);
    }
    if (ffn > 0) {
        const ProductRows activated = mlp_activate(layer, tile);
        if (is_moe && config_.shared_gate) {
            project(layer, Target::kDown, activated, tile, expert_rows_.get(), d);
            shared_gate_backward(layer, rows, expert_rows_.get(), delta, delta_.get());
        }
        project_backward(layer, Target::kDown, activated, tile, delta, d, grad_activated(), ffn, grads);
        for_rows(rows, 4 * width, [&](size_t i) {
            activation_backward(up_of(layer, tile) + i * width, grad_activated() + i * ffn, ffn);
        });
        project_backward(layer, Target::kUp, convert(h_.get(), d, rows, d), tile, up_of(layer, tile), width,
                         delta_.get(), d, grads, is_moe);
    }
    std::vector<float>* sums = config_.shared_norm ? &shared_sums_[index_of(tile)] : nullptr;
    norm_backward(mlp_norm(layer), mlp_input() + at, delta_.get(), tile.groups, sums, !config_.shared_norm);
    add(grad + at, delta_.get(), 1.0f, rows, grad + at);
}

}  // namespace whet
