#include "engine/weights.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "kernels/dispatch.h"
#include "runtime/ceil_div.h"
#include "runtime/checksum.h"
#include "runtime/system.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

// Splits "layers.12.qkv" into 12 and "qkv"; returns false for names without a layer.
bool split_layer(const std::string& slot, size_t n_layers, size_t& layer, std::string& rest) {
    if (slot.rfind("layers.", 0) != 0) return false;
    const size_t dot = slot.find('.', 7);
    if (dot == std::string::npos || dot == 7 || dot > 7 + 6) return false;
    layer = 0;
    for (size_t i = 7; i < dot; ++i) {
        if (slot[i] < '0' || slot[i] > '9') return false;
        layer = 10 * layer + static_cast<size_t>(slot[i] - '0');
    }
    rest = slot.substr(dot + 1);
    return layer < n_layers;
}

// Calls visit(part, first row in the part, count, rows visited before) for parts with rows of [first, first + count).
template <class Parts, class Visit>
void for_parts(Parts& parts, size_t first, size_t count, Visit&& visit) {
    size_t part_first = 0;
    for (auto& part : parts) {
        const size_t begin = std::max(first, part_first), end = std::min(first + count, part_first + part.n());
        if (begin < end) visit(part, begin - part_first, end - begin, begin - first);
        part_first += part.n();
    }
}

constexpr const char* kTable = "layer_embedding";

constexpr size_t kLine = 64;

size_t whole_lines(size_t bytes) { return ceil_div(bytes, kLine) * kLine; }

size_t allocated_bytes(const Matrix& matrix) {
    size_t bytes = 0;
    for (const PackedWeight& part : matrix.parts) bytes += whole_lines(part.size_bytes());
    return bytes;
}

size_t number_bytes(bool bf16) { return bf16 ? sizeof(uint16_t) : sizeof(float); }

}  // namespace

bool has_delta_sizes(const ModelConfig& c) {
    bool has_delta = false;
    for (size_t layer = 0; layer < c.mixers.size(); ++layer) has_delta |= c.is_delta(layer);
    if (!has_delta) return true;
    return c.n_delta_key_heads > 0 && c.n_delta_heads > 0 && c.n_delta_heads % c.n_delta_key_heads == 0 &&
           c.delta_dim > 0 && c.delta_key_dim > 0;
}

bool has_layer_sizes(const ModelConfig& c) {
    if (c.n_shared_kv_layers >= c.n_layers && c.n_shared_kv_layers > 0) return false;
    if (!c.ffn_dims.empty() && c.ffn_dims.size() != c.n_layers) return false;
    for (size_t layer = 0; layer < c.n_layers; ++layer) {
        if (c.kv_layer(layer) >= c.n_layers) return false;
    }
    const bool is_plain = c.n_shared_kv_layers == 0 || !(c.output_gate || c.qk_norm_whole || !c.mixers.empty());
    const bool needs_both = c.parallel_residual || c.layer_input_dim > 0 || c.layer_scale;
    for (size_t layer = 0; layer < c.n_layers; ++layer) {  // of a mixer and an MLP
        if (c.mixes(layer) + c.has_mlp(layer) < (needs_both ? 2 : 1)) return false;
    }
    return is_plain && (c.layer_input_dim == 0 || (c.gated && c.norm == Norm::kRms)) &&
           (!c.parallel_residual || (c.layer_input_dim == 0 && !c.layer_scale));
}

