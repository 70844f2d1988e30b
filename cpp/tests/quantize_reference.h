// Scalar reference of the packing kernels, to the bit: quantisation of float32 to blocks, optimised for squared error.
// The searches for scales differ from llama.cpp's; any choice of scales gives a valid GGUF file.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "engine/blocks.h"
#include "engine/formats.h"

namespace whet {
namespace {

// Rounds to the nearest integer in [low, high], ties to even; NaN, after an overflow, gives low.
int nearest(float x, int low, int high) {
    const float from = static_cast<float>(low), to = static_cast<float>(high), above = x > from ? x : from;
    return static_cast<int>(std::lrintf(above < to ? above : to));
}

float inverse_of(float scale) { return scale == 0.0f ? 0.0f : 1.0f / scale; }

// ---------------------------------------------------------------- scale q, q in [-half, half - 1]

constexpr float kNegligible = 1e-20f;  // treated as 0: the scale would round to 0 in float16

// Searches a few candidate scales for the least squared error. Each candidate is optimal for the integers q of a trial
// scale: sum(q x) / sum(q q), with error sum(x x) - sum(q x)^2 / sum(q q). Trial scales map the largest number near
// -half, the wider end of the range, so the scale may be negative. For q4_0 and q5_0 fewer scales above it are tried:
// the squared error would fall further, but the perplexity of real models rises.
float symmetric_scale(const float* x, size_t n, int half) {
    float top = 0.0f, size = 0.0f;  // Clang 19 at -O3 gets the sign wrong if size is computed from top
    for (size_t i = 0; i < n; ++i) {
        if (std::fabs(x[i]) > size) top = x[i], size = std::fabs(x[i]);
    }
    if (!(size > kNegligible)) return 0.0f;
    float best = 0.0f, most_explained = 0.0f;
    const int last = half == BlockQ6_K::kBias ? 6 : 2;
    for (int step = -6; step <= last; ++step) {
        const float inverse = (static_cast<float>(-half) + 0.15f * static_cast<float>(step)) / top;
        float qx = 0.0f, qq = 0.0f;
        for (size_t i = 0; i < n; ++i) {
            const float q = static_cast<float>(nearest(x[i] * inverse, -half, half - 1));
            qx += q * x[i], qq += q * q;
        }
        const float explained = qx * qx / qq;
        if (explained > most_explained && explained < INFINITY) most_explained = explained, best = qx / qq;
    }
    return best;
}

// Quantises n numbers to integers, stored with an offset of half.
void put_symmetric(const float* x, size_t n, float scale, int half, uint8_t* u) {
    const float inverse = inverse_of(scale);
    for (size_t i = 0; i < n; ++i) u[i] = static_cast<uint8_t>(nearest(x[i] * inverse, -half, half - 1) + half);
}

template <class Block>
void quantize_symmetric(const float* x, Block& block) {
    uint8_t u[kQuantBlock];
    block.d = f16_of(symmetric_scale(x, kQuantBlock, Block::kBias));
    put_symmetric(x, kQuantBlock, f32_of(block.d), Block::kBias, u);
    put_integers(u, block);
}

// ---------------------------------------------------------------- scale q - min, q in [0, most]

constexpr float kN = static_cast<float>(kQuantBlock);

struct Line {
    float scale = 0.0f, min = 0.0f;
    float explained = -INFINITY;  // n times the reduction of the squared error of a constant
};

float sum(const float* x) {
    float total = 0.0f;
    for (size_t i = 0; i < kQuantBlock; ++i) total += x[i];
    return total;
}

// Least-squares scale and min (at least 0) for the integers q of a trial scale and min: the regression of x on q.
Line fit_line(const float* x, int most, float x_sum, float inverse, float min) {
    float q_sum = 0.0f, qq = 0.0f, qx = 0.0f;
    for (size_t i = 0; i < kQuantBlock; ++i) {
        const float q = static_cast<float>(nearest((x[i] + min) * inverse, 0, most));
        q_sum += q, qq += q * q, qx += q * x[i];
    }
    const float determinant = kN * qq - q_sum * q_sum, covariance = kN * qx - q_sum * x_sum;
    Line line;
    line.scale = covariance / determinant;
    line.min = (line.scale * q_sum - x_sum) / kN;
    line.explained = covariance * line.scale;
    if (determinant < 1.0f || line.min < 0.0f) {
        line.scale = qx / qq;
        line.min = 0.0f;
        line.explained = kN * qx * line.scale - x_sum * x_sum;
    }
    return line;
}

Line better(const Line& a, const Line& b) {
    return b.scale > 0.0f && b.explained > a.explained && b.explained < INFINITY ? b : a;
}

// Searches a few lines that span the range of x, each refitted twice, for the least squared error.
Line best_line(const float* x, int most) {
    const auto [low, high] = std::minmax_element(x, x + kQuantBlock);
    const float min = std::max(0.0f, -*low), range = *high + min, x_sum = sum(x);
    Line best{0.0f, min};
    if (!(range > kNegligible)) return best;  // all numbers are -min or 0
    for (int step = -4; step <= 4; ++step) {
        const float inverse = (static_cast<float>(most) + 0.5f * static_cast<float>(step)) / range;
        const Line first = fit_line(x, most, x_sum, inverse, min);
        const Line second = fit_line(x, most, x_sum, inverse_of(first.scale), first.min);
        best = better(better(best, first), second);
    }
    return best;
}

// Least-squares min at a given scale, for the integers of the current min.
float fit_min(const float* x, int most, float scale, float min) {
    const float inverse = inverse_of(scale);
    float q_sum = 0.0f;
    for (size_t i = 0; i < kQuantBlock; ++i) {
        q_sum += static_cast<float>(nearest((x[i] + min) * inverse, 0, most));
    }
    return std::max(0.0f, (scale * q_sum - sum(x)) / kN);
}

void put_line(const float* x, float scale, float min, int most, uint8_t* u) {
    const float inverse = inverse_of(scale);
    for (size_t i = 0; i < kQuantBlock; ++i) {
        u[i] = static_cast<uint8_t>(nearest((x[i] + min) * inverse, 0, most));
    }
}

template <class Block>
void quantize_line(const float* x, Block& block) {
    constexpr int most = (1 << Block::kBits) - 1;
    const Line line = best_line(x, most);
    block.d = f16_of(line.scale);
    block.m = f16_of(-line.min);
    uint8_t u[kQuantBlock];
    put_line(x, f32_of(block.d), -f32_of(block.m), most, u);
    put_integers(u, block);
}

// scale / unit as an integer in [low, high]; 0 if unit is 0.
int factor(float scale, float unit, int low, int high) { return unit == 0.0f ? 0 : nearest(scale / unit, low, high); }

// The 6-bit scales and mins of eight groups.
void put_factors(const Factors& f, uint8_t* bytes) {
    for (int j = 0; j < 4; ++j) {
        bytes[j] = static_cast<uint8_t>(f.scale[j] | (f.scale[j + 4] >> 4) << 6);
        bytes[j + 4] = static_cast<uint8_t>(f.min[j] | (f.min[j + 4] >> 4) << 6);
        bytes[j + 8] = static_cast<uint8_t>((f.scale[j + 4] & 15) | (f.min[j + 4] & 15) << 4);
    }
}

// Eight lines, with scales and mins that are integer multiples of d and dmin. Mins are fitted to the rounded scales.
template <class Block>
void quantize_lines(const float* x, Block& block) {
    constexpr int most = (1 << Block::kBits) - 1;
    Line lines[8];
    float top_scale = 0.0f, max_min = 0.0f;
    for (size_t j = 0; j < 8; ++j) {
        lines[j] = best_line(x + kQuantBlock * j, most);
        top_scale = std::max(top_scale, lines[j].scale);
    }
    block.d = f16_of(top_scale / 63.0f);
    const float d = f32_of(block.d);
    Factors f;
    for (size_t j = 0; j < 8; ++j) {
        f.scale[j] = static_cast<uint8_t>(factor(lines[j].scale, d, 0, 63));
        lines[j].scale = d * static_cast<float>(f.scale[j]);
        lines[j].min = fit_min(x + kQuantBlock * j, most, lines[j].scale, lines[j].min);
        max_min = std::max(max_min, lines[j].min);
    }
    block.dmin = f16_of(max_min / 63.0f);
    const float dmin = f32_of(block.dmin);
    uint8_t u[kSuperBlock];
    for (size_t j = 0; j < 8; ++j) {
        f.min[j] = static_cast<uint8_t>(factor(lines[j].min, dmin, 0, 63));
        const float min = dmin * static_cast<float>(f.min[j]);
        put_line(x + kQuantBlock * j, lines[j].scale, min, most, u + kQuantBlock * j);
    }
    put_factors(f, block.factors);
    put_integers(u, block);
}

// The scale of the binade of the largest number, or half of it, with the smaller error: numbers in units of the scale
// are rounded to the nearest of E2M1's, of equally near ones to the smaller.
void quantize(const float* x, BlockMXFP4& block) {
    constexpr float kTwice[8] = {0, 1, 2, 3, 4, 6, 8, 12}, kBounds[7] = {0.5f, 1.5f, 2.5f, 3.5f, 5.0f, 7.0f, 10.0f};
    float largest = 0.0f, errors[2];
    for (size_t i = 0; i < kQuantBlock; ++i) largest = std::max(largest, std::fabs(x[i]));
    uint8_t u[2][kQuantBlock];
    const int top = largest == 0.0f ? -200 : std::ilogb(largest);
    int e[2];
    for (int c = 0; c < 2; ++c) {
        e[c] = std::clamp(top + 125 + c, 2, 252), errors[c] = 0.0f;
        for (size_t i = 0; i < kQuantBlock; ++i) {
            const float size = std::fabs(x[i]) * std::ldexp(1.0f, 128 - e[c]);
            size_t code = 0;
            while (code < 7 && size > kBounds[code]) ++code;
            errors[c] += (size - kTwice[code]) * (size - kTwice[code]);
            u[c][i] = static_cast<uint8_t>(code | (x[i] < 0.0f && code > 0 ? 8 : 0));
        }
    }
    const int best = errors[1] * 4.0f < errors[0] ? 1 : 0;
    block.e = static_cast<uint8_t>(e[best]);
    put_integers(u[best], block);
}

void quantize(const float* x, BlockQ4_0& block) { quantize_symmetric(x, block); }
void quantize(const float* x, BlockQ5_0& block) { quantize_symmetric(x, block); }
void quantize(const float* x, BlockQ4_1& block) { quantize_line(x, block); }
void quantize(const float* x, BlockQ5_1& block) { quantize_line(x, block); }
void quantize(const float* x, BlockQ4_K& block) { quantize_lines(x, block); }
void quantize(const float* x, BlockQ5_K& block) { quantize_lines(x, block); }

// Sixteen symmetric groups, with scales that are integer multiples of d, from -128 to 127.
void quantize(const float* x, BlockQ6_K& block) {
    constexpr size_t group = BlockQ6_K::kGroup;
    constexpr int half = BlockQ6_K::kBias;
    float scales[16], top = 0.0f, size = 0.0f;
    for (size_t j = 0; j < 16; ++j) {
        scales[j] = symmetric_scale(x + group * j, group, half);
        if (std::fabs(scales[j]) > size) top = scales[j], size = std::fabs(scales[j]);
    }
    block.d = f16_of(top / -128.0f);
    const float d = f32_of(block.d);
    uint8_t u[kSuperBlock];
    for (size_t j = 0; j < 16; ++j) {
        block.factors[j] = static_cast<int8_t>(factor(scales[j], d, -128, 127));
        put_symmetric(x + group * j, group, d * static_cast<float>(block.factors[j]), half, u + group * j);
    }
    put_integers(u, block);
}

template <class Block>
void quantize_blocks(const float* x, size_t k, uint8_t* row) {
    for (size_t i = 0; i < k; i += Block::kLength, row += sizeof(Block)) {
        Block block{};
        quantize(x + i, block);
        std::memcpy(row, &block, sizeof block);
    }
}

// Quantises k finite numbers to a row of a format of integers.
void quantize_row(const FormatTraits& format, const float* x, size_t k, uint8_t* row) {
    switch (static_cast<WeightFormat>(&format - format_table().data())) {
        case WeightFormat::kQ4_0:
            return quantize_blocks<BlockQ4_0>(x, k, row);
        case WeightFormat::kQ4_1:
            return quantize_blocks<BlockQ4_1>(x, k, row);
        case WeightFormat::kQ5_0:
            return quantize_blocks<BlockQ5_0>(x, k, row);
        case WeightFormat::kQ5_1:
            return quantize_blocks<BlockQ5_1>(x, k, row);
        case WeightFormat::kQ4_K:
            return quantize_blocks<BlockQ4_K>(x, k, row);
        case WeightFormat::kQ5_K:
            return quantize_blocks<BlockQ5_K>(x, k, row);
        case WeightFormat::kQ6_K:
            return quantize_blocks<BlockQ6_K>(x, k, row);
        case WeightFormat::kMXFP4:
            return quantize_blocks<BlockMXFP4>(x, k, row);
        default:
            format.quantize_row(x, k, row);
    }
}

}  // namespace
}  // namespace whet
