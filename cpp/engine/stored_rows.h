// Weights as model files and other libraries store them, on their way to float32 and into packed weights.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/packed_weight.h"

namespace whet {

enum class StoredType { kFloat32, kBFloat16, kFloat16, kFloat64, kQ8_0, kQ4_0, kQ4_K };

// (n, k) weights anywhere in memory. Of numbers the strides are in elements and may be negative; of a quantised type
// whole rows are row_stride bytes apart, in the blocks of GGUF.
struct StoredRows {
    StoredType type;
    const void* data;
    size_t n, k;
    ptrdiff_t row_stride, column_stride;
};

// The length of one row in the unit of row_stride: k numbers, or the bytes of its blocks.
size_t stored_width(StoredType type, size_t k);

// To float32, (n, k) contiguous: float64 rounds to nearest even, everything else is exact.
void unpack_rows(const StoredRows& rows, float* out);

// Into rows [first, first + n) of `to`, which has the same k. Blocks of its format keep their bytes; float64 and blocks
// of other formats go through float32, some rows at a time.
void pack_rows(const StoredRows& rows, PackedWeight& to, size_t first);

}  // namespace whet
