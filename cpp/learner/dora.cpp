// DoRA: adapters whose rows of W + B A have trained lengths, the magnitudes m. With c the lengths of these rows, which
// are constant in the gradients (Liu et al. 2024, section 4.3), and v = W x + B A x:
//
//   y = (m / c) v + bias,    dm = sum over rows of dy v / c,    dv = (m / c) dy
//
// The backward pass multiplies by W once more, since v is not kept.
#include <algorithm>
#include <cstring>
#include <vector>

#include "engine/dora.h"
#include "kernels/dispatch.h"
#include "learner/learner.h"
#include "learner/sums.h"
#include "runtime/thread_pool.h"

namespace whet {

std::vector<double> Learner::row_lengths(size_t adapter, const float* a, const float* b, float scale) const {
    const Factors& f = factors_.at(adapter);
    const auto [rank, k, n] = f.shape;
    const auto reading = weights_->reading();
    return whet::row_lengths(matrix_of(*weights_, f.layer, f.target), f.matrix_row, n, {a, b, rank, 1, n, scale});
}

void Learner::set_magnitude(size_t adapter, const float* magnitude, const std::vector<double>& lengths) {
    Factors& f = factors_.at(adapter);
    const Matrix& w = matrix_of(*weights_, f.layer, f.target);
    const float* bias = w.bias_or_null();
    f.low->scales[f.index] = RowScale(magnitude, lengths, bias == nullptr ? nullptr : bias + f.matrix_row);
    f.inverse_lengths.assign(lengths.size(), 0.0f);
    for (size_t j = 0; j < lengths.size(); ++j) {
        if (lengths[j] > 0.0) f.inverse_lengths[j] = static_cast<float>(1.0 / lengths[j]);
    }
    widest_scaled_ = std::max(widest_scaled_, w.n());
    release_kept();
}

// Scales outputs (rows, n) of a matrix with the sum of its product and its adapters', if there are any.
void Learner::scale_outputs(const LowRank* low, size_t rows, float* y, size_t ldy) const {
    if (low == nullptr) return;
    for (size_t adapter : adapters_of_.at(low)) {
        const Factors& f = factors_[adapter];
        const RowScale& scale = low->scales[f.index];
        for_rows(scale.factor.empty() ? 0 : rows, f.shape[2],
                 [&](size_t i) { scale.apply(y + i * ldy + f.first_row(), ldy, 1); });
    }
}

// Returns the gradients of v from the gradients of y, which are the same without magnitudes, and sets their leading
// dimension; adds to the gradients of the magnitudes.
const float* Learner::unscale(size_t layer, Target target, const LowRank* low, ProductRows x, const RowTile& tile,
                              const float* grad_y, size_t& ldy, std::span<const FactorGradients> grads) {
    if (low == nullptr) return grad_y;
    const std::vector<size_t>& adapters = adapters_of_.at(low);
    const auto has = [&](size_t adapter) { return has_magnitude(adapter); };
    if (std::none_of(adapters.begin(), adapters.end(), has)) return grad_y;
    const Matrix& w = matrix_of(*weights_, layer, target);
    const size_t n = w.n(), rows = tile.n();
    float* v = unscaled_.get();
    multiply(type_, w.parts, x, rows, nullptr, v, n);
    add_adapters(low, x, tile, v, n);
    std::vector<float> sums;  // of dy v
    sum_blocks(tile.groups, n, sums, [&](size_t i, float* to) {
        kernels().multiply_add_f32(grad_y + i * ldy, v + i * n, n, to);
        std::memcpy(v + i * n, grad_y + i * ldy, n * sizeof(float));
    });
    for (size_t adapter : adapters) {
        if (!has_magnitude(adapter)) continue;
        const Factors& f = factors_[adapter];
        for (size_t at = f.first_row(); at < sums.size(); at += n) {
            for (size_t j = 0; j < f.shape[2]; ++j) grads[adapter].magnitude[j] += sums[at + j] * f.inverse_lengths[j];
        }
        const std::vector<float>& factor = low->scales[f.index].factor;
        for_rows(rows, f.shape[2], [&](size_t i) {
            float* row = v + i * n + f.first_row();
            for (size_t j = 0; j < factor.size(); ++j) row[j] *= factor[j];
        });
    }
    ldy = n;
    return v;
}

}  // namespace whet
