// DoRA: the rows of W + B A are scaled to trained lengths, the magnitudes m (Liu et al. 2024, arXiv 2402.09353,
// equation 5).
//
//   y = m / |W + B A| (W x + B (A x)) + bias,    |.|: the length of each row
#pragma once
#include <cstddef>
#include <vector>

#include "engine/weights.h"

namespace whet {

// scale B A: A (rank, k) is contiguous, and element (j, r) of B (n, rank) is b[j * b_row + r * b_rank].
struct LowRankProduct {
    const float *a, *b;
    size_t rank, b_row, b_rank;
    float scale;
};

// Lengths of rows [first_row, first_row + n) of W + scale B A: sums of rows are float32, sums of squares float64.
std::vector<double> row_lengths(const Matrix& w, size_t first_row, size_t n, const LowRankProduct& delta);

// The scales of an adapter's outputs; empty: none.
struct RowScale {
    std::vector<float> factor, offset;

    RowScale() = default;
    // bias: of the outputs, or null.
    RowScale(const float* magnitude, const std::vector<double>& lengths, const float* bias);

    size_t size_bytes() const { return (factor.size() + offset.size()) * sizeof(float); }
    // y (rows, n) = factor y + offset, in which y is W x + B (A x) + bias.
    void apply(float* y, size_t ldy, size_t rows) const;
};

}  // namespace whet
