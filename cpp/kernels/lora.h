// The three sums of a low-rank adapter of rank r in [1, 8], A (r, in) and B (r, out), both float32:
//
//   lora_down    hidden[row][j] = sum_i x[row][i] a[j][i]
//   lora_up      y[row][o] += sum_j (scale hidden[row][j]) b[j][o]
//   lora_outer   grad[j][i] += scale sum_row hidden[row][j] x[row][i]
//
// Forward is down and up; the gradients of A and B are down and outer. x and y are float32 or bfloat16, sums float32:
// along a row in 16 lanes, which are added in float64; along the rows in chunks of 32 rows. The delta is summed before
// it is added to y, and a bfloat16 y is rounded once. A row's result does not depend on other rows.
//
// Primitives for adapters in user code (whet.MicroLoRA, whet.lora_*). The engine does not use them: its adapters have
// any rank, and are products of packed weights (linear.h).
//
// Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1.
#pragma once
#include "kernels/rows.h"
#include "simd/dot.h"
#include "simd/math.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

constexpr size_t kLoraPiece = 512;  // columns whose part of A or B fits in L1 for all rows
constexpr size_t kLoraSumRows = 32;

template <int rank>
constexpr int kLoraUnroll = rank <= 2   ? 4
                            : rank <= 4 ? 2
                                        : 1;

// Calls function<rank>() with the rank as a constant.
template <int constant = 1, class Function>
WHET_INLINE void with_rank(size_t rank, Function&& function) {
    if (rank == constant) return function.template operator()<constant>();
    if constexpr (constant < 8) with_rank<constant + 1>(rank, function);
}

WHET_INLINE float lora_add_lanes(f32x16 v) {
    const F64Pair wide = widen(v);
    return static_cast<float>(segment_sum<8>(wide.low + wide.high)[0]);
}

// rows <= kLoraRows; hidden is (rows, rank).
constexpr size_t kLoraRows = 4;

template <int rank, class T>
void lora_down(const T* x, ptrdiff_t x_stride, size_t n_rows, size_t n, const float* a, float* hidden) {
    constexpr int unroll = kLoraUnroll<rank>;
    f32x16 sums[kLoraRows][unroll][rank];
    for (size_t row = 0; row < n_rows; ++row) {
        for (int u = 0; u < unroll; ++u) {
            for (int j = 0; j < rank; ++j) sums[row][u][j] = f32x16(0.0f);
        }
    }
    for (size_t begin = 0; begin < n; begin += kLoraPiece) {
        const size_t end = begin + kLoraPiece < n ? begin + kLoraPiece : n;
        for (size_t row = 0; row < n_rows; ++row) {
            const T* at = x + static_cast<ptrdiff_t>(row) * x_stride;
            f32x16 s[unroll][rank];
            WHET_UNROLL(4)
            for (int u = 0; u < unroll; ++u) {
                WHET_UNROLL(8)
                for (int j = 0; j < rank; ++j) s[u][j] = sums[row][u][j];
            }
            size_t i = begin;
            for (; i + 16 * unroll <= end; i += 16 * unroll) {
                WHET_UNROLL(4)
                for (int u = 0; u < unroll; ++u) {
                    const f32x16 v = rows::read(at + i + 16 * u, 16);
                    WHET_UNROLL(8)
                    for (int j = 0; j < rank; ++j) s[u][j] = fma(v, load(a + j * n + i + 16 * u), s[u][j]);
                }
            }
            rows::each(i, end, [&](size_t column, int count) WHET_INLINE_LAMBDA {
                const f32x16 v = rows::read(at + column, count);
                WHET_UNROLL(8)
                for (int j = 0; j < rank; ++j) s[0][j] = fma(v, rows::read(a + j * n + column, count), s[0][j]);
            });
            WHET_UNROLL(4)
            for (int u = 0; u < unroll; ++u) {
                WHET_UNROLL(8)
                for (int j = 0; j < rank; ++j) sums[row][u][j] = s[u][j];
            }
        }
    }
    for (size_t row = 0; row < n_rows; ++row) {
        for (int j = 0; j < rank; ++j) {
            for (int width = unroll / 2; width > 0; width /= 2) {
                for (int u = 0; u < width; ++u) sums[row][u][j] += sums[row][u + width][j];
            }
            hidden[row * rank + j] = lora_add_lanes(sums[row][0][j]);
        }
    }
}

template <int rank, class T>
void lora_up(const float* hidden, size_t n_rows, size_t n, const float* b, float scale, T* y, ptrdiff_t y_stride) {
    for (size_t begin = 0; begin < n; begin += kLoraPiece) {
        const size_t end = begin + kLoraPiece < n ? begin + kLoraPiece : n;
        for (size_t row = 0; row < n_rows; ++row) {
            T* at = y + static_cast<ptrdiff_t>(row) * y_stride;
            f32x16 h[rank];
            WHET_UNROLL(8)
            for (int j = 0; j < rank; ++j) h[j] = f32x16(scale * hidden[row * rank + j]);
            rows::each(begin, end, [&](size_t i, int count) WHET_INLINE_LAMBDA {
                f32x16 delta = h[0] * rows::read(b + i, count);
                WHET_UNROLL(8)
                for (int j = 1; j < rank; ++j) delta = fma(h[j], rows::read(b + j * n + i, count), delta);
                rows::put(at + i, rows::read(at + i, count) + delta, count);
            });
        }
    }
}