void check(const ModelConfig& c) {
    if (c.n_kv_heads == 0 || c.n_heads % c.n_kv_heads != 0 || c.head_dim == 0 ||
        c.widest_head() > kAttentionMaxHeadDim || c.windows.size() != c.n_layers ||
        (!c.rope_layers.empty() && c.rope_layers.size() != c.n_layers) ||
        (!c.mixers.empty() && c.mixers.size() != c.n_layers) || (c.output_gate && c.qk_norm_whole) ||
        (c.activation == Activation::kClampedSwiglu && !c.gated) ||
        (!c.moe_layers.empty() && c.moe_layers.size() != c.n_layers) ||
        (c.n_experts > 0 && (c.n_used_experts == 0 || c.n_used_experts > c.n_experts || c.expert_dim == 0)) ||
        (c.is_recurrent() && (c.conv_length == 0 || c.conv_length > kMaxConvLength)) || !has_delta_sizes(c) ||
        (!c.local_layers.empty() &&
         (c.local_layers.size() != c.n_layers ||
          c.local_inv_freq.size() != (c.local_head_dim > 0 ? c.local_head_dim / 2 : c.inv_freq.size()))) ||
        c.inv_freq.size() * 2 != c.rotary_dim || c.rotary_dim > c.head_dim || c.query_scale_length == 0 ||
        !has_layer_sizes(c) || (c.learned_positions > 0 && c.max_position > c.learned_positions)) {
        throw std::invalid_argument("inconsistent sizes in the configuration");
    }
}

size_t Matrix::n() const {
    size_t n = 0;
    for (const PackedWeight& part : parts) n += part.n();
    return n;
}

void Matrix::rows(size_t first, size_t count, void* out, bool bf16) const {
    if (first > n() || count > n() - first) throw std::out_of_range("rows outside the matrix");
    for_parts(parts, first, count, [&](const PackedWeight& part, size_t begin, size_t n, size_t before) {
        part.rows(begin, n, static_cast<uint8_t*>(out) + before * k() * number_bytes(bf16), bf16);
    });
}

Matrix* Weights::matrix_named(const std::string& slot) {
    if (slot == "embedding") return &embedding;
    if (slot == "head") return &head;
    if (slot == "positions") return &positions;
    if (slot == "layer_inputs") return &layer_inputs;
    size_t i = 0;
    std::string rest;
    if (!split_layer(slot, layers.size(), i, rest)) return nullptr;
    LayerWeights& layer = layers[i];
    if (rest == "qkv" || rest == "conv_in" || rest == "delta_in") return &layer.qkv;
    if (rest == "o" || rest == "conv_out" || rest == "delta_out") return &layer.o;
    if (rest == "conv") return &layer.conv;
    if (rest == "router") return &layer.router;
    if (rest == "experts_up" || rest == "experts_gate_up") return &layer.experts_up;
    if (rest == "experts_down") return &layer.experts_down;
    if (rest == "shared_router") return &layer.shared_router;
    if (rest == "up" || rest == "gate_up") return &layer.up;
    if (rest == "down") return &layer.down;
    if (rest == "input_gate") return &layer.input_gate;
    if (rest == "input_out") return &layer.input_out;
    return nullptr;
}

std::pair<std::string, std::string> split_part(const std::string& slot) {
    const size_t dot = slot.rfind('.');
    if (dot == std::string::npos) return {slot, {}};
    return {slot.substr(0, dot), slot.substr(dot + 1)};
}

const NormWeight* Norms::find(const std::string& name) const {
    if (name == "final_norm") return &final_norm;
    if (name == "layer_inputs_norm") return &layer_inputs_norm;
    size_t i = 0;
    std::string rest;
    if (!split_layer(name, layers.size(), i, rest)) return nullptr;
    if (rest == "norm1") return &layers[i].norm1;
    if (rest == "norm2") return &layers[i].norm2;
    if (rest == "post_norm1") return &layers[i].post_norm1;
    if (rest == "post_norm2") return &layers[i].post_norm2;
    if (rest == "q_norm") return &layers[i].q_norm;
    if (rest == "k_norm") return &layers[i].k_norm;
    if (rest == "delta_norm") return &layers[i].delta_norm;
    if (rest == "input_norm") return &layers[i].input_norm;
    return nullptr;
}

