// Copies tokens into and out of a contiguous KV cache (sequences, positions, KV heads, head_dim) of any dtype, over the
// pool: the cache of whet.ops. The engine's cache is paged (kv_memory.h).
//
// The caller checks shapes, dtypes and ranges, and that arrays do not overlap. Only the last axis is contiguous.
#pragma once
#include <cstddef>
#include <cstdint>

#include "runtime/array.h"

namespace whet {

// cache[b, positions[b] + t] = added[b, t].
void append_tokens(const ArrayView& cache, const ArrayView& added, const int64_t* positions);

// out (tokens, KV heads, head_dim) = the first lengths[i] tokens of cache[rows[i]], for i < n, concatenated.
void gather_tokens(const ArrayView& cache, const int64_t* rows, const int64_t* lengths, size_t n, const ArrayView& out);

}  // namespace whet
