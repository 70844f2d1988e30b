// The table of weight formats, the single source of their properties.
//
// A format has two layouts: rows of plain numbers or blocks (GGUF's, byte for byte; int8 numbers followed by a scale),
// and panels, which the kernels read (kernels/panel_layout.h).
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/dispatch.h"
#include "kernels/panel_layout.h"

namespace whet {

enum class WeightFormat {
    kFloat32,
    kBFloat16,
    kInt8,
    kQ8_0,
    kQ4_0,
    kQ4_1,
    kQ5_0,
    kQ5_1,
    kQ4_K,
    kQ5_K,
    kQ6_K,
    kMXFP4,
    kCount
};

struct FormatTraits {
    const char* name;
    size_t block_length, block_bytes;  // inputs and bytes of a block; a row is a whole number of blocks
    size_t row_scale_bytes = 0;        // after the blocks of a row
    // Number type of its rows, also the type of the inputs that they are multiplied by. kPacked: rows are blocks, and
    // inputs are quantised to int8.
    RowType source = RowType::kPacked;
    PanelLayout panel;
    // The largest representable |weight|, and the largest |weight| that a block needs for a usable scale: a float16 of
    // at least two units of 2^-24. Smaller scales are 0 or rounded by more than a fifth.
    double largest, vanishing;

    // Copies a row to output j of a panel and back, losslessly. pack_row is null for numbers, which the kernel packs.
    void (*pack_row)(const uint8_t* row, size_t k, uint8_t* panel, size_t j) = nullptr;
    void (*unpack_row)(const uint8_t* panel, size_t j, size_t k, uint8_t* row);
    // Scalar: k finite float32 to a row (null unless int8 or q8_0), with the bits of the packing kernel, and a row to
    // float32.
    void (*quantize_row)(const float* x, size_t k, uint8_t* row) = nullptr;
    void (*dequantize_row)(const uint8_t* row, size_t k, float* x);
    void (*Kernels::*pack_panel)(const PanelTask& task);
    void (*Kernels::*unpack_panel)(const UnpackTask& task);
    void (*Kernels::*linear)(const LinearTask& task);

    size_t row_bytes(size_t k) const { return k / block_length * block_bytes + row_scale_bytes; }
};

// Indexed by WeightFormat.
const std::array<FormatTraits, static_cast<size_t>(WeightFormat::kCount)>& format_table();

// Throws std::out_of_range for an invalid format.
inline const FormatTraits& traits(WeightFormat format) { return format_table().at(static_cast<size_t>(format)); }

}  // namespace whet
