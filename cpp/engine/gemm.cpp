#include "engine/gemm.h"

#include <bit>
#include <cstdint>
#include <cstring>

#include "engine/scratch.h"
#include "engine/tiles.h"
#include "kernels/dispatch.h"
#include "kernels/panel_layout.h"
#include "runtime/array.h"
#include "runtime/ceil_div.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

// Packs b (k, n) with any strides into panels of 16 columns. A step of a panel is one k of float, or two of uint16_t.
template <class T>
void pack_columns(const T* b, ptrdiff_t b_row, ptrdiff_t b_column, size_t k, size_t n, T* panels) {
    constexpr size_t per_step = 4 / sizeof(T);
    const size_t steps = ceil_div(k, per_step), panel_size = steps * kPanel * per_step;
    auto pack_panel = [&](size_t p) {
        T* panel = panels + p * panel_size;
        const size_t first = p * kPanel, count = std::min(kPanel, n - first);
        if (count < kPanel || k % per_step != 0) std::memset(panel, 0, panel_size * sizeof(T));
        const T* from = b + static_cast<ptrdiff_t>(first) * b_column;
        const auto at = [&](size_t i, size_t j) {
            return from[static_cast<ptrdiff_t>(i) * b_row + static_cast<ptrdiff_t>(j) * b_column];
        };
        const size_t whole = k / per_step;
        if (b_row == 1) {  // copy the words of each column, a few cache lines at a time
            for (size_t begin = 0; begin < whole; begin += 64) {
                const size_t end = std::min(whole, begin + 64);
                for (size_t j = 0; j < count; ++j) {
                    const T* column = from + static_cast<ptrdiff_t>(j) * b_column;
                    for (size_t w = begin; w < end; ++w) {
                        std::memcpy(panel + (w * kPanel + j) * per_step, column + w * per_step, 4);
                    }
                }
            }
        } else {
            for (size_t w = 0; w < whole; ++w) {
                uint32_t words[kPanel];
                for (size_t j = 0; j < count; ++j) {
                    if constexpr (per_step == 1) {
                        words[j] = std::bit_cast<uint32_t>(at(w, j));
                    } else {
                        words[j] = at(2 * w, j) | static_cast<uint32_t>(at(2 * w + 1, j)) << 16;
                    }
                }
                std::memcpy(panel + w * kPanel * per_step, words, 4 * count);
            }
        }
        for (size_t j = 0; whole < steps && j < count; ++j) panel[(whole * kPanel + j) * per_step] = at(k - 1, j);
    };
    for_rows(ceil_div(n, kPanel), kPanel * k, pack_panel);
}

// Copies a (rows, k) with any strides to row-major order, zero-padded to width. In square blocks, so that all of a
// cache line of a column-major a is read before it is evicted.
template <class T>
void copy_rows(const T* a, ptrdiff_t a_row, ptrdiff_t a_column, size_t rows, size_t k, size_t width, T* copy,
               size_t ld) {
    constexpr size_t side = 32;
    for_rows(ceil_div(rows, side), side * k, [=](size_t block) {
        const size_t first = block * side, last = std::min(rows, first + side);
        for (size_t begin = 0; begin < width; begin += side) {
            const size_t end = std::min(k, begin + side);
            for (size_t i = first; i < last; ++i) {
                const T* from = a + static_cast<ptrdiff_t>(i) * a_row + static_cast<ptrdiff_t>(begin) * a_column;
                T* to = copy + i * ld;
                for (size_t j = begin; j < end; ++j, from += a_column) to[j] = *from;
            }
        }
        for (size_t i = first; k < width && i < last; ++i) copy[i * ld + k] = T(0);
    });
}