size_t Norms::size_bytes() const {
    size_t bytes = final_norm.size_bytes() + layer_inputs_norm.size_bytes();
    for (const LayerNorms& w : layers) {
        bytes += w.norm1.size_bytes() + w.norm2.size_bytes() + w.post_norm1.size_bytes() + w.post_norm2.size_bytes() +
                 w.q_norm.size_bytes() + w.k_norm.size_bytes() + w.delta_norm.size_bytes() + w.input_norm.size_bytes();
    }
    return bytes;
}

std::vector<float>* Weights::vector_named(const std::string& slot) {
    const auto [owner, part] = split_part(slot);
    size_t i = 0;
    std::string rest;
    if (split_layer(slot, layers.size(), i, rest)) {
        if (rest == "sinks") return &layers[i].sinks;
        if (rest == "scale") return &layers[i].scale;
        if (rest == "decay") return &layers[i].decay;
        if (rest == "dt_bias") return &layers[i].dt_bias;
        if (rest == "conv_bias") return &layers[i].conv_bias;
        if (rest == "skip") return &layers[i].skip;
        if (rest == "router.bias") return &layers[i].router_bias;
        if (rest == "router_correction") return &layers[i].router_correction;
    }
    if (part != "bias" && part != "weight") return nullptr;
    const bool is_bias = part == "bias";
    if (Matrix* matrix = matrix_named(owner)) return is_bias ? &matrix->bias : nullptr;
    NormWeight* norm = norms.find(owner);
    return norm == nullptr ? nullptr : is_bias ? &norm->bias : &norm->weight;
}

// Rows from `first` on that may be in one part: the rest of an expert.
size_t Weights::rows_to_boundary(const std::string& slot, size_t first) const {
    const auto ends_with = [&](const char* end) { return slot.ends_with(end); };
    if (ends_with(".experts_down")) return config_.hidden_dim - first % config_.hidden_dim;
    if (!ends_with(".experts_up") && !ends_with(".experts_gate_up")) return SIZE_MAX;
    return config_.expert_up_dim() - first % config_.expert_up_dim();
}

void Weights::add_matrix(const std::string& slot, WeightFormat format, size_t n, size_t k) {
    Matrix* matrix = matrix_named(slot);
    if (matrix == nullptr) throw std::invalid_argument("no matrix is called \"" + slot + "\"");
    for (size_t rest = n, rows = 0; rest > 0; rest -= rows) {
        rows = std::min(rest, rows_to_boundary(slot, matrix->n()));
        if (!matrix->parts.empty() && slot.find(".experts_") != std::string::npos &&
            matrix->parts.front().format().source != traits(format).source) {
            throw std::invalid_argument("the experts of \"" + slot + "\" have formats of different kinds");
        }
        matrix->parts.emplace_back(format, rows, k, nullptr);
    }
    matrices_[slot] = matrix;
}

void Weights::add_vector(const std::string& slot, size_t n) {
    if (slot == kTable) return layer_embedding.resize(n, config_.layer_inputs());
    std::vector<float>* vector = vector_named(slot);
    if (vector == nullptr) throw std::invalid_argument("no vector is called \"" + slot + "\"");
    vector->assign(n, 0.0f);
    vectors_[slot] = vector;
}

void Weights::allocate() {
    for (const auto& [slot, matrix] : matrices_) memory_bytes_ += allocated_bytes(*matrix);
    memory_ = Zeroed(memory_bytes_);
    uint8_t* at = memory_.data();
    for (const auto& [slot, matrix] : matrices_) at = place(*matrix, at);
}

std::vector<uint8_t> Weights::allocate(const std::string& slot) {
    Matrix& matrix = matrix_at(slot);
    std::vector<uint8_t> memory(allocated_bytes(matrix) + kLine);
    place(matrix, memory.data() + (kLine - reinterpret_cast<uintptr_t>(memory.data()) % kLine));
    return memory;
}

void Weights::free(const std::string& slot) {
    for (PackedWeight& part : matrix_at(slot).parts) part.place(nullptr);
}

uint8_t* Weights::place(Matrix& matrix, uint8_t* memory) {
    for (PackedWeight& part : matrix.parts) part.place(memory), memory += whole_lines(part.size_bytes());
    return memory;
}

