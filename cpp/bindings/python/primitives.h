#pragma once
#include <nanobind/nanobind.h>

namespace whet {

void bind_primitives(nanobind::module_& m);

}  // namespace whet
