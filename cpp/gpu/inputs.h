// The inputs of a step on a GPU, computed by the CPU: see make_plan().
#pragma once
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "engine/device.h"

namespace whet::gpu {

struct Inputs {
    std::vector<int32_t> tokens, page_table, runs;
    std::vector<float> rotation, local_rotation, embedded;
};

// Sets the inputs of a step's tokens, with the numbers of their adapters. Tokens of one sequence share its pages.
// Throws std::runtime_error if the second embedding of a token is not finite.
void set_inputs(const Weights& weights, std::span<const InputToken> tokens, std::span<const StateRun> runs,
                const std::map<const Adapter*, int32_t>& adapters, Inputs& inputs);

// Pairs of a page and the page that is copied to it. New pages without a source are not cleared.
std::vector<int32_t> page_copies(std::span<const PageWrite> writes);

// Rows of logits: tokens of the step, or -1 and a stored hidden state.
struct HeadRows {
    std::vector<int32_t> tokens;
    std::vector<float> hidden;  // no rows, or one for each token
};
HeadRows head_rows(std::span<const HeadInput> inputs, size_t hidden_dim);

// 4 numbers of each draw.
std::vector<float> draw_settings(std::span<const PlainDraw> draws);

}  // namespace whet::gpu
