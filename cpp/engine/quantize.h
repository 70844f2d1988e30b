// Scalar quantisation of float32 to blocks, optimised for squared error rather than speed. The packing kernels do the
// same for 16 rows at once (kernels/pack_quantised.h).
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "engine/blocks.h"

namespace whet {

void quantize(const float* x, BlockQ8_0& block);
void quantize(const float* x, BlockQ4_0& block);
void quantize(const float* x, BlockQ4_1& block);
void quantize(const float* x, BlockQ5_0& block);
void quantize(const float* x, BlockQ5_1& block);
void quantize(const float* x, BlockQ4_K& block);
void quantize(const float* x, BlockQ5_K& block);
void quantize(const float* x, BlockQ6_K& block);

// int8: k numbers, followed by their scale.
void quantize_int8(const float* x, size_t k, uint8_t* row);
void dequantize_int8(const uint8_t* row, size_t k, float* x);

// Converts a block of an unpacked type to length / 32 blocks of q8_0. Groups of 32 with one scale in float16's range
// and no min keep their integers: lossless if the scale is a float16, else within 2^-11 of each weight (IQ4_XS). Others
// are requantised: within 1/254 of the largest of the 32 weights plus 2^-11 of each (Q2_K).
void to_q8_0(const UnpackedBlock& unpacked, size_t length, size_t group, BlockQ8_0* blocks);

template <class Block>
void quantize_blocks(const float* x, size_t k, uint8_t* row) {
    for (size_t i = 0; i < k; i += Block::kLength, row += sizeof(Block)) {
        Block block{};
        quantize(x + i, block);
        std::memcpy(row, &block, sizeof block);
    }
}

}  // namespace whet
