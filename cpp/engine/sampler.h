// Draws one token from a row of logits, as whet.rollout.torch_engine.Sampler does.
//
//   repetition penalty -> temperature -> top-k -> top-p over what top-k left -> min-p -> draw by inverse CDF
//
// Nothing of the vocabulary's size is sorted or allocated: without filters it is one pass over the row; with them a
// second one gathers what lies above a cut that is known to be low enough. Cumulative sums are float64.
//
// Sources: top-k (Fan et al. 2018), top-p (Holtzman et al. 2020), min-p (Nguyen et al. 2024), repetition penalty
// (Keskar et al. 2019).
#pragma once
#include <cstddef>
#include <cstdint>

namespace whet {

struct Sampling {
    float temperature = 1, top_p = 1, min_p = 0, repetition_penalty = 1;
    int32_t top_k = 0;
    bool model_logprobs = false;  // report the log-prob under the model: no penalty, temperature 1, no filter
};

struct Drawn {
    int32_t token;
    float logprob;  // NaN: the logits hold NaN or +inf, or nothing but -inf; the token is then undefined
};

// Scratch for one row of vocab_size logits, aligned to 8 bytes.
size_t sampler_scratch_bytes(size_t vocab_size);

// The first token, in order of id, at which the cumulative probability exceeds `uniform`. At a filter's edge, and at
// temperature 0, the lower of equal ids is preferred. Temperature 0 takes the most probable token; its log-prob is that
// of the unfiltered distribution at temperature 1. `seen` is a bitmap of the tokens already in the sequence, or null.
// May overwrite the logits.
Drawn draw_token(float* logits, size_t vocab_size, const Sampling& sampling, const uint64_t* seen, double uniform,
                 void* scratch);

}  // namespace whet
