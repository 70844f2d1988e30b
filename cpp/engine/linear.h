// The linear layer over packed weights; rows and panels are split over the pool.
#pragma once
#include <cstddef>
#include <span>

#include "engine/packed_weight.h"

namespace whet {

// y (rows, n) = x (rows, k) w^T + bias. x is float32 or, with x_bf16, bfloat16; y is float32. ldx and ldy in elements.
// w is the concatenation of the parts' rows; all have the same k.
void linear(std::span<const PackedWeight> w, const void* x, bool x_bf16, size_t ldx, size_t rows, const float* bias,
            float* y, size_t ldy);
inline void linear(const PackedWeight& w, const void* x, bool x_bf16, size_t ldx, size_t rows, const float* bias,
                   float* y, size_t ldy) {
    linear({&w, 1}, x, x_bf16, ldx, rows, bias, y, ldy);
}

// y (rows, n) += x (rows, k) w^T, all float32. ldx and ldy in elements.
void add_linear(const PackedWeight& w, const float* x, size_t ldx, size_t rows, float* y, size_t ldy);

}  // namespace whet
