// The table of kernels for the best instruction set of this machine.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kernels/adamw_step.h"
#include "kernels/attention_task.h"
#include "kernels/panel_task.h"
#include "kernels/token_sums.h"

namespace whet {

struct Kernels {
    const char* isa;
#define KERNEL(result, name, parameters) result(*name) parameters;
#include "kernels/kernels.def"
#undef KERNEL
};

constexpr int kProbeStep = 512;   // the step of probe_read, probe_copy and probe_scale, in bytes
constexpr int kProbeChains = 12;  // vectors of 64 bytes that probe_fma_* find in `sums`; they may use fewer

// An instruction set of this build, and whether this processor has all of it.
struct Unit {
    const Kernels* table;
    bool usable;
};

// All of them, the one to prefer first.
const Unit* units(size_t& count);

// Picked at the first call: what WHET_ISA names, else the first of units() that the processor has.
// Throws VariableError if WHET_ISA names a set that is not built in or that this processor lacks.
const Kernels& kernels();

}  // namespace whet
