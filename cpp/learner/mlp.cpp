// The MLP of a layer, or its mixture of experts, in both directions, in tiles of rows.
#include <algorithm>

#include "engine/activation.h"
#include "engine/scratch.h"
#include "kernels/dispatch.h"
#include "learner/learner.h"
#include "runtime/thread_pool.h"

namespace whet {

const NormWeight& Learner::mlp_norm(size_t layer) const {
    return norm_at(layer, config_.shared_norm ? &LayerNorms::norm1 : &LayerNorms::norm2);
}

// From the input of the MLP: its norm, and W_up of it.
void Learner::mlp_up(size_t layer, const RowTile& tile) {
    const size_t d = config_.hidden_dim;
    norm(mlp_norm(layer), mlp_input() + tile.begin * d, tile.n(), h_.get());
    project(layer, Target::kUp, convert(h_.get(), d, tile.n(), d), tile, up_of(tile), config_.up_dim(layer));
}

// The activation of up_of(tile), converted.
ProductRows Learner::mlp_activate(size_t layer, const RowTile& tile) {
    const size_t ffn = config_.mlp_dim(layer), width = config_.up_dim(layer);
    for_rows(tile.n(), 4 * width, [&](size_t i) {
        const float* gate = up_of(tile) + i * width;
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

// x = middle + residual_scale norm(W_down act(W_up norm(input))).
void Learner::mlp(size_t layer, const RowTile& tile) {
    const size_t d = config_.hidden_dim, at = tile.begin * d, rows = tile.n();
    mlp_up(layer, tile);
    mlp_down(layer, tile);
    if (config_.post_norm) norm(norm_at(layer, &LayerNorms::post_norm2), delta_.get(), rows, delta_.get());
    add(now_.middle + at, delta_.get(), config_.residual_scale, rows, x_.get() + at);
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
    if (keeps(layer)) {
        norm(mlp_norm(layer), mlp_input() + at, rows, h_.get());
    } else {
        mlp_up(layer, tile);
    }
    float* delta = scratch<float>(rows * d, Scratch::kRuns);  // gradient of W_down's result
    scale(grad_out + at, config_.residual_scale, rows, delta);
    if (config_.post_norm) {
        mlp_down(layer, tile);
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
        for_rows(rows, 4 * width,
                 [&](size_t i) { activation_backward(up_of(tile) + i * width, grad_activated() + i * ffn, ffn); });
        project_backward(layer, Target::kUp, convert(h_.get(), d, rows, d), tile, up_of(tile), width, delta_.get(), d,
                         grads, is_moe);
    }
    std::vector<float>* sums = config_.shared_norm ? &shared_sums_[index_of(tile)] : nullptr;
    norm_backward(mlp_norm(layer), mlp_input() + at, delta_.get(), tile.groups, sums, !config_.shared_norm);
    add(grad + at, delta_.get(), 1.0f, rows, grad + at);
}

}  // namespace whet
