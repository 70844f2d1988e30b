// Per-request low-rank adapters of a transformer's matrices, y[first_row:] += B (A x) with the scaling folded into B,
// then scaled if there are magnitudes (engine/dora.h); and norms in place of the weights' own.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/dora.h"
#include "engine/weights.h"

namespace whet {

// Matrices of LayerWeights; kLayerInputs is Weights::layer_inputs, under layer 0.
enum class Target { kQkv, kO, kUp, kDown, kInputGate, kInputOut, kLayerInputs, kExpertsUp, kExpertsDown };
constexpr size_t kTargets = 9;
constexpr size_t kAdapterRows = 16;  // rows of a task: two tiles of the products

inline const Matrix& matrix_of(const Weights& weights, size_t layer, Target target) {
    constexpr Matrix LayerWeights::* kMatrices[] = {
        &LayerWeights::qkv,         &LayerWeights::o,         &LayerWeights::up, &LayerWeights::down,
        &LayerWeights::input_gate,  &LayerWeights::input_out, nullptr,           &LayerWeights::experts_up,
        &LayerWeights::experts_down};
    if (target == Target::kLayerInputs) return weights.layer_inputs;
    return weights.layers[layer].*kMatrices[static_cast<size_t>(target)];
}

// Adapters of one matrix, or of one expert's: B[i] A[i] x is added to outputs [first_rows[i], first_rows[i] + n), which
// are then scaled.
struct LowRank {
    std::vector<PackedWeight> a, b;  // (rank, k) and (n, rank)
    std::vector<size_t> first_rows;
    std::vector<RowScale> scales;

    size_t ranks() const {
        size_t sum = 0;
        for (const PackedWeight& part : a) sum += part.n();
        return sum;
    }
    // y (rows, n) += B (A x); hidden: (rows, ranks()) floats of memory.
    void add(const float* x, size_t ldx, size_t rows, float* hidden, float* y, size_t ldy) const {
        const size_t ld = ranks();
        linear(a, x, false, ldx, rows, nullptr, hidden, ld);
        for (size_t i = 0, first = 0; i < b.size(); first += a[i++].n()) {
            add_linear(b[i], hidden + first, ld, rows, y + first_rows[i], ldy);
            if constexpr (kIsComplete) scales[i].apply(y + first_rows[i], ldy, rows);
        }
    }
};

struct Adapter {
    explicit Adapter(size_t n_layers) : layers(n_layers) {}

    // Packs contiguous float32 factors A (rank, k) and B (n, rank) of a matrix of `weights`, or of one expert's, as
    // float32 if the matrix is float32, else as bfloat16, and scales for magnitudes (n,) of a matrix unless they are
    // null. Throws std::invalid_argument if they do not fit it.
    void add(const Weights& weights, size_t layer, Target target, size_t first_row, const float* a, const float* b,
             size_t rank, size_t k, size_t n, const float* magnitude = nullptr) {
        if (layer >= layers.size()) throw std::invalid_argument("no such layer");
        const Matrix& matrix = matrix_of(weights, layer, target);
        if (k == 0 || k != matrix.k()) throw std::invalid_argument("the adapter does not fit the shape of its matrix");
        const bool is_wide = matrix.parts.front().format().source == RowType::kFloat32;
        const WeightFormat format = is_wide ? WeightFormat::kFloat32 : WeightFormat::kBFloat16;
        LowRank& low = add_zero(weights, layer, target, first_row, rank, n, format);
        low.a.back().pack_rows(0, rank, a, RowType::kFloat32, static_cast<ptrdiff_t>(k), 1);
        low.b.back().pack_rows(0, n, b, RowType::kFloat32, static_cast<ptrdiff_t>(rank), 1);
        if constexpr (kIsComplete) {
            if (magnitude == nullptr) return;
            const float* bias = matrix.bias_or_null();
            const std::vector<double> lengths = row_lengths(matrix, first_row, n, {a, b, rank, rank, 1, 1.0f});
            low.scales.back() = RowScale(magnitude, lengths, bias == nullptr ? nullptr : bias + first_row);
        }
    }

