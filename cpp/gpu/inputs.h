// The inputs of a step on a GPU, computed by the CPU: see make_plan().
#pragma once
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "engine/transformer.h"

namespace whet::gpu {

struct Inputs {
    std::vector<int32_t> tokens, page_table;
    std::vector<float> rotation, local_rotation, query_scales;
};

// Sets the inputs of a step's tokens, with the numbers of their adapters. Tokens of one sequence share its pages.
void set_inputs(const ModelConfig& config, std::span<const InputToken> tokens,
                const std::map<const Adapter*, int32_t>& adapters, Inputs& inputs);

}  // namespace whet::gpu
