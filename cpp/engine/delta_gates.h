// The gates of the gated delta rule at a token, from their projections.
#pragma once
#include <cmath>

namespace whet {

struct DeltaGates {
    float log_decay, beta;

    float decay() const { return static_cast<float>(std::exp(static_cast<double>(log_decay))); }
};

// beta = sigmoid(b), log decay = decay softplus(a + dt_bias); in float64, so that all processors round alike.
inline DeltaGates delta_gates(double b, double a, double decay, double dt_bias) {
    const double x = a + dt_bias, softplus = x > 40.0 ? x : std::log1p(std::exp(x));
    return {static_cast<float>(decay * softplus), static_cast<float>(1 / (1 + std::exp(-b)))};
}

}  // namespace whet
