// float32 rows to the quantised formats' own layout, and back: the definition, one number at a time. Packing from
// numbers does the same for 16 rows at once (kernels/pack_quantised.h).
#pragma once
#include <cstddef>
#include <cstdint>

#include "engine/linear.h"

namespace whet {

// One row of k finite numbers; k is a multiple of block_length(format). Not for kFloat32 and kBFloat16.
void quantize_row(WeightFormat format, const float* x, size_t k, uint8_t* row);
void dequantize_row(WeightFormat format, const uint8_t* row, size_t k, float* x);

}  // namespace whet
