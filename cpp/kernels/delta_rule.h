// The gated delta rule (Yang, Kautz, Hatamizadeh 2024), token by token. For the state S (key_dim, value_dim) of a head:
//
//   P = decay S;  u = beta (v - P^T k);  S = P + k u^T;  out = S^T q
//
// Mamba-2 (Dao, Gu 2024) has no correction, and a skip of the value: u = beta v, out = S^T q + skip v.
//
// The columns of S are independent: a slice of 16 stays in L1 over all tokens of a task. The result of a token depends
// only on its sequence, to the bit: not on how its tokens are split into tasks.
#pragma once
#include "kernels/delta_task.h"
#include "kernels/rows.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

namespace delta {

constexpr int kSlices = 4 / kParts;  // at once, as registers allow

template <int kN, bool kCorrects>
WHET_INLINE void run_slices(const DeltaTask& task, size_t first) {
    const size_t dk = task.key_dim, size = dk * kDeltaSlice;
    const auto lanes_of = [&](size_t slice) WHET_INLINE_LAMBDA {
        const size_t left = task.value_dim - (first + slice) * kDeltaSlice;
        return static_cast<int>(left < kDeltaSlice ? left : kDeltaSlice);
    };
    const float* from = task.from == nullptr ? nullptr : task.from + first * size;
    float* to = task.to + first * size;
    for (size_t t = 0; t < task.n; ++t, from = to) {
        const float *q = task.q + t * task.stride, *k = task.k + t * task.stride;
        const float* v = task.v + t * task.stride + first * kDeltaSlice;
        const f32x16 decay(task.decay[t * task.gate_stride]), beta(task.beta[t * task.gate_stride]);
        f32x16 u[kN], sum[2][kN], out[kN];
        for (int s = 0; s < kN; ++s) sum[0][s] = sum[1][s] = out[s] = f32x16(0.0f);
        const auto add = [&](size_t i, f32x16(&sums)[kN]) WHET_INLINE_LAMBDA {
            const f32x16 key(k[i]);
            for (int s = 0; s < kN; ++s) {
                sums[s] = fma(key, load(from + static_cast<size_t>(s) * size + i * kDeltaSlice), sums[s]);
            }
        };
        if (kCorrects && from != nullptr) {
            size_t i = 0;
            for (; i + 2 <= dk; i += 2) add(i, sum[0]), add(i + 1, sum[1]);
            if (i < dk) add(i, sum[0]);
        }
        for (int s = 0; s < kN; ++s) {
            const size_t slice = static_cast<size_t>(s);
            u[s] = rows::read(v + slice * kDeltaSlice, lanes_of(slice));
            if constexpr (kCorrects) u[s] = u[s] - decay * (sum[0][s] + sum[1][s]);
            u[s] = beta * u[s];
        }
        for (size_t i = 0; i < dk; ++i) {
            const f32x16 key(k[i]), query(q[i]);
            for (int s = 0; s < kN; ++s) {
                const size_t at = static_cast<size_t>(s) * size + i * kDeltaSlice;
                const f32x16 state = fma(key, u[s], from == nullptr ? f32x16(0.0f) : decay * load(from + at));
                store(to + at, state);
                out[s] = fma(query, state, out[s]);
            }
        }
        for (int s = 0; s < kN; ++s) {
            const size_t slice = static_cast<size_t>(s);
            if constexpr (!kCorrects) {
                const f32x16 value = rows::read(v + slice * kDeltaSlice, lanes_of(slice));
                out[s] = fma(f32x16(task.skip), value, out[s]);
            }
            rows::put(task.out + t * task.out_stride + (first + slice) * kDeltaSlice, out[s], lanes_of(slice));
        }
    }
}

template <bool kCorrects, int kN = kSlices>
void run_rule(const DeltaTask& task, size_t slice = 0) {
    const size_t n = (task.value_dim + kDeltaSlice - 1) / kDeltaSlice;
    for (; slice + kN <= n; slice += kN) run_slices<kN, kCorrects>(task, slice);
    if constexpr (kN > 1) run_rule<kCorrects, kN / 2>(task, slice);
}

}  // namespace delta

void delta_rule_f32(const DeltaTask& task) {
    task.corrects ? delta::run_rule<true>(task) : delta::run_rule<false>(task);
}

// out of one token whose state S is task.from: what delta_rule_f32 has computed for it, to the bit.
void delta_output_f32(const DeltaTask& task) {
    const size_t n = (task.value_dim + kDeltaSlice - 1) / kDeltaSlice, dk = task.key_dim;
    for (size_t slice = 0; slice < n; ++slice) {
        f32x16 out(0.0f);
        for (size_t i = 0; i < dk; ++i) {
            out = fma(f32x16(task.q[i]), load(task.from + (slice * dk + i) * kDeltaSlice), out);
        }
        const size_t left = task.value_dim - slice * kDeltaSlice;
        const int lanes = static_cast<int>(left < kDeltaSlice ? left : kDeltaSlice);
        if (!task.corrects) out = fma(f32x16(task.skip), rows::read(task.v + slice * kDeltaSlice, lanes), out);
        rows::put(task.out + slice * kDeltaSlice, out, lanes);
    }
}

}  // namespace
}  // namespace whet::WHET_ISA
