#include "learner/learner.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "engine/attention.h"
#include "engine/scratch.h"
#include "kernels/dispatch.h"
#include "runtime/ceil_div.h"
#include "runtime/split.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

constexpr size_t kSumRows = 32;          // rows of lora_outer whose products are added to a gradient together
constexpr size_t kTileBytes = 16 << 20;  // of the widest array of a tile of rows
constexpr size_t kOuterRank = 8;         // rows of a gradient that lora_outer computes at once
constexpr size_t kOuterColumns = 128;    // columns of a task of it

float* resize(std::unique_ptr<float[]>& array, size_t n) {
    array = std::make_unique_for_overwrite<float[]>(n);
    return array.get();
}

size_t tile_rows_of(const ModelConfig& c) {
    const size_t rows = kTileBytes / sizeof(float) / std::max(c.up_dim(), c.qkv_dim());
    return std::clamp<size_t>(rows / kSumRows * kSumRows, 256, 2048);
}

void require(bool fits, const char* error) {
    if (!fits) throw std::invalid_argument(error);
}

// Whether offsets begin with 0, do not decrease and end with `last`.
bool are_offsets(const std::vector<int64_t>& offsets, size_t last) {
    return !offsets.empty() && offsets.front() == 0 && std::is_sorted(offsets.begin(), offsets.end()) &&
           static_cast<size_t>(offsets.back()) == last;
}

bool are_below(const std::vector<int64_t>& values, size_t end) {
    return std::all_of(values.begin(), values.end(),
                       [end](int64_t value) { return value >= 0 && static_cast<size_t>(value) < end; });
}

void check(const TrainingBatch& batch, const ModelConfig& config) {
    const size_t n = batch.n_tokens(), n_keys = batch.key_rows.size();
    require(n > 0 && batch.positions.size() == n, "TrainingBatch: expected a position for each of at least one token");
    require(are_below(batch.tokens, config.vocab_size), "TrainingBatch: a token is not in the vocabulary");
    require(are_below(batch.positions, config.max_position), "TrainingBatch: a position is beyond the model's last");
    require(are_offsets(batch.group_offsets, n) && are_offsets(batch.q_offsets, n),
            "TrainingBatch: groups or sequences do not cover the tokens");
    require(batch.k_offsets.size() == batch.q_offsets.size() && are_offsets(batch.k_offsets, n_keys) &&
                are_below(batch.key_rows, n),
            "TrainingBatch: the keys do not fit the sequences");
    for (size_t s = 0; s + 1 < batch.q_offsets.size(); ++s) {
        require(batch.k_offsets[s + 1] - batch.k_offsets[s] >= batch.q_offsets[s + 1] - batch.q_offsets[s],
                "TrainingBatch: a sequence has fewer keys than queries");
    }
    require(batch.reader_offsets.size() == n + 1 && are_offsets(batch.reader_offsets, n_keys) &&
                batch.readers.size() == n_keys && are_below(batch.readers, n_keys),
            "TrainingBatch: the readers do not fit the keys");
    require(are_below(batch.predictors, n), "TrainingBatch: a predictor is not a token of the batch");
}

void add_to(const float* x, size_t n, float factor, float* sum) { kernels().blend_f32(x, n, factor, 1.0f, sum); }

}  // namespace

Learner::Learner(std::shared_ptr<const Weights> weights, ProductType type)
    : weights_(std::move(weights)),
      config_(weights_->config()),
      type_(type),
      number_bytes_(type == ProductType::kFloat32 ? sizeof(float) : sizeof(uint16_t)),
      tile_rows_(tile_rows_of(config_)),
      adapter_(config_.n_layers) {
    require(config_.head_dim % 8 == 0, "the kernels of training need heads of a multiple of 8 elements");
}

size_t Learner::add_adapter(size_t layer, Target target, size_t first_row, size_t n, size_t rank) {
    const WeightFormat format = type_ == ProductType::kFloat32 ? WeightFormat::kFloat32 : WeightFormat::kBFloat16;
    const LowRank& low = adapter_.add_zero(*weights_, layer, target, first_row, rank, n, format);
    factors_.push_back({layer, low.a.size() - 1, target, first_row, {rank, low.a.back().k(), n}, 0.0f});
    return factors_.size() - 1;
}

