#include "engine/blocks.h"

#include <algorithm>
#include <cmath>

namespace whet {
namespace {

static_assert(sizeof(BlockQ8_0) == 34 && sizeof(BlockQ4_0) == 18 && sizeof(BlockQ4_1) == 20);
static_assert(sizeof(BlockQ5_0) == 22 && sizeof(BlockQ5_1) == 24 && sizeof(BlockQ2_K) == 84);
static_assert(sizeof(BlockQ3_K) == 110 && sizeof(BlockQ4_K) == 144 && sizeof(BlockQ5_K) == 176);
static_assert(sizeof(BlockQ6_K) == 210 && sizeof(BlockIQ4_NL) == 18 && sizeof(BlockIQ4_XS) == 136);
static_assert(sizeof(BlockMXFP4) == 17 && sizeof(BlockTQ1_0) == 54 && sizeof(BlockTQ2_0) == 66);

uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// The codebook of iq4_nl and iq4_xs.
constexpr int8_t kCodebook[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kTwiceE2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

void get_values(const uint8_t* bytes, const int8_t* values, int8_t* q) {
    for (size_t i = 0; i < 16; ++i) {
        q[i] = values[bytes[i] & 15];
        q[i + 16] = values[bytes[i] >> 4];
    }
}

// s of a group of 16 weights: 4 low bits in the nibbles of the first 8 bytes, 2 high bits in the last 4.
int q3_k_factor(const uint8_t* bytes, size_t group) {
    const int low = bytes[group % 8] >> (group < 8 ? 0 : 4) & 15, high = bytes[8 + group % 4] >> 2 * (group / 4) & 3;
    return (low | high << 4) - 32;
}

// q in [0, 3] of two halves of 128 weights: weight 32 j + i is bits 2j and 2j + 1 of byte i.
void get_2_bits(const uint8_t* bytes, int8_t* q) {
    for (size_t half = 0; half < 2; ++half) {
        for (size_t j = 0; j < 4; ++j) {
            for (size_t i = 0; i < 32; ++i) q[128 * half + 32 * j + i] = bytes[32 * half + i] >> 2 * j & 3;
        }
    }
}

}  // namespace

void get_nibbles(const uint8_t* bytes, size_t n, uint8_t* u) {
    for (size_t i = 0; i < n; ++i) {
        u[i] = bytes[i] & 15;
        u[n + i] = bytes[i] >> 4;
    }
}

void put_nibbles(const uint8_t* u, size_t n, uint8_t* bytes) {
    for (size_t i = 0; i < n; ++i) bytes[i] = static_cast<uint8_t>((u[i] & 15) | u[n + i] << 4);
}

void dequantize(const UnpackedBlock& unpacked, size_t first, size_t n, size_t group, float* x) {
    for (size_t begin = first; begin < first + n; begin = (begin / group + 1) * group) {
        const float scale = unpacked.scale[begin / group], min = unpacked.min[begin / group];
        const size_t end = std::min(first + n, (begin / group + 1) * group);
        for (size_t i = begin; i < end; ++i) *x++ = scale * static_cast<float>(unpacked.q[i]) - min;
    }
}

// ---------------------------------------------------------------- float16

uint16_t f16_of(float x) {
    const uint32_t sign = bits_of(x) >> 16 & 0x8000;
    const float size = std::min(std::fabs(x), 65504.0f);
    if (size < 0x1p-14f) {  // subnormal: a multiple of 2^-24
        return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(size * 0x1p+24f)));
    }
    const uint32_t bits = bits_of(size), rounded = bits + 0xfff + (bits >> 13 & 1);
    return static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13));
}

float f32_of(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    return float_of(bits_of(float_of(rest << 13) * 0x1p+112f) | sign);
}

// ---------------------------------------------------------------- 256 weights with factors of a scale

Factors get_factors(const uint8_t* bytes) {
    Factors f;
    for (int j = 0; j < 4; ++j) {
        f.scale[j] = bytes[j] & 63;
        f.min[j] = bytes[j + 4] & 63;
        f.scale[j + 4] = static_cast<uint8_t>((bytes[j + 8] & 15) | (bytes[j] >> 6) << 4);
        f.min[j + 4] = static_cast<uint8_t>(bytes[j + 8] >> 4 | (bytes[j + 4] >> 6) << 4);
    }
    return f;
}

