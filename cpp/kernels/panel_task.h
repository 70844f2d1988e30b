// What one task of the kernels that pack panels, and of those that multiply by them, works on.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kernels/panel_layout.h"

namespace whet {

// What rows come in as: numbers, or the weight's own format (of which kernels/pack.h takes none).
enum class Source { kFloat32, kBFloat16, kFloat16, kPacked };

// k numbers for each of the outputs [first, first + count) of one panel; the panel's others stay as they are.
struct PanelTask {
    const void* x;  // of output `first`
    Source source;
    ptrdiff_t row_stride, column_stride;  // in bytes
    size_t first, count, k;
    void* panel;
};

// y (rows, n) = x w^T + bias for the panels of n outputs. Of quantised weights x is int8 in blocks, each with a scale
// and two offsets (linear_quantised.h); of float weights these are null. A null bias is none.
struct LinearTask {
    const void* x = nullptr;  // rows ldx apart
    size_t ldx = 0, rows = 0;
    const float* scales = nullptr;                              // rows x steps
    const int32_t *offsets = nullptr, *half_offsets = nullptr;  // rows x steps
    const void* panels = nullptr;
    size_t steps = 0, n = 0;
    const float* bias = nullptr;
    float* y = nullptr;  // rows ldy apart
    size_t ldy = 0;
};

}  // namespace whet
