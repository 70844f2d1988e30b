// Numbers of any source and strides into one panel of 16 outputs of a quantised format: engine/quantize.cpp, which
// says what the searches look for, for 16 outputs at a time.
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

// ---------------------------------------------------------------- integers of 4 to 6 bits

// The words of a step (kernels/panel_layout.h) of the integers q(0) to q(31).
template <int bits, class Q>
WHET_INLINE void put_step(Q&& q, const PanelTask& task, float* words) {
    f32x16 inputs[8];
    for (size_t w = 0; w < 8; ++w) {
        f32x16 four[4];
#pragma GCC unroll 4
        for (size_t i = 0; i < 4; ++i) four[i] = q(4 * w + i);
        inputs[w] = four_bytes(four);
    }
    for (size_t w = 0; w < 4; ++w) {
        f32x16 halves;
        WHET_EACH_PART(p) {
            const auto low = (NativeU32)inputs[w].part[p], high = (NativeU32)inputs[w + 4].part[p];
            halves.part[p] = (f32x16::Native)((low & 0x0f0f0f0f) | (high & 0x0f0f0f0f) << 4);
        }
        put(words + 16 * w, halves, task);
    }
    constexpr int more = bits - 4, per_word = more == 0 ? 8 : 8 / more;
    for (int w = 0; w < more; ++w) {
        f32x16 above;
        WHET_EACH_PART(p) {
            NativeU32 word = {};
            for (int v = 0; v < per_word; ++v) {
                word |= ((NativeU32)inputs[w * per_word + v].part[p] >> 4 & 0x0f0f0f0f) << more * v;
            }
            above.part[p] = (f32x16::Native)word;
        }
        put(words + 16 * (4 + w), above, task);
    }
}

// ---------------------------------------------------------------- scale q, q in [-half, half - 1]

constexpr float kNegligible = 1e-20f;

template <int half, size_t n>
WHET_INLINE f32x16 symmetric_scale(const float* x) {
    f32x16 top(0.0f), size(0.0f), best(0.0f), most_explained(0.0f);
    for (size_t i = 0; i < n; ++i) {
        const f32x16 each = load(x + 16 * i);
        const auto larger = magnitude(each) > size;
        top = select(larger, each, top);
        size = select(larger, magnitude(each), size);
    }
    constexpr int last = half == 32 ? 6 : 2;
    for (int step = -6; step <= last; ++step) {
        const f32x16 inverse = f32x16(static_cast<float>(-half) + 0.15f * static_cast<float>(step)) / top;
        f32x16 qx(0.0f), qq(0.0f);
        for (size_t i = 0; i < n; ++i) {
            const f32x16 each = load(x + 16 * i), q = nearest(each * inverse, -half, half - 1);
            qx += q * each;
            qq += q * q;
        }
        const f32x16 explained = qx * qx / qq;
        const auto better = (explained > most_explained) & (explained < f32x16(__builtin_inff()));
        most_explained = select(better, explained, most_explained);
        best = select(better, qx / qq, best);
    }
    return select(size > f32x16(kNegligible), best, f32x16(0.0f));
}

WHET_INLINE f32x16 inverse_of(f32x16 scale) {
    return select(scale != f32x16(0.0f), f32x16(1.0f) / scale, f32x16(0.0f));
}

// The integer of a number, half higher.
template <int half>
WHET_INLINE f32x16 symmetric_integer(const float* x, f32x16 inverse) {
    return nearest(load(x) * inverse, -half, half - 1) + f32x16(half);
}

template <const PanelLayout& layout, int bits>
WHET_INLINE void put_symmetric(const PanelTask& task) {
    constexpr int half = 1 << (bits - 1);
    constexpr size_t step = layout.step_bytes / 4;
    auto* words = static_cast<float*>(task.panel);
    auto* scales = reinterpret_cast<uint16_t*>(words + task.k / kTile * step);
    for (size_t at = 0; at < task.k; at += kTile, words += step, scales += 16) {
        alignas(64) float tile[16 * kTile];
        read_block(task, at, tile);
        const Halves d(symmetric_scale<half, kTile>(tile));
        const f32x16 inverse = inverse_of(d.values());
        const auto q = [&](size_t i) WHET_INLINE_LAMBDA { return symmetric_integer<half>(tile + 16 * i, inverse); };
        put_step<bits>(q, task, words);
        put(scales, d.bits, task);
    }
}

// ---------------------------------------------------------------- scale q - lowest, q in [0, most]

struct Line {
    f32x16 scale, lowest, explained;
};

WHET_INLINE f32x16 sum(const float* tile) {
    f32x16 total(0.0f);
    for (size_t i = 0; i < kTile; ++i) total += load(tile + 16 * i);
    return total;
}

WHET_INLINE f32x16 line_integer(const float* x, float most, f32x16 inverse, f32x16 lowest) {
    return nearest((load(x) + lowest) * inverse, 0.0f, most);
}

WHET_INLINE Line choose(i32x16 first, const Line& a, const Line& b) {
    return {select(first, a.scale, b.scale), select(first, a.lowest, b.lowest),
            select(first, a.explained, b.explained)};
}

