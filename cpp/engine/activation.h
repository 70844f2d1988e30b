// Activations of a model.
#pragma once
#include <cmath>
#include <cstddef>

#include "engine/config.h"
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

// In float64, so that all processors round alike.
inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
inline double softplus(double x) { return x > 40.0 ? x : std::log1p(std::exp(x)); }

}  // namespace whet