    // Adds factors of zeros in a format of float numbers: the last of the matrix's, which are returned.
    LowRank& add_zero(const Weights& weights, size_t layer, Target target, size_t first_row, size_t rank, size_t n,
                      WeightFormat format) {
        if (layer >= (target == Target::kLayerInputs ? 1 : layers.size())) throw std::invalid_argument("no such layer");
        const Matrix& matrix = matrix_of(weights, layer, target);
        const size_t n_matrices = target < Target::kExpertsUp ? 1 : std::max<size_t>(1, weights.config().n_experts);
        const size_t rows = matrix.n() / n_matrices;  // of the matrix, or of an expert's
        if (rows == 0 || n > rows || first_row >= matrix.n() || first_row % rows > rows - n) {
            throw std::invalid_argument("the adapter does not fit the shape of its matrix");
        }
        PackedWeight down(format, rank, matrix.k()), up(format, n, rank);
        std::vector<LowRank>& all = layers[layer][static_cast<size_t>(target)];
        all.resize(n_matrices);
        LowRank& low = all[first_row / rows];
        low.a.push_back(std::move(down));
        low.b.push_back(std::move(up));
        low.first_rows.push_back(first_row % rows);
        if constexpr (kIsComplete) low.scales.emplace_back();
        max_rank = std::max(max_rank, low.ranks());
        return low;
    }

    // The factors of a matrix, or of an expert's; null: none.
    const LowRank* find(size_t layer, Target target, size_t expert = 0) const {
        const std::vector<LowRank>& all = layers[layer][static_cast<size_t>(target)];
        return all.empty() || all[expert].a.empty() ? nullptr : &all[expert];
    }

    // Replaces the weight or bias of a norm, by its slot, and returns it. Throws std::invalid_argument for another slot
    // or size.
    std::vector<float>& set_norm(const Weights& weights, const std::string& slot, std::span<const float> values) {
        const auto [name, part] = split_part(slot);
        const NormWeight* from = weights.norms.find(name);
        if (from == nullptr) throw std::invalid_argument("the model has no norm \"" + slot + "\"");
        if (!norms) norms = Norms(layers.size());
        NormWeight& own = *norms->find(name);
        if (own.weight.empty()) own = *from;
        std::vector<float>& vector = part == "bias" ? own.bias : own.weight;
        if (vector.size() != values.size()) throw std::invalid_argument("the values do not fit \"" + slot + "\"");
        std::copy(values.begin(), values.end(), vector.begin());
        return vector;
    }

    std::vector<std::array<std::vector<LowRank>, kTargets>> layers;  // of a matrix, or of each expert's; empty: none
    std::optional<Norms> norms;                                      // those that are replaced; the others are empty
    std::shared_ptr<void> device_copy;                               // freed with the adapter; null: none
    std::vector<std::unique_ptr<PackedWeight>> joined;               // factors that a device's plan made and uploads
    size_t max_rank = 0;                                             // maximum over matrices of the sum of their ranks
};

// A norm of a layer, the final norm, or the norm of the layers' inputs.
struct NormId {
    size_t layer = 0;
    NormWeight LayerNorms::* norm = nullptr;  // null: not of a layer
    bool is_of_inputs = false;

    const NormWeight& of(const Norms& norms) const {
        if (norm != nullptr) return norms.layers[layer].*norm;
        return is_of_inputs ? norms.layer_inputs_norm : norms.final_norm;
    }
};

// A norm with an adapter or without (null).
inline const NormWeight& norm_of(const Weights& weights, const Adapter* adapter, NormId id) {
    if (kIsComplete && adapter != nullptr && adapter->norms && !id.of(*adapter->norms).weight.empty()) {
        return id.of(*adapter->norms);
    }
    return id.of(weights.norms);
}

}  // namespace whet
