#include "learner/learner.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <stdexcept>

#include "engine/attention.h"
#include "engine/scratch.h"
#include "kernels/dispatch.h"
#include "learner/sums.h"
#include "runtime/ceil_div.h"
#include "runtime/split.h"
#include "runtime/thread_pool.h"
#include "runtime/try_allocating.h"

namespace whet {
namespace {

constexpr size_t kTileBytes = 16 << 20;  // of the widest array of a tile of rows

float* resize(std::unique_ptr<float[]>& array, size_t n) {
    array = std::make_unique_for_overwrite<float[]>(n);
    return array.get();
}

size_t tile_rows_of(const ModelConfig& c) {
    const size_t rows =
        kTileBytes / sizeof(float) / std::max({c.widest_up(), c.widest_mixer_in(), c.expert_up_dim(), c.hidden_dim});
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
    const size_t n_chosen = n * config.n_moe_layers(config.n_layers), k = config.n_used_experts;
    require(batch.experts.empty() || (n_chosen > 0 && batch.experts.size() == n_chosen * k),
            "TrainingBatch: expected the experts of each token in each mixture");
    require(batch.noise.empty() || batch.noise.size() == n * config.hidden_dim,
            "TrainingBatch: expected the noise of each token");
    for (const uint16_t* each = batch.experts.data(); each != batch.experts.data() + batch.experts.size(); each += k) {
        for (size_t i = 0; *each != kOwnChoice && i < k; ++i) {
            require(each[i] < config.n_experts && std::find(each, each + i, each[i]) == each + i,
                    "TrainingBatch: the experts of a token are not different ones of the model's");
        }
    }
}

// The bits of x rounded to the upper 24, to nearest even.
uint32_t round_to_24_bits(float x) {
    const auto bits = std::bit_cast<uint32_t>(x);
    const bool is_finite = (bits & 0x7f800000u) != 0x7f800000u;
    return is_finite ? (bits + 0x7fu + (bits >> 8 & 1u)) & ~0xffu : bits & ~0xffu;
}

}  // namespace

Learner::Learner(std::shared_ptr<const Weights> weights, ProductType type, bool is_merged)
    : weights_(std::move(weights)),
      config_(weights_->config()),
      is_merged_(is_merged),
      type_(type),
      // The kernels read bfloat16 in pairs.
      head_type_((config_.head_dim | config_.local_head_dim) % 2 == 0 ? type : ProductType::kFloat32),
      head_bytes_(head_type_ == ProductType::kFloat32 ? sizeof(float) : sizeof(uint16_t)),
      tile_rows_(tile_rows_of(config_)),
      ones_(config_.v_norm ? config_.widest_head() : 0, 1.0f),
      adapter_(config_.n_layers),
      first_kept_(config_.n_layers),
      choice_(config_) {}

size_t Learner::add_adapter(size_t layer, Target target, size_t first_row, size_t n, size_t rank) {
    const WeightFormat format = type_ == ProductType::kFloat32 ? WeightFormat::kFloat32 : WeightFormat::kBFloat16;
    LowRank& low = adapter_.add_zero(*weights_, layer, target, first_row, rank, n, format);
    adapters_of_[&low].push_back(factors_.size());
    adapts_experts_ = adapts_experts_ || target >= Target::kExpertsUp;
    factors_.push_back({&low, low.a.size() - 1, {rank, low.a.back().k(), n}, 0.0f, layer, target, first_row});
    return factors_.size() - 1;
}

void Learner::set_factors(size_t adapter, const float* a, const float* b, float scale) {
    Factors& f = factors_.at(adapter);
    const auto [rank, k, n] = f.shape;
    LowRank& low = *f.low;
    low.a[f.index].pack_rows(0, rank, a, RowType::kFloat32, static_cast<ptrdiff_t>(k), 1);
    std::vector<float> scaled(b, b + rank * n);
    for (float& value : scaled) value *= scale;
    low.b[f.index].pack_rows(0, n, scaled.data(), RowType::kFloat32, 1, static_cast<ptrdiff_t>(n));
    f.scale = scale;
    release_kept();
}

size_t Learner::add_norm(const std::string& slot, std::span<const float> values) {
    norms_.push_back({&adapter_.set_norm(*weights_, slot, values), nullptr});
    return norms_.size() - 1;
}

void Learner::set_norm(size_t norm, const float* values) {
    std::vector<float>& vector = *norms_.at(norm).vector;
    std::copy_n(values, vector.size(), vector.begin());
    release_kept();
}

void Learner::release_kept() {
    is_kept_ = false;
    kept_ = {}, kept_bytes_ = 0;
}

const float* Learner::forward(TrainingBatch batch, bool with_adapters, bool keep, size_t activation_bytes,
                              Dropout dropout) {
    const auto reading = weights_->reading();
    is_kept_ = false;
    check(batch, config_);
    require(dropout.probability >= 0.0 && dropout.probability < 1.0, "the probability of dropout is not in [0, 1)");
    require(dropout.probability == 0.0 || !(adapts_experts_ || is_merged_),
            "adapters of experts, or in the weights, have no dropout");
    batch_ = std::move(batch), with_adapters_ = with_adapters, dropout_ = dropout;
    if (drops()) hash_paths();
    if (config_.is_recurrent()) find_neighbours();
    cut_tiles();
    allocate();
    allocate_kept(keep ? activation_bytes : 0);
    const size_t d = config_.hidden_dim;
    inputs_ = std::make_unique_for_overwrite<uint8_t[]>(keep ? config_.n_layers * input_bytes() : 0);
    embed(x_.get());
    batch_.noise = {};
    if (config_.has_layer_inputs()) read_layer_inputs();
    choice_.n_replaced = 0;
    for (size_t layer = 0; layer < config_.n_layers; ++layer) {
        begin_layer(layer, keep);
        attention_half(layer);
        for (const RowTile& tile : tiles_) mlp(layer, tile);
    }
    const size_t rows = batch_.predictors.size();
    float *last = resize(last_, rows * d), *hidden = resize(hidden_, rows * d);
    for (size_t i = 0; i < rows; ++i) {
        std::memcpy(last + i * d, x_.get() + static_cast<size_t>(batch_.predictors[i]) * d, d * sizeof(float));
    }
    norm(final_norm(), last, rows, hidden);
    if (config_.logits_scale != 1.0f) kernels().blend_f32(hidden, rows * d, config_.logits_scale, 0.0f, hidden);
    n_replaced_ = choice_.n_replaced;
    is_kept_ = keep;
    return hidden;
}

void Learner::backward(const float* grad_hidden, std::span<const FactorGradients> grads,
                       std::span<float* const> norm_grads) {
    check_kept();
    for (size_t i = 0; i < norms_.size(); ++i) norms_[i].grad = norm_grads[i];
    const auto reading = weights_->reading();
    is_kept_ = false;
    const size_t d = config_.hidden_dim, rows = batch_.predictors.size(), size = n() * d;
    const auto grad = std::make_unique<float[]>(size), grad_out = std::make_unique_for_overwrite<float[]>(size);
    const auto grad_last = std::make_unique_for_overwrite<float[]>(rows * d);
    kernels().blend_f32(grad_hidden, rows * d, config_.logits_scale, 0.0f, grad_last.get());
    norm_backward(final_norm(), last_.get(), grad_last.get(), predictor_groups());
    for (size_t i = 0; i < rows; ++i) {
        kernels().blend_f32(grad_last.get() + i * d, d, 1.0f, 1.0f,
                            grad.get() + static_cast<size_t>(batch_.predictors[i]) * d);
    }
    for (size_t layer = 0; layer < config_.n_layers; ++layer) {
        if (!config_.shares_kv(layer)) continue;
        shared_kv_grads_[config_.is_local(layer)] = std::make_unique<float[]>(n() * shared_kv_dim(layer));
    }
    for (size_t layer = config_.n_layers; layer-- > 0;) {
        begin_layer_backward(layer);
        if (!keeps(layer)) attention_half(layer);
        // With a parallel residual both halves read the gradient of the layer's output.
        const float* out = grad.get();
        if (config_.parallel_residual) {
            std::memcpy(grad_out.get(), grad.get(), size * sizeof(float));
            out = grad_out.get();
        }
        shared_sums_.assign(tiles_.size(), {});
        for (const RowTile& tile : tiles_) mlp_backward(layer, tile, out, grad.get(), grads);
        attention_backward_half(layer, out, grad.get(), grads);
    }
    layer_inputs_backward(grads);
    inputs_.reset();
    shared_kv_grads_ = {};
}

void Learner::check_kept() const {
    if (!is_kept_) throw std::logic_error("backward() does not follow a forward() that keeps the layers' inputs");
}

// ---------------------------------------------------------------- batch

void Learner::cut_tiles() {
    tiles_.clear();
    size_t begin = 0;  // of the current tile
    Groups groups;
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
    const size_t d = config_.hidden_dim, rows = std::min(n(), tile_rows_);
    const size_t rank = std::max<size_t>(1, adapter_.max_rank);
    resize(x_, n() * d), resize(raw_, n() * config_.widest_mixer_in());
    size_t shared = 0;
    for (size_t layer = 0; layer < config_.n_layers; ++layer) {
        shared = std::max(shared, layer_bytes(layer, n(), false));
    }
    shared_ = std::make_unique_for_overwrite<uint8_t[]>(shared);
    resize(h_, rows * d), resize(delta_, rows * std::max(d, config_.widest_mixer_out())),
        resize(up_, rows * std::max(config_.widest_up(), config_.widest_mixer_out()));
    const size_t mlp = std::max(config_.widest_mlp(), config_.expert_dim);
    resize(activated_, rows * mlp);
    resize(grad_activated_, type_ == ProductType::kFloat32 ? rows * mlp : 0);
    resize(expert_up_, rows * config_.expert_up_dim()), resize(expert_rows_, config_.n_experts > 0 ? rows * d : 0);
    resize(expert_inputs_, adapts_experts_ ? rows * d : 0);
    resize(gates_, config_.shared_gate ? rows : 0);
    choice_memory_ = {};
    if (config_.n_experts > 0) {
        choice_.take(choice_memory_, rows);
        choice_memory_.allocate();
        choice_.take(choice_memory_, rows);
    }
    resize(t_, rows * rank), resize(u_, rows * rank);
    const size_t dropped =
        drops() ? rows * (std::max({d, config_.widest_mixer_out(), config_.widest_mlp(), config_.layer_input_dim}) + 1)
                : 0;
    resize(grad_dropped_, dropped);
    resize(unscaled_, rows * widest_scaled_);
    dropped_ = std::make_unique_for_overwrite<uint8_t[]>(dropped * sizeof(float));
    mask_ = std::make_unique_for_overwrite<uint8_t[]>(dropped);
    const size_t p = config_.layer_input_dim, ends = p > 0 ? rows * d : 0;
    const auto is_trained = [&](const TrainedVector& each) { return each.vector == &layer_inputs_norm().weight; };
    resize(layer_inputs_, n() * config_.layer_inputs());
    projected_inputs_.reset();
    if (adapters_at(0, Target::kLayerInputs) != nullptr || std::any_of(norms_.begin(), norms_.end(), is_trained)) {
        resize(projected_inputs_, n() * config_.layer_inputs());
    }
    resize(result_, ends), resize(input_out_, ends), resize(input_gate_, rows * 4 * p);
    for (size_t layer = 0; layer < config_.n_layers; ++layer) {
        if (!config_.shares_kv(layer)) continue;
        shared_kv_[config_.is_local(layer)] =
            std::make_unique_for_overwrite<uint8_t[]>(n() * shared_kv_dim(layer) * head_bytes_);
    }
    resize(cos_sin_, n() * config_.rotary_dim), resize(local_cos_sin_, n() * 2 * config_.local_inv_freq.size());
}

// Keeps the activations of the last layers, as many as fit; without memory, of none.
void Learner::allocate_kept(size_t most_bytes) {
    kept_at_.resize(config_.n_layers);
    size_t first = config_.n_layers, bytes = 0;
    for (; first > 0; --first) {
        const size_t more = layer_bytes(first - 1, n(), true);
        if (more > most_bytes - bytes) break;
        kept_at_[first - 1] = bytes;
        bytes += more;
    }
    first_kept_ = config_.n_layers;
    if (bytes > kept_bytes_) {
        kept_ = {}, kept_bytes_ = 0;
        if (!try_allocating([&] { kept_ = Zeroed(bytes); })) return;
        kept_bytes_ = bytes;
    }
    first_kept_ = first;
}

// Divides memory among the activations of a layer and n tokens; returns the bytes that they need.
size_t Learner::divide(size_t layer, size_t n, bool keeps, uint8_t* memory, Activations& arrays) const {
    size_t used = 0;
    const auto take = [&]<class T>(T*& array, size_t width) {
        array = width == 0 ? nullptr : reinterpret_cast<T*>(memory + used);
        used += ceil_div(n * width * sizeof(T), size_t{64}) * 64;
    };
    const size_t d = config_.hidden_dim;
    const bool attends = config_.attends(layer), reads_raw = !attends || config_.qk_norm || config_.output_gate;
    take(arrays.qkv, attends ? config_.heads_dim(layer) * head_bytes_ : 0);
    take(arrays.attended, config_.mixer_out(layer) * head_bytes_);
    take(arrays.lse, attends ? config_.n_heads : 0);
    take(arrays.attended_out, config_.post_norm ? d : 0);
    take(arrays.middle, d);
    take(arrays.raw, keeps && reads_raw ? config_.mixer_in(layer) : 0);
    take(arrays.up, keeps ? config_.up_dim(layer) : 0);
    return used;
}

void Learner::select(size_t layer) {
    divide(layer, n(), keeps(layer), keeps(layer) ? kept_.data() + kept_at_[layer] : shared_.get(), now_);
    if (now_.raw == nullptr) now_.raw = raw_.get();
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
            kernels().blend_f32(learned, d, 1.0f, 1.0f, row);
        }
        if (!batch_.noise.empty()) kernels().blend_f32(batch_.noise.data() + i * d, d, 1.0f, 1.0f, row);
        const auto at = static_cast<double>(position);
        if (config_.rotary_dim > 0) {
            kernels().rope_cos_sin(at, config_.inv_freq.data(), config_.inv_freq.size(), config_.attention_factor,
                                   cos_sin_.get() + i * config_.rotary_dim);
        }
        if (!config_.local_layers.empty()) {
            kernels().rope_cos_sin(at, config_.local_inv_freq.data(), config_.local_inv_freq.size(), 1.0,
                                   local_cos_sin_.get() + i * 2 * config_.local_inv_freq.size());
        }
    });
}

