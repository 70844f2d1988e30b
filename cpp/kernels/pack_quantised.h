// Quantises numbers of any RowType and strides to one panel of 16 outputs: cpp/tests/quantize_reference.h, which
// documents the searches, for 16 outputs at a time.
//
// Each output has one lane, with the operations of the reference in their order: the same numbers, to the bit. Inputs
// must be finite.
#pragma once
#include "kernels/pack.h"
#include "kernels/panel_task.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

namespace pack {

// Rounds each lane to the nearest integer, ties to even, clamped to [low, high].
WHET_INLINE f32x16 nearest(f32x16 x, float low, float high) {
    const f32x16 rounder(kRounder<float>);
    return (min(max(x, f32x16(low)), f32x16(high)) + rounder) - rounder;
}

// The low bits of an integral float, from the mantissa of its sum with kRounder.
WHET_INLINE NativeU32 low_bits(f32x16::Native whole) { return (NativeU32)(whole + kRounder<float>); }

// Packs four integral vectors in [-128, 255] to the bytes of words.
WHET_INLINE f32x16 four_bytes(const f32x16 (&x)[4]) {
    f32x16 words;
    WHET_EACH_PART(p) {
        words.part[p] = (f32x16::Native)((low_bits(x[0].part[p]) & 255) | (low_bits(x[1].part[p]) & 255) << 8 |
                                         (low_bits(x[2].part[p]) & 255) << 16 | low_bits(x[3].part[p]) << 24);
    }
    return words;
}

constexpr float kMaxFloat16 = 65504.0f;

// 16 numbers rounded to float16, to nearest even, clamped to the largest finite number.
struct Float16s {
    uint16_t bits[16];
    explicit WHET_INLINE Float16s(f32x16 x) { store_f16(bits, min(max(x, f32x16(-kMaxFloat16)), f32x16(kMaxFloat16))); }
    WHET_INLINE f32x16 values() const { return load_f16(bits); }
    WHET_INLINE void put(uint8_t* out, const PanelTask& task) const {
        pack::put(reinterpret_cast<uint16_t*>(out), bits, task);
    }
};

// Reads a block, padded with zeros.
WHET_INLINE void read_block(const PanelTask& task, size_t at, float* tile) {
    const size_t n = task.k - at < kTile ? task.k - at : kTile;
    read_tile(task, at, n, tile);
    for (size_t i = n; i < kTile; ++i) store(tile + 16 * i, f32x16(0.0f));
}

// ---------------------------------------------------------------- int8 and q8_0

WHET_INLINE f32x16 abs_max(const float* tile, f32x16 maximum) {
    for (size_t i = 0; i < kTile; ++i) maximum = max(maximum, magnitude(load(tile + 16 * i)));
    return maximum;
}

// Stores the 8 words of a block.
WHET_INLINE void put_int8(const float* tile, f32x16 scale, const PanelTask& task, float* words) {
    const auto some = scale > f32x16(0.0f);
    for (size_t w = 0; w < 8; ++w) {
        f32x16 q[4];
#pragma GCC unroll 4
        for (size_t i = 0; i < 4; ++i) {
            const f32x16 x = select(some, load(tile + 64 * w + 16 * i) / scale, f32x16(0.0f));
            q[i] = nearest(x, -127.0f, 127.0f) + f32x16(kByteBias);
        }
        put(words + 16 * w, four_bytes(q), task);
    }
}

WHET_INLINE void put_q8_0_block(const PanelTask& task, size_t at, float* words, uint8_t* scales) {
    alignas(64) float tile[16 * kTile];
    read_tile(task, at, kTile, tile);
    const Float16s d(abs_max(tile, f32x16(0.0f)) / f32x16(127.0f));
    put_int8(tile, d.values(), task, words);
    d.put(scales, task);
}

// ---------------------------------------------------------------- integers of 4 to 6 bits

// Stores the words of a step (kernels/panel_layout.h) with the integers q(0) to q(31).
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
        f32x16 nibbles;
        WHET_EACH_PART(p) {
            const auto low = (NativeU32)inputs[w].part[p], high = (NativeU32)inputs[w + 4].part[p];
            nibbles.part[p] = (f32x16::Native)((low & 0x0f0f0f0f) | (high & 0x0f0f0f0f) << 4);
        }
        put(words + 16 * w, nibbles, task);
    }
    constexpr int extra_bits = bits - 4, per_word = extra_bits == 0 ? 8 : 8 / extra_bits;
    for (int w = 0; w < extra_bits; ++w) {
        f32x16 high_bits;
        WHET_EACH_PART(p) {
            NativeU32 word = {};
            for (int v = 0; v < per_word; ++v) {
                word |= ((NativeU32)inputs[w * per_word + v].part[p] >> 4 & 0x0f0f0f0f) << extra_bits * v;
            }
            high_bits.part[p] = (f32x16::Native)word;
        }
        put(words + 16 * (4 + w), high_bits, task);
    }
}

