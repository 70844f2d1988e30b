// Numbers of any source and strides into one panel of 16 outputs of int8, q8_0, q4_0 or q4_k: engine/quantize.cpp,
// which says what the searches look for, for 16 outputs at a time.
//
// An output has a lane of its own, and goes through the operations of quantize.cpp in their order: the same numbers, to
// the bit. They have to be finite.
#pragma once
#include "kernels/pack.h"
#include "kernels/panel_task.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

namespace pack {

// The nearest whole number to each lane, ties to even, in [low, high].
WHET_INLINE f32x16 nearest(f32x16 x, float low, float high) {
    const f32x16 rounder(kRounder<float>);
    return (min(max(x, f32x16(low)), f32x16(high)) + rounder) - rounder;
}

// A whole number's low bits stand at the end of its sum with this.
WHET_INLINE NativeU32 low_bits(f32x16::Native whole) { return (NativeU32)(whole + kRounder<float>); }

// The lanes of four (whole) numbers in [0, 255] as the bytes of a word.
WHET_INLINE f32x16 four_bytes(const f32x16 (&x)[4]) {
    f32x16 words;
    WHET_EACH_PART(p) {
        words.part[p] = (f32x16::Native)((low_bits(x[0].part[p]) & 255) | (low_bits(x[1].part[p]) & 255) << 8 |
                                         (low_bits(x[2].part[p]) & 255) << 16 | low_bits(x[3].part[p]) << 24);
    }
    return words;
}

constexpr float kLargestHalf = 65504.0f;

// Rounded to float16, to nearest even; beyond the range the largest number.
struct Halves {
    uint16_t bits[16];
    explicit WHET_INLINE Halves(f32x16 x) { store_f16(bits, min(max(x, f32x16(-kLargestHalf)), f32x16(kLargestHalf))); }
    WHET_INLINE f32x16 values() const { return load_f16(bits); }
};

// A whole block, zeros after the end.
WHET_INLINE void read_block(const PanelTask& task, size_t at, float* tile) {
    const size_t n = task.k - at < kTile ? task.k - at : kTile;
    read_tile(task, at, n, tile);
    for (size_t i = n; i < kTile; ++i) store(tile + 16 * i, f32x16(0.0f));
}

// ---------------------------------------------------------------- int8 and q8_0

WHET_INLINE f32x16 largest(const float* tile, f32x16 top) {
    for (size_t i = 0; i < kTile; ++i) top = max(top, magnitude(load(tile + 16 * i)));
    return top;
}

// The 8 words of a block, its numbers 128 higher.
WHET_INLINE void put_int8(const float* tile, f32x16 scale, const PanelTask& task, float* words) {
    const auto some = scale > f32x16(0.0f);
    for (size_t w = 0; w < 8; ++w) {
        f32x16 q[4];
#pragma GCC unroll 4
        for (size_t i = 0; i < 4; ++i) {
            const f32x16 x = select(some, load(tile + 64 * w + 16 * i) / scale, f32x16(0.0f));
            q[i] = nearest(x, -127.0f, 127.0f) + f32x16(128.0f);
        }
        put(words + 16 * w, four_bytes(q), task);
    }
}

// ---------------------------------------------------------------- 4 bits

// The 4 words of a block of numbers in [0, 15]: of 16 bytes the first holds inputs 0 and 16, and so on.
template <class Q>
WHET_INLINE void put_int4(Q&& q, const PanelTask& task, float* words) {
    for (size_t w = 0; w < 4; ++w) {
        f32x16 bytes[4];
#pragma GCC unroll 4
        for (size_t i = 0; i < 4; ++i) bytes[i] = q(4 * w + i) + f32x16(16.0f) * q(4 * w + i + 16);
        put(words + 16 * w, four_bytes(bytes), task);
    }
}

WHET_INLINE f32x16 q4_0_scale(const float* tile) {
    f32x16 top(0.0f), size(0.0f), best(0.0f), least(__builtin_inff());
    for (size_t i = 0; i < kTile; ++i) {
        const f32x16 x = load(tile + 16 * i);
        const auto larger = magnitude(x) > size;
        top = select(larger, x, top);
        size = select(larger, magnitude(x), size);
    }
    for (int step = -6; step <= 2; ++step) {
        const f32x16 d = Halves(top / f32x16(-8.0f + 0.15f * static_cast<float>(step))).values();
        f32x16 error(0.0f);
        for (size_t i = 0; i < kTile; ++i) {
            const f32x16 x = load(tile + 16 * i), rest = x - d * nearest(x / d, -8.0f, 7.0f);
            error += rest * rest;
        }
        const auto better = (error < least) & (d != f32x16(0.0f));
        least = select(better, error, least);
        best = select(better, d, best);
    }
    return best;
}

// ---------------------------------------------------------------- q4_k

struct Line {  // scale q - lowest
    f32x16 scale, lowest, error;
};

// q for given scales, and then the scales with the least squared error for these q (lowest not below 0).
WHET_INLINE Line fitted(const float* tile, f32x16 x_sum, f32x16 scale, f32x16 lowest) {
    const f32x16 zero(0.0f), n(static_cast<float>(kTile));
    f32x16 q_sum = zero, qq = zero, qx = zero;
    float q[16 * kTile];
    for (size_t i = 0; i < kTile; ++i) {
        const f32x16 x = load(tile + 16 * i), one = nearest((x + lowest) / scale, 0.0f, 15.0f);
        store(q + 16 * i, one);
        q_sum += one;
        qq += one * one;
        qx += one * x;
    }
    const f32x16 determinant = n * qq - q_sum * q_sum;
    const auto solvable = determinant > zero;
    Line line;
    line.lowest = select(solvable, (q_sum * qx - qq * x_sum) / determinant, zero);
    const auto both = solvable & ((line.lowest < zero) == i32x16(0));
    line.lowest = select(both, line.lowest, zero);
    line.scale = select(both, (n * qx - q_sum * x_sum) / determinant, select(qq > zero, qx / qq, zero));
    line.error = zero;
    for (size_t i = 0; i < kTile; ++i) {
        const f32x16 rest = load(tile + 16 * i) - (line.scale * load(q + 16 * i) - line.lowest);
        line.error += rest * rest;
    }
    return line;
}

WHET_INLINE Line chosen(i32x16 first, const Line& a, const Line& b) {
    return {select(first, a.scale, b.scale), select(first, a.lowest, b.lowest), select(first, a.error, b.error)};
}

__attribute__((noinline)) void best_line(const float* tile, Line& best) {
    const f32x16 zero(0.0f);
    f32x16 least = load(tile), most = least, x_sum = zero;
    for (size_t i = 0; i < kTile; ++i) {
        const f32x16 x = load(tile + 16 * i);
        least = min(least, x);
        most = max(most, x);
        x_sum += x;
    }
    const f32x16 lowest = select(least < zero, -least, zero), range = most + lowest;
    best = {zero, zero, f32x16(__builtin_inff())};
    for (int step = -8; step <= 8; ++step) {
        const f32x16 scale = range / f32x16(15.0f + 0.25f * static_cast<float>(step));
        Line line = fitted(tile, x_sum, scale, lowest);
        const Line again = fitted(tile, x_sum, line.scale, line.lowest);
        const auto rising = line.scale > zero;
        line = chosen((again.scale > zero) & (again.error < line.error), again, line);
        best = chosen(rising & (line.error < best.error), line, best);
    }
    best = chosen(range > zero, best, {zero, lowest, zero});
}

// The 12 bytes of the 6-bit factors of 8 blocks.
struct Factors {
    uint8_t scale[8][16], lowest[8][16];

