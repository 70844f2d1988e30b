// The blocks of GGUF's quantised types, byte for byte, and their scalar dequantisation, the reference of the kernels.
//
// A weight is w = scale q - min, with an integer q and, for each group of 16 or 32 weights, a scale and, in some types,
// a min. Packed types (engine/formats.h) store unsigned integers u = q + kBias of kBits, as their panels do. Source of
// the layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, ggml-quants.c.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/panel_layout.h"

namespace whet {

// float16, the type of scales: rounded to nearest even and clamped to the finite range.
uint16_t f16_of(float x);
float f32_of(uint16_t half);

constexpr size_t kSuperBlock = 8 * kQuantBlock;

// w[i] = scale[i / group] q[i] - min[i / group]
struct UnpackedBlock {
    int8_t q[kSuperBlock];
    float scale[16], min[16];
};

// ---------------------------------------------------------------- packed types

struct BlockQ8_0 {  // d q
    static constexpr size_t kLength = kQuantBlock, kGroup = kQuantBlock;
    static constexpr int kBits = 8, kBias = 128;
    uint16_t d;
    int8_t q[kLength];
};
struct BlockQ4_0 {  // d (u - 8); weights i and i + 16 share a byte
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
struct BlockQ4_K {  // (d s) u - (dmin m), with 6-bit s and m for each 32; weights i and i + 32 of 64 share a byte
    static constexpr size_t kLength = kSuperBlock, kGroup = kQuantBlock;
    static constexpr int kBits = 4, kBias = 0;
    uint16_t d, dmin;
    uint8_t factors[12], q[kLength / 2];
};
struct BlockQ5_K {  // as BlockQ4_K; the fifth bit of weight 32 j + i is bit j of high[i]
    static constexpr size_t kLength = kSuperBlock, kGroup = kQuantBlock;
    static constexpr int kBits = 5, kBias = 0;
    uint16_t d, dmin;
    uint8_t factors[12], high[kLength / 8], q[kLength / 2];
};
struct BlockQ6_K {  // (d s) (u - 32), with a signed s for each 16; the high bits of weight 32 j + i of 128 are bits
                    // 2j and 2j + 1 of high[i]
    static constexpr size_t kLength = kSuperBlock, kGroup = 16;
    static constexpr int kBits = 6, kBias = 32;
    uint8_t q[kLength / 2], high[kLength / 4];
    int8_t factors[kLength / kGroup];
    uint16_t d;
};

// Reads the integers u of a block; writes them to a zeroed block.
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

// The 6-bit scales and mins of the eight groups of q4_k and q5_k.
struct Factors {
    uint8_t scale[8], min[8];
};
void put_factors(const Factors& f, uint8_t* bytes);
Factors get_factors(const uint8_t* bytes);

// Computes the scales and mins of a block's groups.
template <class Block>
void get_scales(const Block& block, float* scale, float* min) {
    const float d = f32_of(block.d);
    if constexpr (requires { block.dmin; }) {
        const Factors f = get_factors(block.factors);
        for (size_t j = 0; j < 8; ++j) {
            scale[j] = d * static_cast<float>(f.scale[j]);
            min[j] = f32_of(block.dmin) * static_cast<float>(f.min[j]);
        }
        return;
    }
    for (size_t j = 0; j < Block::kLength / Block::kGroup; ++j) {
        scale[j] = d, min[j] = 0.0f;
        if constexpr (requires { block.factors; }) scale[j] *= static_cast<float>(block.factors[j]);
        if constexpr (requires { block.m; }) min[j] = -f32_of(block.m);
    }
}

// ---------------------------------------------------------------- types that are converted when packed

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
struct BlockIQ4_NL {  // d kCodebook[u]
    static constexpr size_t kLength = kQuantBlock, kGroup = kQuantBlock;
    uint16_t d;
    uint8_t q[kLength / 2];
};
struct BlockIQ4_XS {  // d (s - 32) kCodebook[u], 6-bit s for each 32
    static constexpr size_t kLength = kSuperBlock, kGroup = kQuantBlock;
    uint16_t d, factors_high;
    uint8_t factors[kLength / 64], q[kLength / 2];
};
struct BlockMXFP4 {  // 2^(e - 128) q, with q twice an E2M1 number
    static constexpr size_t kLength = kQuantBlock, kGroup = kQuantBlock;
    uint8_t e, q[kLength / 2];
};
struct BlockTQ1_0 {  // d q, q in {-1, 0, 1}, five per byte
    static constexpr size_t kLength = kSuperBlock, kGroup = kQuantBlock;
    uint8_t q[48], last[4];
    uint16_t d;
};
struct BlockTQ2_0 {  // d q, q in {-1, 0, 1}, four per byte
    static constexpr size_t kLength = kSuperBlock, kGroup = kQuantBlock;
    uint8_t q[kLength / 4];
    uint16_t d;
};

void unpack_block(const BlockQ2_K& block, UnpackedBlock& unpacked);
void unpack_block(const BlockQ3_K& block, UnpackedBlock& unpacked);
void unpack_block(const BlockIQ4_NL& block, UnpackedBlock& unpacked);
void unpack_block(const BlockIQ4_XS& block, UnpackedBlock& unpacked);
void unpack_block(const BlockMXFP4& block, UnpackedBlock& unpacked);
void unpack_block(const BlockTQ1_0& block, UnpackedBlock& unpacked);
void unpack_block(const BlockTQ2_0& block, UnpackedBlock& unpacked);

// Lossless conversion of Q3_K to Q6_K.
BlockQ6_K q6_k_of(const BlockQ3_K& block);

// ---------------------------------------------------------------- rows of blocks

template <class Block>
void unpack_block(const Block& block, UnpackedBlock& unpacked) {
    uint8_t u[Block::kLength];
    get_integers(block, u);
    for (size_t i = 0; i < Block::kLength; ++i) unpacked.q[i] = static_cast<int8_t>(u[i] - Block::kBias);
    get_scales(block, unpacked.scale, unpacked.min);
}

template <class Block>
void dequantize_blocks(const uint8_t* row, size_t k, float* x) {
    for (size_t first = 0; first < k; first += Block::kLength, row += sizeof(Block), x += Block::kLength) {
        Block block;
        UnpackedBlock unpacked;
        std::memcpy(&block, row, sizeof block);
        unpack_block(block, unpacked);
        for (size_t i = 0; i < Block::kLength; ++i) {
            const size_t group = i / Block::kGroup;
            x[i] = unpacked.scale[group] * static_cast<float>(unpacked.q[i]) - unpacked.min[group];
        }
    }
}

}  // namespace whet
