// What one task of the kernels that pack panels, of those that unpack them, and of those that multiply by them, works
// on.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kernels/panel_layout.h"

namespace whet {

// What rows come in as: numbers, or the weight's own format (of which kernels/pack.h takes none).
enum class RowType { kFloat32, kBFloat16, kFloat16, kPacked };

// k numbers for each of the outputs [first, first + count) of one panel; the panel's others stay as they are.
struct PanelTask {
    const void* x;  // of output `first`
    RowType source;
    ptrdiff_t row_stride, column_stride;  // in bytes
    size_t first, count, k;
    void* panel;
};

// The outputs [first, first + count) of one panel as rows of k numbers, one after the other: float32 or, where `bf16`,
// bfloat16.
struct UnpackTask {
    const void* panel;
    size_t first, count, k;
    void* rows;
    bool bf16;
};

// Inputs of quantised weights (linear_quantised.h), from a row on: integers, and per block of 32 a scale, the sum of
// the numbers that they stand for, and -128 times the sum of the integers, of all and of the first 16.
struct QuantisedInputs {
    int8_t* q = nullptr;
    float *scales = nullptr, *sums = nullptr;
    int32_t *offsets = nullptr, *half_offsets = nullptr;
};

// y (rows, n) = x w^T + bias for the panels of n outputs, or += where `add`. A null bias is none.
struct LinearTask {
    const void* x = nullptr;  // of float weights; rows ldx apart
    size_t ldx = 0, rows = 0;
    QuantisedInputs quantised = {};  // of quantised weights; rows of whole blocks
    const void* panels = nullptr;
    size_t steps = 0, n = 0;
    const float* bias = nullptr;
    float* y = nullptr;  // rows ldy apart
    size_t ldy = 0;
    bool add = false;
};

}  // namespace whet