void Learner::set_factors(size_t adapter, const float* a, const float* b, float scale) {
    Factors& f = factors_.at(adapter);
    const auto [rank, k, n] = f.shape;
    LowRank& low = adapter_.layers[f.layer][static_cast<size_t>(f.target)];
    low.a[f.index].pack_rows(0, rank, a, RowType::kFloat32, static_cast<ptrdiff_t>(k), 1);
    std::vector<float> scaled(b, b + rank * n);
    for (float& value : scaled) value *= scale;
    low.b[f.index].pack_rows(0, n, scaled.data(), RowType::kFloat32, 1, static_cast<ptrdiff_t>(n));
    f.scale = scale;
}

const float* Learner::forward(TrainingBatch batch, bool with_adapters, bool keep) {
    const auto reading = weights_->reading();
    is_kept_ = false;
    check(batch, config_);
    batch_ = std::move(batch), with_adapters_ = with_adapters;
    cut_tiles();
    allocate();
    const size_t d = config_.hidden_dim, n_inputs = keep ? config_.n_layers : 0;
    inputs_ = std::make_unique_for_overwrite<uint8_t[]>(n_inputs * n() * d * number_bytes_);
    embed(x_.get());
    for (size_t layer = 0; layer < config_.n_layers; ++layer) {
        if (keep) keep_input(layer);
        attention_half(layer);
        for (const RowTile& tile : tiles_) mlp(layer, tile);
    }
    const size_t rows = batch_.predictors.size();
    float *last = resize(last_, rows * d), *hidden = resize(hidden_, rows * d);
    for (size_t i = 0; i < rows; ++i) {
        std::memcpy(last + i * d, x_.get() + static_cast<size_t>(batch_.predictors[i]) * d, d * sizeof(float));
    }
    norm(weights_->final_norm, last, rows, hidden);
    if (config_.logits_scale != 1.0f) kernels().blend_f32(hidden, rows * d, config_.logits_scale, 0.0f, hidden);
    is_kept_ = keep;
    return hidden;
}

void Learner::backward(const float* grad_hidden, std::span<const FactorGradients> grads) {
    check_kept();
    const auto reading = weights_->reading();
    is_kept_ = false;
    const size_t d = config_.hidden_dim, rows = batch_.predictors.size(), size = n() * d;
    const auto grad = std::make_unique<float[]>(size), grad_out = std::make_unique_for_overwrite<float[]>(size);
    const auto grad_last = std::make_unique_for_overwrite<float[]>(rows * d);
    kernels().blend_f32(grad_hidden, rows * d, config_.logits_scale, 0.0f, grad_last.get());
    norm_backward(weights_->final_norm, last_.get(), grad_last.get(), rows);
    for (size_t i = 0; i < rows; ++i) {
        add_to(grad_last.get() + i * d, d, 1.0f, grad.get() + static_cast<size_t>(batch_.predictors[i]) * d);
    }
    for (size_t layer = config_.n_layers; layer-- > 0;) {
        load_input(layer);
        attention_half(layer);
        // With a parallel residual both halves read the gradient of the layer's output.
        const float* out = grad.get();
        if (config_.parallel_residual) {
            std::memcpy(grad_out.get(), grad.get(), size * sizeof(float));
            out = grad_out.get();
        }
        for (const RowTile& tile : tiles_) mlp_backward(layer, tile, out, grad.get(), grads);
        attention_backward_half(layer, out, grad.get(), grads);
    }
    inputs_.reset();
}

void Learner::check_kept() const {
    if (!is_kept_) throw std::logic_error("backward() does not follow a forward() that keeps the layers' inputs");
}

// ---------------------------------------------------------------- batch

void Learner::cut_tiles() {
    tiles_.clear();
    size_t begin = 0;  // of the current tile
    std::vector<std::pair<size_t, size_t>> groups;
    const auto close = [&](size_t end) {
        if (end > begin) tiles_.push_back({begin, end, std::move(groups)});
        groups.clear();
        begin = end;
    };
    for (size_t g = 0; g + 1 < batch_.group_offsets.size(); ++g) {
        const auto first = static_cast<size_t>(batch_.group_offsets[g]);
        const auto end = static_cast<size_t>(batch_.group_offsets[g + 1]);
        if (end - begin > tile_rows_) close(first);
        for (; end - begin > tile_rows_; close(begin + tile_rows_)) groups.emplace_back(0, tile_rows_);
        const size_t from = std::max(first, begin);
        if (end > from) groups.emplace_back(from - begin, end - begin);
    }
    close(n());
}

