// Low-rank adapters over the pool: forward, gradients, and a batch with one adapter per row.
//
// Factors are contiguous float32 (rank, columns), of rank 1 to kMaxRank. Rows are float32 or bfloat16, with any row
// stride. The caller checks that, and that outputs do not overlap inputs, except y = x in place. Tasks are rows or
// columns that share no sums, so results are bit-identical for any number of threads.
#pragma once
#include <cstddef>
#include <cstdint>

#include "runtime/array.h"

namespace whet {

constexpr size_t kMaxRank = 8;

// y += scale (x a^T) b.
void lora_forward(const Rows& x, const Rows& y, const float* a, const float* b, size_t rank, float scale);

// y += scale hidden b; hidden (rows, rank) is float32 of any strides.
void lora_add_product(const ArrayView& hidden, const Rows& y, const float* b, float scale);

// grad_a += scale (g b^T)^T x,  grad_b += scale (x a^T)^T g. Throws std::bad_alloc.
void lora_accumulate(const Rows& x, const Rows& g, const float* a, const float* b, size_t rank, float scale,
                     float* grad_a, float* grad_b);

// Adapter k is rows [offsets[k], offsets[k + 1]) of a and b, scaled by scales[k].
struct LoraAdapters {
    const float *a, *b;
    const int64_t* offsets;
    const float* scales;
};

// Row i of y += scale (x a^T) b with adapter index[i]; -1: none.
void lora_batch(const Rows& x, const Rows& y, const LoraAdapters& adapters, const int64_t* index);

}  // namespace whet
