#include "engine/transformer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "engine/activation.h"
#include "kernels/dispatch.h"
#include "runtime/ceil_div.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

constexpr double kLog2E = 1.4426950408889634;
constexpr size_t kActivationWidth = 64;  // outputs of gate and up that are activated at once
constexpr size_t kAttentionPart = 32;    // queries for which reading a page takes little of the time

int64_t n_pages(const InputToken& row) { return row.position / kPageTokens + 1; }

// Length in pages of the common prefix of two tokens' sequences.
int64_t common_pages(const InputToken& a, const InputToken& b) {
    const int64_t n = std::min(n_pages(a), n_pages(b));
    int64_t i = 0;
    while (i < n && a.pages[i] == b.pages[i]) ++i;
    return i;
}

// The factors that a token's adapter adds to a matrix, or null.
const LowRank* low_rank(const InputToken& row, size_t layer, Target target) {
    return row.adapter == nullptr ? nullptr : row.adapter->find(layer, target);
}

void scale(float factor, float* x, size_t n) {
    if (factor != 1.0f) kernels().blend_f32(x, n, factor, 0.0f, x);
}

}  // namespace

Transformer::Cache::Cache(KvType type) : type(type) {
    const Kernels& k = kernels();
    output = k.cached_output;
    switch (type) {
        case KvType::kFloat32:
            attend = k.cached_attention_f32, write_query = k.cached_write_query_f32, write_kv = k.cached_write_kv_f32;
            return;
        case KvType::kBFloat16:
            attend = k.cached_attention_bf16, write_query = k.cached_write_query_bf16,
            write_kv = k.cached_write_kv_bf16;
            return;
        case KvType::kInt8:
            if constexpr (!kIsComplete) break;
            attend = k.cached_attention_int8, write_query = k.cached_write_query_int8,
            write_kv = k.cached_write_kv_int8;
            output = k.cached_output_int8;
            return;
    }
}

size_t Transformer::Cache::query_bytes(size_t head_dim) const {
    return type == KvType::kFloat32    ? head_dim * 4
           : type == KvType::kBFloat16 ? ceil_div(head_dim, 2) * 4
                                       : ceil_div(head_dim, 4) * 8 + 8;
}

Transformer::Transformer(std::shared_ptr<const Weights> weights, size_t max_rows, KvType kv_type)
    : weights_(std::move(weights)),
      config_(weights_->config()),
      max_rows_(max_rows),
      kv_type_(kv_type),
      cache_(kv_type),
      recurrent_(config_, max_rows),
      experts_(config_, max_rows) {
    const auto parts = [this] {
        x_ = arena_.take<float>(max_rows_ * config_.hidden_dim);
        h_ = arena_.take<float>(max_rows_ * config_.hidden_dim);
        delta_ = arena_.take<float>(max_rows_ * config_.hidden_dim);
        qkv_ = arena_.take<float>(max_rows_ * config_.widest_mixer_in());
        attended_ = arena_.take<float>(max_rows_ * std::max(config_.hidden_dim, config_.widest_mixer_out()));
        up_ = arena_.take<float>(max_rows_ * std::max(config_.widest_up(), config_.layer_inputs()));
        cos_sin_ = arena_.take<float>(max_rows_ * config_.rotary_dim);
        local_cos_sin_ = arena_.take<float>(max_rows_ * 2 * config_.local_inv_freq.size());
        query_scales_ = arena_.take<float>(config_.query_log_scale == 0.0 ? 0 : max_rows_);
        state_ = arena_.take<float>(max_rows_ * config_.n_heads * state_size(config_.widest_head()));
        queries_ = arena_.take<uint8_t>(max_rows_ * config_.n_heads * cache_.query_bytes(config_.widest_head()));
        layer_inputs_ = arena_.take<float>(max_rows_ * config_.layer_inputs());
        positions_ = arena_.take<int32_t>(max_rows_ * config_.kv_group());
        size_t units = config_.n_heads + config_.n_kv_heads;
        for (size_t layer = 0; layer < config_.n_layers; ++layer) {
            units = std::max(units, activation_units(config_.mlp_dim(layer)).count);
        }
        missing_ = arena_.take<std::atomic<uint32_t>>(Epilogue::n_counters(units, max_rows_));
    };
    parts();
    arena_.allocate();
    parts();
    groups_.reserve(max_rows_);
}

