// linear_bf16 by AArch64's matrix products, which have other bits.
//
// bfmmla adds the products of 2 rows x 4 inputs and 2 outputs x 4 inputs in one instruction, twice as many as the pair
// of instructions of dot_bf16. It rounds sums to odd and flushes subnormals. One row is multiplied as a pair with
// zeros, so that here too the results of a row do not depend on the other rows.
#pragma once
#include "kernels/linear.h"

namespace whet::WHET_ISA {
namespace {

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

namespace bfmmla {

// The inputs of one step or, in the upper half, of the next; 0 after the last.
WHET_INLINE uint32x2_t read_inputs(const uint16_t* x, bool has_next) {
    uint32_t words[2] = {};
    __builtin_memcpy(words, x, has_next ? 8 : 4);
    return uint32x2_t{words[0], words[1]};
}

template <int n_rows>
__attribute__((noinline)) void tile(const LinearTask& t, const Outputs& out, size_t row, size_t panel) {
    constexpr int n_pairs = (n_rows + 1) / 2;
    const auto* x = static_cast<const uint16_t*>(t.x) + row * t.ldx;
    const auto* w = static_cast<const uint16_t*>(t.panels) + panel * t.steps * 32;
    float32x4_t sum[n_pairs][8] = {};  // of rows 2p and 2p + 1, and outputs 2i and 2i + 1
    const auto add = [&](size_t step, bool has_next) WHET_INLINE_LAMBDA {
        const uint16_t* first = w + 32 * step;
        bfloat16x8_t weights[8];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const auto low = (uint32x4_t)vld1q_u16(first + 8 * i);
            const auto high = has_next ? (uint32x4_t)vld1q_u16(first + 32 + 8 * i) : uint32x4_t{};
            weights[2 * i] = (bfloat16x8_t)vzip1q_u32(low, high);
            weights[2 * i + 1] = (bfloat16x8_t)vzip2q_u32(low, high);
        }
#pragma GCC unroll 4
        for (int p = 0; p < n_pairs; ++p) {
            const uint16_t* at = x + 2 * p * t.ldx + 2 * step;
            const uint32x2_t even = read_inputs(at, has_next);
            const uint32x2_t odd = 2 * p + 1 < n_rows ? read_inputs(at + t.ldx, has_next) : uint32x2_t{};
            const auto inputs = (bfloat16x8_t)vcombine_u32(even, odd);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) sum[p][i] = vbfmmlaq_f32(sum[p][i], inputs, weights[i]);
        }
    };
    size_t step = 0;
    for (; step + 2 <= t.steps; step += 2) add(step, true);
    if (step < t.steps) add(step, false);
    f32x16 sums[n_rows][1];
    for (int r = 0; r < n_rows; ++r) {
        const float32x4_t* pair = sum[r / 2];
        for (int i = 0; i < 4; ++i) {
            const float32x4_t a = pair[2 * i], b = pair[2 * i + 1];
            sums[r][0].part[i] = (f32x16::Native)(r % 2 == 0 ? vcombine_f32(vget_low_f32(a), vget_low_f32(b))
                                                             : vcombine_f32(vget_high_f32(a), vget_high_f32(b)));
        }
    }
    store_tile(sums, out, row, panel);
}

}  // namespace bfmmla

void linear_bfmmla(const LinearTask& t) {
    const Outputs out{t.y, t.ldy, t.n, t.bias, t.add};
    for (size_t panel = 0; panel < (t.n + 15) / 16; ++panel) {
        size_t row = 0;
        for (; row + 4 <= t.rows; row += 4) bfmmla::tile<4>(t, out, row, panel);
        if (row + 2 <= t.rows) bfmmla::tile<2>(t, out, row, panel), row += 2;
        if (row < t.rows) bfmmla::tile<1>(t, out, row, panel);
    }
}

#else

constexpr void (*linear_bfmmla)(const LinearTask&) = nullptr;

#endif

}  // namespace
}  // namespace whet::WHET_ISA
