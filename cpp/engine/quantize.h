// Scalar quantisation of float32 to int8 and q8_0: for builds without packing kernels, which give the same bits
// (kernels/pack_quantised.h), and for types that are converted to q8_0.
#pragma once
#include <cstddef>
#include <cstdint>

#include "engine/blocks.h"

namespace whet {

void quantize_q8_0(const float* x, size_t k, uint8_t* row);
// int8: k numbers, followed by their scale.
void quantize_int8(const float* x, size_t k, uint8_t* row);
void dequantize_int8(const uint8_t* row, size_t k, float* x);

// Converts a block of an unpacked type to length / 32 blocks of q8_0. Groups of 32 with one scale in float16's range
// and no min keep their integers: lossless if the scale is a float16, else within 2^-11 of each weight (IQ4_XS). Others
// are requantised: within 1/254 of the largest of the 32 weights plus 2^-11 of each (Q2_K).
void to_q8_0(const UnpackedBlock& unpacked, size_t length, size_t group, BlockQ8_0* blocks);

}  // namespace whet