// Outputs of an MLP of width dim that are activated at once.
Transformer::Units Transformer::activation_units(size_t dim) {
    const size_t width = std::gcd(dim, kActivationWidth);
    return {width, dim == 0 ? 0 : dim / width};
}

void Transformer::reserve_adapters(size_t rank) {
    adapter_hidden_.resize(std::max(adapter_hidden_.size(), max_rows_ * rank));
}

const float* Transformer::forward(const InputToken* rows, size_t n, std::span<const StateRun> runs, KvMemory& memory) {
    group_by_prefix(rows, n);
    embed(rows, n);
    if (config_.has_layer_inputs()) read_layer_inputs(rows, n);
    float* delta = nullptr;  // sublayer output not yet added to the residual stream
    for (size_t i = 0; i < config_.n_layers; ++i) {
        if (config_.mixes(i)) {
            add_and_norm(rows, {i, &LayerNorms::norm1}, delta, n);
            config_.attends(i) ? attention(rows, n, i, memory) : recurrence(rows, n, i, runs, memory);
            post_norm(rows, {i, &LayerNorms::post_norm1}, delta_, n);
            delta = delta_;
        }
        if (!config_.has_mlp(i)) continue;
        if (!config_.parallel_residual) {
            add_and_norm(rows, {i, &LayerNorms::norm2}, delta, n);
            feed_forward(rows, n, i, memory, delta_);
            post_norm(rows, {i, &LayerNorms::post_norm2}, delta_, n);
            delta = delta_;
        } else {
            if (!config_.shared_norm) add_and_norm(rows, {i, &LayerNorms::norm2}, nullptr, n);
            feed_forward(rows, n, i, memory, attended_);  // attended_ is free at this point
            for_rows(n, config_.hidden_dim, [&](size_t r) {
                const size_t at = r * config_.hidden_dim;
                kernels().blend_f32(attended_ + at, config_.hidden_dim, 1.0f, 1.0f, delta_ + at);
            });
        }
        if (config_.has_layer_inputs() || config_.layer_scale) {
            end_layer(rows, n, i, delta_);
            delta = nullptr;
        }
    }
    add_and_norm(rows, {}, delta, n);
    scale(config_.logits_scale, h_, n * config_.hidden_dim);
    return h_;
}

void Transformer::logits(const float* hidden, size_t n, float* out) const {
    linear(weights_->output().parts, hidden, false, config_.hidden_dim, n, weights_->head.bias_or_null(), out,
           config_.vocab_size);
    if (config_.logits_softcap > 0.0f) {
        for_rows(n, config_.vocab_size, [&](size_t i) {
            float* row = out + i * config_.vocab_size;
            kernels().softcap_f32(row, config_.vocab_size, config_.logits_softcap, false, row);
        });
    }
}

