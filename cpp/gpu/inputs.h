// The inputs of a step on a GPU, computed by the CPU: see make_plan().
#pragma once
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "engine/transformer.h"

namespace whet::gpu {

struct Inputs {
    std::vector<int32_t> tokens, page_table, runs;
    std::vector<float> rotation, local_rotation, query_scales, embedded;
};

// Sets the inputs of a step's tokens, with the numbers of their adapters. Tokens of one sequence share its pages.
// Throws std::runtime_error if the second embedding of a token is not finite.
void set_inputs(const Weights& weights, std::span<const InputToken> tokens, std::span<const StateRun> runs,
                const std::map<const Adapter*, int32_t>& adapters, Inputs& inputs);

}  // namespace whet::gpu
