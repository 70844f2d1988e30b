// The kernel of a model's activation.
#pragma once
#include "engine/config.h"
#include "kernels/dispatch.h"

namespace whet {

inline auto activation_kernel(Activation activation) {
    constexpr decltype(&Kernels::silu_f32) kKernels[] = {&Kernels::silu_f32, &Kernels::gelu_f32,
                                                         &Kernels::gelu_tanh_f32, &Kernels::relu2_f32};
    return kernels().*kKernels[static_cast<size_t>(activation)];
}

}  // namespace whet