void Transformer::embed(const InputToken* rows, size_t n) {
    for_rows(n, config_.hidden_dim, [&](size_t i) {
        float* x = x_ + i * config_.hidden_dim;
        weights_->embedding.rows(static_cast<size_t>(rows[i].token), 1, x, false);
        scale(config_.embedding_scale, x, config_.hidden_dim);
        if (config_.learned_positions > 0) {
            weights_->positions.rows(static_cast<size_t>(rows[i].position), 1, h_ + i * config_.hidden_dim, false);
            kernels().blend_f32(h_ + i * config_.hidden_dim, config_.hidden_dim, 1.0f, 1.0f, x);
        }
        if (config_.rotary_dim > 0) {
            kernels().rope_cos_sin(rows[i].position, config_.inv_freq.data(), config_.inv_freq.size(),
                                   config_.attention_factor, cos_sin_ + i * config_.rotary_dim);
        }
        if (!config_.local_layers.empty()) {
            kernels().rope_cos_sin(rows[i].position, config_.local_inv_freq.data(), config_.local_inv_freq.size(), 1.0,
                                   local_cos_sin_ + i * 2 * config_.local_inv_freq.size());
        }
        if (config_.query_log_scale != 0.0) {
            query_scales_[i] = config_.query_scale(static_cast<size_t>(rows[i].position));
        }
        for (size_t g = 0; g < config_.kv_group(); ++g) positions_[i * config_.kv_group() + g] = rows[i].position;
    });
}

// Computes the inputs (n, n_layers, layer_input_dim) of the layers from x and rows of the table.
void Transformer::read_layer_inputs(const InputToken* rows, size_t n) {
    for (size_t i = 0; i < n; ++i) check_layer_embedding(*weights_, rows[i].token);
    const size_t width = config_.layer_inputs();
    product(weights_->layer_inputs, x_, n, layer_inputs_);
    adapt(rows, n, 0, Target::kLayerInputs, x_, config_.hidden_dim, layer_inputs_, width);
    for_rows(n, 8 * width, [&](size_t i) {
        float *inputs = layer_inputs_ + i * width, *embedded = up_ + i * width;
        weights_->layer_embedding.read(static_cast<size_t>(rows[i].token), embedded);
        combine_layer_inputs(config_, norm_of(*weights_, rows[i].adapter, {.is_of_inputs = true}), embedded, inputs);
    });
}

// x = layer_scale (x + residual_scale delta), plus what the layer makes of its input before that product.
void Transformer::end_layer(const InputToken* rows, size_t n, size_t layer, float* delta) {
    const LayerWeights& w = weights_->layers[layer];
    const size_t d = config_.hidden_dim, p = config_.layer_input_dim;
    const float factor = config_.layer_scale ? w.scale[0] : 1.0f;
    for_rows(n, d, [&](size_t i) {
        kernels().blend_f32(delta + i * d, d, config_.residual_scale, 1.0f, x_ + i * d);
        if (p == 0) scale(factor, x_ + i * d, d);
    });
    if (!config_.has_layer_inputs()) return;
    product(w.input_gate, x_, n, up_);
    adapt(rows, n, layer, Target::kInputGate, x_, d, up_, p);
    for_rows(n, 4 * p, [&](size_t i) {
        float* gate = up_ + i * p;
        activate(config_, gate, layer_inputs_ + i * config_.layer_inputs() + layer * p, p, gate);
    });
    product(w.input_out, up_, n, delta);
    adapt(rows, n, layer, Target::kInputOut, up_, p, delta, d);
    for_rows(n, d, [&](size_t i) {
        norm(norm_of(*weights_, rows[i].adapter, {layer, &LayerNorms::input_norm}), delta + i * d, nullptr,
             delta + i * d);
        kernels().blend_f32(delta + i * d, d, 1.0f, 1.0f, x_ + i * d);
        scale(factor, x_ + i * d, d);
    });
}

// Groups tokens of one sequence, or of sequences with a common prefix: groups are large enough to share the reading of
// a page and small enough that every thread has one.
void Transformer::group_by_prefix(const InputToken* rows, size_t n) {
    const size_t most = std::clamp<size_t>(n / 8, 8, 64);
    groups_.clear();
    for (size_t i = 0; i < n; ++i) {
        if (!groups_.empty() && groups_.back().n < most) {
            PrefixGroup& last = groups_.back();
            const InputToken &head = rows[last.first], &before = rows[i - 1];
            const bool one_sequence = before.pages == head.pages;
            if (rows[i].pages == head.pages && one_sequence) {
                last.shared = std::max(last.shared, n_pages(rows[i]));
                ++last.n;
                continue;
            }
            const int64_t common = common_pages(head, rows[i]);
            if (last.n == 1 ? common > 0 : !one_sequence && common >= last.shared) {
                last.shared = std::min(last.shared, common);
                ++last.n;
                continue;
            }
        }
        groups_.push_back({i, 1, n_pages(rows[i])});
    }
}