WHET_INLINE Line fit_line(const float* tile, float most, f32x16 x_sum, f32x16 inverse, f32x16 lowest) {
    const f32x16 zero(0.0f), n(static_cast<float>(kTile));
    f32x16 q_sum = zero, qq = zero, qx = zero;
    for (size_t i = 0; i < kTile; ++i) {
        const f32x16 q = line_integer(tile + 16 * i, most, inverse, lowest);
        q_sum += q;
        qq += q * q;
        qx += q * load(tile + 16 * i);
    }
    const f32x16 determinant = n * qq - q_sum * q_sum, covariance = n * qx - q_sum * x_sum;
    const f32x16 free_scale = covariance / determinant, free_lowest = (free_scale * q_sum - x_sum) / n;
    const f32x16 scale = qx / qq;
    return choose((determinant < f32x16(1.0f)) | (free_lowest < zero), {scale, zero, n * qx * scale - x_sum * x_sum},
                  {free_scale, free_lowest, covariance * free_scale});
}

WHET_INLINE Line better(const Line& a, const Line& b) {
    const auto finite = b.explained < f32x16(__builtin_inff());
    return choose((b.scale > f32x16(0.0f)) & (b.explained > a.explained) & finite, b, a);
}

__attribute__((noinline)) void best_line(const float* tile, float most, Line& best) {
    const f32x16 zero(0.0f), x_sum = sum(tile);
    f32x16 low = load(tile), high = low;
    for (size_t i = 0; i < kTile; ++i) {
        const f32x16 x = load(tile + 16 * i);
        low = min(low, x);
        high = max(high, x);
    }
    const f32x16 lowest = select(low < zero, -low, zero), range = high + lowest;
    const Line constant = {zero, lowest, f32x16(-__builtin_inff())};
    best = constant;
    for (int step = -4; step <= 4; ++step) {
        const f32x16 inverse = f32x16(most + 0.5f * static_cast<float>(step)) / range;
        const Line first = fit_line(tile, most, x_sum, inverse, lowest);
        const Line second = fit_line(tile, most, x_sum, inverse_of(first.scale), first.lowest);
        best = better(better(best, first), second);
    }
    best = choose(range > f32x16(kNegligible), best, constant);
}

WHET_INLINE f32x16 fit_lowest(const float* tile, float most, f32x16 scale, f32x16 lowest) {
    const f32x16 inverse = inverse_of(scale);
    f32x16 q_sum(0.0f);
    for (size_t i = 0; i < kTile; ++i) q_sum += line_integer(tile + 16 * i, most, inverse, lowest);
    return max((scale * q_sum - sum(tile)) / f32x16(static_cast<float>(kTile)), f32x16(0.0f));
}

template <int bits>
WHET_INLINE void put_line_step(const float* tile, f32x16 scale, f32x16 lowest, const PanelTask& task, float* words) {
    constexpr float most = (1 << bits) - 1;
    const f32x16 inverse = inverse_of(scale);
    const auto q = [&](size_t i) WHET_INLINE_LAMBDA { return line_integer(tile + 16 * i, most, inverse, lowest); };
    put_step<bits>(q, task, words);
}

template <const PanelLayout& layout, int bits>
WHET_INLINE void put_lines(const PanelTask& task) {
    constexpr size_t step = layout.step_bytes / 4;
    auto* words = static_cast<float*>(task.panel);
    auto* scales = reinterpret_cast<uint16_t*>(words + task.k / kTile * step);
    for (size_t at = 0; at < task.k; at += kTile, words += step, scales += 32) {
        alignas(64) float tile[16 * kTile];
        Line line;
        read_block(task, at, tile);
        best_line(tile, (1 << bits) - 1, line);
        const Halves d(line.scale), m(-line.lowest);
        put_line_step<bits>(tile, d.values(), -m.values(), task, words);
        put(scales, d.bits, task);
        put(scales + 16, m.bits, task);
    }
}

// ---------------------------------------------------------------- 256 inputs, whose scales are multiples of one

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

// scale / unit as a whole number in [low, high], 0 where there is no unit; its bytes, and what it stands for.
WHET_INLINE f32x16 factor(f32x16 scale, f32x16 unit, float low, float high, uint8_t* bytes) {
    const f32x16 whole = nearest(select(unit != f32x16(0.0f), scale / unit, f32x16(0.0f)), low, high);
    store_low_bytes(reinterpret_cast<int8_t*>(bytes), bit_cast<i32x16>(whole + f32x16(kRounder<float>)));
    return unit * whole;
}

