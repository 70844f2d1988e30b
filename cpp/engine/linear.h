// The linear layer over packed weights; rows and panels are split over the pool.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/packed_weight.h"
#include "engine/tiles.h"

namespace whet {

// Work on the outputs of a product that runs within its job: the thread that computes the last output of a unit calls
// run() for it, so that units need no barrier.
struct Epilogue {
    // Outputs [i width, (i + 1) width) belong to unit i, or to i - fold for i >= units.
    size_t width, units, fold;
    void (*run)(void* context, size_t unit, size_t first_row, size_t n_rows);
    void* context;
    std::atomic<uint32_t>* missing;  // n_counters(): the outputs of a unit that are not yet computed

    // Whether linear() runs the epilogue of these weights; otherwise the caller does, after linear().
    static bool is_supported(std::span<const PackedWeight> w);
    static size_t n_counters(size_t units, size_t rows);

    void begin(size_t n, size_t rows) const;
    // Outputs [begin, end) of rows [row, row + n_rows) have been computed.
    void count_down(size_t begin, size_t end, size_t row, size_t n_rows) const;

private:
    size_t unit_of(size_t run) const { return run < units ? run : run - fold; }
};

// y (rows, n) = x (rows, k) w^T + bias. x is float32 or, with x_bf16, bfloat16; y is float32. ldx and ldy in elements.
// w is the concatenation of the parts' rows; all have the same k.
void linear(std::span<const PackedWeight> w, const void* x, bool x_bf16, size_t ldx, size_t rows, const float* bias,
            float* y, size_t ldy, const Epilogue* epilogue = nullptr);
inline void linear(const PackedWeight& w, const void* x, bool x_bf16, size_t ldx, size_t rows, const float* bias,
                   float* y, size_t ldy) {
    linear({&w, 1}, x, x_bf16, ldx, rows, bias, y, ldy);
}

// Consecutive rows of a product that have separate weights.
struct RowGroup {
    std::span<const PackedWeight> w;
    size_t first, rows;  // first: a multiple of kRowBlock
};

// y[r] = x[x_rows[r]] w^T for the rows r of groups in ascending order, all float32, in one job. The groups' weights
// have one shape, and formats with one type of inputs. x_rows is negative between groups.
void linear_groups(std::span<const RowGroup> groups, const int32_t* x_rows, const float* x, size_t ldx, float* y,
                   size_t ldy);

// y (rows, n) += x (rows, k) w^T, all float32. ldx and ldy in elements.
void add_linear(const PackedWeight& w, const float* x, size_t ldx, size_t rows, float* y, size_t ldy);

}  // namespace whet
