// What one task of the packing kernels works on.
#pragma once
#include <stddef.h>

namespace whet {

// What rows come in as: numbers, or the weight's own format (of which kernels/pack.h takes none).
enum class Source { kFloat32, kBFloat16, kFloat16, kPacked };

// k numbers for each of the outputs [first, first + count) of one panel of 16; the panel's others stay as they are.
struct PanelTask {
    const void* x;  // of output `first`
    Source source;
    ptrdiff_t row_stride, column_stride;  // in bytes
    size_t first, count, k;
    void* panel;
};

}  // namespace whet
