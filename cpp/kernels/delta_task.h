// A task of the gated delta rule (kernels/delta_rule.h).
#pragma once
#include <stddef.h>

namespace whet {

// A state is slices of (key_dim, kDeltaSlice) numbers: columns of S, the last slice padded.
constexpr size_t kDeltaSlice = 16;

// Consecutive tokens of a sequence, for one value head.
struct DeltaTask {
    size_t n, key_dim, value_dim;
    const float *q, *k, *v;  // of the first token
    size_t stride;           // numbers from a token to the next
    const float *decay, *beta;
    size_t gate_stride;
    const float* from;  // state before the first token; null: zeros
    float* to;          // state after the last token; may be `from`
    float* out;         // of the first token
    size_t out_stride;
};

}  // namespace whet
