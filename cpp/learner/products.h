// Products of rows with packed weights, in both directions, for linear layers and their gradients.
//
// Weights of any format are unpacked, some outputs at a time, to the type of the products, float32 or bfloat16, and the
// rows are converted to it: a bfloat16 product rounds both factors to nearest even. Sums are float32, in an order that
// depends only on the shape of the weights: a row's results depend neither on other rows nor on the number of threads.
#pragma once
#include <cstddef>
#include <span>
#include <vector>

#include "engine/packed_weight.h"
#include "engine/scratch.h"

namespace whet {

enum class ProductType { kFloat32, kBFloat16 };

// Rows in the type of products; `ld` in elements. Rows of bfloat16 have an even length, padded with zero.
struct ProductRows {
    const void* data;
    size_t ld;
};

// Returns x (rows, k) itself for float32, else a copy in scratch memory of the calling thread.
ProductRows convert_rows(ProductType type, const float* x, size_t ldx, size_t rows, size_t k, Scratch use);

// Consecutive outputs of a matrix, in whole panels of one part.
struct OutputRange {
    const PackedWeight* part;
    size_t first_panel, n_panels;
    size_t first, n;  // outputs of the matrix
};

// Cuts the outputs of a matrix, given by its parts, into ranges of up to `most` outputs; 0: as many as fit in the
// caches when they are unpacked.
std::vector<OutputRange> split_outputs(std::span<const PackedWeight> w, size_t most = 0);
// Outputs of a range for a matrix with k inputs that fit in the caches.
size_t outputs_in_caches(size_t k);

// y (rows, n) = x (rows, k) w^T + bias, or += if `add`, for the outputs of a range; bias may be null.
void multiply(ProductType type, const OutputRange& w, ProductRows x, size_t rows, const float* bias, float* y,
              size_t ldy, bool add = false);
// The same for all outputs of a matrix.
void multiply(ProductType type, std::span<const PackedWeight> w, ProductRows x, size_t rows, const float* bias,
              float* y, size_t ldy, bool add = false);

// x (rows, k) = y (rows, n) w for the outputs of a range, or += if `add`.
void multiply_transposed(ProductType type, const OutputRange& w, const float* y, size_t ldy, size_t rows, float* x,
                         size_t ldx, bool add);
// The same for all outputs of a matrix.
void multiply_transposed(ProductType type, std::span<const PackedWeight> w, const float* y, size_t ldy, size_t rows,
                         float* x, size_t ldx, bool add);

}  // namespace whet
