#include "engine/recurrent.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "engine/delta_inputs.h"
#include "engine/transformer.h"
#include "kernels/dispatch.h"
#include "runtime/ceil_div.h"
#include "runtime/split.h"

namespace whet {
namespace {

constexpr size_t kChannels = 256;  // of a task of a short convolution

size_t n_tokens(const RecurrentStep& step) {
    size_t n = 0;
    for (const StateRun& run : step.runs) n += run.n;
    return n;
}

}  // namespace

Recurrent::Recurrent(const ModelConfig& config, size_t max_rows)
    : config_(config), gates_(2 * max_rows * config.n_delta_heads) {
    size_t channels = 0;
    for (size_t layer = 0; layer < config.n_layers; ++layer) {
        if (config.is_recurrent(layer)) channels = std::max(channels, config.conv_dim(layer));
    }
    taps_.resize(config.conv_length * channels);
    length_weights_ = length_weights(config);
}

void Recurrent::mix(const RecurrentStep& step, float* in, float* out) {
    step.weights.layers[step.layer].conv.rows(0, config_.conv_length, taps_.data(), false);
    config_.mixer(step.layer) == Mixer::kConv ? short_conv(step, in, out) : delta_rule(step, in, out);
}

// Calls emit(i, inputs) for the tokens i of a run, the last one first, so that it may replace their inputs: with the
// inputs of `count` channels at each tap, the oldest first; null: before the sequence. Keeps the last inputs in the
// state. in: of the run's first token; the others are `stride` numbers apart.
template <class Emit>
void Recurrent::for_windows(const RecurrentStep& step, const StateRun& run, size_t channel, size_t count,
                            const float* in, size_t stride, Emit&& emit) const {
    const size_t length = config_.conv_length, width = config_.conv_dim(step.layer);
    const auto start = static_cast<size_t>(step.rows[run.first].position), end = start + run.n;
    const auto kept = [&](const int32_t* pages, size_t position) {
        return step.memory.state(pages, step.layer, 0) + position % length * width + channel;
    };
    const auto input = [&](size_t position) -> const float* {
        return position >= start ? in + (position - start) * stride : kept(run.from, position);
    };
    for (size_t position = end - std::min(end, length); position < end; ++position) {
        if (position < start && run.from == run.to) continue;
        std::memcpy(kept(run.to, position), input(position), count * sizeof(float));
    }
    for (size_t i = run.n; i-- > 0;) {
        const float* inputs[kMaxConvLength];
        for (size_t j = 0; j < length; ++j) {
            const size_t before = length - 1 - j;
            inputs[j] = start + i < before ? nullptr : input(start + i - before);
        }
        emit(i, inputs);
    }
}

// out = C conv(B x), with [B, C, x] of each token.
void Recurrent::short_conv(const RecurrentStep& step, float* in, float* out) const {
    const size_t d = config_.hidden_dim, length = config_.conv_length;
    const double work = 0.3 * static_cast<double>(n_tokens(step) * d * length);
    parallel_split(ceil_div(d, kChannels), 1, work, [&](size_t begin_task, size_t end_task) {
        const size_t first = begin_task * kChannels, count = std::min(d, end_task * kChannels) - first;
        for (const StateRun& run : step.runs) {
            float* const b = in + run.first * 3 * d + first;
            for (size_t i = 0; i < run.n; ++i) {
                float *gate = b + i * 3 * d, *x = gate + 2 * d;
                for (size_t k = 0; k < count; ++k) x[k] *= gate[k];
            }
            for_windows(step, run, first, count, b + 2 * d, 3 * d, [&](size_t i, const float* const* inputs) {
                kernels().short_conv_f32(inputs, length, taps_.data() + first, d, b + i * 3 * d + d, count,
                                         out + (run.first + i) * d + first);
            });
        }
    });
}

// out of each value head = norm(o) silu(z), or in Mamba-2 norm(o silu(z)) over the value heads of a key head, with q,
// k, v (before their convolution), z, b and a of each token.
void Recurrent::delta_rule(const RecurrentStep& step, float* in, float* out) {
    const size_t n = n_tokens(step), heads = config_.n_delta_heads, width = config_.mixer_in(step.layer);
    const double per_channel = 1.5 * static_cast<double>(n * config_.conv_dim(step.layer));
    const size_t units = 2 * config_.n_delta_key_heads + ceil_div(config_.delta_values(), kChannels);
    parallel_split(step.runs.size() * units, 1, per_channel, [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) convolve_heads(step, step.runs[i / units], i % units, in);
    });
    const double work = 0.2 * static_cast<double>(n * config_.delta_values() * config_.delta_key_dim);
    parallel_split(step.runs.size() * heads, 1, work, [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) delta_head(step, step.runs[i / heads], i % heads, in, out);
    });
    const DeltaPlaces at(config_, step.layer);
    for_rows(n, 4 * config_.delta_values(),
             [&](size_t row) { gate_row(step, row, in + row * width + at.z, out + row * config_.delta_values()); });
}