void Weights::pack(const std::string& slot, size_t first, const StoredRows& rows) {
    const auto packing = lock_.writing();
    if (kIsComplete && slot == kTable) return layer_embedding.set(first, rows, nullptr);
    if (vectors_.contains(slot)) return pack_vector(slot, first, rows);
    for_parts(matrix_for(slot, first, rows).parts, first, rows.n,
              [&](PackedWeight& part, size_t begin, size_t n, size_t before) {
                  if (kIsComplete && part.deferred() != nullptr) part.deferred()->settle();
                  pack_rows(rows.range(before, n), part, begin);
              });
}

void Weights::defer(const std::string& slot, size_t first, const StoredRows& rows, const std::shared_ptr<void>& owner) {
    const auto packing = lock_.writing();
    if (kIsComplete && slot == kTable) return layer_embedding.set(first, rows, owner);
    for_parts(matrix_for(slot, first, rows).parts, first, rows.n,
              [&](PackedWeight& part, size_t begin, size_t n, size_t before) {
                  if (part.deferred() == nullptr) part.defer(&deferred_.emplace_back(part));
                  part.deferred()->add(begin, rows.range(before, n), owner);
              });
}

size_t Weights::deferred_bytes() const {
    size_t bytes = 0;
    for (const DeferredRows& rows : deferred_) bytes += rows.resident_bytes();
    return bytes;
}

void Weights::drop_deferred(size_t limit) {
    size_t bytes = deferred_bytes();
    if (bytes <= limit) return;
    const auto dropping = lock_.writing();
    std::vector<DeferredRows*> packed;
    for (DeferredRows& rows : deferred_) {
        if (rows.resident_bytes() > 0) packed.push_back(&rows);
    }
    std::sort(packed.begin(), packed.end(), [](const auto* a, const auto* b) { return a->last_use() < b->last_use(); });
    for (auto next = packed.begin(); bytes > limit && next != packed.end(); ++next) bytes -= (*next)->drop();
}

PackingLoss Weights::measure_loss(const std::string& slot, size_t first, const StoredRows& rows) const {
    if (vectors_.contains(slot) || (kIsComplete && slot == kTable))
        return measure_packing_loss(rows, WeightFormat::kFloat32);
    const Matrix& matrix = matrix_for(slot, first, rows);
    PackingLoss sum{.format = WeightFormat::kFloat32, .limit = INFINITY};
    for_parts(matrix.parts, first, rows.n, [&](const PackedWeight& part, size_t, size_t n, size_t before) {
        const PackingLoss loss = measure_packing_loss(rows.range(before, n), part.format_id());
        if (sum.largest > sum.limit) return;
        sum.format = loss.format, sum.limit = loss.limit;
        sum.largest = std::max(sum.largest, loss.largest);
        sum.squared_norm += loss.squared_norm, sum.squared_lost += loss.squared_lost;
    });
    return sum;
}

void Weights::pack_vector(const std::string& slot, size_t first, const StoredRows& row) {
    std::vector<float>& vector = *vectors_.at(slot);
    if (row.n != 1 || first > vector.size() || row.k > vector.size() - first) {
        throw std::invalid_argument("the values do not fit the shape of \"" + slot + "\"");
    }
    unpack_rows(row, vector.data() + first);
}

const std::vector<float>* Weights::vector_at(const std::string& slot) const {
    const auto at = vectors_.find(slot);
    return at == vectors_.end() ? nullptr : at->second;
}

Matrix& Weights::matrix_at(const std::string& slot) const {
    const auto at = matrices_.find(slot);
    if (at == matrices_.end()) throw std::invalid_argument("the model has no weight \"" + slot + "\"");
    return *at->second;
}

Matrix& Weights::matrix_for(const std::string& slot, size_t first, const StoredRows& rows) const {
    Matrix& matrix = matrix_at(slot);
    if (first <= matrix.n() && rows.n <= matrix.n() - first && rows.k == matrix.k()) return matrix;
    throw std::invalid_argument("the rows do not fit the shape of \"" + slot + "\"");
}

