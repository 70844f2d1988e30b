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

void adamw_f32(const AdamWStep& s, size_t n, float* p, const float* grad, float* m, float* v) {
    const f32x16 keep(s.keep), beta2(s.beta2), toward(s.toward), square(s.square), root(s.root), eps(s.eps);
    const f32x16 step(s.step), grad_scale(s.grad_scale);
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        const f32x16 g = rows::read(grad + at, count) * grad_scale;
        const f32x16 old_m = rows::read(m + at, count);
        // From the nearer end, like torch.lerp.
        const f32x16 new_m = s.toward < 0.5f ? fma(toward, g - old_m, old_m) : fma(toward - f32x16(1.0f), g - old_m, g);
        const f32x16 new_v = fma(square * g, g, rows::read(v + at, count) * beta2);
        const f32x16 decayed = rows::read(p + at, count) * keep;
        const f32x16 new_p = decayed - step * new_m / (sqrt(new_v) / root + eps);
        rows::put(m + at, new_m, count);
        rows::put(v + at, new_v, count);
        rows::put(p + at, new_p, count);
    });
}

}  // namespace
}  // namespace whet::WHET_ISA
