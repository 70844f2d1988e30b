// Generalised advantage estimation over one trajectory (Schulman et al. 2016, eq. 16):
//
//   delta_t = r_t + gamma (1 - done_t) V_{t+1} - V_t
//   A_t     = delta_t + gamma lambda (1 - done_t) A_{t+1},   returns_t = A_t + V_t
//
// V_T = last_value, A_T = 0. A sequential recurrence of fused multiply-adds in float64, backwards in time.
#pragma once
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

template <class T>
WHET_INLINE void gae(const T* rewards, const T* values, const uint8_t* dones, double last_value, size_t n, double gamma,
                     double lambda, T* advantages, T* returns) {
    double next_value = last_value, advantage = 0.0;
    for (size_t t = n; t-- > 0;) {
        const double value = values[t], discount = dones[t] ? 0.0 : gamma;
        // 0 * NaN is NaN: values after an episode's end must not propagate back.
        if (dones[t]) next_value = advantage = 0.0;
        const double delta = __builtin_fma(discount, next_value, static_cast<double>(rewards[t])) - value;
        advantage = __builtin_fma(discount * lambda, advantage, delta);
        advantages[t] = static_cast<T>(advantage);
        returns[t] = static_cast<T>(advantage + value);
        next_value = value;
    }
}

constexpr auto gae_f32 = gae<float>;
constexpr auto gae_f64 = gae<double>;

}  // namespace
}  // namespace whet::WHET_ISA
