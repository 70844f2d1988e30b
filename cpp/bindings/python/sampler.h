#pragma once
#include <nanobind/nanobind.h>

namespace whet {
void bind_sampler(nanobind::module_& m);
}
