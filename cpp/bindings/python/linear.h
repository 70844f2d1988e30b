#pragma once
#include <nanobind/nanobind.h>

namespace whet {
void bind_linear(nanobind::module_& m);
}