// ---------------------------------------------------------------- mxfp4

// The nibble of a number in units of the scale, of equally near ones the smaller, and the square of its error.
WHET_INLINE f32x16 e2m1_nibble(f32x16 x, f32x16& square) {
    const f32x16 zero(0.0f), one(1.0f), size = magnitude(x);
    f32x16 code(0.0f);
    constexpr float kBounds[] = {0.5f, 1.5f, 2.5f, 3.5f, 5.0f, 7.0f, 10.0f};
    for (const float bound : kBounds) {
        code += select(size > f32x16(bound), one, zero);
    }
    const f32x16 number = code + max(code - f32x16(4.0f), zero) + max(code - f32x16(6.0f), zero) * f32x16(2.0f);
    square = (size - number) * (size - number);
    return code + select((x < zero) & (code > zero), f32x16(8.0f), zero);
}

// 2^exponent; the exponent is integral, in [-126, 127].
WHET_INLINE f32x16 power_of_2(f32x16 exponent) {
    const f32x16 shifted = exponent + f32x16(127.0f) + f32x16(kRounder<float>);
    f32x16 out;
    WHET_EACH_PART(p) out.part[p] = (f32x16::Native)((NativeU32)shifted.part[p] << 23);
    return out;
}

// Chooses the scale with the smaller error: the largest number is in the highest binade of E2M1, or in the next one.
WHET_INLINE void put_mxfp4_block(const PanelTask& task, size_t at, float* words, uint8_t* scales) {
    alignas(64) float tile[16 * kTile];
    read_tile(task, at, kTile, tile);
    const f32x16 largest = abs_max(tile, f32x16(0.0f));
    i32x16 biased;
    WHET_EACH_PART(p) biased.part[p] = (i32x16::Native)((NativeU32)largest.part[p] >> 23);
    f32x16 exponents[2], errors[2];
    for (int c = 0; c < 2; ++c) {
        exponents[c] = min(max(to_f32(biased) + f32x16(static_cast<float>(c - 2)), f32x16(2.0f)), f32x16(252.0f));
        const f32x16 inverse = power_of_2(f32x16(128.0f) - exponents[c]);
        errors[c] = f32x16(0.0f);
        for (size_t i = 0; i < kTile; ++i) {
            f32x16 square;
            e2m1_nibble(load(tile + 16 * i) * inverse, square);
            errors[c] += square;
        }
    }
    const f32x16 e = select(errors[1] * f32x16(4.0f) < errors[0], exponents[1], exponents[0]);
    const f32x16 inverse = power_of_2(f32x16(128.0f) - e);
    const auto nibble = [&](size_t i) WHET_INLINE_LAMBDA {
        f32x16 square;
        return e2m1_nibble(load(tile + 16 * i) * inverse, square);
    };
    put_step<4>(nibble, task, words);
    uint8_t bytes[16];
    store_low_bytes(reinterpret_cast<int8_t*>(bytes), bit_cast<i32x16>(e + f32x16(kRounder<float>)));
    put(scales, bytes, task);
}

// ---------------------------------------------------------------- scale q, q in [-half, half - 1]

constexpr float kNegligible = 1e-20f;

template <int half, size_t n>
WHET_INLINE f32x16 symmetric_scale(const float* x) {
    f32x16 extreme(0.0f), size(0.0f), best(0.0f), best_explained(0.0f);
    for (size_t i = 0; i < n; ++i) {
        const f32x16 each = load(x + 16 * i);
        const auto larger = magnitude(each) > size;
        extreme = select(larger, each, extreme);
        size = select(larger, magnitude(each), size);
    }
    constexpr int last = half == 32 ? 6 : 2;
    for (int step = -6; step <= last; ++step) {
        const f32x16 inverse = f32x16(static_cast<float>(-half) + 0.15f * static_cast<float>(step)) / extreme;
        f32x16 qx(0.0f), qq(0.0f);
        for (size_t i = 0; i < n; ++i) {
            const f32x16 each = load(x + 16 * i), q = nearest(each * inverse, -half, half - 1);
            qx += q * each;
            qq += q * q;
        }
        const f32x16 explained = qx * qx / qq;
        const auto better = (explained > best_explained) & (explained < f32x16(__builtin_inff()));
        best_explained = select(better, explained, best_explained);
        best = select(better, qx / qq, best);
    }
    return select(size > f32x16(kNegligible), best, f32x16(0.0f));
}

