// float32 to the blocks of the quantised formats: small squared error rather than speed, one number at a time. Packing
// from numbers does the same for 16 rows at once (kernels/pack_quantised.h).
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

// int8: k numbers and their scale.
void quantize_int8(const float* x, size_t k, uint8_t* row);
void dequantize_int8(const uint8_t* row, size_t k, float* x);

// A type that is not packed in q8_0, length / 32 blocks. Where 32 weights have one scale, no lowest value, and a
// float16 can hold the scale, they keep their integers: the same numbers if the scale is a float16 already, else within
// 2^-11 of each (IQ4_XS). Others are quantised: within 1/254 of the largest of the 32 and 2^-11 of each (Q2_K).
void to_q8_0(const Opened& opened, size_t length, size_t group, BlockQ8_0* blocks);

template <class Block>
void quantize_blocks(const float* x, size_t k, uint8_t* row) {
    for (size_t i = 0; i < k; i += Block::kLength, row += sizeof(Block)) {
        Block block{};
        quantize(x + i, block);
        std::memcpy(row, &block, sizeof block);
    }
}

}  // namespace whet
