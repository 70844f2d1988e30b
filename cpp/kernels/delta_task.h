// A task of the gated delta rule, or of Mamba-2 (kernels/delta_rule.h).
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
    bool corrects = true;  // u = beta (v - P^T k); else u = beta v, and out += skip v
    float skip = 0.0f;
};

constexpr size_t kDeltaBlock = 64;  // most tokens of a task of the gradient

// The gradient of a task, without its `to` and `out`; gradients of q and k are added to, as heads may share these.
struct DeltaBackwardTask {
    DeltaTask forward;
    const float* grad_out;
    size_t grad_out_stride;
    float* grad_state;       // of the state after the last token; becomes the gradient of `from`
    float *grad_q, *grad_k;  // (n, key_dim), contiguous
    float* grad_v;           // may be v
    size_t grad_v_stride;
    float *grad_decay, *grad_beta;  // of log(decay) and beta, gate_stride apart
    float* scratch;
};

}  // namespace whet
