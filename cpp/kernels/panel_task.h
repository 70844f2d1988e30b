// The tasks of the kernels that pack panels, unpack them, and multiply by them.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kernels/panel_layout.h"

namespace whet {

// The type of input rows: a float type, or the weight's own packed format (which kernels/pack.h does not accept).
enum class RowType { kFloat32, kBFloat16, kFloat16, kPacked };

// Packs k numbers for each of the outputs [first, first + count) of one panel; its other outputs are unchanged.
struct PanelTask {
    const void* x;  // of output `first`
    RowType source;
    ptrdiff_t row_stride, column_stride;  // in bytes
    size_t first, count, k;
    void* panel;
};

// Unpacks the outputs [first, first + count) of one panel to contiguous rows of k numbers, bfloat16 or float32.
struct UnpackTask {
    const void* panel;
    size_t first, count, k;
    void* rows;
    bool bf16;
};

// Quantised inputs (linear_quantised.h) from one row on: integers, for which quantised_row_offset of kernels.def finds
// a row and which have memory for an even number of rows; and per block of 32 a scale, the sum of the dequantised
// inputs, and -128 times the sum of the integers, over the block and over its first 16.
struct QuantisedInputs {
    int8_t* q = nullptr;
    float *scales = nullptr, *sums = nullptr;
    int32_t *offsets = nullptr, *half_offsets = nullptr;
};

// y (rows, n) = x w^T + bias for the panels of n outputs, or += if `add`. bias may be null.
struct LinearTask {
    const void* x = nullptr;  // for float weights; row stride ldx
    size_t ldx = 0, rows = 0;
    QuantisedInputs quantised = {};  // for quantised weights; rows are whole blocks
    const void* panels = nullptr;
    size_t steps = 0, n = 0;
    const float* bias = nullptr;
    float* y = nullptr;  // row stride ldy
    size_t ldy = 0;
    bool add = false;
};

}  // namespace whet
