// Draws a token from a row of logits, as whet.rollout.torch_engine.Sampler does.
//
//   banned tokens -> logit bias -> repetition penalty -> frequency and presence penalty -> temperature
//   -> top-k -> top-p over what top-k left -> min-p -> draw by inverse CDF
//
// No sort or allocation of the vocabulary's size: one pass over the row without filters; with filters, a second pass
// gathers the logits above a conservative threshold. Bans, bias and penalties touch only the affected tokens.
// Cumulative sums are float64.
//
// Sources: top-k (Fan et al. 2018), top-p (Holtzman et al. 2020), min-p (Nguyen et al. 2024), repetition penalty
// (Keskar et al. 2019), frequency and presence penalty (OpenAI's API), the order up to the temperature (vLLM).
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/kept_tokens.h"

namespace whet {

struct TokenBias {
    int32_t token;
    float bias;
};

struct Sampling {
    float temperature = 1, top_p = 1, min_p = 0, repetition_penalty = 1;
    float presence_penalty = 0, frequency_penalty = 0;
    int32_t top_k = 0;
    bool model_logprobs = false;          // report log-probs of unmodified logits: no bias, temperature 1, no filters
    size_t top_logprobs = 0;              // alternatives reported per token
    std::vector<TokenBias> logit_bias{};  // distinct tokens of the vocabulary

    bool counts_tokens() const { return presence_penalty != 0 || frequency_penalty != 0; }
};

struct TokenCount {
    int32_t token;
    uint32_t count;
};

// The parts of a sequence's history that the settings need.
struct History {
    const uint64_t* seen = nullptr;           // bitmap of the sequence's tokens; null: no repetition penalty
    std::span<const TokenCount> generated{};  // completion tokens, for frequency and presence penalties
    std::span<const int32_t> banned{};        // stop tokens before min_new_tokens
    const uint32_t* allowed = nullptr;        // bitmap of the tokens that may be drawn; null: all
};

// Whether bans, bias or penalties change the logits.
inline bool adjusts(const Sampling& sampling, const History& history) {
    return (history.seen != nullptr && sampling.repetition_penalty != 1) || !history.generated.empty() ||
           !history.banned.empty() || history.allowed != nullptr || !sampling.logit_bias.empty();
}

// A token and its log-probability.
struct Drawn {
    int32_t token;
    float logprob;  // NaN: the logits contain NaN or +inf, or are all -inf, and the token is undefined
};

// Throws std::invalid_argument for a token outside the vocabulary.
void check_token(int64_t token, size_t vocab_size);

// Bytes of scratch memory, aligned to 8 bytes, for a row of vocab_size logits.
size_t sampler_scratch_bytes(size_t vocab_size);

// Inverse CDF: draws the first token, by id, at which the cumulative probability exceeds `uniform`. Filters and
// temperature 0 break ties in favour of the lower id. Temperature 0 is greedy, with the log-prob of the unfiltered
// distribution at temperature 1. May overwrite the logits.
//
// Writes the top_logprobs most probable tokens of the reported distribution to `alternatives`, most probable first,
// ties by lower id, padded with token -1 if fewer have non-zero probability. Writes the tokens that bans, `allowed` and
// filters left to `kept`, unless it is null.
Drawn draw_token(float* logits, size_t vocab_size, const Sampling& sampling, const History& history, double uniform,
                 void* scratch, Drawn* alternatives, TokenSetBuffer* kept = nullptr);

}  // namespace whet
