// One step of AdamW (Loshchilov & Hutter 2019), in one pass over parameters, gradients and moments:
//
//   p -= lr decay p,   m += (1 - beta1) (g - m),   v = beta2 v + (1 - beta2) g^2
//   p -= step m / (sqrt(v) / root + eps),   step = lr / (1 - beta1^t),   root = sqrt(1 - beta2^t)
//
// g is grad * grad_scale. All is float32, each operation rounded once, in the order of torch.optim.AdamW.
#pragma once
#include "kernels/adamw_step.h"
#include "kernels/rows.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

// The step of 16 weights.
struct AdamWLanes {
    f32x16 keep, beta2, toward, square, root, eps, step, grad_scale;
    bool from_old;  // m is computed from its nearer end, like torch.lerp

    WHET_INLINE explicit AdamWLanes(const AdamWStep& s)
        : keep(s.keep),
          beta2(s.beta2),
          toward(s.toward),
          square(s.square),
          root(s.root),
          eps(s.eps),
          step(s.step),
          grad_scale(s.grad_scale),
          from_old(s.toward < 0.5f) {}

    WHET_INLINE void update(f32x16 grad, f32x16& p, f32x16& m, f32x16& v) const {
        const f32x16 g = grad * grad_scale;
        m = from_old ? fma(toward, g - m, m) : fma(toward - f32x16(1.0f), g - m, g);
        v = fma(square * g, g, v * beta2);
        p = p * keep - step * m / (sqrt(v) / root + eps);
    }
};

void adamw_f32(const AdamWStep& s, size_t n, float* p, const float* grad, float* m, float* v) {
    const AdamWLanes lanes(s);
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        f32x16 new_p = rows::read(p + at, count), new_m = rows::read(m + at, count), new_v = rows::read(v + at, count);
        lanes.update(rows::read(grad + at, count), new_p, new_m, new_v);
        rows::put(m + at, new_m, count);
        rows::put(v + at, new_v, count);
        rows::put(p + at, new_p, count);
    });
}

}  // namespace
}  // namespace whet::WHET_ISA