void Learner::allocate() {
    const size_t d = config_.hidden_dim, rows = std::min(n(), tile_rows_), bytes = number_bytes_;
    const size_t width = attended_dim(), rank = std::max<size_t>(1, adapter_.max_rank);
    resize(x_, n() * d), resize(middle_, n() * d), resize(raw_, n() * config_.qkv_dim());
    resize(lse_, n() * config_.n_heads);
    resize(attended_out_, config_.post_norm ? n() * d : 0);
    qkv_ = std::make_unique_for_overwrite<uint8_t[]>(n() * config_.qkv_dim() * bytes);
    attended_ = std::make_unique_for_overwrite<uint8_t[]>(n() * width * bytes);
    resize(h_, rows * d), resize(delta_, rows * std::max(d, width)), resize(up_, rows * config_.up_dim());
    resize(activated_, rows * config_.ffn_dim), resize(grad_activated_, rows * config_.ffn_dim);
    resize(t_, rows * rank), resize(u_, rows * rank);
    resize(cos_sin_, n() * config_.rotary_dim), resize(local_cos_sin_, n() * 2 * config_.local_inv_freq.size());
}

void Learner::embed(float* x) {
    const size_t d = config_.hidden_dim;
    for_rows(n(), d, [&](size_t i) {
        float* row = x + i * d;
        const auto token = static_cast<size_t>(batch_.tokens[i]), position = static_cast<size_t>(batch_.positions[i]);
        weights_->embedding.rows(token, 1, row, false);
        if (config_.embedding_scale != 1.0f) kernels().blend_f32(row, d, config_.embedding_scale, 0.0f, row);
        if (config_.learned_positions > 0) {
            float* learned = scratch<float>(d, Scratch::kSums);
            weights_->positions.rows(position, 1, learned, false);
            add_to(learned, d, 1.0f, row);
        }
        const auto at = static_cast<double>(position);
        if (config_.rotary_dim > 0) {
            kernels().rope_cos_sin(at, config_.inv_freq.data(), config_.inv_freq.size(), config_.attention_factor,
                                   cos_sin_.get() + i * config_.rotary_dim);
        }
        if (!config_.local_layers.empty()) {
            kernels().rope_cos_sin(at, config_.local_inv_freq.data(), config_.local_inv_freq.size(), 1.0,
                                   local_cos_sin_.get() + i * config_.rotary_dim);
        }
    });
}

// Converts rows to the type of products.
void Learner::store(const float* x, size_t rows, size_t width, uint8_t* numbers) const {
    if (type_ == ProductType::kFloat32) {
        std::memcpy(numbers, x, rows * width * sizeof(float));
    } else {
        for_rows(rows, width, [&](size_t i) {
            kernels().bf16_from_f32(x + i * width, width, reinterpret_cast<uint16_t*>(numbers) + i * width);
        });
    }
}

void Learner::keep_input(size_t layer) {
    const size_t d = config_.hidden_dim;
    store(x_.get(), n(), d, inputs_.get() + layer * n() * d * number_bytes_);
}

void Learner::load_input(size_t layer) {
    const size_t d = config_.hidden_dim;
    const uint8_t* from = inputs_.get() + layer * n() * d * number_bytes_;
    if (type_ == ProductType::kFloat32) {
        std::memcpy(x_.get(), from, n() * d * sizeof(float));
    } else {
        for_rows(n(), d, [&](size_t i) {
            kernels().f32_from_bf16(reinterpret_cast<const uint16_t*>(from) + i * d, d, x_.get() + i * d);
        });
    }
}

const float* Learner::cos_sin(size_t layer, size_t token) const {
    return (config_.is_local(layer) ? local_cos_sin_ : cos_sin_).get() + token * config_.rotary_dim;
}

// ---------------------------------------------------------------- norms

void Learner::norm(const NormWeight& w, const float* x, size_t rows, float* out) const {
    const size_t d = config_.hidden_dim;
    for_rows(rows, d, [&](size_t i) {
        const float* row = x + i * d;
        if (w.weight.empty()) {
            std::memcpy(out + i * d, row, d * sizeof(float));
        } else if (config_.norm == Norm::kRms) {
            kernels().rms_norm_f32(row, nullptr, w.weight.data(), d, config_.norm_eps, false, out + i * d);
        } else {
            kernels().layer_norm_f32(row, nullptr, w.weight.data(), w.bias_or_null(), d, config_.norm_eps, false,
                                     out + i * d);
        }
    });
}