void Transformer::norm(const NormWeight& w, const float* x, float* residual, float* out) const {
    const size_t d = config_.hidden_dim;
    if (config_.norm == Norm::kRms) {
        kernels().rms_norm_f32(x, residual, w.weight.data(), d, config_.norm_eps, false, out);
    } else {
        kernels().layer_norm_f32(x, residual, w.weight.data(), w.bias_or_null(), d, config_.norm_eps, false, out);
    }
}

void Transformer::post_norm(const InputToken* rows, NormId id, float* delta, size_t n) const {
    const size_t d = config_.hidden_dim;
    if (!config_.post_norm) return;
    for_rows(n, d,
             [&](size_t i) { norm(norm_of(*weights_, rows[i].adapter, id), delta + i * d, nullptr, delta + i * d); });
}

// x += residual_scale delta, scaled in place; h = norm(x), or x without this norm.
void Transformer::add_and_norm(const InputToken* rows, NormId id, float* delta, size_t n) {
    const size_t d = config_.hidden_dim;
    for_rows(n, d, [&](size_t i) {
        float *x = x_ + i * d, *h = h_ + i * d;
        const float* from = x;
        if (delta != nullptr) {
            scale(config_.residual_scale, delta + i * d, d);
            from = delta + i * d;
        }
        const NormWeight& w = norm_of(*weights_, rows[i].adapter, id);
        if (!w.weight.empty()) return norm(w, from, delta == nullptr ? nullptr : x, h);
        if (delta != nullptr) kernels().blend_f32(from, d, 1.0f, 1.0f, x);
        std::memcpy(h, x, d * sizeof *x);
    });
}

// delta = W_o attention(W_qkv h).
void Transformer::attention(const InputToken* rows, size_t n, size_t layer, KvMemory& memory) {
    const LayerWeights& w = weights_->layers[layer];
    const size_t d = config_.head_dim_of(layer);
    project(rows, n, layer, Target::kQkv, qkv_, {d, config_.n_heads + config_.n_own_kv_heads(layer)},
            !config_.qk_norm_whole && !config_.output_gate,
            [&](size_t i, size_t unit) { finish_head(rows[i], i, unit, layer, memory); });
    // With enough groups for all threads, a task is all heads of a group, read in the memory order of a page; with too
    // few, a part of the queries of a KV head.
    const size_t heads = config_.n_kv_heads, threads = static_cast<size_t>(num_threads());
    const size_t at_once = groups_.size() >= 8 * threads ? heads : 1;
    const size_t units = groups_.size() * heads, queries = n * config_.n_heads / units;  // queries of a unit
    const size_t parts = std::max({size_t{1}, std::min(threads / units, config_.kv_group()),
                                   std::min(4 * threads / units, queries / kAttentionPart)});
    auto task = [&](size_t i) {
        for (size_t unit = i / parts * at_once; unit < (i / parts + 1) * at_once; ++unit) {
            attend(rows, groups_[unit / heads], unit % heads, {i % parts, parts}, layer, memory);
        }
    };
    parallel_for(units / at_once * parts, task);
    product(w.o, attended_, n, delta_);
    adapt(rows, n, layer, Target::kO, attended_, config_.n_heads * d, delta_, config_.hidden_dim);
}

