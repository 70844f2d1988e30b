// A weight matrix packed for the linear kernels, in one of the formats.
#pragma once
#include <cstddef>
#include <cstdint>

#include "engine/formats.h"
#include "runtime/zeroed.h"

namespace whet {

// (n, k) weights in panels of 16 outputs (kernels/panel_layout.h), on 64-byte boundaries.
class PackedWeight {
public:
    // Zeros, to be filled. Throws std::invalid_argument if the format's blocks do not divide k.
    PackedWeight(WeightFormat format, size_t n, size_t k);
    // With no memory before place(), which gives it size_bytes() zeros on a 64-byte boundary.
    PackedWeight(WeightFormat format, size_t n, size_t k, std::nullptr_t);
    void place(uint8_t* memory) { data_ = memory; }

    const FormatTraits& format() const { return *format_; }
    WeightFormat format_id() const { return static_cast<WeightFormat>(format_ - format_table().data()); }
    size_t n() const { return n_; }
    size_t k() const { return k_; }
    size_t size_bytes() const { return panel_bytes_ * n_panels_; }
    const void* panel(size_t i) const { return data_ + i * panel_bytes_; }
    size_t n_panels() const { return n_panels_; }
    size_t panel_bytes() const { return panel_bytes_; }
    size_t steps() const { return steps_; }

    // Rows [first, first + count) from numbers with any strides, in elements; or from the format's own layout, its rows
    // row_stride bytes apart. bfloat16 is rounded to nearest even; the quantised formats, whose numbers have to be
    // finite, are those of quantize.h to the bit.
    void pack_rows(size_t first, size_t count, const void* rows, RowType source, ptrdiff_t row_stride,
                   ptrdiff_t column_stride);
    // Rows [first, first + count) as numbers, (count, k): float32 or, where `bf16`, rounded to the nearest bfloat16,
    // ties to even.
    void rows(size_t first, size_t count, void* out, bool bf16) const;  // float32 alone in a WebAssembly build
    void row(size_t i, float* out) const { rows(i, 1, out, false); }
    // Back to rows in the format's own layout: the same numbers that went in.
    void unpack(void* rows, size_t row_stride) const;

private:
    const FormatTraits* format_;
    size_t n_, k_, steps_, n_panels_, panel_bytes_;
    Zeroed memory_;            // unless it was placed elsewhere
    uint8_t* data_ = nullptr;  // touched first by the threads that pack

    void rows_one_by_one(size_t first, size_t count, float* out) const;
    void quantize_rows(size_t first, size_t count, const void* rows, RowType source, ptrdiff_t row_stride,
                       ptrdiff_t column_stride);
    // visit(panel, begin, end) for the rows of each panel that are among [first, first + count), over the pool where so
    // many nanoseconds for each number are worth it.
    template <class Visit>
    void each_panel(size_t first, size_t count, double number_ns, Visit&& visit) const;
};

}  // namespace whet
