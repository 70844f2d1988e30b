// Weights as model files and other libraries store them, and their conversion to float32 and packed weights.
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
    const char* name;  // of the equivalent format, if any
    GgufTensorType gguf;
    bool is_in_gguf = true;  // supported in GGUF files
    bool is_quantised = true;
    // Blocks: the format that keeps their integers, directly or after convert_row. Numbers: the packing kernels'
    // format.
    WeightFormat packed_as;
    std::optional<RowType> source = {};  // number type for the packing kernels
    void (*convert_row)(const uint8_t* row, size_t k, uint8_t* packed) = nullptr;  // null: identical bytes
    void (*dequantize_row)(const uint8_t* row, size_t k, float* x) = nullptr;      // null for numbers
    // Checks n contiguous blocks, or n numbers with a stride.
    bool (*is_finite)(const uint8_t* row, size_t n, ptrdiff_t stride) = nullptr;

    // Numbers in a row of `width` elements: numbers, or bytes of blocks. Throws std::invalid_argument if `width` is not
    // a whole number of blocks.
    size_t row_length(size_t width) const;
};

// Throws std::out_of_range for an invalid type.
const StoredTraits& traits(StoredType type);
// Tensor types supported in GGUF files.
std::span<const GgufTensorType> gguf_types();

// A view of (n, k) weights. Numbers: strides in elements, which may be negative. Quantised types: rows of GGUF blocks,
// row_stride bytes apart.
struct StoredRows {
    StoredType type;
    const void* data;
    size_t n, k;
    ptrdiff_t row_stride, column_stride;

    StoredRows range(size_t first, size_t count) const;
    // The rows, or their transpose if that is their order in memory.
    StoredRows in_memory_order() const;
};

// Returns whether all numbers, or all scales of a quantised type, are finite and in the range of `packed_as`.
bool is_finite(const StoredRows& rows);

// Converts to contiguous (n, k) float32: float64 rounds to nearest even, other types are exact.
void unpack_rows(const StoredRows& rows, float* out);

// Converts row i to float32.
void unpack_row(const StoredRows& rows, size_t i, float* out);

// Packs into rows [first, first + n) of `to`, which has the same k. Blocks of its format keep their bytes; types with
// its format as packed_as are converted (blocks.h, quantize.h); float64 and other blocks are converted to float32
// first, in chunks of rows.
void pack_rows(const StoredRows& rows, PackedWeight& to, size_t first);

}  // namespace whet