// A query or key head, or some values, of a run.
void Recurrent::convolve_heads(const RecurrentStep& step, const StateRun& run, size_t unit, float* in) const {
    const size_t keys = config_.n_delta_key_heads, dk = config_.delta_key_dim, width = config_.mixer_in(step.layer);
    const size_t channels = config_.conv_dim(step.layer);
    const std::vector<float>& bias = step.weights.layers[step.layer].conv_bias;
    const DeltaPlaces at(config_, step.layer);
    const bool is_query = unit < keys, is_value = unit >= 2 * keys;
    const size_t first = (unit - 2 * keys) * kChannels;  // of the values
    const size_t place = is_value ? at.v + first : is_query ? at.q + unit * dk : at.k + (unit - keys) * dk;
    const size_t count = is_value ? std::min(kChannels, config_.delta_values() - first) : dk;
    const size_t channel = place - at.channels;
    float* const rows = in + run.first * width + place;
    for_windows(step, run, channel, count, rows, width, [&](size_t i, const float* const* inputs) {
        float* const row = rows + i * width;
        kernels().short_conv_f32(inputs, config_.conv_length, taps_.data() + channel, channels, nullptr, count, row);
        if (!bias.empty()) kernels().blend_f32(bias.data() + channel, count, 1.0f, 1.0f, row);
        kernels().silu_f32(row, count, false, row);
        if (is_value || config_.mixer(step.layer) == Mixer::kMamba) return;
        kernels().rms_norm_f32(row, nullptr, &length_weights_[is_query ? 0 : dk], dk,
                               kLengthEps / static_cast<double>(dk), false, row);
    });
}

// A value head, from its q, k and v.
void Recurrent::delta_head(const RecurrentStep& step, const StateRun& run, size_t head, const float* in, float* out) {
    const size_t n_keys = config_.n_delta_key_heads, n_values = config_.n_delta_heads, dk = config_.delta_key_dim,
                 dv = config_.delta_dim, width = config_.mixer_in(step.layer), max_rows = gates_.size() / n_values / 2;
    const size_t key_head = config_.delta_tiled ? head % n_keys : head / (n_values / n_keys);
    const LayerWeights& w = step.weights.layers[step.layer];
    const bool is_mamba = config_.mixer(step.layer) == Mixer::kMamba;
    const DeltaPlaces at(config_, step.layer);
    const float* const rows = in + run.first * width;
    float *const decay = gates_.data() + 2 * head * max_rows + run.first, *const beta = decay + max_rows;
    for (size_t i = 0; i < run.n; ++i) {
        const float* row = rows + i * width + head;
        const DeltaGates gates(config_, w, head, row[at.a], row[at.b], is_mamba);
        decay[i] = gates.decay, beta[i] = gates.beta;
    }
    float* const to = step.memory.state(run.to, step.layer, 1 + head);
    const float* const from = run.from == nullptr ? nullptr : step.memory.state(run.from, step.layer, 1 + head);
    auto* const length = reinterpret_cast<StateLength*>(to + config_.delta_state_size());
    const StateLength end = step.rows[run.first + run.n - 1].position + 1;
    const DeltaTask task{.n = run.n,
                         .key_dim = dk,
                         .value_dim = dv,
                         .q = rows + at.q + key_head * dk,
                         .k = rows + at.k + key_head * dk,
                         .v = rows + at.v + head * dv,
                         .stride = width,
                         .decay = decay,
                         .beta = beta,
                         .gate_stride = 1,
                         .from = from,
                         .to = to,
                         .out = out + run.first * n_values * dv + head * dv,
                         .out_stride = n_values * dv,
                         .corrects = !is_mamba,
                         .skip = is_mamba ? w.skip[head] : 0.0f};
    const bool is_repeated = from == to && *length == end;
    is_repeated ? kernels().delta_output_f32(task) : kernels().delta_rule_f32(task);
    *length = end;
}

// Norms and gates the results of a token.
void Recurrent::gate_row(const RecurrentStep& step, size_t row, const float* z, float* out) const {
    const size_t values = config_.delta_values();
    const bool is_mamba = config_.mixer(step.layer) == Mixer::kMamba;
    const size_t group = is_mamba ? values / config_.n_delta_key_heads : config_.delta_dim;
    const NormWeight& norm = norm_of(step.weights, step.rows[row].adapter, {step.layer, &LayerNorms::delta_norm});
    if (is_mamba) kernels().swiglu_f32(z, out, values, false, out);
    for (size_t at = 0; at < values; at += group) {
        const float* weight = norm.weight.data() + (is_mamba ? at : 0);
        kernels().rms_norm_f32(out + at, nullptr, weight, group, config_.norm_eps, false, out + at);
    }
    if (!is_mamba) kernels().swiglu_f32(z, out, values, false, out);
}

}  // namespace whet
