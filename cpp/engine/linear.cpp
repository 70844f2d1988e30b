#include "engine/linear.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <utility>

#include "engine/scratch.h"
#include "kernels/dispatch.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

constexpr size_t kPanel = 16;            // outputs
constexpr size_t kTilePanels = 3;        // what the widest tile takes at once
constexpr size_t kTaskRows = 256;        // rows of one task
constexpr size_t kFewRows = 8;           // below it a layer waits for its weights
constexpr size_t kWorthThreads = 20000;  // multiply-adds
constexpr size_t kTaskWork = 150000;     // of one task at least
constexpr size_t kOwnInputs = 65536;     // inputs of a layer that every thread makes for itself

size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

// ---------------------------------------------------------------- the product

// body(first panel, panel count, first row, row count) for all panels and rows, over the pool where the work is worth
// it.
template <class F>
void for_tiles(size_t n_panels, size_t rows, size_t k, F&& body) {
    if (n_panels == 0 || rows == 0) return;
    const size_t work = n_panels * kPanel * rows * k;
    if (work < kWorthThreads) return body(0, n_panels, 0, rows);
    const size_t row_tasks = ceil_div(rows, kTaskRows), threads = static_cast<size_t>(num_threads());
    // Whole tiles of panels: tasks that are worth a claim, and many enough that no thread waits long for the last one.
    // Few rows are bound by memory, which is read fastest in long runs. With many, few enough panels to stay in the L2
    // cache.
    size_t panels = kTilePanels;
    if (row_tasks == 1) {
        const size_t per_thread = std::clamp<size_t>(work / kTaskWork / threads, 1, rows < kFewRows ? 1 : 16);
        panels *= std::max<size_t>(1, n_panels / kTilePanels / (per_thread * threads));
    }
    const size_t panel_tasks = ceil_div(n_panels, panels);
    auto task = [&](size_t i) {
        const size_t panel = i / row_tasks * panels, row = i % row_tasks * kTaskRows;
        body(panel, std::min(panels, n_panels - panel), row, std::min(kTaskRows, rows - row));
    };
    parallel_for(panel_tasks * row_tasks, task);
}

// body(i) for every row, over the pool where there is much to do.
template <class F>
void for_rows(size_t rows, size_t k, F&& body) {
    if (rows < 2 || rows * k < 32768) {
        for (size_t i = 0; i < rows; ++i) body(i);
        return;
    }
    parallel_for(rows, body);
}

// A layer's inputs in the form that its kernel takes: `bytes` of memory, in which write(memory, i) makes row i.
//
// Few inputs are made by every thread for itself, in memory that is in its caches already: lines that another processor
// has read come back slowly, and cost more than the work. Many are made once, by all threads.
template <class Write>
class Inputs {
public:
    Inputs(size_t rows, size_t k, size_t bytes, Write write) : rows_(rows), bytes_(bytes), write_(std::move(write)) {
        if (rows * k <= kOwnInputs) return;
        shared_ = scratch<uint8_t>(bytes, 0);
        for_rows(rows, k, [this](size_t i) { write_(shared_, i); });
    }

    // For the calling thread.
    const uint8_t* memory() const {
        if (shared_ != nullptr) return shared_;
        thread_local uint64_t made = 0;  // the last layer's inputs here
        uint8_t* own = scratch<uint8_t>(bytes_, 0);
        for (size_t i = 0; made != number_ && i < rows_; ++i) write_(own, i);
        made = number_;
        return own;
    }

private:
    inline static std::atomic<uint64_t> count{0};
    const uint64_t number_ = ++count;
    const size_t rows_, bytes_;
    const Write write_;
    uint8_t* shared_ = nullptr;
};

using QuantisedKernel = decltype(Kernels::linear_q8_0);

QuantisedKernel quantised_kernel(WeightFormat format) {
    const Kernels& k = kernels();
    switch (format) {
        case WeightFormat::kInt8:
            return k.linear_int8;
        case WeightFormat::kQ8_0:
            return k.linear_q8_0;
        case WeightFormat::kQ4_0:
            return k.linear_q4_0;
        default:
            return k.linear_q4_k;
    }
}

// What calls a kernel for some rows and panels of a layer.
struct Tile {
    size_t row, rows, n;
    const void* panels;
    const float* bias;
    float* y;
};

}  // namespace

