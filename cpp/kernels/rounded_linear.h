// y = x bf16(w)^T for a few rows of x over float32 weights as they lie in memory, each rounded to bfloat16 where it is
// loaded: what a product with a bfloat16 copy of w gives, without a copy that could be out of date. Products are exact
// and sums float32, in the order of dot_bf16.
//
// By rows (w is (n, k)), lane l sums the pairs of columns l mod 16 in order, and the 16 sums are added as a tree; by
// columns (w is (k, n)) each y sums over the pairs of k in order.
#pragma once
#include "kernels/gemv.h"
#include "kernels/rows.h"
#include "simd/dot.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

namespace rounded {

constexpr int kInputs = 4;  // rows of x that one pass over w serves

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

template <int n_inputs>
WHET_INLINE void dot_row(const float* w, size_t k, const uint16_t* x, size_t ldx, float* y, size_t ldy) {
    f32x16 sum[n_inputs];
    for (f32x16& one : sum) one = f32x16(0.0f);
    const auto add = [&](size_t at, size_t count) WHET_INLINE_LAMBDA {
        const u16x32 weights = read_weights(w + at, count);
        for (int i = 0; i < n_inputs; ++i) sum[i] = dot_bf16(sum[i], weights, read_inputs(x + i * ldx + at, count));
    };
    size_t at = 0;
    for (; at + 32 <= k; at += 32) add(at, 32);
    if (at < k) add(at, k - at);
    for (int i = 0; i < n_inputs; ++i) y[i * ldy] = add_lanes(sum[i]);
}

// A row at a time: one stream from memory is faster than several side by side.
template <int n_inputs>
WHET_INLINE void by_rows(const float* w, size_t ldw, size_t n, size_t k, const uint16_t* x, size_t ldx, float* y,
                         size_t ldy) {
    for (size_t row = 0; row < n; ++row) dot_row<n_inputs>(w + row * ldw, k, x, ldx, y + row, ldy);
}

// Columns [0, 16 n_vectors) of y, or the first `count` of 16.
template <int n_vectors, int n_inputs>
WHET_INLINE void add_columns(const float* w, size_t ldw, size_t k, const uint16_t* x, size_t ldx, float* y, size_t ldy,
                             int count) {
    f32x16 sum[n_vectors][n_inputs];
    for (auto& of_vector : sum) {
        for (f32x16& one : of_vector) one = f32x16(0.0f);
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

template <int n_inputs>
WHET_INLINE void by_columns(const float* w, size_t ldw, size_t n, size_t k, const uint16_t* x, size_t ldx, float* y,
                            size_t ldy) {
    size_t at = 0;
    for (; at + 64 <= n; at += 64) add_columns<4, n_inputs>(w + at, ldw, k, x, ldx, y + at, ldy, 16);
    rows::each(at, n, [&](size_t i, int count) WHET_INLINE_LAMBDA {
        add_columns<1, n_inputs>(w + i, ldw, k, x, ldx, y + i, ldy, count);
    });
}

}  // namespace rounded

void rounded_linear_rows(const float* w, size_t ldw, size_t n, size_t k, const uint16_t* x, size_t ldx, size_t m,
                         float* y, size_t ldy) {
    size_t i = 0;
    for (; i + rounded::kInputs <= m; i += rounded::kInputs) {
        rounded::by_rows<rounded::kInputs>(w, ldw, n, k, x + i * ldx, ldx, y + i * ldy, ldy);
    }
    for (; i < m; ++i) rounded::by_rows<1>(w, ldw, n, k, x + i * ldx, ldx, y + i * ldy, ldy);
}

void rounded_linear_columns(const float* w, size_t ldw, size_t n, size_t k, const uint16_t* x, size_t ldx, size_t m,
                            float* y, size_t ldy) {
    size_t i = 0;
    for (; i + rounded::kInputs <= m; i += rounded::kInputs) {
        rounded::by_columns<rounded::kInputs>(w, ldw, n, k, x + i * ldx, ldx, y + i * ldy, ldy);
    }
    for (; i < m; ++i) rounded::by_columns<1>(w, ldw, n, k, x + i * ldx, ldx, y + i * ldy, ldy);
}

}  // namespace
}  // namespace whet::WHET_ISA