template <class T>
void gemm_of(size_t m, size_t n, size_t k, float alpha, const T* a, ptrdiff_t a_row, ptrdiff_t a_column, const T* b,
             ptrdiff_t b_row, ptrdiff_t b_column, float beta, T* c, ptrdiff_t ldc) {
    constexpr bool is_f32 = sizeof(T) == 4;
    constexpr size_t per_step = 4 / sizeof(T), row_chunk = 1024;
    const size_t steps = ceil_div(k, per_step), width = steps * per_step;
    T* panels = scratch<T>(ceil_div(n, kPanel) * kPanel * width, Scratch::kPanels);
    pack_columns(b, b_row, b_column, k, n, panels);
    const bool in_place = is_f32 && alpha == 1.0f && beta == 0.0f;
    float* sums = in_place ? nullptr : scratch<float>(std::min(m, row_chunk) * n, Scratch::kSums);
    for (size_t begin = 0; begin < m; begin += row_chunk) {
        const size_t rows = std::min(row_chunk, m - begin);
        const T* x = a + static_cast<ptrdiff_t>(begin) * a_row;
        auto ldx = static_cast<size_t>(a_row);
        if (a_column != 1 || width != k || a_row < 0) {
            // Rows with a stride of a power of two would map to the same few cache sets.
            ldx = ceil_div(width * sizeof(T), 128) * (128 / sizeof(T)) + 64 / sizeof(T);
            T* copy = scratch<T>(rows * ldx, Scratch::kCopy);
            copy_rows(x, a_row, a_column, rows, k, width, copy, ldx);
            x = copy;
        }
        T* out = c + static_cast<ptrdiff_t>(begin) * ldc;
        float* y = sums;
        size_t ldy = n;
        if constexpr (is_f32) {
            if (in_place) y = out, ldy = static_cast<size_t>(ldc);
        }
        for_tiles(ceil_div(n, kPanel), rows, k, [&](const Tile& tile) {
            const size_t first = tile.panel * kPanel;
            const auto kernel = is_f32 ? kernels().linear_f32 : kernels().linear_bf16;
            kernel({.x = x + tile.row * ldx,
                    .ldx = ldx,
                    .rows = tile.n_rows,
                    .panels = panels + first * width,
                    .steps = steps,
                    .n = std::min(tile.n_panels * kPanel, n - first),
                    .y = y + tile.row * ldy + first,
                    .ldy = ldy});
        });
        if (in_place) continue;
        for_rows(rows, n, [&](size_t i) {
            if constexpr (is_f32) {
                kernels().blend_f32(sums + i * n, n, alpha, beta, out + static_cast<ptrdiff_t>(i) * ldc);
            } else {
                kernels().blend_bf16(sums + i * n, n, alpha, beta, out + static_cast<ptrdiff_t>(i) * ldc);
            }
        });
    }
}

}  // namespace

void gemm(bool bf16, size_t m, size_t n, size_t k, float alpha, const void* a, ptrdiff_t a_row, ptrdiff_t a_column,
          const void* b, ptrdiff_t b_row, ptrdiff_t b_column, float beta, void* c, ptrdiff_t ldc) {
    const auto run = [&]<class T>(T* out) {
        gemm_of(m, n, k, alpha, static_cast<const T*>(a), a_row, a_column, static_cast<const T*>(b), b_row, b_column,
                beta, out, ldc);
    };
    bf16 ? run(static_cast<uint16_t*>(c)) : run(static_cast<float*>(c));
}

// ---------------------------------------------------------------- gemv

namespace {

template <class T, class Rows, class Columns>
void gemv_of(Rows by_rows, Columns by_columns, size_t m, size_t n, const T* a, ptrdiff_t a_row, ptrdiff_t a_column,
             const float* x, float* y) {
    const bool rows_lie = a_column == 1;
    const auto lda = static_cast<size_t>(rows_lie ? a_row : a_column);
    // Split by columns, so that a task reads a contiguous run of every row.
    const size_t unit = rows_lie ? 4 : 128, units = ceil_div(m, unit);
    const size_t per_task = std::max<size_t>(1, units / (4 * static_cast<size_t>(num_threads())));
    auto task = [&](size_t i) {
        const size_t first = i * per_task * unit, count = std::min(per_task * unit, m - first);
        if (rows_lie) {
            by_rows(a + first * lda, lda, count, n, x, y + first);
        } else {
            by_columns(a + first, lda, n, count, x, y + first);
        }
    };
    parallel_for(ceil_div(units, per_task), kMultiplyAddNs * static_cast<double>(m * n), task);
}

}  // namespace

void gemv(bool bf16, size_t m, size_t n, float alpha, const void* a, ptrdiff_t a_row, ptrdiff_t a_column,
          const float* x, float beta, float* y) {
    const bool in_place = alpha == 1.0f && beta == 0.0f;
    float* sums = in_place ? y : scratch<float>(m, Scratch::kSums);
    const Kernels& k = kernels();
    if (!kFloat32Only && bf16) {
        gemv_of(k.gemv_rows_bf16, k.gemv_columns_bf16, m, n, static_cast<const uint16_t*>(a), a_row, a_column, x, sums);
    } else {
        gemv_of(k.gemv_rows_f32, k.gemv_columns_f32, m, n, static_cast<const float*>(a), a_row, a_column, x, sums);
    }
    if (!in_place) k.blend_f32(sums, m, alpha, beta, y);
}

}  // namespace whet