// Converts grad in place from the gradient of norm(x) to the gradient of x.
void Learner::norm_backward(const NormWeight& w, const float* x, float* grad, size_t rows) const {
    if (w.weight.empty()) return;
    const size_t d = config_.hidden_dim;
    for_rows(rows, d, [&](size_t i) {
        const float* row = x + i * d;
        float* g = grad + i * d;
        if (config_.norm == Norm::kRms) {
            kernels().rms_norm_backward_f32(row, w.weight.data(), g, d, config_.norm_eps, g, nullptr);
        } else {
            kernels().layer_norm_backward_f32(row, w.weight.data(), g, d, config_.norm_eps, g);
        }
    });
}

ProductRows Learner::convert(const float* x, size_t ldx, size_t rows, size_t k) const {
    return convert_rows(type_, x, ldx, rows, k, Scratch::kInputs);
}

// The results of attention from token `first` on.
ProductRows Learner::attended_rows(size_t first) const {
    return {attended_.get() + first * attended_dim() * number_bytes_, attended_dim()};
}

// ---------------------------------------------------------------- linear layers

// y (rows, n) = W x + bias, and its adapters.
void Learner::project(size_t layer, Target target, ProductRows x, size_t rows, float* y, size_t ldy) {
    const Matrix& w = matrix_of(weights_->layers[layer], target);
    multiply(type_, w.parts, x, rows, w.bias_or_null(), y, ldy);
    if (!with_adapters_) return;
    const LowRank& low = adapter_.layers[layer][static_cast<size_t>(target)];
    for (size_t i = 0; i < low.a.size(); ++i) {
        const size_t rank = low.a[i].n();
        multiply(type_, std::span(&low.a[i], 1), x, rows, nullptr, t_.get(), rank);
        const ProductRows t = convert_rows(type_, t_.get(), rank, rows, rank, Scratch::kCopy);
        multiply(type_, std::span(&low.b[i], 1), t, rows, nullptr, y + low.first_rows[i], ldy, true);
    }
}

// grad_x (rows, k) from grad_y (rows, n); adds to the gradients of the adapters.
void Learner::project_backward(size_t layer, Target target, ProductRows x, const RowTile& tile, const float* grad_y,
                               size_t ldy, float* grad_x, size_t ldx, std::span<const FactorGradients> grads) {
    const Matrix& w = matrix_of(weights_->layers[layer], target);
    const size_t rows = tile.n();
    const bool bf16 = type_ == ProductType::kBFloat16;
    multiply_transposed(type_, w.parts, grad_y, ldy, rows, grad_x, ldx, false);
    if (!with_adapters_) return;
    const LowRank& low = adapter_.layers[layer][static_cast<size_t>(target)];
    for (size_t adapter = 0; adapter < factors_.size(); ++adapter) {
        const Factors& f = factors_[adapter];
        if (f.layer != layer || f.target != target) continue;
        const auto [rank, k, n] = f.shape;
        const std::span<const PackedWeight> a{&low.a[f.index], 1}, b{&low.b[f.index], 1};
        const float* grad = grad_y + f.first_row;
        multiply_transposed(type_, b, grad, ldy, rows, u_.get(), rank, false);
        multiply(type_, a, x, rows, nullptr, t_.get(), rank);
        accumulate(u_.get(), rank, x.data, bf16, x.ld, tile, k, 1.0f, grads[adapter].a);
        accumulate(t_.get(), rank, grad, false, ldy, tile, n, f.scale, grads[adapter].b);
        multiply_transposed(type_, a, u_.get(), rank, rows, grad_x, ldx, true);
    }
}