// ---------------------------------------------------------------- types that are read, and packed as others

void unpack_block(const BlockQ2_K& block, UnpackedBlock& unpacked) {
    const float d = f32_of(block.d), dmin = f32_of(block.dmin);
    for (size_t j = 0; j < 16; ++j) {
        unpacked.scale[j] = d * static_cast<float>(block.factors[j] & 15);
        unpacked.min[j] = dmin * static_cast<float>(block.factors[j] >> 4);
    }
    get_2_bits(block.q, unpacked.q);
}

void unpack_block(const BlockQ3_K& block, UnpackedBlock& unpacked) {
    const float d = f32_of(block.d);
    for (size_t j = 0; j < 16; ++j) unpacked.scale[j] = d * static_cast<float>(q3_k_factor(block.factors, j));
    get_2_bits(block.q, unpacked.q);
    for (size_t j = 0; j < 8; ++j) {
        for (size_t i = 0; i < 32; ++i) {
            unpacked.q[32 * j + i] = static_cast<int8_t>(unpacked.q[32 * j + i] - (block.high[i] >> j & 1 ? 0 : 4));
        }
    }
}

void unpack_block(const BlockIQ4_NL& block, UnpackedBlock& unpacked) {
    unpacked.scale[0] = f32_of(block.d);
    get_values(block.q, kCodebook, unpacked.q);
}

void unpack_block(const BlockIQ4_XS& block, UnpackedBlock& unpacked) {
    const float d = f32_of(block.d);
    for (size_t j = 0; j < 8; ++j) {
        const int low = block.factors[j / 2] >> 4 * (j % 2) & 15, high = block.factors_high >> 2 * j & 3;
        unpacked.scale[j] = d * static_cast<float>((low | high << 4) - 32);
        get_values(block.q + 16 * j, kCodebook, unpacked.q + 32 * j);
    }
}

void unpack_block(const BlockMXFP4& block, UnpackedBlock& unpacked) {
    unpacked.scale[0] = std::ldexp(1.0f, block.e - 128);
    get_values(block.q, kTwiceE2M1, unpacked.q);
}

void unpack_block(const BlockTQ1_0& block, UnpackedBlock& unpacked) {
    std::fill_n(unpacked.scale, 8, f32_of(block.d));
    int8_t* q = unpacked.q;
    // Unpacks n_digits weights from each of n bytes, which are fractions of base 3, most significant digit first.
    const auto get_digits = [&q](const uint8_t* bytes, size_t n, size_t n_digits) {
        int power = 1;
        for (size_t digit = 0; digit < n_digits; ++digit, power *= 3) {
            for (size_t i = 0; i < n; ++i) *q++ = static_cast<int8_t>(((bytes[i] * power & 255) * 3 >> 8) - 1);
        }
    };
    get_digits(block.q, 32, 5);
    get_digits(block.q + 32, 16, 5);
    get_digits(block.last, 4, 4);
}

void unpack_block(const BlockTQ2_0& block, UnpackedBlock& unpacked) {
    std::fill_n(unpacked.scale, 8, f32_of(block.d));
    get_2_bits(block.q, unpacked.q);
    for (int8_t& q : unpacked.q) --q;
}

BlockQ6_K q6_k_of(const BlockQ3_K& block) {
    UnpackedBlock unpacked;
    unpack_block(block, unpacked);
    uint8_t u[kSuperBlock];
    for (size_t i = 0; i < kSuperBlock; ++i) u[i] = static_cast<uint8_t>(unpacked.q[i] + BlockQ6_K::kBias);
    BlockQ6_K same{};
    put_integers(u, same);
    for (size_t j = 0; j < 16; ++j) same.factors[j] = static_cast<int8_t>(q3_k_factor(block.factors, j));
    same.d = block.d;
    return same;
}

}  // namespace whet