void linear(const PackedWeight& w, const void* x, bool x_bf16, size_t ldx, size_t rows, const float* bias, float* y,
            size_t ldy) {
    const size_t k = w.k(), steps = w.steps();
    const auto for_each_tile = [&](auto&& body) {
        for_tiles(ceil_div(w.n(), kPanel), rows, k, [&](size_t panel, size_t count, size_t row, size_t n_rows) {
            const size_t first = panel * kPanel, n = std::min(count * kPanel, w.n() - first);
            body(Tile{row, n_rows, n, w.panel(panel), bias == nullptr ? nullptr : bias + first, y + row * ldy + first});
        });
    };
    const auto* x_f32 = static_cast<const float*>(x);
    const auto* x_bits = static_cast<const uint16_t*>(x);
    if (w.format() == WeightFormat::kFloat32) {
        const auto product = [&](const float* in, size_t ld, const Tile& t) {
            kernels().linear_f32(in + t.row * ld, ld, t.rows, t.panels, steps, t.n, t.bias, t.y, ldy);
        };
        if (!x_bf16) return for_each_tile([&](const Tile& t) { product(x_f32, ldx, t); });
        const Inputs wide(rows, k, rows * k * sizeof(float), [=](uint8_t* memory, size_t i) {
            kernels().f32_from_bf16(x_bits + i * ldx, k, reinterpret_cast<float*>(memory) + i * k);
        });
        for_each_tile([&](const Tile& t) { product(reinterpret_cast<const float*>(wide.memory()), k, t); });
    } else if (w.format() == WeightFormat::kBFloat16) {
        const auto product = [&](const uint16_t* in, size_t ld, const Tile& t) {
            kernels().linear_bf16(in + t.row * ld, ld, t.rows, t.panels, steps, t.n, t.bias, t.y, ldy);
        };
        if (x_bf16 && k % 2 == 0) return for_each_tile([&](const Tile& t) { product(x_bits, ldx, t); });
        const size_t even = k + k % 2;
        const Inputs narrow(rows, k, rows * even * sizeof(uint16_t), [=](uint8_t* memory, size_t i) {
            uint16_t* row = reinterpret_cast<uint16_t*>(memory) + i * even;
            if (x_bf16) {
                std::memcpy(row, x_bits + i * ldx, k * sizeof *row);
            } else {
                kernels().bf16_from_f32(x_f32 + i * ldx, k, row);
            }
            if (k < even) row[k] = 0;
        });
        for_each_tile([&](const Tile& t) { product(reinterpret_cast<const uint16_t*>(narrow.memory()), even, t); });
    } else {
        const size_t blocks = steps, width = blocks * kQuantBlock;
        const Inputs quantised(rows, k, rows * (width + 8 * blocks), [=](uint8_t* memory, size_t i) {
            const float* row = x_f32 + i * ldx;
            if (x_bf16) {
                float* wide = scratch<float>(k, 1);
                kernels().f32_from_bf16(x_bits + i * ldx, k, wide);
                row = wide;
            }
            auto* scales = reinterpret_cast<float*>(memory + rows * width) + i * blocks;
            auto* offsets = reinterpret_cast<int32_t*>(memory + rows * (width + 4 * blocks)) + i * blocks;
            kernels().quantize_row_f32(row, k, reinterpret_cast<int8_t*>(memory) + i * width, scales, offsets);
        });
        const QuantisedKernel kernel = quantised_kernel(w.format());
        for_each_tile([&](const Tile& t) {
            const uint8_t* memory = quantised.memory();
            const auto* scales = reinterpret_cast<const float*>(memory + rows * width) + t.row * blocks;
            const auto* offsets = reinterpret_cast<const int32_t*>(memory + rows * (width + 4 * blocks));
            kernel(reinterpret_cast<const int8_t*>(memory) + t.row * width, scales, offsets + t.row * blocks, t.rows,
                   blocks, t.panels, t.n, t.bias, t.y, ldy);
        });
    }
}

// ---------------------------------------------------------------- gemm

