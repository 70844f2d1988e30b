// A weight matrix packed for the linear kernels, and the linear layer over it: rows and panels split over the pool.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

namespace whet {

enum class WeightFormat { kFloat32, kBFloat16, kInt8, kQ8_0, kQ4_0, kQ4_K };

constexpr size_t kQuantBlock = 32;  // inputs that share a scale of their quantised values

// Bytes of one row of k weights in the format's own layout: plain numbers, or GGUF blocks; int8 with its scale after
// it.
size_t row_bytes(WeightFormat format, size_t k);

// The k that a row must be a multiple of.
size_t block_length(WeightFormat format);

enum class Source { kFloat32, kBFloat16, kFloat16, kPacked };

// (n, k) weights in panels of 16 outputs (kernels/linear.h), on 64-byte boundaries.
class PackedWeight {
public:
    // From rows in the format's own layout, row_stride bytes apart.
    PackedWeight(WeightFormat format, size_t n, size_t k, const void* rows, size_t row_stride);
    PackedWeight(WeightFormat format, size_t n, size_t k);
    void pack_rows(size_t first, size_t count, const void* rows, Source source, ptrdiff_t row_stride,
                   ptrdiff_t column_stride);
    void row(size_t i, float* out) const;

    WeightFormat format() const { return format_; }
    size_t n() const { return n_; }
    size_t k() const { return k_; }
    size_t size_bytes() const { return panel_bytes_ * n_panels_; }
    const void* panel(size_t i) const { return bytes_.get() + i * panel_bytes_; }
    size_t steps() const { return steps_; }

    // Packs again from rows of the same shape and format.
    void pack(const void* rows, size_t row_stride);
    // Back to rows in the format's own layout: the same numbers that went in.
    void unpack(void* rows, size_t row_stride) const;

private:
    struct Free {
        void operator()(uint8_t* p) const;
    };
    WeightFormat format_;
    size_t n_, k_, steps_, n_panels_, panel_bytes_;
    std::unique_ptr<uint8_t[], Free> bytes_;
};

// y (rows, n) = x (rows, k) w^T + bias. x is float32 or, where x_bf16, bfloat16; y is float32. ldx and ldy in elements.
void linear(const PackedWeight& w, const void* x, bool x_bf16, size_t ldx, size_t rows, const float* bias, float* y,
            size_t ldy);

// c (m, n) = alpha a (m, k) b (k, n) + beta c for float32 or bfloat16 (all three alike), summed in float32. Each
// operand has a stride per row and per column, in elements. beta = 0 does not read c.
void gemm(bool bf16, size_t m, size_t n, size_t k, float alpha, const void* a, ptrdiff_t a_row, ptrdiff_t a_column,
          const void* b, ptrdiff_t b_row, ptrdiff_t b_column, float beta, void* c, ptrdiff_t ldc);

// y (m) = alpha a (m, n) x (n) + beta y, with float32 x and y. One of a's strides is 1.
void gemv(bool bf16, size_t m, size_t n, float alpha, const void* a, ptrdiff_t a_row, ptrdiff_t a_column,
          const float* x, float beta, float* y);

}  // namespace whet