WHET_INLINE f32x16 inverse_of(f32x16 scale) {
    return select(scale != f32x16(0.0f), f32x16(1.0f) / scale, f32x16(0.0f));
}

// The quantised integer of a number, with a bias of `half`.
template <int half>
WHET_INLINE f32x16 symmetric_integer(const float* x, f32x16 inverse) {
    return nearest(load(x) * inverse, -half, half - 1) + f32x16(half);
}

template <int bits>
WHET_INLINE void put_symmetric_block(const PanelTask& task, size_t at, float* words, uint8_t* scales) {
    constexpr int half = 1 << (bits - 1);
    alignas(64) float tile[16 * kTile];
    read_tile(task, at, kTile, tile);
    const Float16s d(symmetric_scale<half, kTile>(tile));
    const f32x16 inverse = inverse_of(d.values());
    const auto q = [&](size_t i) WHET_INLINE_LAMBDA { return symmetric_integer<half>(tile + 16 * i, inverse); };
    put_step<bits>(q, task, words);
    d.put(scales, task);
}

// ---------------------------------------------------------------- scale q - minimum, q in [0, q_max]

struct AffineFit {
    f32x16 scale, minimum, explained;
};

WHET_INLINE f32x16 sum(const float* tile) {
    f32x16 total(0.0f);
    for (size_t i = 0; i < kTile; ++i) total += load(tile + 16 * i);
    return total;
}

WHET_INLINE f32x16 affine_integer(const float* x, float q_max, f32x16 inverse, f32x16 minimum) {
    return nearest((load(x) + minimum) * inverse, 0.0f, q_max);
}

WHET_INLINE AffineFit choose(i32x16 first, const AffineFit& a, const AffineFit& b) {
    return {select(first, a.scale, b.scale), select(first, a.minimum, b.minimum),
            select(first, a.explained, b.explained)};
}

WHET_INLINE AffineFit fit_affine(const float* tile, float q_max, f32x16 x_sum, f32x16 inverse, f32x16 minimum) {
    const f32x16 zero(0.0f), n(static_cast<float>(kTile));
    f32x16 q_sum = zero, qq = zero, qx = zero;
    for (size_t i = 0; i < kTile; ++i) {
        const f32x16 q = affine_integer(tile + 16 * i, q_max, inverse, minimum);
        q_sum += q;
        qq += q * q;
        qx += q * load(tile + 16 * i);
    }
    const f32x16 determinant = n * qq - q_sum * q_sum, covariance = n * qx - q_sum * x_sum;
    const f32x16 free_scale = covariance / determinant, free_minimum = (free_scale * q_sum - x_sum) / n;
    const f32x16 scale = qx / qq;
    return choose((determinant < f32x16(1.0f)) | (free_minimum < zero), {scale, zero, n * qx * scale - x_sum * x_sum},
                  {free_scale, free_minimum, covariance * free_scale});
}

WHET_INLINE AffineFit better(const AffineFit& a, const AffineFit& b) {
    const auto finite = b.explained < f32x16(__builtin_inff());
    return choose((b.scale > f32x16(0.0f)) & (b.explained > a.explained) & finite, b, a);
}

__attribute__((noinline)) void best_affine_fit(const float* tile, float q_max, AffineFit& best) {
    const f32x16 zero(0.0f), x_sum = sum(tile);
    f32x16 low = load(tile), high = low;
    for (size_t i = 0; i < kTile; ++i) {
        const f32x16 x = load(tile + 16 * i);
        low = min(low, x);
        high = max(high, x);
    }
    const f32x16 minimum = select(low < zero, -low, zero), range = high + minimum;
    const AffineFit constant = {zero, minimum, f32x16(-__builtin_inff())};
    best = constant;
    for (int step = -4; step <= 4; ++step) {
        const f32x16 inverse = f32x16(q_max + 0.5f * static_cast<float>(step)) / range;
        const AffineFit first = fit_affine(tile, q_max, x_sum, inverse, minimum);
        const AffineFit second = fit_affine(tile, q_max, x_sum, inverse_of(first.scale), first.minimum);
        best = better(better(best, first), second);
    }
    best = choose(range > f32x16(kNegligible), best, constant);
}

