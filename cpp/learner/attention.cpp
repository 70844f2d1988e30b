// The half of a layer up to its attention, or another mixer (learner/short_conv.cpp, delta_rule.cpp), in both
// directions.
#include <cstring>
#include <memory>

#include "engine/attention.h"
#include "engine/scratch.h"
#include "kernels/dispatch.h"
#include "learner/learner.h"
#include "learner/sums.h"
#include "runtime/thread_pool.h"

namespace whet {

TrainingAttention Learner::attention_of(size_t layer) {
    const size_t head_dim = config_.head_dim_of(layer), n_own = config_.n_own_kv_heads(layer);
    const auto d = static_cast<ptrdiff_t>(head_dim);
    uint8_t* const kv = n_own > 0 ? now_.qkv + config_.n_heads * head_dim * head_bytes_ : shared_kv(layer);
    const size_t kv_token = n_own > 0 ? config_.heads_dim(layer) : shared_kv_dim(layer);
    const auto heads = [&](uint8_t* at, size_t token) { return TokenHeads{at, static_cast<ptrdiff_t>(token), d}; };
    const size_t window = config_.windows[layer];
    return {.bf16 = head_type_ == ProductType::kBFloat16,
            .n_tokens = static_cast<int64_t>(n()),
            .n_heads = static_cast<int64_t>(config_.n_heads),
            .n_kv_heads = static_cast<int64_t>(config_.n_kv_heads),
            .head_dim = d,
            .n_sequences = static_cast<int64_t>(batch_.q_offsets.size()) - 1,
            .q_offsets = batch_.q_offsets.data(),
            .k_offsets = batch_.k_offsets.data(),
            .key_rows = batch_.key_rows.data(),
            .window = window == 0 ? kNoWindow : static_cast<int64_t>(window),
            .scale = config_.attention_scale,
            .softcap = config_.attention_softcap,
            .sinks = config_.sinks ? weights_->layers[layer].sinks.data() : nullptr,
            .q = heads(now_.qkv, config_.heads_dim(layer)),
            .k = heads(kv, kv_token),
            .v = heads(kv + config_.n_kv_heads * head_dim * head_bytes_, kv_token),
            .out = now_.attended,
            .lse = now_.lse};
}

// From x: the activations up to `middle`.
void Learner::attention_half(size_t layer) {
    const size_t d = config_.hidden_dim, width = config_.mixer_in(layer);
    const Mixer mixer = config_.mixer(layer);
    if (mixer == Mixer::kNone) {
        std::memcpy(now_.middle, x_.get(), n() * d * sizeof(float));
        return;
    }
    for (const RowTile& tile : tiles_) {
        norm(norm_at(layer, &LayerNorms::norm1), x_.get() + tile.begin * d, tile.n(), h_.get());
        float* raw = now_.raw + tile.begin * width;
        project(layer, Target::kQkv, convert(h_.get(), d, tile.n(), d), tile, raw, width);
        if (!config_.attends(layer)) continue;
        for_rows(tile.n(), 2 * width, [&](size_t i) { finish_heads(layer, tile.begin + i); });
    }
    switch (mixer) {
        case Mixer::kAttention:
            attention_forward(attention_of(layer));
            break;
        case Mixer::kConv:
            convolve(layer);
            break;
        case Mixer::kDelta:
        case Mixer::kMamba:
            delta_rule(layer);
            break;
        case Mixer::kNone:
            break;
    }
    for (const RowTile& tile : tiles_) {
        const size_t at = tile.begin * d, rows = tile.n();
        float* out = config_.post_norm ? now_.attended_out + at : delta_.get();
        project(layer, Target::kO, gated_rows(layer, tile), tile, out, d);
        if (config_.post_norm) norm(norm_at(layer, &LayerNorms::post_norm1), out, rows, delta_.get());
        add(x_.get() + at, delta_.get(), config_.residual_scale, rows, now_.middle + at);
    }
}

// Rotates queries and keys of a token in place, if the layer does.
void Learner::rotate(size_t layer, size_t token, float* heads, bool inverse) const {
    if (!config_.rotates(layer)) return;
    const Kernels& k = kernels();
    (config_.is_neox ? k.rope_neox_f32 : k.rope_gptj_f32)(heads, config_.n_heads + config_.n_own_kv_heads(layer),
                                                          static_cast<ptrdiff_t>(config_.head_dim_of(layer)),
                                                          cos_sin(layer, token), config_.rotary_dim_of(layer), inverse);
}

// Multiplies the queries of a token by the factor of its position.
void Learner::scale_queries(size_t layer, size_t token, float* heads) const {
    if (config_.query_log_scale == 0.0) return;
    const float factor = config_.query_scale(static_cast<size_t>(batch_.positions[token]));
    for (size_t i = 0; i < config_.n_heads * config_.head_dim_of(layer); ++i) heads[i] *= factor;
}

// Copies queries, keys and values of a token, without gates.
void Learner::read_heads(size_t layer, const float* raw, float* heads) const {
    const size_t d = config_.head_dim_of(layer), stride = config_.query_stride(layer);
    for (size_t head = 0; head < config_.n_heads; ++head) {
        std::memcpy(heads + head * d, raw + head * stride, d * sizeof(float));
    }
    std::memcpy(heads + config_.n_heads * d, raw + config_.n_heads * stride,
                2 * config_.n_own_kv_heads(layer) * d * sizeof(float));
}

// Norms and rotates queries and keys of a token, and converts them and the values for attention.
void Learner::finish_heads(size_t layer, size_t token) {
    const NormWeight &q_norm = norm_at(layer, &LayerNorms::q_norm), &k_norm = norm_at(layer, &LayerNorms::k_norm);
    const Kernels& k = kernels();
    const size_t d = config_.head_dim_of(layer), width = config_.heads_dim(layer);
    const size_t n_q = config_.n_heads * d, n_k = config_.n_own_kv_heads(layer) * d;
    float* heads = scratch<float>(width, Scratch::kRow);
    read_heads(layer, now_.raw + token * config_.qkv_dim(layer), heads);
    const auto norm_heads = [&] {
        for (size_t i = 0; i < n_q + n_k; i += d) {
            const NormWeight& norm = i < n_q ? q_norm : k_norm;
            k.rms_norm_f32(heads + i, nullptr, norm.weight.data(), d, config_.norm_eps, false, heads + i);
        }
    };
    if (config_.qk_norm_whole) {
        k.rms_norm_f32(heads, nullptr, q_norm.weight.data(), n_q, config_.norm_eps, false, heads);
        k.rms_norm_f32(heads + n_q, nullptr, k_norm.weight.data(), n_k, config_.norm_eps, false, heads + n_q);
    } else if (config_.qk_norm && !config_.qk_norm_rotated) {
        norm_heads();
    }
    for (size_t i = n_q + n_k; config_.v_norm && i < width; i += d) {
        k.rms_norm_f32(heads + i, nullptr, nullptr, d, config_.norm_eps, false, heads + i);
    }
    rotate(layer, token, heads, false);
    if (config_.qk_norm_rotated) norm_heads();
    scale_queries(layer, token, heads);
    uint8_t* to = now_.qkv + token * width * head_bytes_;
    if (head_type_ == ProductType::kBFloat16) {
        k.bf16_from_f32(heads, width, reinterpret_cast<uint16_t*>(to));
    } else {
        std::memcpy(to, heads, width * sizeof(float));
    }
    if (!config_.shares_kv(layer)) return;
    const size_t bytes = shared_kv_dim(layer) * head_bytes_;
    std::memcpy(shared_kv(layer) + token * bytes, to + n_q * head_bytes_, bytes);
}

// Adds the gradients of keys and values that a layer reads to their sums.
void Learner::add_shared_kv_grads(size_t layer, const uint8_t* grad_k, const uint8_t* grad_v) {
    const size_t n_k = config_.n_kv_heads * config_.head_dim_of(layer);
    for_rows(n(), 4 * n_k, [&](size_t token) {
        float *grad = scratch<float>(2 * n_k, Scratch::kRow), *sum = shared_kv_grads(layer) + token * 2 * n_k;
        load(grad_k + token * n_k * head_bytes_, n_k, grad);
        load(grad_v + token * n_k * head_bytes_, n_k, grad + n_k);
        kernels().blend_f32(grad, 2 * n_k, 1.0f, 1.0f, sum);
    });
}

// Replaces queries, keys and values in `raw` of a token by their gradients, from the gradients of the finished heads.
// Adds the terms of the gradients of the query norm and of the key norm to `sums`, unless null.
void Learner::heads_backward(size_t layer, size_t token, const uint8_t* grad_q, const uint8_t* grad_k,
                             const uint8_t* grad_v, float* sums) {
    const NormWeight &q_norm = norm_at(layer, &LayerNorms::q_norm), &k_norm = norm_at(layer, &LayerNorms::k_norm);
    const Kernels& k = kernels();
    const size_t d = config_.head_dim_of(layer), width = config_.heads_dim(layer);
    const size_t n_q = config_.n_heads * d, n_k = config_.n_own_kv_heads(layer) * d;
    float *heads = scratch<float>(2 * width, Scratch::kRow), *before = heads + width;
    float* raw = now_.raw + token * config_.qkv_dim(layer);
    read_heads(layer, raw, before);
    const auto read = [&](const uint8_t* grad, size_t count, float* to) {
        load(grad + token * count * head_bytes_, count, to);
    };
    read(grad_q, n_q, heads), read(grad_k, n_k, heads + n_q), read(grad_v, n_k, heads + n_q + n_k);
    if (config_.shares_kv(layer)) {
        k.blend_f32(shared_kv_grads(layer) + token * 2 * n_k, 2 * n_k, 1.0f, 1.0f, heads + n_q);
    }
    for (size_t i = n_q + n_k; config_.v_norm && i < width; i += d) {
        k.rms_norm_backward_f32(before + i, ones_.data(), heads + i, d, config_.norm_eps, heads + i, nullptr);
    }
    scale_queries(layer, token, heads);
    if (config_.qk_norm_rotated) {
        rotate(layer, token, before, false);  // the input of the norm
    } else {
        rotate(layer, token, heads, true);
    }
    const auto norm_backward = [&](const NormWeight& norm, size_t at, size_t count) {
        if (sums != nullptr) {
            float* to = &norm == &q_norm ? sums : sums + q_norm.weight.size();
            add_norm_terms(Norm::kRms, before + at, heads + at, count, false, to);
        }
        k.rms_norm_backward_f32(before + at, norm.weight.data(), heads + at, count, config_.norm_eps, heads + at,
                                nullptr);
    };
    if (config_.qk_norm_whole) {
        norm_backward(q_norm, 0, n_q), norm_backward(k_norm, n_q, n_k);
    } else if (config_.qk_norm) {
        for (size_t i = 0; i < n_q + n_k; i += d) norm_backward(i < n_q ? q_norm : k_norm, i, d);
    }
    if (config_.qk_norm_rotated) rotate(layer, token, heads, true);
    const size_t stride = config_.query_stride(layer);
    for (size_t head = 0; head < config_.n_heads; ++head) {
        std::memcpy(raw + head * stride, heads + head * d, d * sizeof(float));
    }
    std::memcpy(raw + config_.n_heads * stride, heads + n_q, 2 * n_k * sizeof(float));
}

// The results of a tile after their gates, in the type of products.
ProductRows Learner::gated_rows(size_t layer, const RowTile& tile) {
    const size_t width = config_.mixer_out(layer), d = config_.head_dim_of(layer), rows = tile.n();
    const uint8_t* attended = now_.attended + tile.begin * width * head_bytes_;
    if (!is_gated(layer)) {
        if (head_type_ == type_) return {attended, width};
        return convert(reinterpret_cast<const float*>(attended), width, rows, width);
    }
    for_rows(rows, 4 * width, [&](size_t i) {
        float *row = up_.get() + i * width, *raw = now_.raw + (tile.begin + i) * config_.mixer_in(layer);
        load(attended + i * width * head_bytes_, width, row);
        if (config_.is_delta(layer)) return gate_delta(layer, tile.begin + i, row);
        for (size_t head = 0; head < config_.n_heads; ++head) {
            const float* gate = raw + head * config_.query_stride(layer) + d;
            kernels().sigmoid_gate_f32(row + head * d, gate, d, row + head * d);
        }
    });
    return convert(up_.get(), width, rows, width);
}

// Converts gradients of a tile's gated results, in place, to gradients of the results, and replaces the gates in `raw`
// by their gradients.
void Learner::gate_backward(size_t layer, const RowTile& tile, float* grad) {
    const size_t width = config_.mixer_out(layer), d = config_.head_dim_of(layer);
    if (!is_gated(layer)) return;
    if (config_.is_delta(layer)) return gate_delta_backward(layer, tile, grad);
    for_rows(tile.n(), 4 * width, [&](size_t i) {
        float *row = scratch<float>(width, Scratch::kRow), *to = grad + i * width;
        float* raw = now_.raw + (tile.begin + i) * config_.mixer_in(layer);
        load(now_.attended + (tile.begin + i) * width * head_bytes_, width, row);
        for (size_t head = 0; head < config_.n_heads; ++head) {
            float *gate = raw + head * config_.query_stride(layer) + d, *of_head = to + head * d;
            kernels().sigmoid_gate_backward_f32(row + head * d, gate, of_head, d, of_head, gate);
        }
    });
}

// Adds to `grad`, the gradient of x, what comes through attention, from grad_out, the gradient of the half's result.
void Learner::attention_backward_half(size_t layer, const float* grad_out, float* grad,
                                      std::span<const FactorGradients> grads) {
    const NormWeight &q_norm = norm_at(layer, &LayerNorms::q_norm), &k_norm = norm_at(layer, &LayerNorms::k_norm);
    const size_t d = config_.hidden_dim, width = config_.mixer_out(layer);
    const size_t n_k = config_.n_kv_heads * config_.head_dim_of(layer);
    const bool attends = config_.attends(layer);
    if (!config_.mixes(layer)) return;
    const auto typed = [&](size_t count) {
        return std::make_unique_for_overwrite<uint8_t[]>(attends ? n() * count * head_bytes_ : 0);
    };
    const Bytes grad_attended = typed(width), grad_q = typed(width), grad_k = typed(n_k), grad_v = typed(n_k);
    const auto grad_mixed = std::make_unique_for_overwrite<float[]>(attends ? 0 : n() * width);
    for (const RowTile& tile : tiles_) {
        const size_t at = tile.begin * d, rows = tile.n();
        float* delta = h_.get();
        scale(grad_out + at, config_.residual_scale, rows, delta);
        if (config_.post_norm)
            norm_backward(norm_at(layer, &LayerNorms::post_norm1), now_.attended_out + at, delta, tile.groups);
        float* grad_in = attends ? delta_.get() : grad_mixed.get() + tile.begin * width;
        project_backward(layer, Target::kO, gated_rows(layer, tile), tile, delta, d, grad_in, width, grads);
        gate_backward(layer, tile, grad_in);
        if (attends) store(delta_.get(), rows, width, grad_attended.get() + tile.begin * width * head_bytes_);
    }
    if (config_.mixer(layer) == Mixer::kConv) {
        convolve_backward(layer, grad_mixed.get());
    } else if (config_.is_delta(layer)) {
        delta_rule_backward(layer, grad_mixed.get());
    } else {
        attention_backward(attention_of(layer), {.out = grad_attended.get(),
                                                 .q = grad_q.get(),
                                                 .k = grad_k.get(),
                                                 .v = grad_v.get(),
                                                 .reader_offsets = batch_.reader_offsets.data(),
                                                 .readers = batch_.readers.data()});
        if (config_.n_own_kv_heads(layer) == 0) add_shared_kv_grads(layer, grad_k.get(), grad_v.get());
    }
    for (const RowTile& tile : tiles_) {
        const size_t at = tile.begin * d, rows = tile.n(), qkv = config_.mixer_in(layer);
        const auto heads = [&](size_t i, float* sums) {
            heads_backward(layer, tile.begin + i, grad_q.get(), grad_k.get(), grad_v.get(), sums);
        };
        float *grad_q_norm = gradient_of(q_norm.weight), *grad_k_norm = gradient_of(k_norm.weight);
        if (!attends) {
            // The rows are replaced.
        } else if (grad_q_norm == nullptr && grad_k_norm == nullptr) {
            for_rows(rows, 2 * qkv, [&](size_t i) { heads(i, nullptr); });
        } else {
            const size_t of_q = q_norm.weight.size(), of_k = k_norm.weight.size();
            std::vector<float> sums;
            sum_blocks(tile.groups, of_q + of_k, sums, heads);
            add_sums(sums, of_q + of_k, 0, of_q, grad_q_norm);
            add_sums(sums, of_q + of_k, of_q, of_k, grad_k_norm);
        }
        norm(norm_at(layer, &LayerNorms::norm1), x_.get() + at, rows, h_.get());
        project_backward(layer, Target::kQkv, convert(h_.get(), d, rows, d), tile, now_.raw + tile.begin * qkv, qkv,
                         delta_.get(), d, grads);
        norm_backward(norm_at(layer, &LayerNorms::norm1), x_.get() + at, delta_.get(), tile.groups,
                      &shared_sums_[index_of(tile)]);
        add(grad + at, delta_.get(), 1.0f, rows, grad + at);
    }
}

}  // namespace whet