namespace {

// b (k, n) with any strides in panels of 16 columns; T is float, or uint16_t whose steps hold two k each.
template <class T>
void pack_columns(const T* b, ptrdiff_t b_row, ptrdiff_t b_column, size_t k, size_t n, T* panels) {
    constexpr size_t per_step = 4 / sizeof(T);
    const size_t steps = ceil_div(k, per_step), panel_size = steps * kPanel * per_step;
    auto one = [&](size_t p) {
        T* panel = panels + p * panel_size;
        const size_t first = p * kPanel, count = std::min(kPanel, n - first);
        if (count < kPanel || k % per_step != 0) std::memset(panel, 0, panel_size * sizeof(T));
        const T* from = b + static_cast<ptrdiff_t>(first) * b_column;
        const auto at = [&](size_t i, size_t j) {
            return from[static_cast<ptrdiff_t>(i) * b_row + static_cast<ptrdiff_t>(j) * b_column];
        };
        const size_t whole = k / per_step;
        if (b_row == 1) {  // a column's words go to the panel as they are; a few lines of it at a time
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
    if (k * n < 32768) {
        for (size_t p = 0; p < ceil_div(n, kPanel); ++p) one(p);
    } else {
        parallel_for(ceil_div(n, kPanel), one);
    }
}

// a (rows, k) with any strides row by row, with zeros from k to width. In squares: the lines of those that lie column
// by column are used up before they leave the cache.
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
    T* panels = scratch<T>(ceil_div(n, kPanel) * kPanel * width, 0);
    pack_columns(b, b_row, b_column, k, n, panels);
    const bool in_place = is_f32 && alpha == 1.0f && beta == 0.0f;
    float* sums = in_place ? nullptr : scratch<float>(std::min(m, row_chunk) * n, 1);
    for (size_t begin = 0; begin < m; begin += row_chunk) {
        const size_t rows = std::min(row_chunk, m - begin);
        const T* x = a + static_cast<ptrdiff_t>(begin) * a_row;
        auto ldx = static_cast<size_t>(a_row);
        if (a_column != 1 || width != k || a_row < 0) {
            // Rows a power of two apart would share a few places of the cache.
            ldx = ceil_div(width * sizeof(T), 128) * (128 / sizeof(T)) + 64 / sizeof(T);
            T* copy = scratch<T>(rows * ldx, 2);
            copy_rows(x, a_row, a_column, rows, k, width, copy, ldx);
            x = copy;
        }
        T* out = c + static_cast<ptrdiff_t>(begin) * ldc;
        float* y = sums;
        size_t ldy = n;
        if constexpr (is_f32) {
            if (in_place) y = out, ldy = static_cast<size_t>(ldc);
        }
        for_tiles(ceil_div(n, kPanel), rows, k, [&](size_t panel, size_t count, size_t row, size_t n_rows) {
            const size_t first = panel * kPanel, columns = std::min(count * kPanel, n - first);
            const T* from = panels + panel * kPanel * width;
            const auto kernel = [] {
                if constexpr (is_f32) {
                    return kernels().linear_f32;
                } else {
                    return kernels().linear_bf16;
                }
            }();
            kernel(x + row * ldx, ldx, n_rows, from, steps, columns, nullptr, y + row * ldy + first, ldy);
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
    if (bf16) {
        gemm_of(m, n, k, alpha, static_cast<const uint16_t*>(a), a_row, a_column, static_cast<const uint16_t*>(b),
                b_row, b_column, beta, static_cast<uint16_t*>(c), ldc);
    } else {
        gemm_of(m, n, k, alpha, static_cast<const float*>(a), a_row, a_column, static_cast<const float*>(b), b_row,
                b_column, beta, static_cast<float*>(c), ldc);
    }
}

// ---------------------------------------------------------------- gemv

namespace {

template <class T, class Rows, class Columns>
void gemv_of(Rows by_rows, Columns by_columns, size_t m, size_t n, const T* a, ptrdiff_t a_row, ptrdiff_t a_column,
             const float* x, float* y) {
    const bool rows_lie = a_column == 1;
    const auto lda = static_cast<size_t>(rows_lie ? a_row : a_column);
    // By columns a task takes whole runs of memory of every row.
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
    const size_t tasks = ceil_div(units, per_task);
    if (m * n < kWorthThreads) {
        for (size_t i = 0; i < tasks; ++i) task(i);
    } else {
        parallel_for(tasks, task);
    }
}

}  // namespace

void gemv(bool bf16, size_t m, size_t n, float alpha, const void* a, ptrdiff_t a_row, ptrdiff_t a_column,
          const float* x, float beta, float* y) {
    const bool in_place = alpha == 1.0f && beta == 0.0f;
    float* sums = in_place ? y : scratch<float>(m, 1);
    const Kernels& k = kernels();
    if (bf16) {
        gemv_of(k.gemv_rows_bf16, k.gemv_columns_bf16, m, n, static_cast<const uint16_t*>(a), a_row, a_column, x, sums);
    } else {
        gemv_of(k.gemv_rows_f32, k.gemv_columns_f32, m, n, static_cast<const float*>(a), a_row, a_column, x, sums);
    }
    if (!in_place) k.blend_f32(sums, m, alpha, beta, y);
}

}  // namespace whet
