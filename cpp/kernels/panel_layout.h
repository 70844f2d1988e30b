// Memory layout of packed weights: panels of 16 outputs, shared by the kernels that pack and that multiply.
//
// A panel stores its inputs in steps of whole cache lines: first the numbers of all steps, then the scales of all
// groups of steps, then the scales of the outputs. kernels/linear.h and linear_quantised.h describe each format.
#pragma once
#include <stddef.h>

namespace whet {

constexpr size_t kPanel = 16;       // outputs of a panel
constexpr size_t kQuantBlock = 32;  // inputs per quantisation block: they share a scale, and so do their weights

struct PanelLayout {
    size_t step_inputs, step_bytes;
    size_t group = 1, group_bytes = 0;  // steps that share scales, and the bytes of these scales
    size_t output_bytes = 0;            // bytes of the scales per output

    // Padded to whole cache lines.
    __attribute__((always_inline)) constexpr size_t bytes(size_t steps) const {
        return (steps * step_bytes + steps / group * group_bytes + output_bytes + 63) / 64 * 64;
    }
};

// Bias of 8-bit integers in a panel: the dot products of x86 and WebAssembly take unsigned weights and signed inputs,
// the ones of AArch64 two signed factors.
#if defined(__aarch64__)
constexpr int kByteBias = 0;
#else
constexpr int kByteBias = 128;
#endif

constexpr PanelLayout kFloat32Layout = {1, 4 * kPanel};
constexpr PanelLayout kBFloat16Layout = {2, 4 * kPanel};
constexpr PanelLayout kInt8Layout = {kQuantBlock, kQuantBlock * kPanel, 1, 0, 4 * kPanel};
constexpr PanelLayout kQ8_0Layout = {kQuantBlock, kQuantBlock * kPanel, 1, 2 * kPanel};

// For integers of 4 to 6 bits, byte b of word w < 4 of a step holds the low 4 bits of input 4 w + b in its low nibble
// and of input 16 + 4 w + b in its high nibble; then follow the high bits, of 8 or 4 words of inputs per word.
constexpr PanelLayout kQ4_0Layout = {kQuantBlock, 16 * kPanel, 1, 2 * kPanel};
constexpr PanelLayout kMXFP4Layout = {kQuantBlock, 16 * kPanel, 1, kPanel};
constexpr PanelLayout kQ4_1Layout = {kQuantBlock, 16 * kPanel, 1, (2 + 2) * kPanel};
constexpr PanelLayout kQ5_0Layout = {kQuantBlock, (16 + 4) * kPanel, 1, 2 * kPanel};
constexpr PanelLayout kQ5_1Layout = {kQuantBlock, (16 + 4) * kPanel, 1, (2 + 2) * kPanel};
constexpr PanelLayout kQ4_KLayout = {kQuantBlock, 16 * kPanel, 8, (12 + 2 + 2) * kPanel};
constexpr PanelLayout kQ5_KLayout = {kQuantBlock, (16 + 4) * kPanel, 8, (12 + 2 + 2) * kPanel};
constexpr PanelLayout kQ6_KLayout = {kQuantBlock, (16 + 8) * kPanel, 8, (16 + 2) * kPanel};

}  // namespace whet
