#pragma once
#include <nanobind/nanobind.h>

namespace whet {
void bind_files(nanobind::module_& m);
}
