// Draws one token from a row of logits, as whet.rollout.torch_engine.Sampler does.
//
//   banned tokens -> logit bias -> repetition penalty -> frequency and presence penalty -> temperature
//   -> top-k -> top-p over what top-k left -> min-p -> draw by inverse CDF
//
// Nothing of the vocabulary's size is sorted or allocated: without filters it is one pass over the row; with them a
// second one gathers what lies above a cut that is known to be low enough. Bans, bias and penalties touch only the
// tokens concerned. Cumulative sums are float64.
//
// Sources: top-k (Fan et al. 2018), top-p (Holtzman et al. 2020), min-p (Nguyen et al. 2024), repetition penalty
// (Keskar et al. 2019), frequency and presence penalty (OpenAI's API), the order up to the temperature (vLLM).
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace whet {

struct TokenBias {
    int32_t token;
    float bias;
};

struct Sampling {
    float temperature = 1, top_p = 1, min_p = 0, repetition_penalty = 1;
    float presence_penalty = 0, frequency_penalty = 0;
    int32_t top_k = 0;
    bool model_logprobs = false;          // report log-probs under the model: nothing added, temperature 1, no filter
    size_t top_logprobs = 0;              // alternatives that are reported with each token
    std::vector<TokenBias> logit_bias{};  // each token once, in the vocabulary

    bool counts_tokens() const { return presence_penalty != 0 || frequency_penalty != 0; }
};

struct TokenCount {
    int32_t token;
    uint32_t count;
};

// The sequence that a token is drawn for, as far as the settings ask for it.
struct History {
    const uint64_t* seen = nullptr;  // bitmap of the tokens already in the sequence; null: no repetition penalty
    std::span<const TokenCount> generated{};  // tokens of the completion, for the frequency and the presence penalty
    std::span<const int32_t> banned{};        // tokens that may not come yet
};

// A token and its log-probability.
struct Drawn {
    int32_t token;
    float logprob;  // NaN: the logits hold NaN or +inf, or nothing but -inf; the token is then undefined
};

// Scratch for one row of vocab_size logits, aligned to 8 bytes.
size_t sampler_scratch_bytes(size_t vocab_size);

// The first token, in order of id, at which the cumulative probability exceeds `uniform`. At a filter's edge, and at
// temperature 0, the lower of equal ids is preferred. Temperature 0 takes the most probable token; its log-prob is that
// of the unfiltered distribution at temperature 1. May overwrite the logits.
//
// `alternatives` gets the top_logprobs most probable tokens of the distribution whose log-prob is reported, the most
// probable first and of equal ones the lower id; -1 as the token behind the last of non-zero probability.
Drawn draw_token(float* logits, size_t vocab_size, const Sampling& sampling, const History& history, double uniform,
                 void* scratch, Drawn* alternatives);

}  // namespace whet
