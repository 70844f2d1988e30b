// The table of kernels for the instruction set that this machine runs best.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace whet {

struct Kernels {
    const char* isa;
#define KERNEL(result, name, parameters) result(*name) parameters;
#include "kernels/kernels.def"
#undef KERNEL
};

// Picked at the first call: what WHET_ISA names, else the widest set that the processor has.
// Throws std::runtime_error if WHET_ISA names a set that is not built in or that this processor lacks.
const Kernels& kernels();

}  // namespace whet
