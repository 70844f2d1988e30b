// The weight formats: a table with one row for each, from which all else derives what it knows of them.
//
// A format has two layouts. Its own is that of its rows: plain numbers, or blocks (those of GGUF, byte for byte; int8
// with its scale after the numbers). Panels (kernels/panel_layout.h) are what the kernels read.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/dispatch.h"
#include "kernels/panel_layout.h"

namespace whet {

enum class WeightFormat { kFloat32, kBFloat16, kInt8, kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ4_K, kQ5_K, kQ6_K, kCount };

struct FormatTraits {
    const char* name;
    size_t block_length, block_bytes;  // inputs and bytes of a block; a row is a whole number of these
    size_t row_scale_bytes = 0;        // after a row's blocks
    // What its rows are: numbers, which are multiplied by inputs of the same type, or kPacked: blocks, which are
    // multiplied by inputs quantised to int8.
    RowType source = RowType::kPacked;
    PanelLayout panel;
    // The largest |weight| that it can hold; and what the largest |weight| of a block has to reach for its scale to be
    // usable: a float16 of at least two units of 2^-24. Smaller scales are 0 or rounded by more than a fifth.
    double largest, vanishing;

    // A row as output j of a panel, and back: the same bytes. Numbers are packed by the kernel alone.
    void (*pack_row)(const uint8_t* row, size_t k, uint8_t* panel, size_t j) = nullptr;
    void (*unpack_row)(const uint8_t* panel, size_t j, size_t k, uint8_t* row);
    // k finite float32 to a row (not of plain numbers), and a row to float32: the definition, one number at a time. The
    // kernel that packs numbers chooses the same, to the bit.
    void (*quantize_row)(const float* x, size_t k, uint8_t* row) = nullptr;
    void (*dequantize_row)(const uint8_t* row, size_t k, float* x);
    void (*Kernels::*pack_panel)(const PanelTask& task);
    void (*Kernels::*unpack_panel)(const UnpackTask& task);
    void (*Kernels::*linear)(const LinearTask& task);

    size_t row_bytes(size_t k) const { return k / block_length * block_bytes + row_scale_bytes; }
};

// In the order of WeightFormat.
const std::array<FormatTraits, static_cast<size_t>(WeightFormat::kCount)>& format_table();

// Throws std::out_of_range if there is no such format.
inline const FormatTraits& traits(WeightFormat format) { return format_table().at(static_cast<size_t>(format)); }

}  // namespace whet
