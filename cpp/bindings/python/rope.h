#pragma once
#include <nanobind/nanobind.h>

namespace whet {

void bind_rope(nanobind::module_& m);

}  // namespace whet