// grad (rank, n) += scale hidden^T x for hidden (rows, rank) and x (rows, n): group by group, kSumRows rows at a time.
void Learner::accumulate(const float* hidden, size_t rank, const void* x, bool bf16, size_t ldx, const RowTile& tile,
                         size_t n, float scale, float* grad) const {
    const size_t rows = tile.n(), blocks = ceil_div(rank, kOuterRank), columns = ceil_div(n, kOuterColumns);
    float* copy = scratch<float>(rows * rank, Scratch::kSums);  // block by block, (rows, ranks of the block)
    for (size_t block = 0; block < blocks; ++block) {
        const size_t first = block * kOuterRank, ranks = std::min(kOuterRank, rank - first);
        for (size_t i = 0; i < rows; ++i) {
            std::memcpy(copy + first * rows + i * ranks, hidden + i * rank + first, ranks * sizeof(float));
        }
    }
    parallel_for(blocks * columns, 0.05 * static_cast<double>(rows * rank * n), [&](size_t i) {
        const size_t first = i % blocks * kOuterRank, ranks = std::min(kOuterRank, rank - first);
        const size_t column = i / blocks * kOuterColumns, count = std::min(kOuterColumns, n - column);
        for (const auto& [begin, end] : tile.groups) {
            const float* h = copy + first * rows + begin * ranks;
            float* to = grad + first * n + column;
            const size_t at = begin * ldx + column;
            if (bf16) {
                kernels().lora_outer_bf16(ranks, h, static_cast<const uint16_t*>(x) + at, static_cast<ptrdiff_t>(ldx),
                                          end - begin, count, scale, to, n);
            } else {
                kernels().lora_outer_f32(ranks, h, static_cast<const float*>(x) + at, static_cast<ptrdiff_t>(ldx),
                                         end - begin, count, scale, to, n);
            }
        }
    });
}

// ---------------------------------------------------------------- attention

TrainingAttention Learner::attention_of(size_t layer) {
    const auto d = static_cast<int64_t>(config_.head_dim), token = static_cast<int64_t>(config_.qkv_dim());
    const auto head = [&](size_t i) { return TokenHeads{qkv_.get() + i * config_.head_dim * number_bytes_, token, d}; };
    const size_t window = config_.windows[layer];
    return {.bf16 = type_ == ProductType::kBFloat16,
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
            .q = head(0),
            .k = head(config_.n_heads),
            .v = head(config_.n_heads + config_.n_kv_heads),
            .out = attended_.get(),
            .lse = lse_.get()};
}

// From x: attended_ and lse_, attended_out_ = W_o attended before its norm, and middle_ = x + residual_scale norm(it).
void Learner::attention_half(size_t layer) {
    const LayerWeights& w = weights_->layers[layer];
    const size_t d = config_.hidden_dim, width = config_.qkv_dim();
    for (const RowTile& tile : tiles_) {
        norm(w.norm1, x_.get() + tile.begin * d, tile.n(), h_.get());
        float* raw = raw_.get() + tile.begin * width;
        project(layer, Target::kQkv, convert(h_.get(), d, tile.n(), d), tile.n(), raw, width);
        for_rows(tile.n(), 2 * width, [&](size_t i) { finish_heads(layer, tile.begin + i); });
    }
    attention_forward(attention_of(layer));
    for (const RowTile& tile : tiles_) {
        const size_t at = tile.begin * d, rows = tile.n();
        project(layer, Target::kO, attended_rows(tile.begin), rows, delta_.get(), d);
        if (config_.post_norm) {
            std::memcpy(attended_out_.get() + at, delta_.get(), rows * d * sizeof(float));
            norm(w.post_norm1, delta_.get(), rows, delta_.get());
        }
        std::memcpy(middle_.get() + at, x_.get() + at, rows * d * sizeof(float));
        add_to(delta_.get(), rows * d, config_.residual_scale, middle_.get() + at);
    }
}

// Norms and rotates queries and keys of a token, and converts them and the values for attention.
void Learner::finish_heads(size_t layer, size_t token) {
    const LayerWeights& w = weights_->layers[layer];
    const Kernels& k = kernels();
    const size_t d = config_.head_dim, width = config_.qkv_dim();
    const size_t n_q = config_.n_heads * d, n_k = config_.n_kv_heads * d;
    float* heads = scratch<float>(width, Scratch::kRow);
    std::memcpy(heads, raw_.get() + token * width, width * sizeof(float));
    if (config_.qk_norm_whole) {
        k.rms_norm_f32(heads, nullptr, w.q_norm.weight.data(), n_q, config_.norm_eps, false, heads);
        k.rms_norm_f32(heads + n_q, nullptr, w.k_norm.weight.data(), n_k, config_.norm_eps, false, heads + n_q);
    } else if (config_.qk_norm) {
        for (size_t i = 0; i < n_q + n_k; i += d) {
            const NormWeight& norm = i < n_q ? w.q_norm : w.k_norm;
            k.rms_norm_f32(heads + i, nullptr, norm.weight.data(), d, config_.norm_eps, false, heads + i);
        }
    }
    if (config_.rotates(layer)) {
        const auto rotate = config_.is_neox ? k.rope_neox_f32 : k.rope_gptj_f32;
        rotate(heads, config_.n_heads + config_.n_kv_heads, static_cast<ptrdiff_t>(d), cos_sin(layer, token),
               config_.rotary_dim, false);
    }
    uint8_t* to = qkv_.get() + token * width * number_bytes_;
    if (type_ == ProductType::kBFloat16) {
        k.bf16_from_f32(heads, width, reinterpret_cast<uint16_t*>(to));
    } else {
        std::memcpy(to, heads, width * sizeof(float));
    }
}

