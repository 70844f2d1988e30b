// Division that rounds up.
#pragma once
#include <cstddef>

namespace whet {

constexpr size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

}  // namespace whet