size_t Weights::k(const std::string& slot) const {
    if (kIsComplete && slot == kTable) return layer_embedding.k();
    return vector_at(slot) ? 1 : matrix_at(slot).k();
}

void Weights::table_rows(size_t first, size_t count, void* out, bool bf16) const {
    const size_t k = layer_embedding.k();
    std::vector<float> row(bf16 ? k : 0);
    for (size_t i = 0; i < count; ++i) {
        if (!bf16) {
            layer_embedding.read(first + i, static_cast<float*>(out) + i * k);
            continue;
        }
        layer_embedding.read(first + i, row.data());
        kernels().bf16_from_f32(row.data(), k, static_cast<uint16_t*>(out) + i * k);
    }
}

void Weights::rows(const std::string& slot, size_t first, size_t count, void* out, bool bf16) const {
    const auto lock = reading();
    if (kIsComplete && slot == kTable) return table_rows(first, count, out, bf16);
    const auto* vector = vector_at(slot);
    if (vector == nullptr) return matrix_at(slot).rows(first, count, out, bf16);
    if (first > vector->size() || count > vector->size() - first) throw std::out_of_range("rows outside the vector");
    if (bf16) return kernels().bf16_from_f32(vector->data() + first, count, static_cast<uint16_t*>(out));
    std::copy_n(vector->data() + first, count, static_cast<float*>(out));
}

void Weights::gather(const std::string& slot, const int64_t* rows, size_t count, void* out, bool bf16) const {
    constexpr double number_ns = 0.5;  // reading one row touches its panel of 16 rows
    const auto lock = reading();
    if (kIsComplete && slot == kTable) {
        const size_t row_bytes = layer_embedding.k() * number_bytes(bf16);
        for (size_t i = 0; i < count; ++i) {
            table_rows(static_cast<size_t>(rows[i]), 1, static_cast<uint8_t*>(out) + i * row_bytes, bf16);
        }
        return;
    }
    const Matrix& matrix = matrix_at(slot);
    const size_t row_bytes = matrix.k() * number_bytes(bf16);
    parallel_for(count, number_ns * static_cast<double>(count * matrix.k()), [&](size_t i) {
        matrix.rows(static_cast<size_t>(rows[i]), 1, static_cast<uint8_t*>(out) + i * row_bytes, bf16);
    });
}

uint64_t Weights::checksum(const std::string& slot) const {
    const auto lock = reading();
    if (slot == kTable) {
        uint64_t sum = 0;
        std::vector<float> row(layer_embedding.k());
        for (const size_t i : layer_embedding.checked_rows()) {
            layer_embedding.read(i, row.data());
            sum = mix(sum, whet::checksum(row.data(), row.size() * sizeof(float)));
        }
        return sum;
    }
    if (const auto* vector = vector_at(slot)) return whet::checksum(vector->data(), vector->size() * sizeof(float));
    uint64_t sum = 0;
    for (const PackedWeight& part : matrix_at(slot).parts) {
        part.prepare();
        const size_t bytes = part.panel_bytes();
        sum = mix(sum, checksum_rows(static_cast<const char*>(part.panel(0)), part.n_panels(), bytes,
                                     static_cast<ptrdiff_t>(bytes)));
    }
    return sum;
}

size_t Weights::size_bytes() const {
    size_t bytes = layer_embedding.size_bytes();
    for (const auto& [slot, matrix] : matrices_) {
        for (const PackedWeight& part : matrix->parts) bytes += part.size_bytes();
    }
    for (const auto& [slot, vector] : vectors_) bytes += vector->size() * sizeof(float);
    return bytes;
}

size_t Weights::release() {
    const auto packing = lock_.writing();
    for (DeferredRows& rows : deferred_) rows.drop();
    release_pages(memory_.data(), memory_bytes_);
    return memory_bytes_;
}

}  // namespace whet