WHET_INLINE f32x16 refit_minimum(const float* tile, float q_max, f32x16 scale, f32x16 minimum) {
    const f32x16 inverse = inverse_of(scale);
    f32x16 q_sum(0.0f);
    for (size_t i = 0; i < kTile; ++i) q_sum += affine_integer(tile + 16 * i, q_max, inverse, minimum);
    return max((scale * q_sum - sum(tile)) / f32x16(static_cast<float>(kTile)), f32x16(0.0f));
}

template <int bits>
WHET_INLINE void put_affine_step(const float* tile, f32x16 scale, f32x16 minimum, const PanelTask& task, float* words) {
    constexpr float q_max = (1 << bits) - 1;
    const f32x16 inverse = inverse_of(scale);
    const auto q = [&](size_t i) WHET_INLINE_LAMBDA { return affine_integer(tile + 16 * i, q_max, inverse, minimum); };
    put_step<bits>(q, task, words);
}

template <int bits>
WHET_INLINE void put_affine_block(const PanelTask& task, size_t at, float* words, uint8_t* scales) {
    alignas(64) float tile[16 * kTile];
    AffineFit fit;
    read_tile(task, at, kTile, tile);
    best_affine_fit(tile, (1 << bits) - 1, fit);
    const Float16s d(fit.scale), m(-fit.minimum);
    put_affine_step<bits>(tile, d.values(), -m.values(), task, words);
    d.put(scales, task);
    m.put(scales + 32, task);
}

// ---------------------------------------------------------------- K-quants: 256 inputs with quantised scales

// The 6-bit scale and min factors of 8 blocks, stored in 12 bytes.
struct KQuantFactors {
    uint8_t scale[8][16], minimum[8][16];

    WHET_INLINE void put_bytes(const PanelTask& task, uint8_t* out) const {
        for (int j = 0; j < 4; ++j) {
            uint8_t bytes[3][16];
            for (int i = 0; i < 16; ++i) {
                const int s = scale[j + 4][i], l = minimum[j + 4][i];
                bytes[0][i] = static_cast<uint8_t>(scale[j][i] | (s >> 4) << 6);
                bytes[1][i] = static_cast<uint8_t>(minimum[j][i] | (l >> 4) << 6);
                bytes[2][i] = static_cast<uint8_t>((s & 15) | (l & 15) << 4);
            }
            for (int third = 0; third < 3; ++third) put(out + 16 * (4 * third + j), bytes[third], task);
        }
    }
};

// Quantises scale / unit to an integer in [low, high] (0 if unit is 0); stores its bytes, and returns unit times it.
WHET_INLINE f32x16 quantise_factor(f32x16 scale, f32x16 unit, float low, float high, uint8_t* bytes) {
    const f32x16 whole = nearest(select(unit != f32x16(0.0f), scale / unit, f32x16(0.0f)), low, high);
    store_low_bytes(reinterpret_cast<int8_t*>(bytes), bit_cast<i32x16>(whole + f32x16(kRounder<float>)));
    return unit * whole;
}

template <int bits, const PanelLayout& layout>
WHET_INLINE void put_super_block(const PanelTask& task, size_t at, float* words, uint8_t* scales) {
    constexpr float q_max = (1 << bits) - 1;
    const f32x16 zero(0.0f);
    alignas(64) float tiles[8][16 * kTile];
    AffineFit fits[8];
    f32x16 max_scale = zero, max_minimum = zero;
    for (size_t j = 0; j < 8; ++j) {
        read_tile(task, at + kTile * j, kTile, tiles[j]);
        best_affine_fit(tiles[j], q_max, fits[j]);
        max_scale = max(fits[j].scale, max_scale);
    }
    const Float16s stored_d(max_scale / f32x16(63.0f));
    const f32x16 d = stored_d.values();
    KQuantFactors factors;
    for (size_t j = 0; j < 8; ++j) {
        fits[j].scale = quantise_factor(fits[j].scale, d, 0.0f, 63.0f, factors.scale[j]);
        fits[j].minimum = refit_minimum(tiles[j], q_max, fits[j].scale, fits[j].minimum);
        max_minimum = max(fits[j].minimum, max_minimum);
    }
    const Float16s stored_dmin(max_minimum / f32x16(63.0f));
    for (size_t j = 0; j < 8; ++j) {
        const f32x16 minimum = quantise_factor(fits[j].minimum, stored_dmin.values(), 0.0f, 63.0f, factors.minimum[j]);
        put_affine_step<bits>(tiles[j], fits[j].scale, minimum, task, words + layout.step_bytes / 4 * j);
    }
    factors.put_bytes(task, scales);
    stored_d.put(scales + 192, task);
    stored_dmin.put(scales + 224, task);
}

