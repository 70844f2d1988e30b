// Reductions over a row of logits x for sampling: weights relative to a maximum, their sums, maxima, and the logits
// above a cutoff.
//
//   w_i = exp2((x_i - maximum) scale)     scale = log2(e) / temperature
//
// A weight has a relative error of at most 3e-7 (1 + |log w|), is 1 at the maximum, and 0 below 2^-126. Sums are
// float32 over 8 vectors and float64 across them. engine/sampler.cpp chooses the token.
#pragma once
#include "kernels/rows.h"
#include "kernels/softmax.h"
#include "simd/compress.h"
#include "simd/lanes.h"
#include "simd/math.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

namespace sampling {

WHET_INLINE f32x16 weight_of(f32x16 x, f32x16 maximum, f32x16 scale) {
    const f32x16 u = (x - maximum) * scale;
    return select(u < f32x16(-126.0f), f32x16(0.0f), exp2_fast(u));  // NaN stays NaN
}

// Calls use(weights, at, count) for each vector; returns the sum of all weights. Prefetches the elements after the row.
template <class Use>
WHET_INLINE double exp_weights(const float* x, size_t n, float maximum, float scale, Use use) {
    constexpr size_t kRun = 128;
    const f32x16 all_maximum(maximum), all_scale(scale);
    f64x8 total(0.0);
    const auto add = [&](f32x16 run) WHET_INLINE_LAMBDA {
        const F64Pair wide = widen(run);
        total += wide.low + wide.high;
    };
    size_t at = 0;
    for (; at + kRun <= n; at += kRun) {
        f32x16 run[2] = {f32x16(0.0f), f32x16(0.0f)};
        WHET_UNROLL(4)
        for (size_t pair = 0; pair < kRun; pair += 32) {
#pragma GCC unroll 2
            for (size_t i = 0; i < 2; ++i) {
                const size_t from = at + pair + 16 * i;
                __builtin_prefetch(x + n + from);
                const f32x16 weights = weight_of(load(x + from), all_maximum, all_scale);
                run[i] += weights;
                use(weights, from, 16);
            }
        }
        add(run[0] + run[1]);
    }
    f32x16 run(0.0f);
    rows::each(at, n, [&](size_t i, int count) WHET_INLINE_LAMBDA {
        const f32x16 weights = weight_of(rows::read(x + i, count, -__builtin_inff()), all_maximum, all_scale);
        run += weights;
        use(weights, i, count);
    });
    add(run);
    return segment_sum<8>(total)[0];
}

}  // namespace sampling

// For each block of the row: the maximum logit up to its end, and the sum of its weights relative to that maximum. NaN
// or +inf makes the block's sum NaN.
void exp_sum_blocks_f32(const float* x, size_t n, size_t block, float scale, double* sums, float* maxima) {
    float maximum = kInitialMax;
    for (size_t begin = 0; begin < n; begin += block) {
        const size_t length = n - begin < block ? n - begin : block;
        const float block_maximum = softmax_row::max_of(x + begin, length);
        if (block_maximum > maximum) maximum = block_maximum;
        *maxima++ = maximum;
        *sums++ =
            sampling::exp_weights(x + begin, length, maximum, scale, [](f32x16, size_t, int) WHET_INLINE_LAMBDA {});
    }
}

double exp_weights_f32(const float* x, size_t n, float maximum, float scale, float* weights) {
    return sampling::exp_weights(x, n, maximum, scale, [&](f32x16 w, size_t at, int count) WHET_INLINE_LAMBDA {
        rows::put(weights + at, w, count);
    });
}

// Writes 16 maxima per span of 256 logits, each over every 16th logit; -inf beyond the row. Returns the maximum of all,
// or NaN if the row holds NaN or +inf.
float lane_maxima_f32(const float* x, size_t n, float* maxima) {
    constexpr size_t kSpan = 256;
    constexpr float kLowest = -__builtin_inff();
    f32x16 greatest(kLowest), nan(0.0f);
    const auto update = [&](f32x16 v, f32x16& maximum) WHET_INLINE_LAMBDA {
        maximum = max(v, maximum);
        // 0 times a finite number is 0: only NaN and +inf give NaN.
        nan = fma(max(f32x16(kInitialMax), v), f32x16(0.0f), nan);
    };
    for (size_t begin = 0; begin < n; begin += kSpan, maxima += 16) {
        f32x16 maximum(kLowest);
        if (begin + kSpan <= n) {
            f32x16 other(kLowest);
            WHET_UNROLL(8)
            for (size_t i = 0; i < kSpan; i += 32) {
                __builtin_prefetch(x + begin + 4 * kSpan + i);
                __builtin_prefetch(x + begin + 4 * kSpan + i + 16);
                update(load(x + begin + i), maximum);
                update(load(x + begin + i + 16), other);
            }
            maximum = max(maximum, other);
        } else {
            rows::each(begin, n, [&](size_t i, int count) WHET_INLINE_LAMBDA {
                update(rows::read(x + i, count, kLowest), maximum);
            });
        }
        store(maxima, maximum);
        greatest = max(maximum, greatest);
    }
    return max_lane(greatest) + sum_lanes(nan);
}

// Gathers the logits >= the finite cutoff and their indices, in order; returns their number. Both outputs have capacity
// n + 16.
size_t gather_above_f32(const float* x, size_t n, float cutoff, float* values, int32_t* ids) {
    size_t n_found = 0;
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        const f32x16 v = rows::read(x + at, count, -__builtin_inff());
        const uint32_t bits = lane_bits(v < f32x16(cutoff)) ^ 0xffff;
        if (bits != 0) {
            n_found += static_cast<size_t>(
                store_compressed(values + n_found, ids + n_found, v, static_cast<int32_t>(at), bits));
        }
    });
    return n_found;
}

}  // namespace
}  // namespace whet::WHET_ISA
