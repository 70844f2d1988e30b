// y = a x for an unpacked matrix, read once: by rows (dot products) or by columns (a sum of scaled rows).
//
// By rows, lane l sums the products of the columns k = l mod 16 in order, and the 16 sums are added as a tree; by
// columns each y is summed over the rows in order. All sums are float32.
#pragma once
#include "kernels/rows.h"
#include "simd/lanes.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

template <class T, int n_rows>
WHET_INLINE void dot_rows(const T* a, size_t lda, size_t k, const float* x, float* y) {
    f32x16 sum[n_rows];
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; ++r) sum[r] = f32x16(0.0f);
    size_t i = 0;
    for (; i + 16 <= k; i += 16) {
        const f32x16 xs = load(x + i);
#pragma GCC unroll 4
        for (int r = 0; r < n_rows; ++r) sum[r] = fma(rows::read(a + r * lda + i, 16), xs, sum[r]);
    }
    if (i < k) {
        const int n = static_cast<int>(k - i);
        const f32x16 xs = load_first(x + i, n, 0.0f);
#pragma GCC unroll 4
        for (int r = 0; r < n_rows; ++r) sum[r] = fma(rows::read(a + r * lda + i, n), xs, sum[r]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; ++r) y[r] = sum_lanes(sum[r]);
}

template <class T>
WHET_INLINE void gemv_rows(const T* a, size_t lda, size_t rows, size_t k, const float* x, float* y) {
    size_t row = 0;
    for (; row + 4 <= rows; row += 4) dot_rows<T, 4>(a + row * lda, lda, k, x, y + row);
    for (; row < rows; ++row) dot_rows<T, 1>(a + row * lda, lda, k, x, y + row);
}

template <class T, int n_vectors>
WHET_INLINE void add_scaled_rows(const T* a, size_t lda, size_t k, const float* x, float* y) {
    f32x16 sum[n_vectors];
#pragma GCC unroll 8
    for (int v = 0; v < n_vectors; ++v) sum[v] = f32x16(0.0f);
    for (size_t i = 0; i < k; ++i) {
#pragma GCC unroll 8
        for (int v = 0; v < n_vectors; ++v) sum[v] = fma(rows::read(a + i * lda + 16 * v, 16), f32x16(x[i]), sum[v]);
    }
#pragma GCC unroll 8
    for (int v = 0; v < n_vectors; ++v) store(y + 16 * v, sum[v]);
}

template <class T>
WHET_INLINE void gemv_columns(const T* a, size_t lda, size_t k, size_t n, const float* x, float* y) {
    constexpr int wide = kParts == 1 ? 8 : 2;
    size_t at = 0;
    for (; at + 16 * wide <= n; at += 16 * wide) add_scaled_rows<T, wide>(a + at, lda, k, x, y + at);
    for (; at + 16 <= n; at += 16) add_scaled_rows<T, 1>(a + at, lda, k, x, y + at);
    if (at == n) return;
    const int rest = static_cast<int>(n - at);
    f32x16 sum(0.0f);
    for (size_t i = 0; i < k; ++i) sum = fma(rows::read(a + i * lda + at, rest), f32x16(x[i]), sum);
    store_first(y + at, sum, rest);
}

constexpr auto gemv_rows_f32 = gemv_rows<float>;
constexpr auto gemv_rows_bf16 = gemv_rows<uint16_t>;
constexpr auto gemv_columns_f32 = gemv_columns<float>;
constexpr auto gemv_columns_bf16 = gemv_columns<uint16_t>;

}  // namespace
}  // namespace whet::WHET_ISA
