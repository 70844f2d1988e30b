// The model of this instance of the module, which the engine loads and a learner shares.
#pragma once
#include <memory>

#include "engine/weights.h"

namespace whet {

// Null before begin_model.
std::shared_ptr<Weights> loaded_weights();

}  // namespace whet
