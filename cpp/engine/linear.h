// The linear layer over packed weights: rows and panels split over the pool.
#pragma once
#include <cstddef>

#include "engine/packed_weight.h"

namespace whet {

// y (rows, n) = x (rows, k) w^T + bias. x is float32 or, where x_bf16, bfloat16; y is float32. ldx and ldy in elements.
void linear(const PackedWeight& w, const void* x, bool x_bf16, size_t ldx, size_t rows, const float* bias, float* y,
            size_t ldy);

}  // namespace whet
