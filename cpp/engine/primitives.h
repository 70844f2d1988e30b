// The primitives of an RL step over the pool.
//
// Arrays are contiguous and checked by the caller. Rows are cut into pieces whose size does not depend on the number of
// threads, and partial sums are added in order: the same bits on any number of threads.
#pragma once
#include <cstddef>
#include <cstdint>

#include "runtime/array.h"

namespace whet {

// sums[row] = the KL of a row's tokens between log-probs p and q (rows, columns), float32 or float64; tokens whose mask
// (rows, columns) is 0 do not count; no mask: null. Throws std::bad_alloc.
void token_kl(bool schulman, const ArrayView& p, const ArrayView& q, const uint8_t* mask, size_t rows, size_t columns,
              double* sums);

enum class AdvantageScale { kGroup, kBatch, kNone };  // the deviation that an advantage is divided by

// rewards and out (n_groups, group_size), float32 or float64; eps below 0: none is added, and a deviation below 1e-8
// counts as 0.
void group_advantages(const ArrayView& rewards, size_t n_groups, size_t group_size, AdvantageScale scale, double ddof,
                      double eps, void* out);

// Of token_ids (rows,) under logits (rows, vocab), float32 or bfloat16; entropy may be null.
void token_logprobs(const ArrayView& logits, const int64_t* token_ids, double temperature, float* logprobs,
                    float* entropy);

// rewards, values, dones, advantages, returns (T,) or (rows, T), float32 or float64; last_values (rows,).
void gae(const ArrayView& rewards, const ArrayView& values, const uint8_t* dones, const double* last_values,
         double gamma, double lambda, void* advantages, void* returns);

}  // namespace whet
