// Operations across lanes of several vectors: transposition, and the sum or maximum of each of many vectors at once.
//
// All are butterflies over pairs of vectors: log2(16) steps of two-source shuffles, in an order that does not depend on
// the register width. Only sums and maxima interpret lanes as numbers; other operations copy bits.
#pragma once
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

// Swaps bit `distance` of the lane index with the vector index: lanes i of `a` with that bit set are exchanged with
// lanes i ^ distance of `b`.
template <int distance>
WHET_INLINE void swap_pair(f32x16& a, f32x16& b) {
    constexpr int n = f32x16::kPartLanes, d = distance;
    f32x16 low = a, high = b;
    WHET_EACH_PART(p) {
        if constexpr (d >= n) {
            if (p & (d / n)) {
                low.part[p] = b.part[p ^ (d / n)];
            } else {
                high.part[p] = a.part[p ^ (d / n)];
            }
        } else {
            constexpr auto low_lane = [](int i) { return i & d ? n + (i ^ d) : i; };
            constexpr auto high_lane = [](int i) { return i & d ? n + i : i ^ d; };
            low.part[p] = shuffle<low_lane>(a.part[p], b.part[p]);
            high.part[p] = shuffle<high_lane>(a.part[p], b.part[p]);
        }
    }
    a = low;
    b = high;
}

template <int distance>
WHET_INLINE void swap_pairs(f32x16 (&v)[16]) {
    WHET_UNROLL(16)
    for (int i = 0; i < 16; ++i) {
        if ((i & distance) == 0) swap_pair<distance>(v[i], v[i | distance]);
    }
}

// Transposes: lane j of vector i becomes lane i of vector j.
WHET_SHARED void transpose(f32x16 (&v)[16]) {
    swap_pairs<1>(v);
    swap_pairs<2>(v);
    swap_pairs<4>(v);
    swap_pairs<8>(v);
}

template <int distance, int n, class F>
WHET_INLINE void fold_pairs(f32x16 (&v)[n], F&& combine) {
    WHET_UNROLL(16)
    for (int i = 0; i < n; i += 2 * distance) {
        swap_pair<distance>(v[i], v[i + distance]);
        v[i] = combine(v[i], v[i + distance]);
    }
}

// Lane i is the sum of all lanes of v[i]. Overwrites v.
WHET_SHARED f32x16 sum_each(f32x16 (&v)[16]) {
    const auto add = [](f32x16 a, f32x16 b) WHET_INLINE_LAMBDA { return a + b; };
    fold_pairs<1>(v, add);
    fold_pairs<2>(v, add);
    fold_pairs<4>(v, add);
    fold_pairs<8>(v, add);
    return v[0];
}

// Lanes i and i + 8 are the maximum of v[i]. Overwrites v.
WHET_SHARED f32x16 max_each(f32x16 (&v)[8]) {
    const auto greater = [](f32x16 a, f32x16 b) WHET_INLINE_LAMBDA { return max(a, b); };
    fold_pairs<1>(v, greater);
    fold_pairs<2>(v, greater);
    fold_pairs<4>(v, greater);
    f32x16 other = v[0];
    swap_pair<8>(v[0], other);
    return max(v[0], other);
}

// Lane i is the maximum of v[i]. Overwrites v.
WHET_SHARED f32x16 max_each(f32x16 (&v)[16]) {
    const auto greater = [](f32x16 a, f32x16 b) WHET_INLINE_LAMBDA { return max(a, b); };
    fold_pairs<1>(v, greater);
    fold_pairs<2>(v, greater);
    fold_pairs<4>(v, greater);
    fold_pairs<8>(v, greater);
    return v[0];
}

template <int distance, class F>
WHET_INLINE f32x16 fold_lanes(f32x16 v, F&& combine) {
    f32x16 other = v;
    swap_pair<distance>(v, other);
    v = combine(v, other);
    if constexpr (distance > 1) v = fold_lanes<distance / 2>(v, combine);
    return v;
}

// The sum of all lanes, as a tree of halves.
WHET_SHARED float sum_lanes(f32x16 v) {
    return fold_lanes<8>(v, [](f32x16 a, f32x16 b) WHET_INLINE_LAMBDA { return a + b; })[0];
}

// The maximum of all lanes, in all lanes.
WHET_SHARED f32x16 max_lanes(f32x16 v) {
    return fold_lanes<8>(v, [](f32x16 a, f32x16 b) WHET_INLINE_LAMBDA { return max(a, b); });
}

}  // namespace
}  // namespace whet::WHET_ISA
