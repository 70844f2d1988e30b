// Mixers with a state per sequence, over the tokens of a step: short convolutions, the gated delta rule, and Mamba-2.
//
// A run of tokens reads the state before it and writes the state after it (kv_memory.h). Runs are independent, and the
// result of a token depends only on its sequence, to the bit. A step that threw can be repeated: the state before a run
// is still there, or, if a run of one token replaces it, it has the number of tokens up to it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/config.h"
#include "engine/kv_memory.h"
#include "engine/weights.h"

namespace whet {

struct InputToken;

// Consecutive tokens of a sequence in a step, and the states before and after them.
struct StateRun {
    size_t first, n;           // tokens of the step
    const int32_t *from, *to;  // pages of the states; from null: the run starts its sequence. May be equal if n is 1
    int32_t from_state, to_state;  // their numbers in the index; from_state negative: none
};

// A layer of a step.
struct RecurrentStep {
    const InputToken* rows;
    std::span<const StateRun> runs;
    const Weights& weights;
    size_t layer;
    const KvMemory& memory;
};

class Recurrent {
public:
    Recurrent(const ModelConfig& config, size_t max_rows);

    // Computes out (n, mixer_out) from in (n, mixer_in), which it changes.
    void mix(const RecurrentStep& step, float* in, float* out);

    size_t workspace_bytes() const { return (taps_.size() + length_weights_.size() + gates_.size()) * sizeof(float); }

private:
    const ModelConfig& config_;
    std::vector<float> taps_;  // of the layer
    std::vector<float> length_weights_;
    std::vector<float> gates_;  // decay and beta of a head, of all tokens, head by head

    void short_conv(const RecurrentStep& step, float* in, float* out) const;
    void delta_rule(const RecurrentStep& step, float* in, float* out);
    void convolve_heads(const RecurrentStep& step, const StateRun& run, size_t unit, float* in) const;
    void delta_head(const RecurrentStep& step, const StateRun& run, size_t head, const float* in, float* out);
    void gate_row(const RecurrentStep& step, size_t row, const float* z, float* out) const;
    template <class Emit>
    void for_windows(const RecurrentStep& step, const StateRun& run, size_t channel, size_t count, const float* in,
                     size_t stride, Emit&& emit) const;
};

}  // namespace whet
