// Linear layers of the learner with their adapters, in both directions.
#include <algorithm>
#include <cstring>

#include "engine/scratch.h"
#include "kernels/dispatch.h"
#include "learner/learner.h"
#include "runtime/ceil_div.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

constexpr size_t kOuterRank = 8;       // rows of a gradient that lora_outer computes at once
constexpr size_t kOuterColumns = 128;  // columns of a task of it

}  // namespace

// y (rows, n) = W x + bias, and its adapters.
void Learner::project(size_t layer, Target target, ProductRows x, const RowTile& tile, float* y, size_t ldy) {
    const Matrix& w = matrix_of(*weights_, layer, target);
    const LowRank* low = adapters_at(layer, target);
    multiply(type_, w.parts, x, tile.n(), w.bias_or_null(), y, ldy);
    add_adapters(low, x, tile, y, ldy);
    if constexpr (kIsComplete) scale_outputs(low, tile.n(), y, ldy);
}

// Adds the results of the adapters of a matrix, or of an expert's, if there are any.
void Learner::add_adapters(const LowRank* low, ProductRows x, const RowTile& tile, float* y, size_t ldy) {
    if (low == nullptr || is_merged_) return;
    const size_t rows = tile.n();
    for (size_t adapter : adapters_of_.at(low)) {
        const Factors& f = factors_[adapter];
        const size_t rank = f.shape[0];
        project_down(f, input_of(adapter, x, tile), rows);
        const ProductRows t = convert_rows(type_, t_.get(), rank, rows, rank, Scratch::kCopy);
        multiply(type_, f.b(), t, rows, nullptr, y + f.first_row(), ldy, true);
    }
}

// x, or x with dropped elements, whose mask is drawn.
ProductRows Learner::input_of(size_t adapter, ProductRows x, const RowTile& tile) {
    if (!drops()) return x;
    const size_t k = factors_[adapter].shape[1];
    draw_mask(adapter, k, tile);
    return drop(x, tile.n(), k);
}

// t (rows, rank) = A x / (1 - p).
void Learner::project_down(const Factors& f, ProductRows x, size_t rows) {
    const size_t rank = f.shape[0];
    multiply(type_, f.a(), x, rows, nullptr, t_.get(), rank);
    if (drops()) kernels().blend_f32(t_.get(), rows * rank, kept_scale(), 0.0f, t_.get());
}

// grad_x (rows, k), or what is added to it, from grad_y (rows, n); adds to the gradients of the adapters.
void Learner::project_backward(size_t layer, Target target, ProductRows x, const RowTile& tile, const float* grad_y,
                               size_t ldy, float* grad_x, size_t ldx, std::span<const FactorGradients> grads,
                               bool add) {
    const LowRank* low = adapters_at(layer, target);
    if constexpr (kIsComplete) grad_y = unscale(layer, target, low, x, tile, grad_y, ldy, grads);
    multiply_transposed(type_, matrix_of(*weights_, layer, target).parts, grad_y, ldy, tile.n(), grad_x, ldx, add);
    adapters_backward(low, x, tile, grad_y, ldy, grad_x, ldx, grads);
}

// Adds to grad_x and to the gradients of the adapters of a matrix, or of an expert's, if there are any. The latter are
// of grad_y times row_weights, unless these are null.
void Learner::adapters_backward(const LowRank* low, ProductRows x, const RowTile& tile, const float* grad_y, size_t ldy,
                                float* grad_x, size_t ldx, std::span<const FactorGradients> grads,
                                const float* row_weights) {
    if (low == nullptr) return;
    const size_t rows = tile.n();
    const bool bf16 = type_ == ProductType::kBFloat16;
    for (size_t adapter : adapters_of_.at(low)) {
        const Factors& f = factors_[adapter];
        const auto [rank, k, n] = f.shape;
        const float* grad = grad_y + f.first_row();
        const ProductRows input = input_of(adapter, x, tile);
        project_down(f, input, rows);
        multiply_transposed(type_, f.b(), grad, ldy, rows, u_.get(), rank, false);
        if (drops()) {
            kernels().blend_f32(u_.get(), rows * rank, kept_scale(), 0.0f, u_.get());
            multiply_transposed(type_, f.a(), u_.get(), rank, rows, grad_dropped_.get(), k, false);
            add_kept(rows, k, grad_x, ldx);
        } else if (!is_merged_) {
            multiply_transposed(type_, f.a(), u_.get(), rank, rows, grad_x, ldx, true);
        }
        for (size_t i = 0; row_weights != nullptr && i < rows; ++i) {
            for (float* values : {t_.get(), u_.get()}) {
                kernels().blend_f32(values + i * rank, rank, row_weights[i], 0.0f, values + i * rank);
            }
        }
        accumulate(u_.get(), rank, input.data, bf16, input.ld, tile, k, 1.0f, grads[adapter].a);
        accumulate(t_.get(), rank, grad, false, ldy, tile, n, f.scale, grads[adapter].b);
    }
}

// grad (rank, n) += scale hidden^T x for hidden (rows, rank) and x (rows, n): group by group, kSumRows rows at a time.
void Learner::accumulate(const float* hidden, size_t rank, const void* x, bool bf16, size_t ldx, const RowTile& tile,
                         size_t n, float scale, float* grad) const {
    const size_t rows = tile.n(), blocks = ceil_div(rank, kOuterRank), columns = ceil_div(n, kOuterColumns);
    float* copy = scratch<float>(rows * rank, Scratch::kSums);  // block by block, (rows, ranks of the block)
    for (size_t block = 0; block < blocks; ++block) {
        const size_t first = block * kOuterRank, ranks = std::min(kOuterRank, rank - first);
        for (size_t i = 0; i < rows; ++i) {
            std::memcpy(copy + first * rows + i * ranks, hidden + i * rank + first, ranks * sizeof(float));
        }
    }
    parallel_for(blocks * columns, 0.05 * static_cast<double>(rows * rank * n), [&](size_t i) {
        const size_t first = i % blocks * kOuterRank, ranks = std::min(kOuterRank, rank - first);
        const size_t column = i / blocks * kOuterColumns, count = std::min(kOuterColumns, n - column);
        for (const auto& [begin, end] : tile.groups) {
            const float* h = copy + first * rows + begin * ranks;
            float* to = grad + first * n + column;
            const size_t at = begin * ldx + column;
            if (bf16) {
                kernels().lora_outer_bf16(ranks, h, static_cast<const uint16_t*>(x) + at, static_cast<ptrdiff_t>(ldx),
                                          end - begin, count, scale, to, n);
            } else {
                kernels().lora_outer_f32(ranks, h, static_cast<const float*>(x) + at, static_cast<ptrdiff_t>(ldx),
                                         end - begin, count, scale, to, n);
            }
        }
    });
}

}  // namespace whet
