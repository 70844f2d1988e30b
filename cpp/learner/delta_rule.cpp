// The gated delta rule of a layer (engine/training_delta.h) and what surrounds it, in both directions:
//
//   q, k, v = silu(conv(qkv)), q and k divided by their length, q also by sqrt(key_dim)
//   out = W_o (norm(rule(q, k, v, decay, beta)) silu(z)), beta = sigmoid(b), log(decay) = A softplus(a + dt_bias)
//
// with the rows qkv, z, b and a of the first matrix in `raw`. All but the rule's results is computed again from `raw`.
#include <cmath>
#include <cstring>

#include "engine/delta_inputs.h"
#include "engine/scratch.h"
#include "kernels/dispatch.h"
#include "learner/learner.h"
#include "learner/sums.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

// Positions in a row of `raw`.
struct Places {
    size_t z, b, a;
    explicit Places(const ModelConfig& c, size_t layer)
        : z(c.conv_dim(layer)), b(z + c.n_delta_heads * c.delta_dim), a(b + c.n_delta_heads) {}
};

}  // namespace

Learner::DeltaInputs Learner::delta_inputs(size_t layer) const {
    const Kernels& k = kernels();
    const size_t width = config_.mixer_in(layer), channels = config_.conv_dim(layer), heads = config_.n_delta_heads;
    const size_t length = config_.conv_length, d = config_.delta_key_dim, key_heads = config_.n_delta_key_heads;
    const std::vector<float> taps = taps_of(layer), weights = length_weights(config_);
    const LayerWeights& w = weights_->layers[layer];
    const Places at(config_, layer);
    const auto floats = [&](size_t size) { return std::make_unique_for_overwrite<float[]>(n() * size); };
    DeltaInputs inputs{floats(channels), floats(heads), floats(heads)};
    for_rows(n(), (length + 4) * channels, [&](size_t i) {
        const float *raw = now_.raw + i * width, *rows[kMaxConvLength];
        float* row = inputs.qkv.get() + i * channels;
        find_rows(now_.raw, width, i, rows);
        k.short_conv_f32(rows, length, taps.data(), channels, nullptr, channels, row);
        k.silu_f32(row, channels, false, row);
        for (size_t head = 0; head < 2 * key_heads; ++head) {
            float* x = row + head * d;
            k.rms_norm_f32(x, nullptr, &weights[head < key_heads ? 0 : d], d, kLengthEps / static_cast<double>(d),
                           false, x);
        }
        for (size_t head = 0; head < heads; ++head) {
            inputs.decay[i * heads + head] = decay_of(raw[at.a + head], w.decay[head], w.dt_bias[head]);
            inputs.beta[i * heads + head] = beta_of(raw[at.b + head]);
        }
    });
    return inputs;
}

TrainingDelta Learner::delta_of(const DeltaInputs& inputs) const {
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
            .beta = inputs.beta.get()};
}

void Learner::delta_rule(size_t layer) {
    const DeltaInputs inputs = delta_inputs(layer);
    const TrainingDelta d = delta_of(inputs);
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
    const Places at(config_, layer);
    const DeltaInputs inputs = delta_inputs(layer);
    const auto grad_decay = std::make_unique_for_overwrite<float[]>(n() * heads);
    const auto grad_beta = std::make_unique_for_overwrite<float[]>(n() * heads);
    float* grad_qkv = inputs.qkv.get();
    delta_backward(delta_of(inputs), {grad, grad_qkv, grad_decay.get(), grad_beta.get()});
    for_rows(n(), (length + 8) * channels, [&](size_t i) {
        float *raw = now_.raw + i * width, *to = grad_qkv + i * channels;
        float *before = scratch<float>(2 * channels, Scratch::kRow), *row = before + channels;
        const float* rows[kMaxConvLength];
        find_rows(now_.raw, width, i, rows);
        k.short_conv_f32(rows, length, taps.data(), channels, nullptr, channels, before);
        k.silu_f32(before, 2 * key_heads * d, false, row);
        for (size_t head = 0; head < 2 * key_heads; ++head) {
            k.rms_norm_backward_f32(row + head * d, &weights[head < key_heads ? 0 : d], to + head * d, d,
                                    kLengthEps / static_cast<double>(d), to + head * d, nullptr);
        }
        k.silu_backward_f32(before, nullptr, to, channels, to, nullptr);
        for (size_t head = 0; head < heads; ++head) {
            const double beta = sigmoid(raw[at.b + head]), slope = sigmoid(double{raw[at.a + head]} + w.dt_bias[head]);
            raw[at.b + head] = static_cast<float>(grad_beta[i * heads + head] * beta * (1.0 - beta));
            raw[at.a + head] = static_cast<float>(grad_decay[i * heads + head] * w.decay[head] * slope);
        }
    });
    for_rows(n(), length * channels, [&](size_t i) { add_readers(grad_qkv, taps, i, now_.raw + i * width); });
}

// Norms the results of a token, and multiplies them by silu(z).
void Learner::gate_delta(size_t layer, size_t token, float* row) const {
    const size_t d = config_.delta_dim;
    const float* z = now_.raw + token * config_.mixer_in(layer) + Places(config_, layer).z;
    const float* weight = norm_at(layer, &LayerNorms::delta_norm).weight.data();
    for (size_t head = 0; head < config_.n_delta_heads; ++head, row += d) {
        kernels().rms_norm_f32(row, nullptr, weight, d, config_.norm_eps, false, row);
    }
    row -= config_.n_delta_heads * d;
    kernels().swiglu_f32(z, row, config_.n_delta_heads * d, false, row);
}

void Learner::gate_delta_backward(size_t layer, const RowTile& tile, float* grad) const {
    const size_t d = config_.delta_dim, width = config_.mixer_out(layer);
    const NormWeight& norm = norm_at(layer, &LayerNorms::delta_norm);
    float* grad_norm = gradient_of(norm.weight);
    const auto run = [&](size_t i, float* sums) {
        float *row = scratch<float>(2 * width, Scratch::kRow), *normed = row + width, *to = grad + i * width;
        float* z = now_.raw + (tile.begin + i) * config_.mixer_in(layer) + Places(config_, layer).z;
        load(now_.attended + (tile.begin + i) * width * head_bytes_, width, row);
        for (size_t at = 0; at < width; at += d) {
            kernels().rms_norm_f32(row + at, nullptr, norm.weight.data(), d, config_.norm_eps, false, normed + at);
        }
        kernels().silu_backward_f32(z, normed, to, width, z, to);
        for (size_t at = 0; at < width; at += d) {
            if (sums != nullptr) add_norm_terms(Norm::kRms, row + at, to + at, d, false, sums);
            kernels().rms_norm_backward_f32(row + at, norm.weight.data(), to + at, d, config_.norm_eps, to + at,
                                            nullptr);
        }
    };
    if (grad_norm == nullptr) {
        for_rows(tile.n(), 8 * width, [&](size_t i) { run(i, nullptr); });
        return;
    }
    std::vector<float> sums;
    sum_blocks(tile.groups, d, sums, run);
    add_sums(sums, d, 0, d, grad_norm);
}

}  // namespace whet