// delta = W_out mix(W_in h) of a recurrent mixer.
void Transformer::recurrence(const InputToken* rows, size_t n, size_t layer, std::span<const StateRun> runs,
                             const KvMemory& memory) {
    const LayerWeights& w = weights_->layers[layer];
    product(w.qkv, h_, n, qkv_);
    adapt(rows, n, layer, Target::kQkv, h_, config_.hidden_dim, qkv_, w.qkv.n());
    recurrent_.mix({rows, runs, *weights_, layer, memory}, qkv_, attended_);
    product(w.o, attended_, n, delta_);
    adapt(rows, n, layer, Target::kO, attended_, w.o.k(), delta_, config_.hidden_dim);
}

// Norms and rotates a query head of token i, unit < n_heads, and writes it for attend(); or norms and rotates a key,
// and writes it and its value to the cache.
void Transformer::finish_head(const InputToken& row, size_t i, size_t unit, size_t layer, KvMemory& memory) {
    const Kernels& k = kernels();
    const size_t d = config_.head_dim_of(layer), group = config_.kv_group(), stride = config_.query_stride(layer);
    const size_t n_q = config_.n_heads * stride;
    const bool is_query = unit < config_.n_heads;
    float* const q = qkv_ + i * config_.qkv_dim(layer);
    float* const x = q + (is_query ? unit * stride : n_q + (unit - config_.n_heads) * d);
    const auto weight = [&](NormWeight LayerNorms::* norm) {
        return norm_of(*weights_, row.adapter, {layer, norm}).weight.data();
    };
    const auto norm_head = [&] {
        k.rms_norm_f32(x, nullptr, weight(is_query ? &LayerNorms::q_norm : &LayerNorms::k_norm), d, config_.norm_eps,
                       false, x);
    };
    if (config_.qk_norm_whole && unit == 0) {
        const size_t n_k = config_.n_kv_heads * d;
        k.rms_norm_f32(q, nullptr, weight(&LayerNorms::q_norm), n_q, config_.norm_eps, false, q);
        k.rms_norm_f32(q + n_q, nullptr, weight(&LayerNorms::k_norm), n_k, config_.norm_eps, false, q + n_q);
    } else if (config_.qk_norm && !config_.qk_norm_whole && !config_.qk_norm_rotated) {
        norm_head();
    }
    if (config_.rotates(layer)) {
        const auto rotate = config_.is_neox ? k.rope_neox_f32 : k.rope_gptj_f32;
        const size_t rotary_dim = config_.rotary_dim_of(layer);
        const float* table = (config_.is_local(layer) ? local_cos_sin_ : cos_sin_) + i * rotary_dim;
        rotate(x, 1, static_cast<ptrdiff_t>(d), table, rotary_dim, false);
    }
    if (config_.qk_norm_rotated) norm_head();
    if (!is_query) {
        float* const value = x + config_.n_kv_heads * d;
        if (config_.v_norm) k.rms_norm_f32(value, nullptr, nullptr, d, config_.norm_eps, false, value);
        cache_.write_kv(
            x, value, static_cast<int64_t>(d), row.position % kPageTokens,
            memory.page(row.pages[row.position / kPageTokens]) + memory.offset(layer, unit - config_.n_heads));
        return;
    }
    if (config_.query_log_scale != 0.0) scale(query_scales_[i], x, d);
    cache_.write_query(x, static_cast<int64_t>(d),
                       queries_ + ((unit / group * max_rows_ + i) * group + unit % group) * cache_.query_bytes(d));
}

