// A weight matrix packed for the linear kernels.
#pragma once
#include <cstddef>
#include <cstdint>

#include "engine/formats.h"
#include "runtime/system.h"
#include "runtime/zeroed.h"

namespace whet {

class DeferredRows;

// (n, k) weights in panels of 16 outputs (kernels/panel_layout.h), 64-byte aligned.
class PackedWeight {
public:
    // Zero weights. Throws std::invalid_argument if k is not a multiple of the format's block length.
    PackedWeight(WeightFormat format, size_t n, size_t k);
    // Has no memory before place(), which takes size_bytes() zeroed, 64-byte aligned bytes.
    PackedWeight(WeightFormat format, size_t n, size_t k, std::nullptr_t);
    void place(uint8_t* memory) { data_ = memory; }
    void release_memory() { release_pages(data_, size_bytes()); }  // its contents are undefined
    // Before the panels are used: packs rows that have been deferred, see deferred_rows.h.
    void prepare() const {
#if !defined(__wasm__)
        if (deferred_ != nullptr) prepare_deferred();
#endif
    }
    void defer(DeferredRows* rows) { deferred_ = rows; }
    DeferredRows* deferred() const { return deferred_; }

    const FormatTraits& format() const { return *format_; }
    WeightFormat format_id() const { return static_cast<WeightFormat>(format_ - format_table().data()); }
    size_t n() const { return n_; }
    size_t k() const { return k_; }
    size_t size_bytes() const { return panel_bytes_ * n_panels_; }
    const void* panel(size_t i) const { return data_ + i * panel_bytes_; }
    size_t n_panels() const { return n_panels_; }
    size_t panel_bytes() const { return panel_bytes_; }
    size_t steps() const { return steps_; }

    // Packs rows [first, first + count) from numbers with any strides, in elements, or from rows in the format's
    // layout, row_stride bytes apart. Rounds to bfloat16 to nearest even; quantises finite numbers
    // (kernels/pack_quantised.h).
    void pack_rows(size_t first, size_t count, const void* rows, RowType source, ptrdiff_t row_stride,
                   ptrdiff_t column_stride);
    // Dequantises rows [first, first + count) to (count, k) float32 or, with `bf16`, bfloat16 rounded to nearest even.
    void rows(size_t first, size_t count, void* out, bool bf16) const;  // WebAssembly builds: float32 only
    void row(size_t i, float* out) const { rows(i, 1, out, false); }
    // Copies all rows in the format's layout, losslessly.
    void unpack(void* rows, size_t row_stride) const;

private:
    const FormatTraits* format_;
    size_t n_, k_, steps_, n_panels_, panel_bytes_;
    Zeroed memory_;                     // empty after place()
    uint8_t* data_ = nullptr;           // first touched by the threads that pack
    DeferredRows* deferred_ = nullptr;  // null: none

    void prepare_deferred() const;

    void rows_one_by_one(size_t first, size_t count, float* out) const;
    void quantize_rows(size_t first, size_t count, const void* rows, RowType source, ptrdiff_t row_stride,
                       ptrdiff_t column_stride);
    // Calls visit(panel, begin, end) for the rows [begin, end) of each panel that are in [first, first + count), over
    // the pool if the work is worth threads.
    template <class Visit>
    void each_panel(size_t first, size_t count, double number_ns, Visit&& visit) const;
};

}  // namespace whet
