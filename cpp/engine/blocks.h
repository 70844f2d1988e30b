// The blocks of GGUF's quantised types, byte for byte, and their scalar dequantisation, the reference of the kernels.
//
// A weight is w = scale q - min, with an integer q and, for each group of 16 or 32 weights, a scale and, in some types,
// a min. Packed types (engine/formats.h) store integers u = q + kBias of kBits, as their panels do. Source of
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
    float scale[16], min[16] = {};
};

// Weights of a block and of a scale; bits and bias of the unsigned integers of packed types.
template <size_t length, size_t group, int bits = 0, int bias = 0>
struct BlockOf {
    static constexpr size_t kLength = length, kGroup = group;
    static constexpr int kBits = bits, kBias = bias;
};

// ---------------------------------------------------------------- packed types

// d q
struct BlockQ8_0 : BlockOf<kQuantBlock, kQuantBlock, 8, kByteBias> {
    uint16_t d;
    int8_t q[kLength];
};
// d (u - 8); weights i and i + 16 share a byte
struct BlockQ4_0 : BlockOf<kQuantBlock, kQuantBlock, 4, 8> {
    uint16_t d;
    uint8_t q[kLength / 2];
};
// d u + m
struct BlockQ4_1 : BlockOf<kQuantBlock, kQuantBlock, 4, 0> {
    uint16_t d, m;
    uint8_t q[kLength / 2];
};
// d (u - 16); the fifth bit of weight i is bit i of `high`
struct BlockQ5_0 : BlockOf<kQuantBlock, kQuantBlock, 5, 16> {
    uint16_t d;
    uint8_t high[4], q[kLength / 2];
};
// d u + m
struct BlockQ5_1 : BlockOf<kQuantBlock, kQuantBlock, 5, 0> {
    uint16_t d, m;
    uint8_t high[4], q[kLength / 2];
};
// 2^(e - 128) q, with q twice an E2M1 number, whose nibble is u; weights i and i + 16 share a byte
struct BlockMXFP4 : BlockOf<kQuantBlock, kQuantBlock, 4, 0> {
    uint8_t e, q[kLength / 2];
};
// (d s) u - (dmin m), with 6-bit s and m for each 32; weights i and i + 32 of 64 share a byte
struct BlockQ4_K : BlockOf<kSuperBlock, kQuantBlock, 4, 0> {
    uint16_t d, dmin;
    uint8_t factors[12], q[kLength / 2];
};
// as BlockQ4_K; the fifth bit of weight 32 j + i is bit j of high[i]
struct BlockQ5_K : BlockOf<kSuperBlock, kQuantBlock, 5, 0> {
    uint16_t d, dmin;
    uint8_t factors[12], high[kLength / 8], q[kLength / 2];
};
// (d s) (u - 32), with a signed s for each 16; the high bits of weight 32 j + i of 128 are bits 2j and 2j + 1 of
// high[i]
struct BlockQ6_K : BlockOf<kSuperBlock, 16, 6, 32> {
    uint8_t q[kLength / 2], high[kLength / 4];
    int8_t factors[kLength / kGroup];
    uint16_t d;
};

// get_integers and put_integers are not inlined: GCC vectorises put_integers only out of line, and the tables of
// formats and of stored types share one copy of each.

// Calls visit(weight, byte, shift) for the bits of integers above their nibbles: from bit `shift` of high[byte] on.
template <class Block, class Visit>
void each_high_bits(Visit&& visit) {
    if constexpr (Block::kLength == kQuantBlock) {
        for (size_t i = 0; i < kQuantBlock; ++i) visit(i, i / 8, i % 8);
    } else {
        constexpr size_t bits = Block::kBits - 4, per_byte = 8 / bits;
        for (size_t first = 0; first < Block::kLength; first += 32 * per_byte) {
            for (size_t j = 0; j < per_byte; ++j) {
                for (size_t i = 0; i < 32; ++i) visit(first + 32 * j + i, first / per_byte + i, bits * j);
            }
        }
    }
}

