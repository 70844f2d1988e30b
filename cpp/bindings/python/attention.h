#pragma once
#include <nanobind/nanobind.h>

namespace whet {

void bind_attention(nanobind::module_& m);

}  // namespace whet