// One chunk of rows, and rank <= 4 rows of grad: more rows would evict each other's cache lines.
template <int rank, class T>
void lora_outer_piece(const float* hidden, size_t hidden_stride, const T* x, ptrdiff_t x_stride, size_t n_rows,
                      size_t n, float scale, float* grad, size_t grad_stride) {
    constexpr int unroll = kLoraUnroll<rank>;
    size_t i = 0;
    for (; i + 16 * unroll <= n; i += 16 * unroll) {
        f32x16 s[unroll][rank];
        WHET_UNROLL(4)
        for (int u = 0; u < unroll; ++u) {
            WHET_UNROLL(4)
            for (int j = 0; j < rank; ++j) s[u][j] = f32x16(0.0f);
        }
        for (size_t row = 0; row < n_rows; ++row) {
            const T* at = x + static_cast<ptrdiff_t>(row) * x_stride + i;
            WHET_UNROLL(4)
            for (int u = 0; u < unroll; ++u) {
                const f32x16 v = rows::read(at + 16 * u, 16);
                WHET_UNROLL(4)
                for (int j = 0; j < rank; ++j) s[u][j] = fma(f32x16(hidden[row * hidden_stride + j]), v, s[u][j]);
            }
        }
        WHET_UNROLL(4)
        for (int u = 0; u < unroll; ++u) {
            WHET_UNROLL(4)
            for (int j = 0; j < rank; ++j) {
                float* g = grad + j * grad_stride + i + 16 * u;
                store(g, fma(f32x16(scale), s[u][j], load(g)));
            }
        }
    }
    rows::each(i, n, [&](size_t column, int count) WHET_INLINE_LAMBDA {
        for (int j = 0; j < rank; ++j) {
            f32x16 s(0.0f);
            for (size_t row = 0; row < n_rows; ++row) {
                const T* at = x + static_cast<ptrdiff_t>(row) * x_stride + column;
                s = fma(f32x16(hidden[row * hidden_stride + j]), rows::read(at, count), s);
            }
            float* g = grad + j * grad_stride + column;
            rows::put(g, fma(f32x16(scale), s, rows::read(g, count)), count);
        }
    });
}

// n columns of x (rows, ...) and of grad (rank, ...) with row stride grad_stride; hidden is (rows, rank).
template <int rank, class T>
void lora_outer(const float* hidden, const T* x, ptrdiff_t x_stride, size_t n_rows, size_t n, float scale, float* grad,
                size_t grad_stride) {
    constexpr int low = rank <= 4 ? rank : 4, high = rank - low;
    for (size_t row = 0; row < n_rows; row += kLoraSumRows) {
        const size_t count = row + kLoraSumRows < n_rows ? kLoraSumRows : n_rows - row;
        const float* h = hidden + row * rank;
        const T* at = x + static_cast<ptrdiff_t>(row) * x_stride;
        lora_outer_piece<low>(h, rank, at, x_stride, count, n, scale, grad, grad_stride);
        if constexpr (high > 0) {
            lora_outer_piece<high>(h + low, rank, at, x_stride, count, n, scale, grad + low * grad_stride, grad_stride);
        }
    }
}

template <class T>
void lora_down_any(size_t rank, const T* x, ptrdiff_t x_stride, size_t n_rows, size_t n, const float* a,
                   float* hidden) {
    with_rank(rank, [&]<int r>() { lora_down<r>(x, x_stride, n_rows, n, a, hidden); });
}
template <class T>
void lora_up_any(size_t rank, const float* hidden, size_t n_rows, size_t n, const float* b, float scale, T* y,
                 ptrdiff_t y_stride) {
    with_rank(rank, [&]<int r>() { lora_up<r>(hidden, n_rows, n, b, scale, y, y_stride); });
}
template <class T>
void lora_outer_any(size_t rank, const float* hidden, const T* x, ptrdiff_t x_stride, size_t n_rows, size_t n,
                    float scale, float* grad, size_t grad_stride) {
    with_rank(rank, [&]<int r>() { lora_outer<r>(hidden, x, x_stride, n_rows, n, scale, grad, grad_stride); });
}

constexpr auto lora_down_f32 = lora_down_any<float>;
constexpr auto lora_down_bf16 = lora_down_any<uint16_t>;
constexpr auto lora_up_f32 = lora_up_any<float>;
constexpr auto lora_up_bf16 = lora_up_any<uint16_t>;
constexpr auto lora_outer_f32 = lora_outer_any<float>;
constexpr auto lora_outer_bf16 = lora_outer_any<uint16_t>;

}  // namespace
}  // namespace whet::WHET_ISA
