// Products of unpacked matrices and vectors, split over the pool.
#pragma once
#include <cstddef>

namespace whet {

// c (m, n) = alpha a (m, k) b (k, n) + beta c, all float32 or all bfloat16, accumulated in float32. Each operand has
// row and column strides in elements. beta = 0 does not read c.
void gemm(bool bf16, size_t m, size_t n, size_t k, float alpha, const void* a, ptrdiff_t a_row, ptrdiff_t a_column,
          const void* b, ptrdiff_t b_row, ptrdiff_t b_column, float beta, void* c, ptrdiff_t ldc);

// y (m) = alpha a (m, n) x (n) + beta y, with float32 x and y. One of a's strides is 1.
void gemv(bool bf16, size_t m, size_t n, float alpha, const void* a, ptrdiff_t a_row, ptrdiff_t a_column,
          const float* x, float beta, float* y);

}  // namespace whet
