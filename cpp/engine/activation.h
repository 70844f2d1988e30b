// Activations of a model, and the inputs of its layers.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "engine/config.h"
#include "engine/weights.h"
#include "kernels/dispatch.h"

namespace whet {

inline auto activation_kernel(Activation activation) {
    constexpr decltype(&Kernels::silu_f32) kKernels[] = {&Kernels::silu_f32, &Kernels::gelu_f32,
                                                         &Kernels::gelu_tanh_f32, &Kernels::relu2_f32};
    return kernels().*kKernels[static_cast<size_t>(activation)];
}

// out (n) = act(gate) * up, or act(gate) without gates, where the gate is the up projection; out may be the gate.
inline void activate(const ModelConfig& config, const float* gate, const float* up, size_t n, float* out) {
    if (config.gated && config.activation == Activation::kSilu) return kernels().swiglu_f32(gate, up, n, false, out);
    if (config.activation == Activation::kClampedSwiglu) return kernels().clamped_swiglu_f32(gate, up, n, out);
    activation_kernel(config.activation)(gate, n, false, out);
    for (size_t j = 0; config.gated && j < n; ++j) out[j] *= up[j];
}

// Throws std::runtime_error if the second embedding of a token is not finite.
inline void check_layer_embedding(const Weights& weights, int32_t token) {
    if (!weights.layer_embedding.is_finite(static_cast<size_t>(token))) {
        throw std::runtime_error("the second embedding of a token holds NaN or infinity");
    }
}

// inputs (layer_inputs(), the projection of the embedding) = (norm(inputs / sqrt(hidden_dim)) +
// sqrt(layer_input_dim) embedded) / sqrt(2); the norm is of each layer's input.
inline void combine_layer_inputs(const ModelConfig& config, const NormWeight& norm, const float* embedded,
                                 float* inputs) {
    const size_t n = config.layer_inputs(), p = config.layer_input_dim;
    const auto root = [](double x) { return static_cast<float>(std::sqrt(x)); };
    kernels().blend_f32(inputs, n, 1.0f / root(static_cast<double>(config.hidden_dim)), 0.0f, inputs);
    for (size_t at = 0; at < n; at += p) {
        kernels().rms_norm_f32(inputs + at, nullptr, norm.weight.data(), p, config.norm_eps, false, inputs + at);
    }
    kernels().blend_f32(embedded, n, root(static_cast<double>(p) / 2), root(0.5), inputs);
}

// In float64, so that all processors round alike.
inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
inline double softplus(double x) { return x > 40.0 ? x : std::log1p(std::exp(x)); }

}  // namespace whet
