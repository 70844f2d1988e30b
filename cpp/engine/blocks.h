// The blocks of GGUF's quantised types, byte for byte, and what their numbers are: the definition, one at a time.
//
// In all of them a weight is w = scale q - lowest, with an integer q and, for each group of 16 or 32 weights, a scale
// and perhaps a lowest value. The types that the kernels multiply by (engine/formats.h) have unsigned integers
// u = q + kBias of kBits, as in their panels.
// Source of the layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, ggml-quants.c.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/panel_layout.h"

namespace whet {

// float16, the scales' type: rounded to nearest even; beyond the range the largest number, since a scale has to stay
// finite.
uint16_t f16_of(float x);
float f32_of(uint16_t half);

constexpr size_t kSuperBlock = 8 * kQuantBlock;

// w[i] = scale[i / group] q[i] - lowest[i / group]
struct Opened {
    int8_t q[kSuperBlock];
    float scale[16], lowest[16];
};

// ---------------------------------------------------------------- packed types

struct BlockQ8_0 {  // d q
    static constexpr size_t kLength = kQuantBlock, kGroup = kQuantBlock;
    static constexpr int kBits = 8, kBias = 128;
    uint16_t d;
    int8_t q[kLength];
};
struct BlockQ4_0 {  // d (u - 8); weights i and i + 16 in one byte
    static constexpr size_t kLength = kQuantBlock, kGroup = kQuantBlock;
    static constexpr int kBits = 4, kBias = 8;
    uint16_t d;
    uint8_t q[kLength / 2];
};
struct BlockQ4_1 {  // d u + m
    static constexpr size_t kLength = kQuantBlock, kGroup = kQuantBlock;
    static constexpr int kBits = 4, kBias = 0;
    uint16_t d, m;
    uint8_t q[kLength / 2];
};
struct BlockQ5_0 {  // d (u - 16); the fifth bit of weight i is bit i of `high`
    static constexpr size_t kLength = kQuantBlock, kGroup = kQuantBlock;
    static constexpr int kBits = 5, kBias = 16;
    uint16_t d;
    uint8_t high[4], q[kLength / 2];
};
struct BlockQ5_1 {  // d u + m
    static constexpr size_t kLength = kQuantBlock, kGroup = kQuantBlock;
    static constexpr int kBits = 5, kBias = 0;
    uint16_t d, m;
    uint8_t high[4], q[kLength / 2];
};
struct BlockQ4_K {  // (d s) u - (dmin m), with 6-bit s and m for each 32; weights i and i + 32 of 64 in one byte
    static constexpr size_t kLength = kSuperBlock, kGroup = kQuantBlock;
    static constexpr int kBits = 4, kBias = 0;
    uint16_t d, dmin;
    uint8_t factors[12], q[kLength / 2];
};
struct BlockQ5_K {  // the same; the fifth bit of weight 32 j + i is bit j of high[i]
    static constexpr size_t kLength = kSuperBlock, kGroup = kQuantBlock;
    static constexpr int kBits = 5, kBias = 0;
    uint16_t d, dmin;
    uint8_t factors[12], high[kLength / 8], q[kLength / 2];
};
struct BlockQ6_K {  // (d s) (u - 32), with a signed s for each 16; of 128 weights, 32 j + i has bits 2j of high[i] on
                    // top
    static constexpr size_t kLength = kSuperBlock, kGroup = 16;
    static constexpr int kBits = 6, kBias = 32;
    uint8_t q[kLength / 2], high[kLength / 4];
    int8_t factors[kLength / kGroup];
    uint16_t d;
};

// The integers u of a block; a block's bits from them, which are zero before.
#define WHET_PACKED_BLOCK(Block)                       \
    void get_integers(const Block& block, uint8_t* u); \
    void put_integers(const uint8_t* u, Block& block);
WHET_PACKED_BLOCK(BlockQ8_0)
WHET_PACKED_BLOCK(BlockQ4_0)
WHET_PACKED_BLOCK(BlockQ4_1)
WHET_PACKED_BLOCK(BlockQ5_0)
WHET_PACKED_BLOCK(BlockQ5_1)
WHET_PACKED_BLOCK(BlockQ4_K)
WHET_PACKED_BLOCK(BlockQ5_K)
WHET_PACKED_BLOCK(BlockQ6_K)
#undef WHET_PACKED_BLOCK

// The 6-bit factors of the eight groups of q4_k and q5_k.
struct Factors {
    uint8_t scale[8], lowest[8];
};
void put_factors(const Factors& f, uint8_t* bytes);
Factors get_factors(const uint8_t* bytes);

// The scales and lowest values of a block's groups.
template <class Block>
void get_scales(const Block& block, float* scale, float* lowest) {
    const float d = f32_of(block.d);
    if constexpr (requires { block.dmin; }) {
        const Factors f = get_factors(block.factors);
        for (size_t j = 0; j < 8; ++j) {
            scale[j] = d * static_cast<float>(f.scale[j]);
            lowest[j] = f32_of(block.dmin) * static_cast<float>(f.lowest[j]);
        }
        return;
    }
    for (size_t j = 0; j < Block::kLength / Block::kGroup; ++j) {
        scale[j] = d, lowest[j] = 0.0f;
        if constexpr (requires { block.factors; }) scale[j] *= static_cast<float>(block.factors[j]);
        if constexpr (requires { block.m; }) lowest[j] = -f32_of(block.m);
    }
}

// ---------------------------------------------------------------- types that are read, and packed as others

struct BlockQ2_K {  // (d s) q - (dmin m), q in [0, 3], 4-bit s and m for each 16
    static constexpr size_t kLength = kSuperBlock, kGroup = 16;
    uint8_t factors[16], q[kLength / 4];
    uint16_t d, dmin;
};
struct BlockQ3_K {  // d (s - 32) q, q in [-4, 3], 6-bit s for each 16
    static constexpr size_t kLength = kSuperBlock, kGroup = 16;
    uint8_t high[kLength / 8], q[kLength / 4], factors[12];
    uint16_t d;
};
struct BlockIQ4_NL {  // d kValues[u]
    static constexpr size_t kLength = kQuantBlock, kGroup = kQuantBlock;
    uint16_t d;
    uint8_t q[kLength / 2];
};
struct BlockIQ4_XS {  // d (s - 32) kValues[u], 6-bit s for each 32
    static constexpr size_t kLength = kSuperBlock, kGroup = kQuantBlock;
    uint16_t d, factors_high;
    uint8_t factors[kLength / 64], q[kLength / 2];
};
struct BlockMXFP4 {  // 2^(e - 128) q, q twice an E2M1 number
    static constexpr size_t kLength = kQuantBlock, kGroup = kQuantBlock;
    uint8_t e, q[kLength / 2];
};
struct BlockTQ1_0 {  // d q, q in {-1, 0, 1}, five to a byte
    static constexpr size_t kLength = kSuperBlock, kGroup = kQuantBlock;
    uint8_t q[48], last[4];
    uint16_t d;
};
struct BlockTQ2_0 {  // d q, q in {-1, 0, 1}, four to a byte
    static constexpr size_t kLength = kSuperBlock, kGroup = kQuantBlock;
    uint8_t q[kLength / 4];
    uint16_t d;
};

void open(const BlockQ2_K& block, Opened& opened);
void open(const BlockQ3_K& block, Opened& opened);
void open(const BlockIQ4_NL& block, Opened& opened);
void open(const BlockIQ4_XS& block, Opened& opened);
void open(const BlockMXFP4& block, Opened& opened);
void open(const BlockTQ1_0& block, Opened& opened);
void open(const BlockTQ2_0& block, Opened& opened);

// Q3_K's numbers in Q6_K: the same.
BlockQ6_K q6_k_of(const BlockQ3_K& block);

// ---------------------------------------------------------------- rows of blocks

template <class Block>
void open(const Block& block, Opened& opened) {
    uint8_t u[Block::kLength];
    get_integers(block, u);
    for (size_t i = 0; i < Block::kLength; ++i) opened.q[i] = static_cast<int8_t>(u[i] - Block::kBias);
    get_scales(block, opened.scale, opened.lowest);
}

template <class Block>
void dequantize_blocks(const uint8_t* row, size_t k, float* x) {
    for (size_t first = 0; first < k; first += Block::kLength, row += sizeof(Block), x += Block::kLength) {
        Block block;
        Opened opened;
        std::memcpy(&block, row, sizeof block);
        open(block, opened);
        for (size_t i = 0; i < Block::kLength; ++i) {
            const size_t group = i / Block::kGroup;
            x[i] = opened.scale[group] * static_cast<float>(opened.q[i]) - opened.lowest[group];
        }
    }
}

}  // namespace whet
