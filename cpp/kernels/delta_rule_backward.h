// The gradient of the gated delta rule (kernels/delta_rule.h) over a block of tokens, token by token. With P = decay S,
// w = v - P^T k, u = beta w and D the gradient of the state after a token, from the tokens after it:
//
//   D += q dout^T;  dq = S dout;  du = D^T k;  dk = D u - beta P du;  dv = beta du;  dbeta = du . w
//   D -= beta k du^T;  d(log decay) = <D, P>;  D = decay D
#pragma once
#include "kernels/delta_task.h"
#include "kernels/rows.h"
#include "simd/lanes.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

size_t delta_backward_scratch(size_t n, size_t key_dim, size_t) { return (n + 1) * (key_dim + 1) * kDeltaSlice; }

void delta_rule_backward_f32(const DeltaBackwardTask& task) {
    const DeltaTask& f = task.forward;
    const size_t dk = f.key_dim, size = dk * kDeltaSlice;
    for (size_t t = 0; t < f.n; ++t) task.grad_decay[t * f.gate_stride] = task.grad_beta[t * f.gate_stride] = 0;
    for (size_t first = 0; first < f.value_dim; first += kDeltaSlice) {
        const size_t left = f.value_dim - first;
        const int count = static_cast<int>(left < kDeltaSlice ? left : kDeltaSlice);
        float *states = task.scratch, *ws = states + (f.n + 1) * size;
        __builtin_memcpy(states, f.from + first * dk, size * sizeof(float));
        for (size_t t = 0; t < f.n; ++t) {
            const float *k = f.k + t * f.stride, *from = states + t * size;
            const f32x16 decay(f.decay[t * f.gate_stride]), beta(f.beta[t * f.gate_stride]);
            f32x16 sum(0.0f);
            for (size_t i = 0; i < dk; ++i) sum = fma(f32x16(k[i]), load(from + i * kDeltaSlice), sum);
            const f32x16 w = rows::read(f.v + t * f.stride + first, count) - decay * sum, u = beta * w;
            store(ws + t * kDeltaSlice, w);
            float* to = states + (t + 1) * size;
            for (size_t i = 0; i < dk; ++i) {
                store(to + i * kDeltaSlice, fma(f32x16(k[i]), u, decay * load(from + i * kDeltaSlice)));
            }
        }
        float* grad = task.grad_state + first * dk;
        for (size_t t = f.n; t-- > 0;) {
            const float *q = f.q + t * f.stride, *k = f.k + t * f.stride;
            const float *before = states + t * size, *after = before + size;
            const f32x16 decay(f.decay[t * f.gate_stride]), beta(f.beta[t * f.gate_stride]);
            const f32x16 d = rows::read(task.grad_out + t * task.grad_out_stride + first, count);
            const f32x16 w = load(ws + t * kDeltaSlice), u = beta * w;
            f32x16 du(0.0f), by_decay(0.0f);
            for (size_t i = 0; i < dk; ++i) {
                const f32x16 g = fma(f32x16(q[i]), d, load(grad + i * kDeltaSlice));
                store(grad + i * kDeltaSlice, g);
                du = fma(f32x16(k[i]), g, du);
            }
            const f32x16 dw = beta * du;
            for (size_t i = 0; i < dk; i += 16) {
                const size_t n = dk - i < 16 ? dk - i : 16;
                f32x16 of_q[16], of_k[16];
                for (size_t j = 0; j < n; ++j) {
                    const size_t at = (i + j) * kDeltaSlice;
                    const f32x16 p = decay * load(before + at), g = load(grad + at);
                    of_q[j] = load(after + at) * d;
                    of_k[j] = g * u - p * dw;
                    const f32x16 gp = g - f32x16(k[i + j]) * dw;
                    by_decay = fma(gp, p, by_decay);
                    store(grad + at, decay * gp);
                }
                for (size_t j = n; j < 16; ++j) of_q[j] = of_k[j] = f32x16(0.0f);
                const int lanes = static_cast<int>(n);
                float *grad_q = task.grad_q + t * dk + i, *grad_k = task.grad_k + t * dk + i;
                rows::put(grad_q, rows::read(grad_q, lanes) + sum_each(of_q), lanes);
                rows::put(grad_k, rows::read(grad_k, lanes) + sum_each(of_k), lanes);
            }
            rows::put(task.grad_v + t * task.grad_v_stride + first, dw, count);
            task.grad_beta[t * f.gate_stride] += sum_lanes(du * w);
            task.grad_decay[t * f.gate_stride] += sum_lanes(by_decay);
        }
    }
}

}  // namespace
}  // namespace whet::WHET_ISA
