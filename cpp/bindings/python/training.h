// Bindings of the kernels of a training step.
#pragma once
#include <nanobind/nanobind.h>

namespace whet {

void bind_training(nanobind::module_& m);

}  // namespace whet
