#include "engine/dora.h"

#include <algorithm>
#include <cmath>

#include "kernels/dispatch.h"
#include "kernels/panel_layout.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

constexpr size_t kRows = 16 * kPanel;  // that are unpacked at once
constexpr size_t kMostRanks = 8;       // of a kernel for A and B

double squared_length(const float* x, size_t n) {
    double sums[8] = {};  // independent additions
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (size_t lane = 0; lane < 8; ++lane) sums[lane] += double{x[i + lane]} * double{x[i + lane]};
    }
    for (; i < n; ++i) sums[0] += double{x[i]} * double{x[i]};
    double sum = 0.0;
    for (const double each : sums) sum += each;
    return sum;
}

// row (k,) += row j of scale B A.
void add_row(const LowRankProduct& delta, size_t j, size_t k, float* row) {
    for (size_t first = 0; first < delta.rank; first += kMostRanks) {
        const size_t ranks = std::min(kMostRanks, delta.rank - first);
        float b[kMostRanks];
        for (size_t r = 0; r < ranks; ++r) b[r] = delta.b[j * delta.b_row + (first + r) * delta.b_rank];
        kernels().lora_up_f32(ranks, b, 1, k, delta.a + first * k, delta.scale, row, static_cast<ptrdiff_t>(k));
    }
}

}  // namespace

std::vector<double> row_lengths(const Matrix& w, size_t first_row, size_t n, const LowRankProduct& delta) {
    const size_t k = w.k();
    std::vector<double> lengths(n);
    std::vector<float> rows(std::min(n, kRows) * k);
    for (size_t first = 0; first < n; first += kRows) {
        const size_t count = std::min(kRows, n - first);
        w.rows(first_row + first, count, rows.data(), false);
        for_rows(count, (delta.rank + 2) * k, [&](size_t i) {
            float* row = rows.data() + i * k;
            add_row(delta, first + i, k, row);
            lengths[first + i] = std::sqrt(squared_length(row, k));
        });
    }
    return lengths;
}

RowScale::RowScale(const float* magnitude, const std::vector<double>& lengths, const float* bias)
    : factor(lengths.size()), offset(lengths.size()) {
    for (size_t j = 0; j < lengths.size(); ++j) {
        // A row of zeros has no direction, and initial magnitudes change no bit.
        const bool is_kept = lengths[j] == 0.0 || magnitude[j] == static_cast<float>(lengths[j]);
        const double scale = is_kept ? 1.0 : double{magnitude[j]} / lengths[j];
        factor[j] = static_cast<float>(scale);
        offset[j] = bias == nullptr ? 0.0f : static_cast<float>((1.0 - scale) * double{bias[j]});
    }
}

void RowScale::apply(float* y, size_t ldy, size_t rows) const {
    const size_t n = factor.size();
    for (size_t i = 0; i < rows; ++i) {
        float* row = y + i * ldy;
        for (size_t j = 0; j < n; ++j) row[j] = factor[j] * row[j] + offset[j];
    }
}

}  // namespace whet
