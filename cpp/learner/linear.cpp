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
    const Matrix& w = matrix_of(weights_->layers[layer], target);
    const size_t rows = tile.n();
    multiply(type_, w.parts, x, rows, w.bias_or_null(), y, ldy);
    if (!with_adapters_) return;
    const LowRank& low = adapter_.layers[layer][static_cast<size_t>(target)];
    for (size_t adapter = 0; adapter < factors_.size(); ++adapter) {
        const Factors& f = factors_[adapter];
        if (f.layer != layer || f.target != target) continue;
        const size_t rank = f.shape[0];
        project_down(adapter, input_of(adapter, x, tile), rows);
        const ProductRows t = convert_rows(type_, t_.get(), rank, rows, rank, Scratch::kCopy);
        multiply(type_, std::span(&low.b[f.index], 1), t, rows, nullptr, y + f.first_row, ldy, true);
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
void Learner::project_down(size_t adapter, ProductRows x, size_t rows) {
    const Factors& f = factors_[adapter];
    const LowRank& low = adapter_.layers[f.layer][static_cast<size_t>(f.target)];
    const size_t rank = f.shape[0];
    multiply(type_, std::span(&low.a[f.index], 1), x, rows, nullptr, t_.get(), rank);
    if (drops()) kernels().blend_f32(t_.get(), rows * rank, kept_scale(), 0.0f, t_.get());
}

// grad_x (rows, k), or what is added to it, from grad_y (rows, n); adds to the gradients of the adapters.
void Learner::project_backward(size_t layer, Target target, ProductRows x, const RowTile& tile, const float* grad_y,
                               size_t ldy, float* grad_x, size_t ldx, std::span<const FactorGradients> grads,
                               bool add) {
    const Matrix& w = matrix_of(weights_->layers[layer], target);
    const size_t rows = tile.n();
    const bool bf16 = type_ == ProductType::kBFloat16;
    multiply_transposed(type_, w.parts, grad_y, ldy, rows, grad_x, ldx, add);
    if (!with_adapters_) return;
    const LowRank& low = adapter_.layers[layer][static_cast<size_t>(target)];
    for (size_t adapter = 0; adapter < factors_.size(); ++adapter) {
        const Factors& f = factors_[adapter];
        if (f.layer != layer || f.target != target) continue;
        const auto [rank, k, n] = f.shape;
        const std::span<const PackedWeight> a{&low.a[f.index], 1}, b{&low.b[f.index], 1};
        const float* grad = grad_y + f.first_row;
        const ProductRows input = input_of(adapter, x, tile);
        project_down(adapter, input, rows);
        multiply_transposed(type_, b, grad, ldy, rows, u_.get(), rank, false);
        if (drops()) kernels().blend_f32(u_.get(), rows * rank, kept_scale(), 0.0f, u_.get());
        accumulate(u_.get(), rank, input.data, bf16, input.ld, tile, k, 1.0f, grads[adapter].a);
        accumulate(t_.get(), rank, grad, false, ldy, tile, n, f.scale, grads[adapter].b);
        if (drops()) {
            multiply_transposed(type_, a, u_.get(), rank, rows, grad_dropped_.get(), k, false);
            add_kept(rows, k, grad_x, ldx);
        } else {
            multiply_transposed(type_, a, u_.get(), rank, rows, grad_x, ldx, true);
        }
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
