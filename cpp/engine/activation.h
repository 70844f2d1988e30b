// A model's activation.
#pragma once
#include <cstddef>

#include "engine/config.h"
#include "kernels/dispatch.h"

namespace whet {

inline auto activation_kernel(Activation activation) {
    constexpr decltype(&Kernels::silu_f32) kKernels[] = {&Kernels::silu_f32, &Kernels::gelu_f32,
                                                         &Kernels::gelu_tanh_f32, &Kernels::relu2_f32};
    return kernels().*kKernels[static_cast<size_t>(activation)];
}

// out (n) = act(gate) * up of a row of W_up's results, or act(up); out may be its beginning.
inline void activate(const ModelConfig& config, const float* row, size_t n, float* out) {
    const float* up = row + n;
    if (config.gated && config.activation == Activation::kSilu) return kernels().swiglu_f32(row, up, n, false, out);
    activation_kernel(config.activation)(row, n, false, out);
    for (size_t j = 0; config.gated && j < n; ++j) out[j] *= up[j];
}

}  // namespace whet
