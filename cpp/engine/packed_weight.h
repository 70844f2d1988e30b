// A weight matrix packed for the linear kernels, in one of six formats.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/panel_task.h"
#include "runtime/zeroed.h"

namespace whet {

enum class WeightFormat { kFloat32, kBFloat16, kInt8, kQ8_0, kQ4_0, kQ4_K };

constexpr size_t kQuantBlock = 32;  // inputs that share a scale of their quantised values

// Bytes of one row of k weights in the format's own layout: plain numbers, or GGUF blocks; int8 with its scale after
// it.
size_t row_bytes(WeightFormat format, size_t k);

// The k that a row must be a multiple of.
size_t block_length(WeightFormat format);

// (n, k) weights in panels of 16 outputs (kernels/linear.h), on 64-byte boundaries.
class PackedWeight {
public:
    // Zeros, to be filled.
    PackedWeight(WeightFormat format, size_t n, size_t k);

    WeightFormat format() const { return format_; }
    size_t n() const { return n_; }
    size_t k() const { return k_; }
    size_t size_bytes() const { return panel_bytes_ * n_panels_; }
    const void* panel(size_t i) const { return memory_.data() + i * panel_bytes_; }
    size_t steps() const { return steps_; }

    // Rows [first, first + count) from numbers with any strides, in elements; or from the format's own layout, its rows
    // row_stride bytes apart. bfloat16 is rounded to nearest even; the quantised formats, whose numbers have to be
    // finite, are those of quantize.h to the bit.
    void pack_rows(size_t first, size_t count, const void* rows, Source source, ptrdiff_t row_stride,
                   ptrdiff_t column_stride);
    // Row i as numbers.
    void row(size_t i, float* out) const;
    // Back to rows in the format's own layout: the same numbers that went in.
    void unpack(void* rows, size_t row_stride) const;

private:
    WeightFormat format_;
    size_t n_, k_, steps_, n_panels_, panel_bytes_;
    Zeroed memory_;  // touched first by the threads that pack
};

}  // namespace whet
