// The work of one step as data: planned by the scheduler, computed by a model runner.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/kv_memory.h"
#include "engine/sampler.h"
#include "engine/transformer.h"

namespace whet {

// Draws a token from the logits after a hidden state.
struct DrawTask {
    size_t sample;    // index of the running sample
    size_t position;  // of the token in its sample
    // The token that it follows: of a draft, or kDrawn, the one that is drawn at the position before; kNone: the
    // sample's last token.
    int32_t before;
    static constexpr int32_t kNone = -1, kDrawn = -2;
    size_t token;         // index into StepPlan::tokens of the token with the hidden state
    const float* hidden;  // a stored hidden state instead; null: none
    const Sampling* sampling;
    History history;
    double uniform;
    Drawn* alternatives;   // output: the top_logprobs alternatives
    TokenSetBuffer* kept;  // output: the tokens that it was drawn from; null: not recorded
};

// Whether a draw is from the whole distribution, and only its token and log-prob are needed.
inline bool is_plain(const DrawTask& draw, size_t vocab_size) {
    const Sampling& s = *draw.sampling;
    const bool filters = (s.top_k > 0 && static_cast<size_t>(s.top_k) < vocab_size) || s.top_p < 1 || s.min_p > 0;
    return s.top_logprobs == 0 && draw.kept == nullptr && !adjusts(s, draw.history) && (!filters || s.temperature == 0);
}

// Scores a token under the logits after the token before it.
struct ScoreTask {
    size_t token;         // index into StepPlan::tokens of the token before
    const float* hidden;  // its stored hidden state instead; null: none
    int32_t target;
    const Sampling* sampling;           // temperature and number of alternatives
    float *logprob, *entropy, *logits;  // outputs; null: not computed
    Drawn* alternatives;                // output: the top_logprobs alternatives of the target
};

// Copies the hidden state of a token.
struct HiddenTask {
    size_t token;   // index into StepPlan::tokens
    float* hidden;  // output
};

// Pointers are to memory of the scheduler and its jobs, valid until Scheduler::complete().
struct StepPlan {
    std::vector<PageWrite> page_writes;  // in order, before all else; the runner removes those that it has applied
    std::vector<InputToken> tokens;
    std::vector<StateRun> runs;  // of all tokens, with recurrent mixers
    std::vector<HiddenTask> hiddens;
    std::vector<DrawTask> draws;
    std::vector<ScoreTask> scores;
    // On a device, steps that follow one another: tokens and draws are as many of each, the first step's first. Tokens
    // of later steps are kDrawn: what the step before draws. All draws are plain.
    size_t n_steps = 1;

    bool is_empty() const { return tokens.empty() && draws.empty(); }
};

}  // namespace whet
