// Rotary position embedding of query and key, in place, over the pool. The rotation itself is in kernels/rope.h.
//
// Tokens are split into tasks whose size does not depend on the number of threads. The caller checks shapes and dtypes.
#pragma once
#include <cstddef>
#include <cstdint>

#include "runtime/array.h"

namespace whet {

// Query or key: (positions..., heads * head_size) or (positions..., heads, head_size), float32 or bfloat16.
struct RopeHeads {
    ArrayView array;
    size_t count = 0;      // heads per token; 0: no array
    ptrdiff_t stride = 0;  // between heads, in elements
};

struct Rope {
    ArrayView positions{};  // (T,) or (B, T), int32 or int64, any strides
    RopeHeads query{}, key{};
    size_t rotary_dim = 0;
    bool is_neox = true, inverse = false;
};

bool positions_within(const ArrayView& positions, int64_t lowest, int64_t highest);

// Row p of the table (positions, rotary_dim) has the cosines, then the sines, of position p. Rows are contiguous.
void rotate_by_table(const Rope& rope, const ArrayView& table);

// Cosines and sines of position * inv_freq, times `scale`; inv_freq has rotary_dim / 2 elements.
void rotate_by_freqs(const Rope& rope, const double* inv_freq, double scale);

// table (rows, 2 n), contiguous, for rotate_by_table.
void fill_rope_table(const double* inv_freq, size_t n, double scale, size_t rows, float* table);

}  // namespace whet
