// The searches for scales are our own; any choice makes a valid GGUF file.
#include "engine/quantize.h"

#include <algorithm>
#include <cmath>

namespace whet {
namespace {

int nearest(float x, int low, int high) {
    return std::clamp(static_cast<int>(std::lrintf(std::clamp(x, -1e6f, 1e6f))), low, high);
}

float largest(const float* x, size_t n) {
    float top = 0.0f;
    for (size_t i = 0; i < n; ++i) top = std::max(top, std::fabs(x[i]));
    return top;
}

void to_int8(const float* x, size_t n, float scale, int8_t* q) {
    for (size_t i = 0; i < n; ++i) q[i] = static_cast<int8_t>(scale > 0.0f ? nearest(x[i] / scale, -127, 127) : 0);
}

// ---------------------------------------------------------------- scale q, q in [-half, half - 1]

constexpr bool kAsHalf = true;  // a scale that is stored as a float16

// The scale with the least squared error among some that put the largest number at or near -half scale. Of both ends of
// the range the wider one, -half, takes it, so the scale may be negative.
float symmetric_scale(const float* x, size_t n, int half, bool as_half) {
    float top = 0.0f;
    for (size_t i = 0; i < n; ++i) {
        if (std::fabs(x[i]) > std::fabs(top)) top = x[i];
    }
    float best = 0.0f, least = INFINITY;
    for (int step = -6; step <= 2; ++step) {
        float scale = top / (static_cast<float>(-half) + 0.15f * static_cast<float>(step));
        if (as_half) scale = f32_of(f16_of(scale));
        if (scale == 0.0f) continue;
        float error = 0.0f;
        for (size_t i = 0; i < n; ++i) {
            const float rest = x[i] - scale * static_cast<float>(nearest(x[i] / scale, -half, half - 1));
            error += rest * rest;
        }
        if (error < least) least = error, best = scale;
    }
    return best;
}

// n integers, half higher.
void put_symmetric(const float* x, size_t n, float scale, int half, uint8_t* u) {
    for (size_t i = 0; i < n; ++i) {
        u[i] = static_cast<uint8_t>((scale == 0.0f ? 0 : nearest(x[i] / scale, -half, half - 1)) + half);
    }
}

template <class Block>
void quantize_symmetric(const float* x, Block& block) {
    const float d = symmetric_scale(x, kQuantBlock, Block::kBias, kAsHalf);
    uint8_t u[kQuantBlock];
    block.d = f16_of(d);
    put_symmetric(x, kQuantBlock, d, Block::kBias, u);
    put_integers(u, block);
}

// ---------------------------------------------------------------- scale q - lowest, q in [0, most]

struct Line {
    float scale = 0.0f, lowest = 0.0f, error = INFINITY;
};

// q for given scales, and then the scales with the least squared error for these q (lowest not below 0).
Line fit_line(const float* x, int most, float scale, float lowest) {
    float n = 0.0f, q_sum = 0.0f, qq = 0.0f, x_sum = 0.0f, qx = 0.0f, q[kQuantBlock];
    for (size_t i = 0; i < kQuantBlock; ++i) {
        q[i] = static_cast<float>(nearest((x[i] + lowest) / scale, 0, most));
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

Line best_line(const float* x, int most) {
    const auto [low, high] = std::minmax_element(x, x + kQuantBlock);
    const float lowest = std::max(0.0f, -*low), range = *high + lowest;
    Line best;
    if (!(range > 0.0f)) return {0.0f, lowest, 0.0f};  // every number is -lowest, or the numbers are 0
    for (int step = -8; step <= 8; ++step) {
        const float scale = range / (static_cast<float>(most) + 0.25f * static_cast<float>(step));
        Line line = fit_line(x, most, scale, lowest);
        if (line.scale > 0.0f) {
            const Line again = fit_line(x, most, line.scale, line.lowest);
            if (again.scale > 0.0f && again.error < line.error) line = again;
            if (line.error < best.error) best = line;
        }
    }
    return best;
}

void put_line(const float* x, float scale, float lowest, int most, uint8_t* u) {
    for (size_t i = 0; i < kQuantBlock; ++i) {
        u[i] = static_cast<uint8_t>(scale > 0.0f ? nearest((x[i] + lowest) / scale, 0, most) : 0);
    }
}

template <class Block>
void quantize_line(const float* x, Block& block) {
    constexpr int most = (1 << Block::kBits) - 1;
    const Line line = best_line(x, most);
    block.d = f16_of(line.scale);
    block.m = f16_of(-line.lowest);
    uint8_t u[kQuantBlock];
    put_line(x, f32_of(block.d), -f32_of(block.m), most, u);
    put_integers(u, block);
}

// Eight lines, whose scales are whole multiples of d and of dmin.
template <class Block>
void quantize_lines(const float* x, Block& block) {
    constexpr int most = (1 << Block::kBits) - 1;
    Line lines[8];
    float top_scale = 0.0f, top_lowest = 0.0f;
    for (size_t j = 0; j < 8; ++j) {
        lines[j] = best_line(x + kQuantBlock * j, most);
        top_scale = std::max(top_scale, lines[j].scale);
        top_lowest = std::max(top_lowest, lines[j].lowest);
    }
    block.d = f16_of(top_scale / 63.0f);
    block.dmin = f16_of(top_lowest / 63.0f);
    const float d = f32_of(block.d), dmin = f32_of(block.dmin);
    Factors f;
    uint8_t u[kSuperBlock];
    for (size_t j = 0; j < 8; ++j) {
        f.scale[j] = static_cast<uint8_t>(d > 0.0f ? nearest(lines[j].scale / d, 0, 63) : 0);
        f.lowest[j] = static_cast<uint8_t>(dmin > 0.0f ? nearest(lines[j].lowest / dmin, 0, 63) : 0);
        const float scale = d * static_cast<float>(f.scale[j]), lowest = dmin * static_cast<float>(f.lowest[j]);
        put_line(x + kQuantBlock * j, scale, lowest, most, u + kQuantBlock * j);
    }
    put_factors(f, block.factors);
    put_integers(u, block);
}

}  // namespace

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
void quantize(const float* x, BlockQ4_0& block) { quantize_symmetric(x, block); }
void quantize(const float* x, BlockQ5_0& block) { quantize_symmetric(x, block); }
void quantize(const float* x, BlockQ4_1& block) { quantize_line(x, block); }
void quantize(const float* x, BlockQ5_1& block) { quantize_line(x, block); }
void quantize(const float* x, BlockQ4_K& block) { quantize_lines(x, block); }
void quantize(const float* x, BlockQ5_K& block) { quantize_lines(x, block); }

// Sixteen symmetric groups, whose scales are whole multiples of d, from -128 to 127.
void quantize(const float* x, BlockQ6_K& block) {
    constexpr size_t group = BlockQ6_K::kGroup;
    constexpr int half = BlockQ6_K::kBias;
    float scales[16], top = 0.0f;
    for (size_t j = 0; j < 16; ++j) {
        scales[j] = symmetric_scale(x + group * j, group, half, !kAsHalf);
        if (std::fabs(scales[j]) > std::fabs(top)) top = scales[j];
    }
    block.d = f16_of(top / -128.0f);
    const float d = f32_of(block.d);
    uint8_t u[kSuperBlock];
    for (size_t j = 0; j < 16; ++j) {
        block.factors[j] = static_cast<int8_t>(d == 0.0f ? 0 : nearest(scales[j] / d, -128, 127));
        put_symmetric(x + group * j, group, d * static_cast<float>(block.factors[j]), half, u + group * j);
    }
    put_integers(u, block);
}

void to_q8_0(const Opened& opened, size_t length, size_t group, BlockQ8_0* blocks) {
    for (size_t first = 0; first < length; first += kQuantBlock, ++blocks) {
        const int8_t* q = opened.q + first;
        const float scale = opened.scale[first / group], size = std::fabs(scale);
        const bool is_symmetric = group >= kQuantBlock && opened.lowest[first / group] == 0.0f;
        blocks->d = f16_of(scale);
        if (is_symmetric && (f32_of(blocks->d) == scale || (size >= 0x1p-14f && size <= 65504.0f))) {
            std::memcpy(blocks->q, q, kQuantBlock);
            continue;
        }
        float x[kQuantBlock];
        for (size_t i = 0; i < kQuantBlock; ++i) {
            const size_t j = (first + i) / group;
            x[i] = opened.scale[j] * static_cast<float>(q[i]) - opened.lowest[j];
        }
        quantize(x, *blocks);
    }
}

}  // namespace whet
