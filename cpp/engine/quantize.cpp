// What a block's numbers mean, and how they are chosen: small squared error rather than speed.
//
// The searches for scales are our own; any choice makes a valid GGUF file.
#include "engine/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace whet {
namespace {

// ---------------------------------------------------------------- float16

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

// Rounded to nearest even; beyond the range the largest number, since a scale has to stay finite.
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

int nearest(float x, int low, int high) {
    return std::clamp(static_cast<int>(std::lrintf(std::clamp(x, -1e6f, 1e6f))), low, high);
}

float largest(const float* x, size_t n) {
    float top = 0.0f;
    for (size_t i = 0; i < n; ++i) top = std::max(top, std::fabs(x[i]));
    return top;
}

// ---------------------------------------------------------------- int8 and q8_0

void to_int8(const float* x, size_t n, float scale, int8_t* q) {
    for (size_t i = 0; i < n; ++i) q[i] = static_cast<int8_t>(scale > 0.0f ? nearest(x[i] / scale, -127, 127) : 0);
}

// ---------------------------------------------------------------- q4_0: d (q - 8), q in [0, 15]

// The d with the least squared error among some that put the largest number at or near -8 d. Of both ends of the range
// the wider one, -8, takes it, so d may be negative.
float q4_0_scale(const float* x) {
    float top = 0.0f;
    for (size_t i = 0; i < kQuantBlock; ++i) {
        if (std::fabs(x[i]) > std::fabs(top)) top = x[i];
    }
    float best = 0.0f, least = INFINITY;
    for (int step = -6; step <= 2; ++step) {
        const float d = f32_of(f16_of(top / (-8.0f + 0.15f * static_cast<float>(step))));
        if (d == 0.0f) continue;
        float error = 0.0f;
        for (size_t i = 0; i < kQuantBlock; ++i) {
            const float rest = x[i] - d * static_cast<float>(nearest(x[i] / d, -8, 7));
            error += rest * rest;
        }
        if (error < least) least = error, best = d;
    }
    return best;
}

// ---------------------------------------------------------------- q4_k: (d s) q - (dmin m), q in [0, 15]

struct Line {  // scale q - lowest
    float scale = 0.0f, lowest = 0.0f, error = INFINITY;
};

// q for given scales, and then the scales with the least squared error for these q (lowest not below 0).
Line fitted(const float* x, float scale, float lowest) {
    float n = 0.0f, q_sum = 0.0f, qq = 0.0f, x_sum = 0.0f, qx = 0.0f, q[kQuantBlock];
    for (size_t i = 0; i < kQuantBlock; ++i) {
        q[i] = static_cast<float>(nearest((x[i] + lowest) / scale, 0, 15));
        n += 1.0f, q_sum += q[i], qq += q[i] * q[i], x_sum += x[i], qx += q[i] * x[i];
    }
    Line line;
    const float determinant = n * qq - q_sum * q_sum;
    if (determinant > 0.0f) {
        line.scale = (n * qx - q_sum * x_sum) / determinant;
        line.lowest = (q_sum * qx - qq * x_sum) / determinant;
    }
    if (determinant <= 0.0f || line.lowest < 0.0f) {
        line.lowest = 0.0f;
        line.scale = qq > 0.0f ? qx / qq : 0.0f;
    }
    line.error = 0.0f;
    for (size_t i = 0; i < kQuantBlock; ++i) {
        const float rest = x[i] - (line.scale * q[i] - line.lowest);
        line.error += rest * rest;
    }
    return line;
}

Line best_line(const float* x) {
    const auto [least, most] = std::minmax_element(x, x + kQuantBlock);
    const float lowest = std::max(0.0f, -*least), range = *most + lowest;
    Line best;
    if (!(range > 0.0f)) return {0.0f, lowest, 0.0f};  // every number is -lowest, or the numbers are 0
    for (int step = -8; step <= 8; ++step) {
        const float scale = range / (15.0f + 0.25f * static_cast<float>(step));
        Line line = fitted(x, scale, lowest);
        if (line.scale > 0.0f) {
            const Line again = fitted(x, line.scale, line.lowest);
            if (again.scale > 0.0f && again.error < line.error) line = again;
            if (line.error < best.error) best = line;
        }
    }
    return best;
}

struct Factors {  // the 6-bit factors of a super-block
    int scale[8], lowest[8];
};

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
        f.scale[j + 4] = (bytes[j + 8] & 15) | (bytes[j] >> 6) << 4;
        f.lowest[j + 4] = bytes[j + 8] >> 4 | (bytes[j + 4] >> 6) << 4;
    }
    return f;
}

}  // namespace

