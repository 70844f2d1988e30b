// The engine's device in the WebAssembly build for GPUs.
#pragma once
#include "engine/device.h"
#include "engine/lora.h"

namespace whet {

// Throws std::logic_error before gpu_plan().
Device& gpu_device();
// A step begins again until it has all results of the GPU; then it ends.
void begin_gpu_step();
void end_gpu_step();

// Sets `result` to the plan of an adapter, with its uploads and the dispatches of each point. Throws
// std::invalid_argument for what has no kernel, named.
void describe_for_gpu(Adapter& adapter);
// Gives an adapter its number, until it is destroyed: JavaScript has copied it.
void add_to_gpu(uint32_t number, Adapter& adapter);

}  // namespace whet
