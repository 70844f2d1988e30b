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

// ---------------------------------------------------------------- integers

// n weights with the low half of n bytes first, then n with the high half; and back.
void get_halves(const uint8_t* bytes, size_t n, uint8_t* u) {
    for (size_t i = 0; i < n; ++i) {
        u[i] = bytes[i] & 15;
        u[n + i] = bytes[i] >> 4;
    }
}
void put_halves(const uint8_t* u, size_t n, uint8_t* bytes) {
    for (size_t i = 0; i < n; ++i) bytes[i] = static_cast<uint8_t>((u[i] & 15) | u[n + i] << 4);
}

// Of 32 weights, those halves and a fifth bit: bit i of 4 bytes is that of weight i.
template <class Block>
void get_five_bits(const Block& block, uint8_t* u) {
    get_halves(block.q, 16, u);
    for (size_t i = 0; i < kQuantBlock; ++i) u[i] |= static_cast<uint8_t>((block.high[i / 8] >> i % 8 & 1) << 4);
}
template <class Block>
void put_five_bits(const uint8_t* u, Block& block) {
    put_halves(u, 16, block.q);
    for (size_t i = 0; i < kQuantBlock; ++i) block.high[i / 8] |= static_cast<uint8_t>((u[i] >> 4 & 1) << i % 8);
}

void get_no_lowest(float* lowest, size_t n) { std::fill_n(lowest, n, 0.0f); }

// The values of iq4_nl and iq4_xs.
constexpr int8_t kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kTwiceE2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

void get_values(const uint8_t* bytes, const int8_t* values, int8_t* q) {
    for (size_t i = 0; i < 16; ++i) {
        q[i] = values[bytes[i] & 15];
        q[i + 16] = values[bytes[i] >> 4];
    }
}

// s of each 16 weights: 4 low bits in the halves of the first 8 bytes, 2 high bits in the last 4.
int q3_k_factor(const uint8_t* bytes, size_t group) {
    const int low = bytes[group % 8] >> (group < 8 ? 0 : 4) & 15, high = bytes[8 + group % 4] >> 2 * (group / 4) & 3;
    return (low | high << 4) - 32;
}

// q in [0, 3]: of 128 weights, 32 j + i is bits 2j of byte i.
void get_quarters(const uint8_t* bytes, int8_t* q) {
    for (size_t half = 0; half < 2; ++half) {
        for (size_t j = 0; j < 4; ++j) {
            for (size_t i = 0; i < 32; ++i) q[128 * half + 32 * j + i] = bytes[32 * half + i] >> 2 * j & 3;
        }
    }
}

}  // namespace

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

// ---------------------------------------------------------------- 32 weights with a scale each

void get_integers(const BlockQ8_0& block, uint8_t* u) {
    for (size_t i = 0; i < kQuantBlock; ++i) u[i] = static_cast<uint8_t>(block.q[i] ^ 0x80);
}
void put_integers(const uint8_t* u, BlockQ8_0& block) {
    for (size_t i = 0; i < kQuantBlock; ++i) block.q[i] = static_cast<int8_t>(u[i] ^ 0x80);
}

void get_integers(const BlockQ4_0& block, uint8_t* u) { get_halves(block.q, 16, u); }
void put_integers(const uint8_t* u, BlockQ4_0& block) { put_halves(u, 16, block.q); }

void get_integers(const BlockQ4_1& block, uint8_t* u) { get_halves(block.q, 16, u); }
void put_integers(const uint8_t* u, BlockQ4_1& block) { put_halves(u, 16, block.q); }

void get_integers(const BlockQ5_0& block, uint8_t* u) { get_five_bits(block, u); }
void put_integers(const uint8_t* u, BlockQ5_0& block) { put_five_bits(u, block); }

void get_integers(const BlockQ5_1& block, uint8_t* u) { get_five_bits(block, u); }
void put_integers(const uint8_t* u, BlockQ5_1& block) { put_five_bits(u, block); }

// ---------------------------------------------------------------- 256 weights with factors of a scale

void put_factors(const Factors& f, uint8_t* bytes) {
    for (int j = 0; j < 4; ++j) {
        bytes[j] = static_cast<uint8_t>(f.scale[j] | (f.scale[j + 4] >> 4) << 6);
        bytes[j + 4] = static_cast<uint8_t>(f.lowest[j] | (f.lowest[j + 4] >> 4) << 6);
        bytes[j + 8] = static_cast<uint8_t>((f.scale[j + 4] & 15) | (f.lowest[j + 4] & 15) << 4);
    }
}

Factors get_factors(const uint8_t* bytes) {
    Factors f;
    for (int j = 0; j < 4; ++j) {
        f.scale[j] = bytes[j] & 63;
        f.lowest[j] = bytes[j + 4] & 63;
        f.scale[j + 4] = static_cast<uint8_t>((bytes[j + 8] & 15) | (bytes[j] >> 6) << 4);
        f.lowest[j + 4] = static_cast<uint8_t>(bytes[j + 8] >> 4 | (bytes[j + 4] >> 6) << 4);
    }
    return f;
}

