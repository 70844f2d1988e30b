// Reductions that sampling needs over a row of logits x: weights relative to a maximum, their sums, maxima, and the
// logits above a cut.
//
//   w_i = exp2((x_i - top) scale)     scale = log2(e) / temperature
//
// A weight is within 3e-7 (1 + |log w|) relative, is 1 at the top, and 0 where it would be below 2^-126. Sums are
// float32 over 8 vectors and float64 beyond. The token is chosen from these by engine/sampler.cpp.
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

WHET_INLINE f32x16 weight_of(f32x16 x, f32x16 top, f32x16 scale) {
    const f32x16 u = (x - top) * scale;
    return select(u < f32x16(-126.0f), f32x16(0.0f), exp2_fast(u));  // a NaN stays
}

// use(weights, at, count) for each vector; the sum of all weights. The elements behind the row are prefetched.
template <class Use>
WHET_INLINE double weigh(const float* x, size_t n, float top, float scale, Use use) {
    constexpr size_t kRun = 128;
    const f32x16 all_top(top), all_scale(scale);
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
                const f32x16 weights = weight_of(load(x + from), all_top, all_scale);
                run[i] += weights;
                use(weights, from, 16);
            }
        }
        add(run[0] + run[1]);
    }
    f32x16 run(0.0f);
    rows::each(at, n, [&](size_t i, int count) WHET_INLINE_LAMBDA {
        const f32x16 weights = weight_of(rows::read(x + i, count, -__builtin_inff()), all_top, all_scale);
        run += weights;
        use(weights, i, count);
    });
    add(run);
    return segment_sum<8>(total)[0];
}

}  // namespace sampling

// For each block of the row: tops, the greatest logit up to its end, and sums, of its weights relative to that. A NaN
// or +inf makes its block's sum NaN.
void exp_sum_blocks_f32(const float* x, size_t n, size_t block, float scale, double* sums, float* tops) {
    float top = kNothing;
    for (size_t begin = 0; begin < n; begin += block) {
        const size_t length = n - begin < block ? n - begin : block;
        const float block_top = softmax_row::top_of(x + begin, length);
        if (block_top > top) top = block_top;
        *tops++ = top;
        *sums++ = sampling::weigh(x + begin, length, top, scale, [](f32x16, size_t, int) WHET_INLINE_LAMBDA {});
    }
}

double exp_weights_f32(const float* x, size_t n, float top, float scale, float* weights) {
    return sampling::weigh(x, n, top, scale, [&](f32x16 w, size_t at, int count) WHET_INLINE_LAMBDA {
        rows::put(weights + at, w, count);
    });
}

// 16 maxima for each span of 256 logits, over every 16th of them; -inf where there are none. Returns the greatest of
// all, or NaN if the row holds NaN or +inf.
float lane_maxima_f32(const float* x, size_t n, float* tops) {
    constexpr size_t kSpan = 256;
    constexpr float kLowest = -__builtin_inff();
    f32x16 greatest(kLowest), nan(0.0f);
    const auto take = [&](f32x16 v, f32x16& top) WHET_INLINE_LAMBDA {
        top = max(v, top);
        // 0 times a finite number is 0: only NaN and +inf give NaN.
        nan = fma(max(f32x16(kNothing), v), f32x16(0.0f), nan);
    };
    for (size_t begin = 0; begin < n; begin += kSpan, tops += 16) {
        f32x16 top(kLowest);
        if (begin + kSpan <= n) {
            f32x16 other(kLowest);
            WHET_UNROLL(8)
            for (size_t i = 0; i < kSpan; i += 32) {
                __builtin_prefetch(x + begin + 4 * kSpan + i);
                __builtin_prefetch(x + begin + 4 * kSpan + i + 16);
                take(load(x + begin + i), top);
                take(load(x + begin + i + 16), other);
            }
            top = max(top, other);
        } else {
            rows::each(begin, n,
                       [&](size_t i, int count) WHET_INLINE_LAMBDA { take(rows::read(x + i, count, kLowest), top); });
        }
        store(tops, top);
        greatest = max(top, greatest);
    }
    return max_lane(greatest) + sum_lanes(nan);
}

// The logits that are not below the finite cut, and their places, in order; returns how many. Both outputs have room
// for n + 16.
size_t gather_above_f32(const float* x, size_t n, float cut, float* values, int32_t* ids) {
    size_t found = 0;
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        const f32x16 v = rows::read(x + at, count, -__builtin_inff());
        const uint32_t bits = lane_bits(v < f32x16(cut)) ^ 0xffff;
        if (bits != 0) {
            found += static_cast<size_t>(store_picked(values + found, ids + found, v, static_cast<int32_t>(at), bits));
        }
    });
    return found;
}

}  // namespace
}  // namespace whet::WHET_ISA
