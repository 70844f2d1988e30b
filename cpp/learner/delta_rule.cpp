// The gated delta rule of a layer (engine/training_delta.h) and what surrounds it, in both directions:
//
//   q, k, v = silu(conv(qkv)), q and k divided by their length, q also by sqrt(key_dim)
//   out = W_o (norm(rule(q, k, v, decay, beta)) silu(z)), beta = sigmoid(b), log(decay) = A softplus(a + dt_bias)
//
// with the rows qkv, z, b and a of the first matrix in `raw` (DeltaPlaces). Mamba-2 is the rule without correction:
//
//   q, k, v = silu(conv(qkv) + bias),  beta = softplus(a + dt_bias)
//   out = W_o norm((rule(q, k, v, decay, beta) + skip v) silu(z)), with a norm over the value heads of each key head
//
// All but the rule's results is computed again from `raw`.
#include <cmath>
#include <cstring>

#include "engine/delta_inputs.h"
#include "engine/scratch.h"
#include "kernels/dispatch.h"
#include "learner/learner.h"
#include "learner/sums.h"
#include "runtime/thread_pool.h"

namespace whet {

// The channels of a token after their convolution, before silu.
void Learner::convolve_channels(size_t layer, size_t token, const std::vector<float>& taps, float* out) const {
    const size_t width = config_.mixer_in(layer), channels = config_.conv_dim(layer);
    const std::vector<float>& bias = weights_->layers[layer].conv_bias;
    const float* rows[kMaxConvLength];
    find_rows(now_.raw + DeltaPlaces(config_, layer).channels, width, token, rows);
    kernels().short_conv_f32(rows, config_.conv_length, taps.data(), channels, nullptr, channels, out);
    if (!bias.empty()) kernels().blend_f32(bias.data(), channels, 1.0f, 1.0f, out);
}

Learner::DeltaInputs Learner::delta_inputs(size_t layer) const {
    const Kernels& k = kernels();
    const size_t width = config_.mixer_in(layer), channels = config_.conv_dim(layer), heads = config_.n_delta_heads;
    const size_t length = config_.conv_length, d = config_.delta_key_dim, key_heads = config_.n_delta_key_heads;
    const std::vector<float> taps = taps_of(layer), weights = length_weights(config_);
    const LayerWeights& w = weights_->layers[layer];
    const DeltaPlaces at(config_, layer);
    const bool is_mamba = config_.mixer(layer) == Mixer::kMamba;
    const auto floats = [&](size_t size) { return std::make_unique_for_overwrite<float[]>(n() * size); };
    DeltaInputs inputs{floats(channels), floats(heads), floats(heads)};
    for_rows(n(), (length + 4) * channels, [&](size_t i) {
        const float* raw = now_.raw + i * width;
        float* row = inputs.qkv.get() + i * channels;
        convolve_channels(layer, i, taps, row);
        k.silu_f32(row, channels, false, row);
        for (size_t head = 0; !is_mamba && head < 2 * key_heads; ++head) {
            float* x = row + head * d;
            k.rms_norm_f32(x, nullptr, &weights[head < key_heads ? 0 : d], d, kLengthEps / static_cast<double>(d),
                           false, x);
        }
        for (size_t head = 0; head < heads; ++head) {
            const DeltaGates gates(config_, w, head, raw[at.a + head], raw[at.b + head], is_mamba);
            inputs.decay[i * heads + head] = gates.decay, inputs.beta[i * heads + head] = gates.beta;
        }
    });
    return inputs;
}

TrainingDelta Learner::delta_of(size_t layer, const DeltaInputs& inputs) const {
    const bool is_mamba = config_.mixer(layer) == Mixer::kMamba;
    return {.n_heads = config_.n_delta_heads,
            .n_key_heads = config_.n_delta_key_heads,
            .dim = config_.delta_dim,
            .key_dim = config_.delta_key_dim,
            .is_tiled = config_.delta_tiled,
            .n_sequences = batch_.q_offsets.size() - 1,
            .q_offsets = batch_.q_offsets.data(),
            .k_offsets = batch_.k_offsets.data(),
            .key_rows = batch_.key_rows.data(),
            .qkv = inputs.qkv.get(),
            .decay = inputs.decay.get(),
            .beta = inputs.beta.get(),
            .corrects = !is_mamba,
            .values_first = is_mamba,
            .skip = is_mamba ? weights_->layers[layer].skip.data() : nullptr};
}

void Learner::delta_rule(size_t layer) {
    const DeltaInputs inputs = delta_inputs(layer);
    const TrainingDelta d = delta_of(layer, inputs);
    float* values = inputs.qkv.get() + d.first_value();
    const size_t width = config_.mixer_out(layer);
    delta_forward(d, values, d.channels());
    for_rows(n(), width,
             [&](size_t i) { store(values + i * d.channels(), 1, width, now_.attended + i * width * head_bytes_); });
}

// Replaces `raw` of all tokens, except z, by its gradient, from the gradient of the rule's results.
void Learner::delta_rule_backward(size_t layer, const float* grad) {
    const Kernels& k = kernels();
    const size_t width = config_.mixer_in(layer), channels = config_.conv_dim(layer), heads = config_.n_delta_heads;
    const size_t length = config_.conv_length, d = config_.delta_key_dim, key_heads = config_.n_delta_key_heads;
    const std::vector<float> taps = taps_of(layer), weights = length_weights(config_);
    const LayerWeights& w = weights_->layers[layer];
    const DeltaPlaces at(config_, layer);
    const bool is_mamba = config_.mixer(layer) == Mixer::kMamba;
    const DeltaInputs inputs = delta_inputs(layer);
    const auto grad_decay = std::make_unique_for_overwrite<float[]>(n() * heads);
    const auto grad_beta = std::make_unique_for_overwrite<float[]>(n() * heads);
    float* grad_qkv = inputs.qkv.get();
    delta_backward(delta_of(layer, inputs), {grad, grad_qkv, grad_decay.get(), grad_beta.get()});
    for_rows(n(), (length + 8) * channels, [&](size_t i) {
        float *raw = now_.raw + i * width, *to = grad_qkv + i * channels;
        float *before = scratch<float>(2 * channels, Scratch::kRow), *row = before + channels;
        convolve_channels(layer, i, taps, before);
        if (!is_mamba) k.silu_f32(before, 2 * key_heads * d, false, row);
        for (size_t head = 0; !is_mamba && head < 2 * key_heads; ++head) {
            k.rms_norm_backward_f32(row + head * d, &weights[head < key_heads ? 0 : d], to + head * d, d,
                                    kLengthEps / static_cast<double>(d), to + head * d, nullptr);
        }
        k.silu_backward_f32(before, nullptr, to, channels, to, nullptr);
        for (size_t head = 0; head < heads; ++head) {
            const double beta = sigmoid(raw[at.b + head]), input = double{raw[at.a + head]} + w.dt_bias[head];
            const double slope = softplus(input) < config_.delta_step_min ? 0.0 : sigmoid(input);
            const double of_step = double{grad_decay[i * heads + head]} * w.decay[head],
                         of_beta = grad_beta[i * heads + head];
            if (!is_mamba) raw[at.b + head] = static_cast<float>(of_beta * beta * (1.0 - beta));
            raw[at.a + head] = static_cast<float>((is_mamba ? of_step + of_beta : of_step) * slope);
        }
    });
    for_rows(n(), length * channels,
             [&](size_t i) { add_readers(grad_qkv, taps, i, now_.raw + i * width + at.channels); });
}

// Calls visit(first, count, weights) for the numbers of a token's results that have one norm.
template <class Visit>
void Learner::for_groups(size_t layer, Visit&& visit) const {
    const float* weight = norm_at(layer, &LayerNorms::delta_norm).weight.data();
    const size_t width = config_.mixer_out(layer);
    const bool is_mamba = config_.mixer(layer) == Mixer::kMamba;
    const size_t n = is_mamba ? width / config_.n_delta_key_heads : config_.delta_dim;
    for (size_t at = 0; at < width; at += n) visit(at, n, weight + (is_mamba ? at : 0));
}

// Norms the results of a token, and multiplies them by silu(z), before in Mamba-2.
void Learner::gate_delta(size_t layer, size_t token, float* row) const {
    const size_t width = config_.mixer_out(layer);
    const float* z = now_.raw + token * config_.mixer_in(layer) + DeltaPlaces(config_, layer).z;
    const bool is_mamba = config_.mixer(layer) == Mixer::kMamba;
    if (is_mamba) kernels().swiglu_f32(z, row, width, false, row);
    for_groups(layer, [&](size_t at, size_t n, const float* weight) {
        kernels().rms_norm_f32(row + at, nullptr, weight, n, config_.norm_eps, false, row + at);
    });
    if (!is_mamba) kernels().swiglu_f32(z, row, width, false, row);
}

void Learner::gate_delta_backward(size_t layer, const RowTile& tile, float* grad) const {
    const Kernels& k = kernels();
    const size_t width = config_.mixer_out(layer);
    const NormWeight& norm = norm_at(layer, &LayerNorms::delta_norm);
    const bool is_mamba = config_.mixer(layer) == Mixer::kMamba;
    float* grad_norm = gradient_of(norm.weight);
    const auto run = [&](size_t i, float* sums) {
        float *row = scratch<float>(2 * width, Scratch::kRow), *other = row + width, *to = grad + i * width;
        float* z = now_.raw + (tile.begin + i) * config_.mixer_in(layer) + DeltaPlaces(config_, layer).z;
        load(now_.attended + (tile.begin + i) * width * head_bytes_, width, row);
        const auto norm_backward = [&](const float* x) {
            for_groups(layer, [&](size_t at, size_t n, const float* weight) {
                float* of_group = sums == nullptr ? nullptr : sums + (weight - norm.weight.data());
                if (sums != nullptr) add_norm_terms(Norm::kRms, x + at, to + at, n, false, of_group);
                k.rms_norm_backward_f32(x + at, weight, to + at, n, config_.norm_eps, to + at, nullptr);
            });
        };
        if (is_mamba) {
            k.swiglu_f32(z, row, width, false, other);
            norm_backward(other);
            return k.silu_backward_f32(z, row, to, width, z, to);
        }
        for_groups(layer, [&](size_t at, size_t n, const float* weight) {
            k.rms_norm_f32(row + at, nullptr, weight, n, config_.norm_eps, false, other + at);
        });
        k.silu_backward_f32(z, other, to, width, z, to);
        norm_backward(row);
    };
    if (grad_norm == nullptr) {
        for_rows(tile.n(), 8 * width, [&](size_t i) { run(i, nullptr); });
        return;
    }
    std::vector<float> sums;
    sum_blocks(tile.groups, norm.weight.size(), sums, run);
    add_sums(sums, norm.weight.size(), 0, norm.weight.size(), grad_norm);
}

}  // namespace whet