// Attention of a part of the queries of a group and KV head.
void Transformer::attend(const InputToken* rows, const PrefixGroup& group, size_t kv_head, Part part, size_t layer,
                         const KvMemory& memory) {
    const Kernels& k = kernels();
    const size_t per_row = config_.kv_group(), d = config_.head_dim_of(layer), n = group.n * per_row;
    const size_t first = n * part.index / part.count, last = n * (part.index + 1) / part.count;
    if (first == last) return;
    const size_t begin = first / per_row, end = ceil_div(last, per_row);  // its tokens
    const size_t window = config_.windows[layer], query_bytes = cache_.query_bytes(d);
    const auto queries = [&](CachedTask& task, size_t from, size_t to) {
        const size_t at = (kv_head * max_rows_ + group.first) * per_row + from;
        task.queries = queries_ + at * query_bytes;
        task.positions = positions_ + group.first * per_row + from;
        task.state = state_ + at * state_size(d);
        task.rows = static_cast<int64_t>(to - from);
    };
    CachedTask task{};
    queries(task, first, last);
    task.head_dim = static_cast<int64_t>(d);
    task.window = window == 0 ? INT32_MAX : static_cast<int64_t>(window);
    task.cache = memory.data() + memory.offset(layer, kv_head);
    task.page_bytes = memory.page_bytes();
    task.pages = rows[group.first].pages;
    task.scale = static_cast<float>(config_.attention_scale * kLog2E);
    task.softcap = static_cast<float>(config_.attention_softcap * kLog2E);
    const auto first_page = [&](const InputToken& row) {
        return std::max<int64_t>(0, row.position - task.window + 1) / kPageTokens;
    };
    k.cached_init_state(task.state, task.rows, task.head_dim);
    task.begin = first_page(rows[group.first + begin]);
    for (size_t r = begin + 1; r < end; ++r) task.begin = std::min(task.begin, first_page(rows[group.first + r]));
    task.end = group.shared;
    cache_.attend(task);
    for (size_t r = begin; r < end; ++r) {
        const InputToken& row = rows[group.first + r];
        const size_t from = std::max(first, r * per_row), to = std::min(last, (r + 1) * per_row);
        CachedTask own = task;
        queries(own, from, to);
        own.pages = row.pages;
        own.begin = std::max(group.shared, first_page(row));
        own.end = n_pages(row);
        if (own.begin < own.end) cache_.attend(own);
        float* out = attended_ + ((group.first + r) * config_.n_heads + kv_head * per_row) * d;
        for (size_t i = from; i < to; ++i) {
            const size_t head = i - r * per_row;
            const float sink = config_.sinks ? weights_->layers[layer].sinks[kv_head * per_row + head] : -INFINITY;
            cache_.output(own.state + (i - from) * state_size(d), sink, task.head_dim, out + head * d);
            if (!config_.output_gate) continue;
            const float* query = qkv_ + (group.first + r) * config_.qkv_dim(layer) + (kv_head * per_row + head) * 2 * d;
            k.sigmoid_gate_f32(out + head * d, query + d, d, out + head * d);
        }
    }
}

// out = the MLP of h, or the shared expert and those that the router chooses, which are recorded in the page.
void Transformer::feed_forward(const InputToken* rows, size_t n, size_t layer, KvMemory& memory, float* out) {
    const LayerWeights& w = weights_->layers[layer];
    const size_t d = config_.hidden_dim;
    if (!config_.is_moe(layer)) return mlp(rows, n, layer, out);
    if (config_.shared_dim > 0) {
        mlp(rows, n, layer, out);
    } else {
        std::fill_n(out, n * d, 0.0f);
    }
    if (config_.shared_gate) {
        float* const gates = state_;  // free at this point
        linear(w.shared_router.parts, h_, false, d, n, nullptr, gates, 1);
        for_rows(n, d, [&](size_t i) { scale(static_cast<float>(sigmoid(gates[i])), out + i * d, d); });
    }
    experts_.add(w, rows, layer, h_, n, out);
    const size_t at = config_.n_moe_layers(layer) * config_.n_used_experts;
    for (size_t i = 0; kIsComplete && i < n; ++i) {
        const auto position = static_cast<size_t>(rows[i].position);
        uint16_t* const recorded = memory.experts(rows[i].pages[position / kPageTokens], position % kPageTokens);
        std::copy_n(experts_.chosen(i), config_.n_used_experts, recorded + at);
    }
}

