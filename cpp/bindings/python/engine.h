#pragma once
#include <nanobind/nanobind.h>

namespace whet {

void bind_engine(nanobind::module_& m);

}  // namespace whet
