// The primitives of an RL step over the pool.
//
// Arrays are contiguous and checked by the caller. Rows are split into chunks whose size does not depend on the number
// of threads, and partial sums are added in order, so results are bit-identical for any number of threads.
#pragma once
#include <cstddef>
#include <cstdint>

#include "runtime/array.h"

namespace whet {

// sums[row] = KL over the tokens of a row between log-probs p and q (rows, columns), float32 or float64, excluding
// tokens whose mask (rows, columns) is 0; mask may be null. Throws std::bad_alloc.
void token_kl(bool schulman, const ArrayView& p, const ArrayView& q, const uint8_t* mask, size_t rows, size_t columns,
              double* sums);

enum class AdvantageScale { kGroup, kBatch, kNone };  // the standard deviation that divides advantages

// rewards and out (n_groups, group_size), float32 or float64. Negative eps: nothing is added to the standard deviation,
// and one below 1e-8 counts as 0.
void group_advantages(const ArrayView& rewards, size_t n_groups, size_t group_size, AdvantageScale scale, double ddof,
                      double eps, void* out);

// Log-probs of token_ids (rows,) under logits (rows, vocab), float32 or bfloat16; entropy may be null.
void token_logprobs(const ArrayView& logits, const int64_t* token_ids, double temperature, float* logprobs,
                    float* entropy);

// rewards, values, dones, advantages, returns (T,) or (rows, T), float32 or float64; last_values (rows,).
void gae(const ArrayView& rewards, const ArrayView& values, const uint8_t* dones, const double* last_values,
         double gamma, double lambda, void* advantages, void* returns);

}  // namespace whet