// Replaces raw_ of a token by its gradient, from the gradients of queries, keys and values.
void Learner::heads_backward(size_t layer, size_t token, const uint8_t* grad_q, const uint8_t* grad_k,
                             const uint8_t* grad_v) {
    const LayerWeights& w = weights_->layers[layer];
    const Kernels& k = kernels();
    const size_t d = config_.head_dim, n_q = config_.n_heads * d, n_k = config_.n_kv_heads * d;
    float *heads = scratch<float>(config_.qkv_dim(), Scratch::kRow), *raw = raw_.get() + token * config_.qkv_dim();
    const auto read = [&](const uint8_t* grad, size_t count, float* to) {
        grad += token * count * number_bytes_;
        if (type_ == ProductType::kBFloat16) {
            k.f32_from_bf16(reinterpret_cast<const uint16_t*>(grad), count, to);
        } else {
            std::memcpy(to, grad, count * sizeof(float));
        }
    };
    read(grad_q, n_q, heads), read(grad_k, n_k, heads + n_q), read(grad_v, n_k, heads + n_q + n_k);
    if (config_.rotates(layer)) {
        const auto rotate = config_.is_neox ? k.rope_neox_f32 : k.rope_gptj_f32;
        rotate(heads, config_.n_heads + config_.n_kv_heads, static_cast<ptrdiff_t>(d), cos_sin(layer, token),
               config_.rotary_dim, true);
    }
    const auto norm_backward = [&](const NormWeight& norm, size_t at, size_t count) {
        k.rms_norm_backward_f32(raw + at, norm.weight.data(), heads + at, count, config_.norm_eps, heads + at, nullptr);
    };
    if (config_.qk_norm_whole) {
        norm_backward(w.q_norm, 0, n_q), norm_backward(w.k_norm, n_q, n_k);
    } else if (config_.qk_norm) {
        for (size_t i = 0; i < n_q + n_k; i += d) norm_backward(i < n_q ? w.q_norm : w.k_norm, i, d);
    }
    std::memcpy(raw, heads, config_.qkv_dim() * sizeof(float));
}

// Adds to `grad`, the gradient of x, what comes through attention, from grad_out, the gradient of the half's result.
void Learner::attention_backward_half(size_t layer, const float* grad_out, float* grad,
                                      std::span<const FactorGradients> grads) {
    const LayerWeights& w = weights_->layers[layer];
    const size_t d = config_.hidden_dim, width = attended_dim(), n_k = config_.n_kv_heads * config_.head_dim;
    const auto typed = [&](size_t count) {
        return std::make_unique_for_overwrite<uint8_t[]>(n() * count * number_bytes_);
    };
    const Bytes grad_attended = typed(width), grad_q = typed(width), grad_k = typed(n_k), grad_v = typed(n_k);
    for (const RowTile& tile : tiles_) {
        const size_t at = tile.begin * d, rows = tile.n();
        float* delta = h_.get();
        kernels().blend_f32(grad_out + at, rows * d, config_.residual_scale, 0.0f, delta);
        if (config_.post_norm) norm_backward(w.post_norm1, attended_out_.get() + at, delta, rows);
        project_backward(layer, Target::kO, attended_rows(tile.begin), tile, delta, d, delta_.get(), width, grads);
        store(delta_.get(), rows, width, grad_attended.get() + tile.begin * width * number_bytes_);
    }
    attention_backward(attention_of(layer), {.out = grad_attended.get(),
                                             .q = grad_q.get(),
                                             .k = grad_k.get(),
                                             .v = grad_v.get(),
                                             .reader_offsets = batch_.reader_offsets.data(),
                                             .readers = batch_.readers.data()});
    for (const RowTile& tile : tiles_) {
        const size_t at = tile.begin * d, rows = tile.n(), qkv = config_.qkv_dim();
        for_rows(rows, 2 * qkv,
                 [&](size_t i) { heads_backward(layer, tile.begin + i, grad_q.get(), grad_k.get(), grad_v.get()); });
        norm(w.norm1, x_.get() + at, rows, h_.get());
        project_backward(layer, Target::kQkv, convert(h_.get(), d, rows, d), tile, raw_.get() + tile.begin * qkv, qkv,
                         delta_.get(), d, grads);
        norm_backward(w.norm1, x_.get() + at, delta_.get(), rows);
        add_to(delta_.get(), rows * d, 1.0f, grad + at);
    }
}

