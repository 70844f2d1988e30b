#pragma once
#include <nanobind/nanobind.h>

namespace whet {

void bind_probe(nanobind::module_& m);

}  // namespace whet
