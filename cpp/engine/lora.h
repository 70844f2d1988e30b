// Per-request low-rank adapters of a transformer's matrices: y[first_row:] += B (A x), with the scaling folded into B.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include "engine/weights.h"

namespace whet {

enum class Target { kQkv, kO, kUp, kDown };  // matrices of LayerWeights
constexpr size_t kTargets = 4;

inline const Matrix& matrix_of(const LayerWeights& layer, Target target) {
    return target == Target::kQkv  ? layer.qkv
           : target == Target::kO  ? layer.o
           : target == Target::kUp ? layer.up
                                   : layer.down;
}

// Format of the factors of an adapter: float32 if the matrix is float32, else bfloat16.
inline WeightFormat adapter_format(const Matrix& matrix) {
    const bool wide = matrix.parts.front().format().source == RowType::kFloat32;
    return wide ? WeightFormat::kFloat32 : WeightFormat::kBFloat16;
}

// Adapters of one matrix: B[i] A[i] x is added to outputs [first_rows[i], first_rows[i] + n).
struct LowRank {
    std::vector<PackedWeight> a, b;  // (rank, k) and (n, rank)
    std::vector<size_t> first_rows;
};

struct Adapter {
    explicit Adapter(size_t n_layers) : layers(n_layers) {}

    void add(size_t layer, Target target, size_t first_row, PackedWeight a, PackedWeight b) {
        LowRank& low = layers[layer][static_cast<size_t>(target)];
        low.a.push_back(std::move(a));
        low.b.push_back(std::move(b));
        low.first_rows.push_back(first_row);
        size_t rank = 0;
        for (const PackedWeight& part : low.a) rank += part.n();
        max_rank = std::max(max_rank, rank);
    }

    std::vector<std::array<LowRank, kTargets>> layers;
    size_t max_rank = 0;  // maximum over matrices of the sum of their ranks
};

}  // namespace whet