// Converts rows to the type of heads.
void Learner::store(const float* x, size_t rows, size_t width, uint8_t* numbers) const {
    if (head_type_ == ProductType::kFloat32) {
        std::memcpy(numbers, x, rows * width * sizeof(float));
    } else {
        for_rows(rows, width, [&](size_t i) {
            kernels().bf16_from_f32(x + i * width, width, reinterpret_cast<uint16_t*>(numbers) + i * width);
        });
    }
}

// Converts numbers of the type of heads.
void Learner::load(const uint8_t* numbers, size_t n, float* x) const {
    if (head_type_ == ProductType::kFloat32) {
        std::memcpy(x, numbers, n * sizeof(float));
    } else {
        kernels().f32_from_bf16(reinterpret_cast<const uint16_t*>(numbers), n, x);
    }
}

// Rounds the input of a layer with bfloat16 products, so that the backward pass computes the layer from the same.
void Learner::begin_layer(size_t layer, bool keep) {
    select(layer);
    const size_t d = config_.hidden_dim, size = n() * d;
    uint8_t* to = inputs_.get() + (keep ? layer * input_bytes() : 0);
    if (type_ == ProductType::kFloat32) {
        if (keep) std::memcpy(to, x_.get(), size * sizeof(float));
        return;
    }
    for_rows(n(), d, [&](size_t i) {
        for (size_t j = i * d; j < (i + 1) * d; ++j) {
            const uint32_t bits = round_to_24_bits(x_[j]);
            x_[j] = std::bit_cast<float>(bits);
            if (!keep) continue;
            reinterpret_cast<uint16_t*>(to)[j] = static_cast<uint16_t>(bits >> 16);
            to[2 * size + j] = static_cast<uint8_t>(bits >> 8);
        }
    });
}

