// The table of kernels for the best instruction set of this machine.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kernels/adamw_step.h"
#include "kernels/attention_task.h"
#include "kernels/delta_task.h"
#include "kernels/divergence_row.h"
#include "kernels/panel_task.h"
#include "kernels/token_sums.h"

namespace whet {

struct Kernels {
    const char* isa;
#define KERNEL(result, name, parameters) result(*name) parameters;
#include "kernels/kernels.def"
#undef KERNEL
};

constexpr int kProbeStep = 512;   // granularity of probe_read, probe_copy and probe_scale, in bytes
constexpr int kProbeChains = 12;  // 64-byte vectors in `sums` of probe_fma_*, which may use fewer

// An instruction set of this build, and whether this processor supports it.
struct Unit {
    const Kernels* table;
    bool usable;
};

// All instruction sets of this build, the preferred one first.
const Unit* units(size_t& count);

// The kernels, selected at the first call: WHET_ISA, or the first of units() that the processor supports.
// With WHET_BFMMLA=1, linear_bf16 is linear_bfmmla. Throws VariableError if this build or this processor does not
// support WHET_ISA or WHET_BFMMLA.
const Kernels& kernels();

}  // namespace whet
