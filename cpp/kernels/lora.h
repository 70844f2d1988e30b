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

WHET_INLINE f32x16 lora_load(const float* x) { return load(x); }
WHET_INLINE f32x16 lora_load(const uint16_t* x) { return load_bf16(x); }
WHET_INLINE void lora_store(float* y, f32x16 v) { store(y, v); }
WHET_INLINE void lora_store(uint16_t* y, f32x16 v) { store_bf16(y, v); }

// The first n lanes, n < 16: the others are 0 on a load and unchanged in memory on a store.
WHET_INLINE f32x16 lora_load_first(const float* x, int n) { return load_first(x, n, 0.0f); }
WHET_INLINE f32x16 lora_load_first(const uint16_t* x, int n) {
    uint16_t lanes[16] = {};
    for (int i = 0; i < n; ++i) lanes[i] = x[i];
    return load_bf16(lanes);
}
WHET_INLINE void lora_store_first(float* y, f32x16 v, int n) { store_first(y, v, n); }
WHET_INLINE void lora_store_first(uint16_t* y, f32x16 v, int n) {
    uint16_t lanes[16];
    store_bf16(lanes, v);
    for (int i = 0; i < n; ++i) y[i] = lanes[i];
}

WHET_INLINE float lora_add_lanes(f32x16 v) {
    const F64Pair wide = widen(v);
    return static_cast<float>(segment_sum<8>(wide.low + wide.high)[0]);
}

// rows <= kLoraRows; hidden is (rows, rank).
constexpr size_t kLoraRows = 4;

template <int rank, class T>
void lora_down(const T* x, ptrdiff_t x_stride, size_t rows, size_t n, const float* a, float* hidden) {
    constexpr int unroll = kLoraUnroll<rank>;
    f32x16 sums[kLoraRows][unroll][rank];
    for (size_t row = 0; row < rows; ++row) {
        for (int u = 0; u < unroll; ++u) {
            for (int j = 0; j < rank; ++j) sums[row][u][j] = f32x16(0.0f);
        }
    }
    for (size_t begin = 0; begin < n; begin += kLoraPiece) {
        const size_t end = begin + kLoraPiece < n ? begin + kLoraPiece : n;
        for (size_t row = 0; row < rows; ++row) {
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
                    const f32x16 v = lora_load(at + i + 16 * u);
                    WHET_UNROLL(8)
                    for (int j = 0; j < rank; ++j) s[u][j] = fma(v, load(a + j * n + i + 16 * u), s[u][j]);
                }
            }
            for (; i + 16 <= end; i += 16) {
                const f32x16 v = lora_load(at + i);
                WHET_UNROLL(8)
                for (int j = 0; j < rank; ++j) s[0][j] = fma(v, load(a + j * n + i), s[0][j]);
            }
            if (i < end) {
                const int rest = static_cast<int>(end - i);
                const f32x16 v = lora_load_first(at + i, rest);
                WHET_UNROLL(8)
                for (int j = 0; j < rank; ++j) s[0][j] = fma(v, load_first(a + j * n + i, rest, 0.0f), s[0][j]);
            }
            WHET_UNROLL(4)
            for (int u = 0; u < unroll; ++u) {
                WHET_UNROLL(8)
                for (int j = 0; j < rank; ++j) sums[row][u][j] = s[u][j];
            }
        }
    }
    for (size_t row = 0; row < rows; ++row) {
        for (int j = 0; j < rank; ++j) {
            for (int width = unroll / 2; width > 0; width /= 2) {
                for (int u = 0; u < width; ++u) sums[row][u][j] += sums[row][u + width][j];
            }
            hidden[row * rank + j] = lora_add_lanes(sums[row][0][j]);
        }
    }
}

template <int rank, class T>
void lora_up(const float* hidden, size_t rows, size_t n, const float* b, float scale, T* y, ptrdiff_t y_stride) {
    for (size_t begin = 0; begin < n; begin += kLoraPiece) {
        const size_t end = begin + kLoraPiece < n ? begin + kLoraPiece : n;
        for (size_t row = 0; row < rows; ++row) {
            T* at = y + static_cast<ptrdiff_t>(row) * y_stride;
            f32x16 h[rank];
            WHET_UNROLL(8)
            for (int j = 0; j < rank; ++j) h[j] = f32x16(scale * hidden[row * rank + j]);
            size_t i = begin;
            for (; i + 16 <= end; i += 16) {
                f32x16 delta = h[0] * load(b + i);
                WHET_UNROLL(8)
                for (int j = 1; j < rank; ++j) delta = fma(h[j], load(b + j * n + i), delta);
                lora_store(at + i, lora_load(at + i) + delta);
            }
            if (i < end) {
                const int rest = static_cast<int>(end - i);
                f32x16 delta = h[0] * load_first(b + i, rest, 0.0f);
                WHET_UNROLL(8)
                for (int j = 1; j < rank; ++j) delta = fma(h[j], load_first(b + j * n + i, rest, 0.0f), delta);
                lora_store_first(at + i, lora_load_first(at + i, rest) + delta, rest);
            }
        }
    }
}