void Learner::begin_layer_backward(size_t layer) {
    select(layer);
    const size_t d = config_.hidden_dim, size = n() * d;
    const uint8_t* from = inputs_.get() + layer * input_bytes();
    if (type_ == ProductType::kFloat32) {
        std::memcpy(x_.get(), from, size * sizeof(float));
        return;
    }
    for_rows(n(), d, [&](size_t i) {
        for (size_t j = i * d; j < (i + 1) * d; ++j) {
            const uint32_t upper = reinterpret_cast<const uint16_t*>(from)[j];
            x_[j] = std::bit_cast<float>(upper << 16 | uint32_t{from[2 * size + j]} << 8);
        }
    });
}

const float* Learner::cos_sin(size_t layer, size_t token) const {
    return (config_.is_local(layer) ? local_cos_sin_ : cos_sin_).get() + token * config_.rotary_dim_of(layer);
}

// ---------------------------------------------------------------- rows of hidden_dim

void Learner::scale(const float* x, float factor, size_t rows, float* out) const {
    const size_t d = config_.hidden_dim;
    for_rows(rows, d, [&](size_t i) { kernels().blend_f32(x + i * d, d, factor, 0.0f, out + i * d); });
}

// sum = x + factor y; x may be the sum.
void Learner::add(const float* x, const float* y, float factor, size_t rows, float* sum) const {
    const size_t d = config_.hidden_dim;
    for_rows(rows, d, [&](size_t i) {
        if (x != sum) std::memcpy(sum + i * d, x + i * d, d * sizeof(float));
        kernels().blend_f32(y + i * d, d, factor, 1.0f, sum + i * d);
    });
}

ProductRows Learner::convert(const float* x, size_t ldx, size_t rows, size_t k) const {
    return convert_rows(type_, x, ldx, rows, k, Scratch::kInputs);
}

}  // namespace whet