// ---------------------------------------------------------------- MLP

const NormWeight& Learner::mlp_norm(size_t layer) const {
    const LayerWeights& w = weights_->layers[layer];
    return config_.parallel_residual && config_.shared_norm ? w.norm1 : w.norm2;
}

// From the input of the MLP: h_, its norm, up_ and activated_; returns the last, converted.
ProductRows Learner::mlp_up(size_t layer, const RowTile& tile) {
    const Kernels& k = kernels();
    const size_t d = config_.hidden_dim, ffn = config_.ffn_dim, width = config_.up_dim();
    norm(mlp_norm(layer), mlp_input() + tile.begin * d, tile.n(), h_.get());
    project(layer, Target::kUp, convert(h_.get(), d, tile.n(), d), tile.n(), up_.get(), width);
    const auto act = config_.activation == Activation::kSilu   ? k.silu_f32
                     : config_.activation == Activation::kGelu ? k.gelu_f32
                                                               : k.gelu_tanh_f32;
    for_rows(tile.n(), 4 * width, [&](size_t i) {
        const float *gate = up_.get() + i * width, *up = gate + ffn;
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
    project(layer, Target::kDown, mlp_up(layer, tile), rows, delta_.get(), d);
    if (config_.post_norm) norm(weights_->layers[layer].post_norm2, delta_.get(), rows, delta_.get());
    std::memcpy(x_.get() + at, middle_.get() + at, rows * d * sizeof(float));
    add_to(delta_.get(), rows * d, config_.residual_scale, x_.get() + at);
}

// Adds to `grad`, the gradient of the MLP's input, what comes through the MLP, from the gradient of its result.
void Learner::mlp_backward(size_t layer, const RowTile& tile, const float* grad_out, float* grad,
                           std::span<const FactorGradients> grads) {
    const Kernels& k = kernels();
    const size_t d = config_.hidden_dim, ffn = config_.ffn_dim, width = config_.up_dim();
    const size_t at = tile.begin * d, rows = tile.n();
    const ProductRows activated = mlp_up(layer, tile);
    float* delta = scratch<float>(rows * d, Scratch::kRuns);  // gradient of W_down's result
    kernels().blend_f32(grad_out + at, rows * d, config_.residual_scale, 0.0f, delta);
    if (config_.post_norm) {
        project(layer, Target::kDown, activated, rows, delta_.get(), d);
        norm_backward(weights_->layers[layer].post_norm2, delta_.get(), delta, rows);
    }
    project_backward(layer, Target::kDown, activated, tile, delta, d, grad_activated_.get(), ffn, grads);
    const auto backward = config_.activation == Activation::kSilu   ? k.silu_backward_f32
                          : config_.activation == Activation::kGelu ? k.gelu_backward_f32
                                                                    : k.gelu_tanh_backward_f32;
    for_rows(rows, 4 * width, [&](size_t i) {
        float *gate = up_.get() + i * width, *up = config_.gated ? gate + ffn : nullptr;
        backward(gate, up, grad_activated_.get() + i * ffn, ffn, gate, up);
    });
    project_backward(layer, Target::kUp, convert(h_.get(), d, rows, d), tile, up_.get(), width, delta_.get(), d, grads);
    norm_backward(mlp_norm(layer), mlp_input() + at, delta_.get(), rows);
    add_to(delta_.get(), rows * d, 1.0f, grad + at);
}

}  // namespace whet