    WHET_INLINE void put_bytes(const PanelTask& task, uint8_t* out) const {
        for (int j = 0; j < 4; ++j) {
            uint8_t bytes[3][16];
            for (int i = 0; i < 16; ++i) {
                const int s = scale[j + 4][i], l = lowest[j + 4][i];
                bytes[0][i] = static_cast<uint8_t>(scale[j][i] | (s >> 4) << 6);
                bytes[1][i] = static_cast<uint8_t>(lowest[j][i] | (l >> 4) << 6);
                bytes[2][i] = static_cast<uint8_t>((s & 15) | (l & 15) << 4);
            }
            for (int third = 0; third < 3; ++third) put(out + 16 * (4 * third + j), bytes[third], task);
        }
    }
};

// scale / unit as a whole number in [0, 63], 0 where there is no unit; its bytes, and what it stands for.
WHET_INLINE f32x16 factor(f32x16 scale, f32x16 unit, uint8_t* bytes) {
    const f32x16 zero(0.0f);
    const f32x16 whole = nearest(select(unit > zero, scale / unit, zero), 0.0f, 63.0f);
    store_low_bytes(reinterpret_cast<int8_t*>(bytes), bit_cast<i32x16>(whole + f32x16(kRounder<float>)));
    return unit * whole;
}

// 256 inputs: the words of 8 blocks, and then their scales.
WHET_INLINE void put_super_block(const PanelTask& task, size_t at, float* words, uint8_t* scales) {
    const f32x16 zero(0.0f);
    float tiles[8][16 * kTile];
    Line lines[8];
    f32x16 top_scale = zero, top_lowest = zero;
    for (size_t j = 0; j < 8; ++j) {
        read_tile(task, at + kTile * j, kTile, tiles[j]);
        best_line(tiles[j], lines[j]);
        top_scale = select(top_scale < lines[j].scale, lines[j].scale, top_scale);
        top_lowest = select(top_lowest < lines[j].lowest, lines[j].lowest, top_lowest);
    }
    const Halves d(top_scale / f32x16(63.0f)), dmin(top_lowest / f32x16(63.0f));
    Factors factors;
    for (size_t j = 0; j < 8; ++j) {
        const f32x16 scale = factor(lines[j].scale, d.values(), factors.scale[j]);
        const f32x16 lowest = factor(lines[j].lowest, dmin.values(), factors.lowest[j]);
        const auto q = [&](size_t i) WHET_INLINE_LAMBDA {
            const f32x16 x = (load(tiles[j] + 16 * i) + lowest) / scale;
            return nearest(select(scale > zero, x, zero), 0.0f, 15.0f);
        };
        put_int4(q, task, words + kQ4_KLayout.step_bytes / 4 * j);
    }
    factors.put_bytes(task, scales);
    put(reinterpret_cast<uint16_t*>(scales + 192), d.bits, task);
    put(reinterpret_cast<uint16_t*>(scales + 224), dmin.bits, task);
}

}  // namespace pack

