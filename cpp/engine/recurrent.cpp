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

Recurrent::Recurrent(const ModelConfig& config) : config_(config) {
    size_t channels = 0;
    for (size_t layer = 0; layer < config.n_layers; ++layer) {
        if (config.mixer(layer) != Mixer::kAttention) channels = std::max(channels, config.conv_dim(layer));
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

// out of each value head = norm(o) silu(z), with q, k, v (before their convolution), z, b and a of each token. A task
// is the value heads of a key head.
void Recurrent::delta_rule(const RecurrentStep& step, float* in, float* out) const {
    const size_t n_keys = config_.n_delta_key_heads, n_values = config_.n_delta_heads, dk = config_.delta_key_dim,
                 dv = config_.delta_dim, width = config_.mixer_in(step.layer), channels = config_.conv_dim(step.layer);
    const size_t per_key = n_values / n_keys;
    const double work = 0.2 * static_cast<double>(n_tokens(step) * n_values * dk * dv);
    parallel_split(step.runs.size() * n_keys, 1, work, [&](size_t begin, size_t end) {
        for (size_t task = begin; task < end; ++task) {
            const StateRun& run = step.runs[task / n_keys];
            const size_t key_head = task % n_keys;
            float* const rows = in + run.first * width;
            const auto convolve = [&](size_t channel, size_t count) {
                for_windows(step, run, channel, count, rows + channel, width,
                            [&](size_t i, const float* const* inputs) {
                                float* row = rows + i * width + channel;
                                kernels().short_conv_f32(inputs, config_.conv_length, taps_.data() + channel, channels,
                                                         nullptr, count, row);
                                kernels().silu_f32(row, count, false, row);
                            });
            };
            const size_t q = key_head * dk, k = (n_keys + key_head) * dk;
            convolve(q, dk), convolve(k, dk);
            for (size_t i = 0; i < run.n; ++i) {
                for (const size_t at : {q, k}) {
                    float* const x = rows + i * width + at;
                    kernels().rms_norm_f32(x, nullptr, &length_weights_[at == q ? 0 : dk], dk,
                                           kLengthEps / static_cast<double>(dk), false, x);
                }
            }
            for (size_t j = 0; j < per_key; ++j) {
                const size_t head = config_.delta_tiled ? key_head + j * n_keys : key_head * per_key + j;
                convolve(2 * n_keys * dk + head * dv, dv);
                delta_head(step, run, key_head, head, in, out);
            }
        }
    });
}

// A value head, from its q, k and v.
void Recurrent::delta_head(const RecurrentStep& step, const StateRun& run, size_t key_head, size_t head, float* in,
                           float* out) const {
    const size_t n_keys = config_.n_delta_key_heads, n_values = config_.n_delta_heads, dk = config_.delta_key_dim,
                 dv = config_.delta_dim, width = config_.mixer_in(step.layer), channels = config_.conv_dim(step.layer);
    const LayerWeights& w = step.weights.layers[step.layer];
    float* const rows = in + run.first * width;
    float *const z = rows + channels + head * dv, *const b = rows + channels + n_values * dv + head,
                 *const a = b + n_values;
    for (size_t i = 0; i < run.n; ++i) {  // b becomes beta, and a the decay
        b[i * width] = beta_of(b[i * width]);
        a[i * width] = decay_of(a[i * width], w.decay[head], w.dt_bias[head]);
    }
    float* const to = step.memory.state(run.to, step.layer, 1 + head);
    const float* const from = run.from == nullptr ? nullptr : step.memory.state(run.from, step.layer, 1 + head);
    auto* const length = reinterpret_cast<StateLength*>(to + config_.delta_state_size());
    const StateLength end = step.rows[run.first + run.n - 1].position + 1;
    float* const o = out + run.first * n_values * dv + head * dv;
    const DeltaTask task{.n = run.n,
                         .key_dim = dk,
                         .value_dim = dv,
                         .q = rows + key_head * dk,
                         .k = rows + (n_keys + key_head) * dk,
                         .v = rows + 2 * n_keys * dk + head * dv,
                         .stride = width,
                         .decay = a,
                         .beta = b,
                         .gate_stride = width,
                         .from = from,
                         .to = to,
                         .out = o,
                         .out_stride = n_values * dv};
    const bool is_repeated = from == to && *length == end;
    is_repeated ? kernels().delta_output_f32(task) : kernels().delta_rule_f32(task);
    *length = end;
    for (size_t i = 0; i < run.n; ++i) {
        float* const row = o + i * n_values * dv;
        const NormWeight& norm =
            norm_of(step.weights, step.rows[run.first + i].adapter, {step.layer, &LayerNorms::delta_norm});
        kernels().rms_norm_f32(row, nullptr, norm.weight.data(), dv, config_.norm_eps, false, row);
        kernels().swiglu_f32(z + i * width, row, dv, false, row);
    }
}

}  // namespace whet