// q6_k: 16 groups with scales of d times an integer in [-128, 127].
WHET_INLINE void put_signed_super_block(const PanelTask& task, size_t at, float* words, uint8_t* scales) {
    constexpr int half = 32;
    constexpr size_t group = 16;
    const f32x16 zero(0.0f);
    alignas(64) float tiles[8][16 * kTile];
    f32x16 group_scales[16], extreme = zero;
    for (size_t j = 0; j < 16; ++j) {
        if (j % 2 == 0) read_tile(task, at + group * j, kTile, tiles[j / 2]);
        group_scales[j] = symmetric_scale<half, group>(tiles[j / 2] + 16 * group * (j % 2));
        extreme = select(magnitude(group_scales[j]) > magnitude(extreme), group_scales[j], extreme);
    }
    const Float16s stored_d(extreme / f32x16(-128.0f));
    const f32x16 d = stored_d.values();
    f32x16 inverse[16];
    for (size_t j = 0; j < 16; ++j) {
        uint8_t bytes[16];
        inverse[j] = inverse_of(quantise_factor(group_scales[j], d, -128.0f, 127.0f, bytes));
        put(scales + 16 * j, bytes, task);
    }
    for (size_t j = 0; j < 8; ++j) {
        const auto q = [&](size_t i) WHET_INLINE_LAMBDA {
            return symmetric_integer<half>(tiles[j] + 16 * i, inverse[2 * j + i / group]);
        };
        put_step<6>(q, task, words + kQ6_KLayout.step_bytes / 4 * j);
    }
    stored_d.put(scales + 256, task);
}

// Calls put_block(task, input, words, scales) for every block or super-block.
template <const PanelLayout& layout, void (*put_block)(const PanelTask&, size_t, float*, uint8_t*)>
void put_blocks(const PanelTask& task) {
    constexpr size_t step = layout.step_bytes / 4, length = layout.group * kTile;
    auto* words = static_cast<float*>(task.panel);
    auto* scales = reinterpret_cast<uint8_t*>(words + task.k / kTile * step);
    for (size_t at = 0; at < task.k; at += length, words += layout.group * step, scales += layout.group_bytes) {
        put_block(task, at, words, scales);
    }
}

}  // namespace pack

void pack_panel_int8(const PanelTask& task) {
    alignas(64) float tile[16 * pack::kTile];
    f32x16 maximum(0.0f);
    for (size_t at = 0; at < task.k; at += pack::kTile) {
        pack::read_block(task, at, tile);
        maximum = pack::abs_max(tile, maximum);
    }
    const f32x16 scale = maximum / f32x16(127.0f);
    auto* words = static_cast<float*>(task.panel);
    for (size_t at = 0; at < task.k; at += pack::kTile, words += kInt8Layout.step_bytes / 4) {
        pack::read_block(task, at, tile);
        pack::put_int8(tile, scale, task, words);
    }
    pack::put(words, scale, task);
}

constexpr auto pack_panel_q8_0 = pack::put_blocks<kQ8_0Layout, pack::put_q8_0_block>;
constexpr auto pack_panel_q4_0 = pack::put_blocks<kQ4_0Layout, pack::put_symmetric_block<4>>;
constexpr auto pack_panel_q5_0 = pack::put_blocks<kQ5_0Layout, pack::put_symmetric_block<5>>;
constexpr auto pack_panel_mxfp4 = pack::put_blocks<kMXFP4Layout, pack::put_mxfp4_block>;
constexpr auto pack_panel_q4_1 = pack::put_blocks<kQ4_1Layout, pack::put_affine_block<4>>;
constexpr auto pack_panel_q5_1 = pack::put_blocks<kQ5_1Layout, pack::put_affine_block<5>>;
constexpr auto pack_panel_q4_k = pack::put_blocks<kQ4_KLayout, pack::put_super_block<4, kQ4_KLayout>>;
constexpr auto pack_panel_q5_k = pack::put_blocks<kQ5_KLayout, pack::put_super_block<5, kQ5_KLayout>>;
constexpr auto pack_panel_q6_k = pack::put_blocks<kQ6_KLayout, pack::put_signed_super_block>;

}  // namespace
}  // namespace whet::WHET_ISA