void pack_panel_int8(const PanelTask& task) {
    float tile[16 * pack::kTile];
    f32x16 top(0.0f);
    for (size_t at = 0; at < task.k; at += pack::kTile) {
        pack::read_block(task, at, tile);
        top = pack::largest(tile, top);
    }
    const f32x16 scale = top / f32x16(127.0f);
    auto* words = static_cast<float*>(task.panel);
    for (size_t at = 0; at < task.k; at += pack::kTile, words += kInt8Layout.step_bytes / 4) {
        pack::read_block(task, at, tile);
        pack::put_int8(tile, scale, task, words);
    }
    pack::put(words, scale, task);
}

void pack_panel_q8_0(const PanelTask& task) {
    constexpr size_t step = kQ8_0Layout.step_bytes / 4;
    auto* words = static_cast<float*>(task.panel);
    auto* scales = reinterpret_cast<uint16_t*>(words + task.k / pack::kTile * step);
    for (size_t at = 0; at < task.k; at += pack::kTile, words += step, scales += 16) {
        float tile[16 * pack::kTile];
        pack::read_block(task, at, tile);
        const pack::Halves d(pack::largest(tile, f32x16(0.0f)) / f32x16(127.0f));
        pack::put_int8(tile, d.values(), task, words);
        pack::put(scales, d.bits, task);
    }
}

void pack_panel_q4_0(const PanelTask& task) {
    constexpr size_t step = kQ4_0Layout.step_bytes / 4;
    auto* words = static_cast<float*>(task.panel);
    auto* scales = reinterpret_cast<uint16_t*>(words + task.k / pack::kTile * step);
    for (size_t at = 0; at < task.k; at += pack::kTile, words += step, scales += 16) {
        float tile[16 * pack::kTile];
        pack::read_block(task, at, tile);
        const f32x16 d = pack::q4_0_scale(tile);
        const auto q = [&](size_t i) WHET_INLINE_LAMBDA {
            const f32x16 x = select(d != f32x16(0.0f), load(tile + 16 * i) / d, f32x16(0.0f));
            return pack::nearest(x, -8.0f, 7.0f) + f32x16(8.0f);
        };
        pack::put_int4(q, task, words);
        pack::put(scales, pack::Halves(d).bits, task);
    }
}

void pack_panel_q4_k(const PanelTask& task) {
    constexpr PanelLayout layout = kQ4_KLayout;
    constexpr size_t step = layout.step_bytes / 4, super_block = layout.group * pack::kTile;
    auto* words = static_cast<float*>(task.panel);
    auto* scales = reinterpret_cast<uint8_t*>(words + task.k / pack::kTile * step);
    for (size_t at = 0; at < task.k; at += super_block, words += layout.group * step, scales += layout.group_bytes) {
        pack::put_super_block(task, at, words, scales);
    }
}

}  // namespace
}  // namespace whet::WHET_ISA
