// Weights as model files and other libraries store them, on their way to float32 and into packed weights.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "engine/packed_weight.h"
#include "files/gguf.h"

namespace whet {

enum class StoredType {
    kFloat32,
    kBFloat16,
    kFloat16,
    kFloat64,
    kQ8_0,
    kQ4_0,
    kQ4_1,
    kQ5_0,
    kQ5_1,
    kQ4_K,
    kQ5_K,
    kQ6_K,
    kQ2_K,
    kQ3_K,
    kIQ4_NL,
    kIQ4_XS,
    kMXFP4,
    kTQ1_0,
    kTQ2_0,
    kCount
};

struct StoredTraits {
    const char* name;  // that of the format that holds the same numbers, if there is one
    GgufTensorType gguf;
    bool is_in_gguf = true;  // GGUF files of this type are read
    bool is_quantised = true;
    // The format that packed weights take the rows in as they are, or after convert_row. Of numbers: that of the
    // kernels that pack them.
    WeightFormat packed_as;
    std::optional<RowType> source = {};  // of the numbers that packing kernels read
    void (*convert_row)(const uint8_t* row, size_t k, uint8_t* packed) = nullptr;  // null: the same bytes
    void (*dequantize_row)(const uint8_t* row, size_t k, float* x) = nullptr;      // of quantised types
    // Of n blocks that lie end to end, or of n numbers, `stride` of them apart.
    bool (*is_finite)(const uint8_t* row, size_t n, ptrdiff_t stride) = nullptr;

    // The numbers of a row of so many elements, which are the unit of row_stride: numbers, or bytes of blocks. Throws
    // std::invalid_argument if there is no such row.
    size_t row_length(size_t width) const;
};

// Throws std::out_of_range if there is no such type.
const StoredTraits& traits(StoredType type);
// The types of tensors that GGUF files may have.
std::span<const GgufTensorType> gguf_types();

// (n, k) weights anywhere in memory. Of numbers the strides are in elements and may be negative; of a quantised type
// whole rows are row_stride bytes apart, in the blocks of GGUF.
struct StoredRows {
    StoredType type;
    const void* data;
    size_t n, k;
    ptrdiff_t row_stride, column_stride;

    StoredRows range(size_t first, size_t count) const;
};

// Whether no number, or no scale of a quantised type, is NaN, infinite, or beyond what the rows are packed as.
bool is_finite(StoredRows rows);

// To float32, (n, k) contiguous: float64 rounds to nearest even, everything else is exact.
void unpack_rows(const StoredRows& rows, float* out);

// Into rows [first, first + n) of `to`, which has the same k. Blocks of its format keep their bytes, and those that are
// packed as its format are converted (blocks.h, quantize.h); float64 and other blocks go through float32, some rows at
// a time.
void pack_rows(const StoredRows& rows, PackedWeight& to, size_t first);

}  // namespace whet
