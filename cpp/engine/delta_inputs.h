// The inputs of the gated delta rule, as engine and learner compute them.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "engine/activation.h"
#include "engine/config.h"

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

// The decay of a state at a token, from LayerWeights::decay and dt_bias.
inline float decay_of(double a, double decay, double dt_bias) {
    return static_cast<float>(std::exp(decay * softplus(a + dt_bias)));
}
inline float beta_of(double b) { return static_cast<float>(sigmoid(b)); }

}  // namespace whet
