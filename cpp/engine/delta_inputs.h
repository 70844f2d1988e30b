// The inputs of the gated delta rule and of Mamba-2, as engine and learner compute them.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "engine/activation.h"
#include "engine/config.h"
#include "engine/weights.h"

namespace whet {

constexpr double kLengthEps = 1e-6;  // added to the squared length of queries and keys

// x / |x| is an RMS norm with these weights: of queries, which are also divided by sqrt(key_dim), then of keys.
inline std::vector<float> length_weights(const ModelConfig& c) {
    const double d = static_cast<double>(c.delta_key_dim);
    std::vector<float> weights(2 * c.delta_key_dim, static_cast<float>(1.0 / d));
    std::fill(weights.begin() + static_cast<ptrdiff_t>(c.delta_key_dim), weights.end(),
              static_cast<float>(1.0 / std::sqrt(d)));
    return weights;
}

// Positions in the outputs of a layer's first matrix: q, k, v, z, b, a, or, without b, z, v, k, q, a.
struct DeltaPlaces {
    size_t channels, q, k, v, z, b, a;  // channels: of the convolution, the first of q, k and v

    DeltaPlaces(const ModelConfig& c, size_t layer) {
        const size_t keys = c.n_delta_key_heads * c.delta_key_dim;
        if (c.mixer(layer) == Mixer::kMamba) {
            z = 0, channels = v = c.delta_values(), k = v + c.delta_values(), q = k + keys, a = b = q + keys;
        } else {
            channels = q = 0, k = keys, v = 2 * keys, z = c.conv_dim(layer), b = z + c.delta_values();
            a = b + c.n_delta_heads;
        }
    }
};

// The decay of a state at a token, and the factor of its value, from the token's a and b.
struct DeltaGates {
    float decay, beta;

    DeltaGates(const ModelConfig& c, const LayerWeights& w, size_t head, double a, double b, bool is_mamba) {
        const double step = std::max(softplus(a + double{w.dt_bias[head]}), c.delta_step_min);
        decay = static_cast<float>(std::exp(double{w.decay[head]} * step));
        beta = static_cast<float>(is_mamba ? step : sigmoid(b));
    }
};

}  // namespace whet
