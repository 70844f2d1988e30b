// y = x bf16(w)^T for a few rows of x and unpacked float32 weights, rounded to bfloat16 on load: the result equals the
// product with a bfloat16 copy of w, but no copy can be stale. Products are exact and sums float32, in the order of
// dot_bf16.
//
// By rows (w is (n, k)), lane l sums the pairs of columns l mod 16 in order, and the 16 sums are added as a tree, 16
// results at a time: for a k of some hundreds that costs as much as the products. By columns (w is (k, n)) each y is
// summed over the pairs of k in order.
#pragma once
#include "kernels/rows.h"
#include "simd/dot.h"
#include "simd/lanes.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

namespace rounded {

constexpr size_t kAhead = 4096;  // prefetch distance, in weights

WHET_INLINE u16x32 read_weights(const float* w, size_t count) {
    if (count >= 32) return join_bf16(load(w), load(w + 16));
    float lanes[32] = {};
    __builtin_memcpy(lanes, w, count * sizeof(float));
    return join_bf16(load(lanes), load(lanes + 16));
}

WHET_INLINE u16x32 read_inputs(const uint16_t* x, size_t count) {
    if (count >= 32) return load(x);
    uint16_t lanes[32] = {};
    __builtin_memcpy(lanes, x, count * sizeof(uint16_t));
    return load(lanes);
}

// sums[r n_inputs + i]: the lane-wise dot product of row r of w and row i of x.
template <int n_rows, int n_inputs>
WHET_INLINE void dot_rows(const float* w, size_t ldw, size_t k, const uint16_t* x, size_t ldx, f32x16* sums) {
    f32x16 sum[n_rows * n_inputs];
#pragma GCC unroll 16
    for (f32x16& pair_sum : sum) pair_sum = f32x16(0.0f);
    const auto add = [&](size_t at, size_t count) WHET_INLINE_LAMBDA {
        u16x32 weights[n_rows];
#pragma GCC unroll 2
        for (int r = 0; r < n_rows; ++r) {
            const float* from = w + r * ldw + at;
            __builtin_prefetch(from + kAhead);
            __builtin_prefetch(from + kAhead + 16);
            weights[r] = read_weights(from, count);
        }
#pragma GCC unroll 8
        for (int i = 0; i < n_inputs; ++i) {
            const u16x32 inputs = read_inputs(x + i * ldx + at, count);
#pragma GCC unroll 2
            for (int r = 0; r < n_rows; ++r) {
                sum[r * n_inputs + i] = dot_bf16(sum[r * n_inputs + i], weights[r], inputs);
            }
        }
    };
    size_t at = 0;
    for (; at + 32 <= k; at += 32) add(at, 32);
    if (at < k) add(at, k - at);
#pragma GCC unroll 16
    for (int j = 0; j < n_rows * n_inputs; ++j) sums[j] = sum[j];
}

// 16 results: 16 / n_inputs rows of w, or only the first n. With 8 inputs, loading them costs more than the products,
// so two rows of w share the loads; with fewer, one stream from memory is faster than two.
template <int n_inputs>
WHET_INLINE void dot_tile(const float* w, size_t ldw, size_t n, size_t k, const uint16_t* x, size_t ldx, float* y,
                          size_t ldy) {
    f32x16 sums[16];
    for (f32x16& pair_sum : sums) pair_sum = f32x16(0.0f);
    if (n_inputs == 8 && n == 2) {
        dot_rows<2, n_inputs>(w, ldw, k, x, ldx, sums);
    } else {
        for (size_t r = 0; r < n; ++r) dot_rows<1, n_inputs>(w + r * ldw, ldw, k, x, ldx, sums + r * n_inputs);
    }
    float results[16];
    store(results, sum_each(sums));
    for (size_t r = 0; r < n; ++r) {
        for (int i = 0; i < n_inputs; ++i) y[i * ldy + r] = results[r * n_inputs + i];
    }
}

template <int n_inputs>
WHET_INLINE void dot_tiles(const float* w, size_t ldw, size_t n, size_t k, const uint16_t* x, size_t ldx, float* y,
                           size_t ldy) {
    constexpr size_t kRows = 16 / n_inputs;
    for (size_t r = 0; r < n; r += kRows) {
        dot_tile<n_inputs>(w + r * ldw, ldw, r + kRows < n ? kRows : n - r, k, x, ldx, y + r, ldy);
    }
}

// Columns [0, 16 n_vectors) of y, or the first `count` of 16.
template <int n_vectors, int n_inputs>
WHET_INLINE void add_columns(const float* w, size_t ldw, size_t k, const uint16_t* x, size_t ldx, float* y, size_t ldy,
                             int count) {
    f32x16 sum[n_vectors][n_inputs];
    for (auto& vector_sums : sum) {
        for (f32x16& vector_sum : vector_sums) vector_sum = f32x16(0.0f);
    }
    for (size_t j = 0; j < k; j += 2) {
        const bool paired = j + 1 < k;
        for (int v = 0; v < n_vectors; ++v) {
            const float* at = w + j * ldw + 16 * v;
            const u16x32 weights = zip_bf16(rows::read(at, count), paired ? rows::read(at + ldw, count) : f32x16(0.0f));
            for (int i = 0; i < n_inputs; ++i) {
                const uint16_t* pair = x + i * ldx + j;
                const uint32_t bits = pair[0] | (paired ? static_cast<uint32_t>(pair[1]) << 16 : 0);
                sum[v][i] = dot_bf16(sum[v][i], weights, bit_cast<u16x32>(f32x16(bit_cast<float>(bits))));
            }
        }
    }
    for (int v = 0; v < n_vectors; ++v) {
        for (int i = 0; i < n_inputs; ++i) rows::put(y + i * ldy + 16 * v, sum[v][i], count);
    }
}

template <int n_vectors>
WHET_INLINE void all_inputs_by_columns(const float* w, size_t ldw, size_t k, const uint16_t* x, size_t ldx, size_t m,
                                       float* y, size_t ldy, int count) {
    size_t i = 0;
    for (; i + 4 <= m; i += 4) add_columns<n_vectors, 4>(w, ldw, k, x + i * ldx, ldx, y + i * ldy, ldy, count);
    for (; i < m; ++i) add_columns<n_vectors, 1>(w, ldw, k, x + i * ldx, ldx, y + i * ldy, ldy, count);
}

}  // namespace rounded