// One chunk of rows, and rank <= 4 rows of grad: more rows would evict each other's cache lines.
template <int rank, class T>
void lora_outer_piece(const float* hidden, size_t hidden_stride, const T* x, ptrdiff_t x_stride, size_t rows, size_t n,
                      float scale, float* grad, size_t grad_stride) {
    constexpr int unroll = kLoraUnroll<rank>;
    size_t i = 0;
    for (; i + 16 * unroll <= n; i += 16 * unroll) {
        f32x16 s[unroll][rank];
        WHET_UNROLL(4)
        for (int u = 0; u < unroll; ++u) {
            WHET_UNROLL(4)
            for (int j = 0; j < rank; ++j) s[u][j] = f32x16(0.0f);
        }
        for (size_t row = 0; row < rows; ++row) {
            const T* at = x + static_cast<ptrdiff_t>(row) * x_stride + i;
            WHET_UNROLL(4)
            for (int u = 0; u < unroll; ++u) {
                const f32x16 v = lora_load(at + 16 * u);
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
    for (; i < n; i += 16) {
        const int lanes = n - i < 16 ? static_cast<int>(n - i) : 16;
        const bool whole = lanes == 16;
        for (int j = 0; j < rank; ++j) {
            f32x16 s(0.0f);
            for (size_t row = 0; row < rows; ++row) {
                const T* at = x + static_cast<ptrdiff_t>(row) * x_stride + i;
                s = fma(f32x16(hidden[row * hidden_stride + j]), whole ? lora_load(at) : lora_load_first(at, lanes), s);
            }
            float* g = grad + j * grad_stride + i;
            if (whole) {
                store(g, fma(f32x16(scale), s, load(g)));
            } else {
                store_first(g, fma(f32x16(scale), s, load_first(g, lanes, 0.0f)), lanes);
            }
        }
    }
}

// n columns of x (rows, ...) and of grad (rank, ...) with row stride grad_stride; hidden is (rows, rank).
template <int rank, class T>
void lora_outer(const float* hidden, const T* x, ptrdiff_t x_stride, size_t rows, size_t n, float scale, float* grad,
                size_t grad_stride) {
    constexpr int low = rank <= 4 ? rank : 4, high = rank - low;
    for (size_t row = 0; row < rows; row += kLoraSumRows) {
        const size_t count = row + kLoraSumRows < rows ? kLoraSumRows : rows - row;
        const float* h = hidden + row * rank;
        const T* at = x + static_cast<ptrdiff_t>(row) * x_stride;
        lora_outer_piece<low>(h, rank, at, x_stride, count, n, scale, grad, grad_stride);
        if constexpr (high > 0) {
            lora_outer_piece<high>(h + low, rank, at, x_stride, count, n, scale, grad + low * grad_stride, grad_stride);
        }
    }
}

// Dispatches to a function compiled for the rank.
#define WHET_LORA_RANKS(function, ...)       \
    switch (rank) {                          \
        case 1:                              \
            return function<1>(__VA_ARGS__); \
        case 2:                              \
            return function<2>(__VA_ARGS__); \
        case 3:                              \
            return function<3>(__VA_ARGS__); \
        case 4:                              \
            return function<4>(__VA_ARGS__); \
        case 5:                              \
            return function<5>(__VA_ARGS__); \
        case 6:                              \
            return function<6>(__VA_ARGS__); \
        case 7:                              \
            return function<7>(__VA_ARGS__); \
        case 8:                              \
            return function<8>(__VA_ARGS__); \
    }

void lora_down_f32(size_t rank, const float* x, ptrdiff_t x_stride, size_t rows, size_t n, const float* a,
                   float* hidden) {
    WHET_LORA_RANKS(lora_down, x, x_stride, rows, n, a, hidden)
}
void lora_down_bf16(size_t rank, const uint16_t* x, ptrdiff_t x_stride, size_t rows, size_t n, const float* a,
                    float* hidden) {
    WHET_LORA_RANKS(lora_down, x, x_stride, rows, n, a, hidden)
}
void lora_up_f32(size_t rank, const float* hidden, size_t rows, size_t n, const float* b, float scale, float* y,
                 ptrdiff_t y_stride) {
    WHET_LORA_RANKS(lora_up, hidden, rows, n, b, scale, y, y_stride)
}
void lora_up_bf16(size_t rank, const float* hidden, size_t rows, size_t n, const float* b, float scale, uint16_t* y,
                  ptrdiff_t y_stride) {
    WHET_LORA_RANKS(lora_up, hidden, rows, n, b, scale, y, y_stride)
}
void lora_outer_f32(size_t rank, const float* hidden, const float* x, ptrdiff_t x_stride, size_t rows, size_t n,
                    float scale, float* grad, size_t grad_stride) {
    WHET_LORA_RANKS(lora_outer, hidden, x, x_stride, rows, n, scale, grad, grad_stride)
}
void lora_outer_bf16(size_t rank, const float* hidden, const uint16_t* x, ptrdiff_t x_stride, size_t rows, size_t n,
                     float scale, float* grad, size_t grad_stride) {
    WHET_LORA_RANKS(lora_outer, hidden, x, x_stride, rows, n, scale, grad, grad_stride)
}
#undef WHET_LORA_RANKS

}  // namespace
}  // namespace whet::WHET_ISA