// ---------------------------------------------------------------- rows and blocks

void quantize_int8(const float* x, size_t k, uint8_t* row) {
    const float scale = largest(x, k) / 127.0f;
    to_int8(x, k, scale, reinterpret_cast<int8_t*>(row));
    std::memcpy(row + k, &scale, sizeof scale);
}

void dequantize_int8(const uint8_t* row, size_t k, float* x) {
    float scale;
    std::memcpy(&scale, row + k, sizeof scale);
    for (size_t i = 0; i < k; ++i) x[i] = scale * static_cast<float>(static_cast<int8_t>(row[i]));
}

void quantize(const float* x, BlockQ8_0& block) {
    block.d = f16_of(largest(x, kQuantBlock) / 127.0f);
    to_int8(x, kQuantBlock, f32_of(block.d), block.q);
}

void dequantize(const BlockQ8_0& block, float* x) {
    const float d = f32_of(block.d);
    for (size_t i = 0; i < kQuantBlock; ++i) x[i] = d * static_cast<float>(block.q[i]);
}

void quantize(const float* x, BlockQ4_0& block) {
    const float d = q4_0_scale(x);
    block.d = f16_of(d);
    const auto q = [&](size_t i) { return static_cast<uint8_t>(d == 0.0f ? 8 : nearest(x[i] / d, -8, 7) + 8); };
    for (size_t i = 0; i < 16; ++i) block.q[i] = static_cast<uint8_t>(q(i) | q(i + 16) << 4);
}

void dequantize(const BlockQ4_0& block, float* x) {
    const float d = f32_of(block.d);
    for (size_t i = 0; i < kQuantBlock; ++i) {
        x[i] = d * static_cast<float>((block.q[i % 16] >> (i < 16 ? 0 : 4) & 15) - 8);
    }
}

void quantize(const float* x, BlockQ4_K& block) {
    Line lines[8];
    float top_scale = 0.0f, top_lowest = 0.0f;
    for (size_t j = 0; j < 8; ++j) {
        lines[j] = best_line(x + kQuantBlock * j);
        top_scale = std::max(top_scale, lines[j].scale);
        top_lowest = std::max(top_lowest, lines[j].lowest);
    }
    block = {f16_of(top_scale / 63.0f), f16_of(top_lowest / 63.0f), {}, {}};
    const float d = f32_of(block.d), dmin = f32_of(block.dmin);
    Factors f;
    for (size_t j = 0; j < 8; ++j) {
        f.scale[j] = d > 0.0f ? nearest(lines[j].scale / d, 0, 63) : 0;
        f.lowest[j] = dmin > 0.0f ? nearest(lines[j].lowest / dmin, 0, 63) : 0;
        const float scale = d * static_cast<float>(f.scale[j]), lowest = dmin * static_cast<float>(f.lowest[j]);
        for (size_t i = 0; i < kQuantBlock; ++i) {
            const int q = scale > 0.0f ? nearest((x[kQuantBlock * j + i] + lowest) / scale, 0, 15) : 0;
            block.q[j / 2 * 32 + i] |= static_cast<uint8_t>(q << (j % 2 == 0 ? 0 : 4));
        }
    }
    put_factors(f, block.factors);
}

void dequantize(const BlockQ4_K& block, float* x) {
    const float d = f32_of(block.d), dmin = f32_of(block.dmin);
    const Factors f = get_factors(block.factors);
    for (size_t j = 0; j < 8; ++j) {
        const float scale = d * static_cast<float>(f.scale[j]), lowest = dmin * static_cast<float>(f.lowest[j]);
        for (size_t i = 0; i < kQuantBlock; ++i) {
            const int q = block.q[j / 2 * 32 + i] >> (j % 2 == 0 ? 0 : 4) & 15;
            x[kQuantBlock * j + i] = scale * static_cast<float>(q) - lowest;
        }
    }
}

}  // namespace whet
