#pragma once
#include <nanobind/nanobind.h>

namespace whet {

void bind_norm(nanobind::module_& m);

}  // namespace whet