// out = W_down (act(gate) * up), or W_down act(up), of h.
void Transformer::mlp(const InputToken* rows, size_t n, size_t layer, float* out) {
    const LayerWeights& w = weights_->layers[layer];
    const size_t dim = config_.mlp_dim(layer), width = config_.up_dim(layer);
    const Units units = activation_units(dim);
    project(rows, n, layer, Target::kUp, up_, units, true, [&](size_t i, size_t unit) {
        float* const gate = up_ + i * width + unit * units.width;
        activate(config_, gate, gate + dim, units.width, gate);
    });
    linear(w.down.parts, up_, false, width, n, w.down.bias_or_null(), out, config_.hidden_dim);
    adapt(rows, n, layer, Target::kDown, up_, width, out, config_.hidden_dim);
}

// y = W h, then finish(i, unit) for every row i and unit of `units` in ascending order: in the job of the product if
// `by_unit`, units are independent, and no adapter adds to the outputs of the product.
template <class Finish>
void Transformer::project(const InputToken* rows, size_t n, size_t layer, Target target, float* y, Units units,
                          bool by_unit, Finish&& finish) {
    const auto run = [](void* context, size_t unit, size_t first_row, size_t n_rows) {
        auto& finish_unit = *static_cast<std::remove_reference_t<Finish>*>(context);
        for (size_t i = first_row; i < first_row + n_rows; ++i) finish_unit(i, unit);
    };
    const Epilogue epilogue{.width = units.width,
                            .units = units.count,
                            .fold = matrix_of(*weights_, layer, target).n() / units.width - units.count,
                            .run = run,
                            .context = &finish,
                            .missing = missing_};
    project(rows, n, layer, target, y, epilogue, by_unit);
}

void Transformer::project(const InputToken* rows, size_t n, size_t layer, Target target, float* y,
                          const Epilogue& epilogue, bool by_unit) {
    const Matrix& w = matrix_of(*weights_, layer, target);
    const bool has_adapter =
        std::any_of(rows, rows + n, [&](const InputToken& row) { return low_rank(row, layer, target) != nullptr; });
    const bool in_job = by_unit && !has_adapter && Epilogue::is_supported(w.parts);
    linear(w.parts, h_, false, w.k(), n, w.bias_or_null(), y, w.n(), in_job ? &epilogue : nullptr);
    if (in_job) return;
    adapt(rows, n, layer, target, h_, config_.hidden_dim, y, w.n());
    for_rows(n, 2 * w.n(), [&](size_t i) {
        for (size_t unit = 0; unit < epilogue.units; ++unit) epilogue.run(epilogue.context, unit, i, 1);
    });
}

void Transformer::product(const Matrix& w, const float* x, size_t n, float* y) const {
    linear(w.parts, x, false, w.k(), n, w.bias_or_null(), y, w.n());
}

// y += B (A x) for rows with an adapter of this matrix: consecutive rows with the same adapter are one product.
void Transformer::adapt(const InputToken* rows, size_t n, size_t layer, Target target, const float* x, size_t ldx,
                        float* y, size_t ldy) {
    for (size_t begin = 0, end; begin < n; begin = end) {
        const Adapter* adapter = rows[begin].adapter;
        for (end = begin + 1; end < n && rows[end].adapter == adapter; ++end) {
        }
        const LowRank* low = low_rank(rows[begin], layer, target);
        if (low == nullptr) continue;
        const auto add = [&](size_t row, size_t count) {
            low->add(x + row * ldx, ldx, count, adapter_hidden_.data() + row * low->ranks(), y + row * ldy, ldy);
        };
        // Many rows are split across threads, each of which applies all factors: the products are small, and running
        // each of them on all threads would synchronise up to four times.
        if (end - begin < kAdapterRows * static_cast<size_t>(num_threads())) {
            add(begin, end - begin);
            continue;
        }
        auto task = [&](size_t i) {
            const size_t row = begin + i * kAdapterRows;
            add(row, std::min(kAdapterRows, end - row));
        };
        parallel_for(ceil_div(end - begin, kAdapterRows), task);
    }
}

}  // namespace whet
