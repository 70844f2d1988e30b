// Low-rank adapters of a transformer's matrices, a request's own: y[first_row ...] += B (A x), with the scaling in B.
#pragma once
#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "engine/linear.h"

namespace whet {

enum class Target { kQkv, kO, kUp, kDown };  // as in LayerWeights
constexpr size_t kTargets = 4;

struct LowRank {
    size_t first_row;
    std::unique_ptr<PackedWeight> a, b;  // (rank, k) and (n, rank), float32
};

struct Adapter {
    explicit Adapter(size_t n_layers) : layers(n_layers) {}
    std::vector<std::array<std::vector<LowRank>, kTargets>> layers;
    size_t max_rank = 0;
};

}  // namespace whet
