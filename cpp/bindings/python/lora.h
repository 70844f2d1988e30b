#pragma once
#include <nanobind/nanobind.h>

namespace whet {

void bind_lora(nanobind::module_& m);

}  // namespace whet
