// The constants of one AdamW step; see adamw.h.
#pragma once
#include <stddef.h>

namespace whet {

constexpr size_t kMomentBlock = 256;  // weights that share the scales of their 8-bit moments

struct AdamWStep {
    float keep;        // 1 - lr decay
    float beta2;       //
    float toward;      // 1 - beta1
    float square;      // 1 - beta2
    float root;        // sqrt(1 - beta2^t)
    float eps;         //
    float step;        // lr / (1 - beta1^t)
    float grad_scale;  // from gradient clipping
};

}  // namespace whet