void get_integers(const BlockQ4_K& block, uint8_t* u) {
    for (size_t j = 0; j < 4; ++j) get_halves(block.q + 32 * j, 32, u + 64 * j);
}
void put_integers(const uint8_t* u, BlockQ4_K& block) {
    for (size_t j = 0; j < 4; ++j) put_halves(u + 64 * j, 32, block.q + 32 * j);
}

void get_integers(const BlockQ5_K& block, uint8_t* u) {
    for (size_t j = 0; j < 4; ++j) get_halves(block.q + 32 * j, 32, u + 64 * j);
    for (size_t j = 0; j < 8; ++j) {
        for (size_t i = 0; i < 32; ++i) u[32 * j + i] |= static_cast<uint8_t>((block.high[i] >> j & 1) << 4);
    }
}
void put_integers(const uint8_t* u, BlockQ5_K& block) {
    for (size_t j = 0; j < 4; ++j) put_halves(u + 64 * j, 32, block.q + 32 * j);
    for (size_t j = 0; j < 8; ++j) {
        for (size_t i = 0; i < 32; ++i) block.high[i] |= static_cast<uint8_t>((u[32 * j + i] >> 4 & 1) << j);
    }
}

void get_integers(const BlockQ6_K& block, uint8_t* u) {
    for (size_t half = 0; half < 2; ++half, u += 128) {
        get_halves(block.q + 64 * half, 64, u);
        const uint8_t* high = block.high + 32 * half;
        for (size_t j = 0; j < 4; ++j) {
            for (size_t i = 0; i < 32; ++i) u[32 * j + i] |= static_cast<uint8_t>((high[i] >> 2 * j & 3) << 4);
        }
    }
}
void put_integers(const uint8_t* u, BlockQ6_K& block) {
    for (size_t half = 0; half < 2; ++half, u += 128) {
        put_halves(u, 64, block.q + 64 * half);
        uint8_t* high = block.high + 32 * half;
        for (size_t j = 0; j < 4; ++j) {
            for (size_t i = 0; i < 32; ++i) high[i] |= static_cast<uint8_t>((u[32 * j + i] >> 4 & 3) << 2 * j);
        }
    }
}

// ---------------------------------------------------------------- types that are read, and packed as others

void open(const BlockQ2_K& block, Opened& opened) {
    const float d = f32_of(block.d), dmin = f32_of(block.dmin);
    for (size_t j = 0; j < 16; ++j) {
        opened.scale[j] = d * static_cast<float>(block.factors[j] & 15);
        opened.lowest[j] = dmin * static_cast<float>(block.factors[j] >> 4);
    }
    get_quarters(block.q, opened.q);
}

void open(const BlockQ3_K& block, Opened& opened) {
    const float d = f32_of(block.d);
    for (size_t j = 0; j < 16; ++j) opened.scale[j] = d * static_cast<float>(q3_k_factor(block.factors, j));
    get_no_lowest(opened.lowest, 16);
    get_quarters(block.q, opened.q);
    for (size_t j = 0; j < 8; ++j) {
        for (size_t i = 0; i < 32; ++i) {
            opened.q[32 * j + i] = static_cast<int8_t>(opened.q[32 * j + i] - (block.high[i] >> j & 1 ? 0 : 4));
        }
    }
}

void open(const BlockIQ4_NL& block, Opened& opened) {
    opened.scale[0] = f32_of(block.d);
    get_no_lowest(opened.lowest, 1);
    get_values(block.q, kValues, opened.q);
}

void open(const BlockIQ4_XS& block, Opened& opened) {
    const float d = f32_of(block.d);
    for (size_t j = 0; j < 8; ++j) {
        const int low = block.factors[j / 2] >> 4 * (j % 2) & 15, high = block.factors_high >> 2 * j & 3;
        opened.scale[j] = d * static_cast<float>((low | high << 4) - 32);
        get_values(block.q + 16 * j, kValues, opened.q + 32 * j);
    }
    get_no_lowest(opened.lowest, 8);
}

void open(const BlockMXFP4& block, Opened& opened) {
    opened.scale[0] = std::ldexp(1.0f, block.e - 128);
    get_no_lowest(opened.lowest, 1);
    get_values(block.q, kTwiceE2M1, opened.q);
}

void open(const BlockTQ1_0& block, Opened& opened) {
    std::fill_n(opened.scale, 8, f32_of(block.d));
    get_no_lowest(opened.lowest, 8);
    int8_t* q = opened.q;
    // n_digits weights of each of n bytes: digit by digit, the first in the highest place of a fraction of base 3.
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

void open(const BlockTQ2_0& block, Opened& opened) {
    std::fill_n(opened.scale, 8, f32_of(block.d));
    get_no_lowest(opened.lowest, 8);
    get_quarters(block.q, opened.q);
    for (int8_t& q : opened.q) --q;
}

BlockQ6_K q6_k_of(const BlockQ3_K& block) {
    Opened opened;
    open(block, opened);
    uint8_t u[kSuperBlock];
    for (size_t i = 0; i < kSuperBlock; ++i) u[i] = static_cast<uint8_t>(opened.q[i] + BlockQ6_K::kBias);
    BlockQ6_K same{};
    put_integers(u, same);
    for (size_t j = 0; j < 16; ++j) same.factors[j] = static_cast<int8_t>(q3_k_factor(block.factors, j));
    same.d = block.d;
    return same;
}

}  // namespace whet
