// One token of a causal depthwise convolution with few taps, y = gate sum over j of w_j x_j (LFM2, Liquid AI 2025), and
// the products of its gradient.
#pragma once
#include "kernels/rows.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

// inputs: rows of n numbers, the oldest first; null: zeros. taps: a row for each, `stride` numbers apart. gate null: 1.
// out may be the gate.
void short_conv_f32(const float* const* inputs, size_t n_taps, const float* taps, size_t stride, const float* gate,
                    size_t n, float* out) {
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        f32x16 sum(0.0f);
        for (size_t j = 0; j < n_taps; ++j) {
            if (inputs[j] == nullptr) continue;
            sum = fma(rows::read(taps + j * stride + at, count), rows::read(inputs[j] + at, count), sum);
        }
        rows::put(out + at, gate == nullptr ? sum : sum * rows::read(gate + at, count), count);
    });
}

// sum += a b, element-wise.
void multiply_add_f32(const float* a, const float* b, size_t n, float* sum) {
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        rows::put(sum + at, fma(rows::read(a + at, count), rows::read(b + at, count), rows::read(sum + at, count)),
                  count);
    });
}

}  // namespace
}  // namespace whet::WHET_ISA