// The low nibbles of n bytes are the first n integers, the high nibbles the next n.
void get_nibbles(const uint8_t* bytes, size_t n, uint8_t* u);
void put_nibbles(const uint8_t* u, size_t n, uint8_t* bytes);

// Bytes whose nibbles are consecutive weights.
template <class Block>
constexpr size_t kRun = Block::kLength == kQuantBlock ? 16
                        : Block::kBits == 6           ? 64
                                                      : 32;

// Reads the integers u of a block.
template <class Block>
__attribute__((noinline)) void get_integers(const Block& block, uint8_t* u) {
    if constexpr (Block::kBits == 8) {
        for (size_t i = 0; i < Block::kLength; ++i) u[i] = static_cast<uint8_t>(block.q[i] ^ kByteBias);
    } else {
        for (size_t i = 0; i < Block::kLength / 2; i += kRun<Block>) get_nibbles(block.q + i, kRun<Block>, u + 2 * i);
    }
    if constexpr (requires { block.high; }) {
        constexpr int mask = (1 << (Block::kBits - 4)) - 1;
        each_high_bits<Block>([&](size_t i, size_t byte, size_t shift) {
            u[i] |= static_cast<uint8_t>((block.high[byte] >> shift & mask) << 4);
        });
    }
}

// Writes the integers u to a zeroed block.
template <class Block>
__attribute__((noinline)) void put_integers(const uint8_t* u, Block& block) {
    if constexpr (Block::kBits == 8) {
        for (size_t i = 0; i < Block::kLength; ++i) block.q[i] = static_cast<int8_t>(u[i] ^ kByteBias);
    } else {
        for (size_t i = 0; i < Block::kLength / 2; i += kRun<Block>) put_nibbles(u + 2 * i, kRun<Block>, block.q + i);
    }
    if constexpr (requires { block.high; }) {
        constexpr int mask = (1 << (Block::kBits - 4)) - 1;
        each_high_bits<Block>([&](size_t i, size_t byte, size_t shift) {
            block.high[byte] |= static_cast<uint8_t>((u[i] >> 4 & mask) << shift);
        });
    }
}

// The 6-bit scales and mins of the eight groups of q4_k and q5_k.
struct Factors {
    uint8_t scale[8], min[8];
};
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

// (d s) q - (dmin m), q in [0, 3], 4-bit s and m for each 16
struct BlockQ2_K : BlockOf<kSuperBlock, 16> {
    uint8_t factors[16], q[kLength / 4];
    uint16_t d, dmin;
};
// d (s - 32) q, q in [-4, 3], 6-bit s for each 16
struct BlockQ3_K : BlockOf<kSuperBlock, 16> {
    uint8_t high[kLength / 8], q[kLength / 4], factors[12];
    uint16_t d;
};
// d kCodebook[u]
struct BlockIQ4_NL : BlockOf<kQuantBlock, kQuantBlock> {
    uint16_t d;
    uint8_t q[kLength / 2];
};
// d (s - 32) kCodebook[u], 6-bit s for each 32
struct BlockIQ4_XS : BlockOf<kSuperBlock, kQuantBlock> {
    uint16_t d, factors_high;
    uint8_t factors[kLength / 64], q[kLength / 2];
};
// d q, q in {-1, 0, 1}, five per byte
struct BlockTQ1_0 : BlockOf<kSuperBlock, kQuantBlock> {
    uint8_t q[48], last[4];
    uint16_t d;
};
// d q, q in {-1, 0, 1}, four per byte
struct BlockTQ2_0 : BlockOf<kSuperBlock, kQuantBlock> {
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

// Weights [first, first + n) of a block with a scale for each `group` of them.
void dequantize(const UnpackedBlock& unpacked, size_t first, size_t n, size_t group, float* x);

template <class Block>
void dequantize_blocks(const uint8_t* row, size_t k, float* x) {
    for (size_t first = 0; first < k; first += Block::kLength, row += sizeof(Block), x += Block::kLength) {
        Block block;
        UnpackedBlock unpacked;
        std::memcpy(&block, row, sizeof block);
        unpack_block(block, unpacked);
        dequantize(unpacked, 0, Block::kLength, Block::kGroup, x);
    }
}

}  // namespace whet
