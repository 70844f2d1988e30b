// The blocks of the quantised formats, and float32 to them and back: the definition, one number at a time. Packing from
// numbers does the same for 16 rows at once (kernels/pack_quantised.h).
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/panel_layout.h"

namespace whet {

// GGUF's blocks of these names, byte for byte.
struct BlockQ8_0 {  // d q
    static constexpr size_t kLength = kQuantBlock;
    uint16_t d;
    int8_t q[kLength];
};
struct BlockQ4_0 {  // d (q - 8); inputs i and i + 16 in one byte
    static constexpr size_t kLength = kQuantBlock;
    uint16_t d;
    uint8_t q[kLength / 2];
};
struct BlockQ4_K {  // (d s) q - (dmin m), with 6-bit s and m for each 32; inputs i and i + 32 in one byte
    static constexpr size_t kLength = 8 * kQuantBlock;
    uint16_t d, dmin;
    uint8_t factors[12], q[kLength / 2];
};

void quantize(const float* x, BlockQ8_0& block);
void quantize(const float* x, BlockQ4_0& block);
void quantize(const float* x, BlockQ4_K& block);
void dequantize(const BlockQ8_0& block, float* x);
void dequantize(const BlockQ4_0& block, float* x);
void dequantize(const BlockQ4_K& block, float* x);

// int8: k numbers and their scale.
void quantize_int8(const float* x, size_t k, uint8_t* row);
void dequantize_int8(const uint8_t* row, size_t k, float* x);

template <class Block>
void quantize_blocks(const float* x, size_t k, uint8_t* row) {
    for (size_t i = 0; i < k; i += Block::kLength, row += sizeof(Block)) {
        Block block;
        quantize(x + i, block);
        std::memcpy(row, &block, sizeof block);
    }
}

template <class Block>
void dequantize_blocks(const uint8_t* row, size_t k, float* x) {
    for (size_t i = 0; i < k; i += Block::kLength, row += sizeof(Block)) {
        Block block;
        std::memcpy(&block, row, sizeof block);
        dequantize(block, x + i);
    }
}

}  // namespace whet
