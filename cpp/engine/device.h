// A device that computes steps in place of the CPU, with its memory of weights, keys and values.
#pragma once
#include <cstddef>
#include <span>

#include "engine/step_plan.h"

namespace whet {

// The hidden state of a row of logits: of a token of the step, or a stored one.
struct HeadInput {
    size_t token;
    const float* hidden;  // null: the token's
};

// A draw from the whole distribution.
struct PlainDraw {
    float temperature;  // 0: greedy
    double uniform;
    bool model_logprobs;  // report the log-prob at temperature 1
};

class Device {
public:
    virtual ~Device() = default;
    virtual void write_pages(std::span<const PageWrite> writes) = 0;  // in order
    // Computes the final hidden states of a step's tokens, which stay on the device until the next call.
    // `runs`: with recurrent mixers, the runs of all tokens. Writes the chosen experts of a mixture to `memory`.
    virtual void forward(std::span<const InputToken> tokens, std::span<const StateRun> runs, KvMemory& memory) = 0;
    virtual void read_hidden(std::span<const HiddenTask> tasks) = 0;
    // Draws a token after each of n hidden states, as draw_token() does.
    virtual void draw(std::span<const HeadInput> inputs, std::span<const PlainDraw> draws, Drawn* out) = 0;
    // Computes steps in which each token is followed by its draw: `tokens` and `draws` are of all steps, one step after
    // the other.
    virtual void decode(std::span<const InputToken> tokens, size_t n_steps, std::span<const PlainDraw> draws,
                        Drawn* out) = 0;
    // Computes the logits (n, vocab_size) of n hidden states.
    virtual void logits(std::span<const HeadInput> inputs, float* out) = 0;
};

}  // namespace whet
