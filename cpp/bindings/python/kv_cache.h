#pragma once
#include <nanobind/nanobind.h>

namespace whet {

void bind_kv_cache(nanobind::module_& m);

}  // namespace whet