void rounded_linear_rows(const float* w, size_t ldw, size_t n, size_t k, const uint16_t* x, size_t ldx, size_t m,
                         float* y, size_t ldy) {
    for (size_t row = 0; row < n; row += 16) {  // multiplied with every row of x before the next weights are read
        const size_t count = row + 16 < n ? 16 : n - row;
        const float* rows = w + row * ldw;
        size_t i = 0;
        for (; i + 8 <= m; i += 8) rounded::dot_tiles<8>(rows, ldw, count, k, x + i * ldx, ldx, y + i * ldy + row, ldy);
        for (; i + 4 <= m; i += 4) rounded::dot_tiles<4>(rows, ldw, count, k, x + i * ldx, ldx, y + i * ldy + row, ldy);
        for (; i + 2 <= m; i += 2) rounded::dot_tiles<2>(rows, ldw, count, k, x + i * ldx, ldx, y + i * ldy + row, ldy);
        for (; i < m; ++i) rounded::dot_tiles<1>(rows, ldw, count, k, x + i * ldx, ldx, y + i * ldy + row, ldy);
    }
}

void rounded_linear_columns(const float* w, size_t ldw, size_t n, size_t k, const uint16_t* x, size_t ldx, size_t m,
                            float* y, size_t ldy) {
    size_t at = 0;
    for (; at + 64 <= n; at += 64) rounded::all_inputs_by_columns<4>(w + at, ldw, k, x, ldx, m, y + at, ldy, 16);
    rows::each(at, n, [&](size_t i, int count) WHET_INLINE_LAMBDA {
        rounded::all_inputs_by_columns<1>(w + i, ldw, k, x, ldx, m, y + i, ldy, count);
    });
}

}  // namespace
}  // namespace whet::WHET_ISA