template <int bits, const PanelLayout& layout>
WHET_INLINE void put_super_block(const PanelTask& task, size_t at, float* words, uint8_t* scales) {
    constexpr float most = (1 << bits) - 1;
    const f32x16 zero(0.0f);
    alignas(64) float tiles[8][16 * kTile];
    Line lines[8];
    f32x16 top_scale = zero, top_lowest = zero;
    for (size_t j = 0; j < 8; ++j) {
        read_tile(task, at + kTile * j, kTile, tiles[j]);
        best_line(tiles[j], most, lines[j]);
        top_scale = max(lines[j].scale, top_scale);
    }
    const Halves half_d(top_scale / f32x16(63.0f));
    const f32x16 d = half_d.values();
    Factors factors;
    for (size_t j = 0; j < 8; ++j) {
        lines[j].scale = factor(lines[j].scale, d, 0.0f, 63.0f, factors.scale[j]);
        lines[j].lowest = fit_lowest(tiles[j], most, lines[j].scale, lines[j].lowest);
        top_lowest = max(lines[j].lowest, top_lowest);
    }
    const Halves half_dmin(top_lowest / f32x16(63.0f));
    for (size_t j = 0; j < 8; ++j) {
        const f32x16 lowest = factor(lines[j].lowest, half_dmin.values(), 0.0f, 63.0f, factors.lowest[j]);
        put_line_step<bits>(tiles[j], lines[j].scale, lowest, task, words + layout.step_bytes / 4 * j);
    }
    factors.put_bytes(task, scales);
    put(reinterpret_cast<uint16_t*>(scales + 192), half_d.bits, task);
    put(reinterpret_cast<uint16_t*>(scales + 224), half_dmin.bits, task);
}

// Of q6_k: 16 groups, whose scales are multiples of d from -128 to 127.
WHET_INLINE void put_signed_super_block(const PanelTask& task, size_t at, float* words, uint8_t* scales) {
    constexpr int half = 32;
    constexpr size_t group = 16;
    const f32x16 zero(0.0f);
    alignas(64) float tiles[8][16 * kTile];
    f32x16 wanted[16], top = zero;
    for (size_t j = 0; j < 16; ++j) {
        if (j % 2 == 0) read_tile(task, at + group * j, kTile, tiles[j / 2]);
        wanted[j] = symmetric_scale<half, group>(tiles[j / 2] + 16 * group * (j % 2));
        top = select(magnitude(wanted[j]) > magnitude(top), wanted[j], top);
    }
    const Halves half_d(top / f32x16(-128.0f));
    const f32x16 d = half_d.values();
    f32x16 inverse[16];
    for (size_t j = 0; j < 16; ++j) {
        uint8_t bytes[16];
        inverse[j] = inverse_of(factor(wanted[j], d, -128.0f, 127.0f, bytes));
        put(scales + 16 * j, bytes, task);
    }
    for (size_t j = 0; j < 8; ++j) {
        const auto q = [&](size_t i) WHET_INLINE_LAMBDA {
            return symmetric_integer<half>(tiles[j] + 16 * i, inverse[2 * j + i / group]);
        };
        put_step<6>(q, task, words + kQ6_KLayout.step_bytes / 4 * j);
    }
    put(reinterpret_cast<uint16_t*>(scales + 256), half_d.bits, task);
}

// put_block(task, input, words, scales) for every 256 inputs.
template <const PanelLayout& layout, class PutBlock>
WHET_INLINE void put_super_blocks(const PanelTask& task, PutBlock&& put_block) {
    constexpr size_t step = layout.step_bytes / 4, super_block = layout.group * kTile;
    auto* words = static_cast<float*>(task.panel);
    auto* scales = reinterpret_cast<uint8_t*>(words + task.k / kTile * step);
    for (size_t at = 0; at < task.k; at += super_block, words += layout.group * step, scales += layout.group_bytes) {
        put_block(task, at, words, scales);
    }
}

}  // namespace pack

void pack_panel_int8(const PanelTask& task) {
    alignas(64) float tile[16 * pack::kTile];
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
        alignas(64) float tile[16 * pack::kTile];
        pack::read_block(task, at, tile);
        const pack::Halves d(pack::largest(tile, f32x16(0.0f)) / f32x16(127.0f));
        pack::put_int8(tile, d.values(), task, words);
        pack::put(scales, d.bits, task);
    }
}

void pack_panel_q4_0(const PanelTask& task) { pack::put_symmetric<kQ4_0Layout, 4>(task); }
void pack_panel_q5_0(const PanelTask& task) { pack::put_symmetric<kQ5_0Layout, 5>(task); }
void pack_panel_q4_1(const PanelTask& task) { pack::put_lines<kQ4_1Layout, 4>(task); }
void pack_panel_q5_1(const PanelTask& task) { pack::put_lines<kQ5_1Layout, 5>(task); }
void pack_panel_q4_k(const PanelTask& task) {
    pack::put_super_blocks<kQ4_KLayout>(task, pack::put_super_block<4, kQ4_KLayout>);
}
void pack_panel_q5_k(const PanelTask& task) {
    pack::put_super_blocks<kQ5_KLayout>(task, pack::put_super_block<5, kQ5_KLayout>);
}
void pack_panel_q6_k(const PanelTask& task) { pack::put_super_blocks<kQ6_KLayout>(task, pack::put_signed_super_block); }

}  // namespace
}  // namespace whet::WHET_ISA
