// The MLP of a layer, in both directions, in tiles of rows.
#include <cstring>

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
    const Kernels& k = kernels();
    const size_t ffn = config_.mlp_dim(layer), width = config_.up_dim(layer);
    const auto act = activation_kernel(config_.activation);
    for_rows(tile.n(), 4 * width, [&](size_t i) {
        const float *gate = up_of(tile) + i * width, *up = gate + ffn;
        float* out = activated_.get() + i * ffn;
        if (config_.gated && config_.activation == Activation::kSilu) return k.swiglu_f32(gate, up, ffn, false, out);
        act(gate, ffn, false, out);
        for (size_t j = 0; config_.gated && j < ffn; ++j) out[j] *= up[j];
    });
    return convert(activated_.get(), ffn, tile.n(), ffn);
}

// x = middle + residual_scale norm(W_down act(W_up norm(input))).
void Learner::mlp(size_t layer, const RowTile& tile) {
    const size_t d = config_.hidden_dim, at = tile.begin * d, rows = tile.n();
    mlp_up(layer, tile);
    project(layer, Target::kDown, mlp_activate(layer, tile), tile, delta_.get(), d);
    if (config_.post_norm) norm(norm_at(layer, &LayerNorms::post_norm2), delta_.get(), rows, delta_.get());
    add(now_.middle + at, delta_.get(), config_.residual_scale, rows, x_.get() + at);
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
    const ProductRows activated = mlp_activate(layer, tile);
    float* delta = scratch<float>(rows * d, Scratch::kRuns);  // gradient of W_down's result
    scale(grad_out + at, config_.residual_scale, rows, delta);
    if (config_.post_norm) {
        project(layer, Target::kDown, activated, tile, delta_.get(), d);
        norm_backward(norm_at(layer, &LayerNorms::post_norm2), delta_.get(), delta, tile.groups);
    }
    project_backward(layer, Target::kDown, activated, tile, delta, d, grad_activated(), ffn, grads);
    constexpr decltype(&Kernels::silu_backward_f32) kBackward[] = {
        &Kernels::silu_backward_f32, &Kernels::gelu_backward_f32, &Kernels::gelu_tanh_backward_f32,
        &Kernels::relu2_backward_f32};
    const auto backward = kernels().*kBackward[static_cast<size_t>(config_.activation)];
    for_rows(rows, 4 * width, [&](size_t i) {
        float *gate = up_of(tile) + i * width, *up = config_.gated ? gate + ffn : nullptr;
        backward(gate, up, grad_activated() + i * ffn, ffn, gate, up);
    });
    project_backward(layer, Target::kUp, convert(h_.get(), d, rows, d), tile, up_of(tile), width, delta_.get(), d,
                     grads);
    std::vector<float>* sums = config_.shared_norm ? &shared_sums_[index_of(tile)] : nullptr;
    norm_backward(mlp_norm(layer), mlp_input() + at, delta_.get(), tile.groups, sums, !config_.shared_norm);
    add(grad + at, delta_.get(), 1.0f, rows, grad + at);
}

}  // namespace whet
