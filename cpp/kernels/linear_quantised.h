// The linear layer on quantised weights, in the panels of linear.h: integer products within blocks of 32 inputs.
//
// A row of inputs is quantised as it comes: in each block of 32, x = scale q with q in [-127, 127] (round to nearest
// even, scale = max|x| / 127). Beside it come the block's sum, and -128 times that of q, of all and of the first half.
// Weights are stored as unsigned integers u = w + bias, so that a block's dot product is exact in int32:
//
//   sum_k w q = sum_k u q - bias sum_k q
//
// and the blocks are added in float32, in order. The formats differ in how u is stored and in what scales it:
//
//           bits of u   bias   w, but for the bias
//   int8    8           128    one float32 scale per output
//   q8_0    8           128    d u, one float16 d per output and block of 32
//   q4_0    4           8      the same
//   q5_0    5           16     the same
//   q4_1    4                  d u + m, float16 d and m per block of 32
//   q5_1    5                  the same
//   q4_k    4                  (d s) u - (dmin m), 6-bit s and m per block of 32, float16 d and dmin per 256
//   q5_k    5                  the same
//   q6_k    6           32     (d s) u, an int8 s per 16, float16 d per 256
//
// Within a panel (kernels/panel_layout.h): first all blocks' integers, 4 inputs x 16 outputs to a vector, then all
// blocks' scales. Source of the formats but int8: GGUF's block types of these names; panels hold the same numbers.
#pragma once
#include "kernels/linear.h"
#include "simd/dot.h"
#include "simd/lanes.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

struct QuantisedRows : QuantisedInputs {
    size_t rows, blocks;
};

WHET_INLINE u8x64 low_halves(u8x64 x) { return x & u8x64(15); }
// Each byte by n bits to the right, to the left where n is below 0; what comes in from the byte beside it is cut off by
// the caller's mask.
template <int n>
WHET_INLINE u8x64 shift_right(u8x64 x) {
    auto words = bit_cast<Vec<uint32_t>>(x);
    WHET_EACH_PART(p) {
        if constexpr (n < 0) {
            words.part[p] = words.part[p] << -n;
        } else {
            words.part[p] = words.part[p] >> n;
        }
    }
    return bit_cast<u8x64>(words);
}
WHET_INLINE u8x64 high_halves(u8x64 x) { return shift_right<4>(x) & u8x64(15); }
WHET_INLINE u8x64 high_halves_in_place(u8x64 x) { return x & u8x64(0xf0); }

WHET_INLINE i32x16 sixteenth(i32x16 x) {
    WHET_EACH_PART(p) x.part[p] = x.part[p] >> 4;
    return x;
}

// --- the formats. Scales, opened at a group of blocks: what the i-th of them is scaled by.

// How the sum of a block becomes floats: by the scale of its output alone, which comes at the end; by a scale of its
// own; by that, with a lowest value.
enum class Scaling { kOutput, kBlock, kBlockLowest };

struct NoScales {
    WHET_INLINE void open(const uint8_t*, size_t) {}
};

template <size_t count>
struct HalfScales {  // d and perhaps m: float16 numbers per output and block
    const uint16_t* scales;
    WHET_INLINE void open(const uint8_t* all, size_t block) {
        scales = reinterpret_cast<const uint16_t*>(all) + 16 * count * block;
    }
    WHET_INLINE f32x16 scale(size_t i) const { return load_f16(scales + 16 * count * i); }
    WHET_INLINE f32x16 lowest(size_t i) const { return load_f16(scales + 16 * count * i + 16); }
};

// The scales of 256 inputs become floats at once: each is used by several rows.
struct SignedFactors {  // d times 16 bytes, each of 16 inputs
    alignas(64) float scales[16 * 16];

    WHET_INLINE void open(const uint8_t* all, size_t block) {
        const uint8_t* bytes = all + block / kQ6_KLayout.group * kQ6_KLayout.group_bytes;
        const f32x16 d = load_f16(reinterpret_cast<const uint16_t*>(bytes + 256));
        for (size_t i = 0; i < 16; ++i) {
            store(scales + 16 * i, d * to_f32(load_bytes(reinterpret_cast<const int8_t*>(bytes) + 16 * i)));
        }
    }
    WHET_INLINE f32x16 scale(size_t i) const { return load(scales + 16 * i); }
};

// 12 x 16 bytes (the format's 12 bytes, 16 outputs side by side), d, then dmin. With bytes 0-3, 4-7 and 8-11 as a, b,
// c, the factors of the first four blocks are the low 6 bits of a and b, and those of the others have their low 4 bits
// in the halves of c and their high 2 in the top of a and b.
struct LineFactors {
    alignas(64) float scales[8 * 16], lowests[8 * 16];

    WHET_INLINE void open(const uint8_t* all, size_t block) {
        const uint8_t* bytes = all + block / kQ4_KLayout.group * kQ4_KLayout.group_bytes;
        const u8x64 a = load(bytes), b = load(bytes + 64), c = load(bytes + 128), six_bits(63), top_bits(0x30);
        uint8_t factors[2][8 * 16];
        store(factors[0], a & six_bits);
        store(factors[1], b & six_bits);
        store(factors[0] + 64, low_halves(c) | (shift_right<2>(a) & top_bits));
        store(factors[1] + 64, high_halves(c) | (shift_right<2>(b) & top_bits));
        const f32x16 d = load_f16(reinterpret_cast<const uint16_t*>(bytes + 192));
        const f32x16 dmin = load_f16(reinterpret_cast<const uint16_t*>(bytes + 224));
        for (size_t i = 0; i < 8; ++i) {
            store(scales + 16 * i, d * to_f32(load_bytes(factors[0] + 16 * i)));
            store(lowests + 16 * i, -(dmin * to_f32(load_bytes(factors[1] + 16 * i))));
        }
    }
    WHET_INLINE f32x16 scale(size_t i) const { return load(scales + 16 * i); }
    WHET_INLINE f32x16 lowest(size_t i) const { return load(lowests + 16 * i); }
};
static_assert(kQ4_KLayout.group_bytes == kQ5_KLayout.group_bytes);

template <const PanelLayout& layout, int bits, int bias, Scaling scaling, class ScalesOf>
struct Panel {
    static constexpr PanelLayout kLayout = layout;
    static constexpr int kBits = bits, kBias = bias;
    static constexpr Scaling kScaling = scaling;
    static constexpr int kScales = bits == 6 ? 2 : 1;  // of a block of 32
    using Scales = ScalesOf;
};

using Int8Panel = Panel<kInt8Layout, 8, 128, Scaling::kOutput, NoScales>;
using Q8_0Panel = Panel<kQ8_0Layout, 8, 128, Scaling::kBlock, HalfScales<1>>;
using Q4_0Panel = Panel<kQ4_0Layout, 4, 8, Scaling::kBlock, HalfScales<1>>;
using Q4_1Panel = Panel<kQ4_1Layout, 4, 0, Scaling::kBlockLowest, HalfScales<2>>;
using Q5_0Panel = Panel<kQ5_0Layout, 5, 16, Scaling::kBlock, HalfScales<1>>;
using Q5_1Panel = Panel<kQ5_1Layout, 5, 0, Scaling::kBlockLowest, HalfScales<2>>;
using Q4_KPanel = Panel<kQ4_KLayout, 4, 0, Scaling::kBlockLowest, LineFactors>;
using Q5_KPanel = Panel<kQ5_KLayout, 5, 0, Scaling::kBlockLowest, LineFactors>;
using Q6_KPanel = Panel<kQ6_KLayout, 6, 32, Scaling::kBlock, SignedFactors>;

#if defined(__AVX512F__)
constexpr int kQuantisedRows = 4, kQuantisedPanels = 3;  // each with an integer sum and a float one
#elif defined(__AVX2__) || defined(__aarch64__) || defined(__wasm_relaxed_simd__)
constexpr int kQuantisedRows = 2, kQuantisedPanels = 1;
#else
constexpr int kQuantisedRows = 1, kQuantisedPanels = 1;
#endif
constexpr int kRowsApart = 1;  // of so many rows, low and high halves are summed apart: a vector is loaded once

template <class T, int n_rows, int n_panels>
WHET_INLINE void set_zero(Vec<T> (&v)[n_rows][n_panels]) {
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; ++r) {
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) v[r][p] = Vec<T>(T(0));
    }
}

// One row's inputs of a vector, for all its outputs.
WHET_INLINE i8x64 four_inputs(const int8_t* q) {
    int32_t four;
    __builtin_memcpy(&four, q, sizeof four);
    return bit_cast<i8x64>(i32x16(four));
}

WHET_INLINE i32x16 add_products(i32x16 dot, u8x64 w, i8x64 x) { return dot_int8(dot, w, x); }
WHET_INLINE i16x32 add_products(i16x32 dot, u8x64 w, i8x64 x) { return dot_pairs(dot, w, x); }

// dot[r][p] += four inputs of each row times the bytes of the vectors `weights`.
template <class Sums, int n_rows, int n_panels>
WHET_INLINE void add_dots(Sums (&dot)[n_rows][n_panels], const u8x64 (&weights)[n_panels], const int8_t* q,
                          size_t stride) {
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; ++r) {
        const i8x64 x = four_inputs(q + r * stride);
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) dot[r][p] = add_products(dot[r][p], weights[p], x);
    }
}

// Vector v of a block of each panel.
template <int n_panels>
WHET_INLINE void load_weights(u8x64 (&weights)[n_panels], const uint8_t* block, size_t panel_bytes, int v) {
#pragma GCC unroll 4
    for (int p = 0; p < n_panels; ++p) weights[p] = load(block + p * panel_bytes + 64 * v);
}

// dot += the products of a block whose integers are bytes.
template <int n_rows, int n_panels>
WHET_INLINE void add_bytes(i32x16 (&dot)[n_rows][n_panels], const int8_t* q, size_t stride, const uint8_t* block,
                           size_t panel_bytes) {
    u8x64 weights[n_panels];
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) {
        load_weights(weights, block, panel_bytes, v);
        add_dots(dot, weights, q + 4 * v, stride);
    }
}

// The same without their bias of 128, where only seven bits of one factor can be multiplied at once: x w is |x| w, and
// where x is below 0 |x| (-w - 1) + |x|. The bits of u are those of w but for the highest, and those of -w - 1 but for
// the others. The sums begin with minus_below_zero.
template <int n_rows, int n_panels>
WHET_INLINE void add_unbiased_bytes(i32x16 (&dot)[n_rows][n_panels], const int8_t* q, size_t stride,
                                    const uint8_t* block, size_t panel_bytes) {
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) {
        u8x64 weights[n_panels];
        load_weights(weights, block, panel_bytes, v);
#pragma GCC unroll 4
        for (int r = 0; r < n_rows; ++r) {
            const i8x64 x = four_inputs(q + r * stride + 4 * v), below = x < i8x64(0);
            const u8x64 magnitude = bit_cast<u8x64>((x ^ below) - below), flipped = bit_cast<u8x64>(below) ^ u8x64(128);
#pragma GCC unroll 4
            for (int p = 0; p < n_panels; ++p) {
                dot[r][p] = dot_int7(dot[r][p], magnitude, bit_cast<i8x64>(weights[p] ^ flipped));
            }
        }
    }
}

// dot += those of a block whose integers are halves of bytes: the high halves are multiplied where they stand, which
// takes eight bits, and their sum is divided by 16. The low halves have a sum of their own meanwhile, so that each
// vector is loaded once.
template <int n_rows, int n_panels>
WHET_INLINE void add_halves_apart(i32x16 (&dot)[n_rows][n_panels], const int8_t* q, size_t stride, const uint8_t* block,
                                  size_t panel_bytes) {
    i32x16 low[n_rows][n_panels];
    set_zero(low);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
        u8x64 bytes[n_panels], weights[n_panels];
        load_weights(bytes, block, panel_bytes, v);
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) weights[p] = high_halves_in_place(bytes[p]);
        add_dots(dot, weights, q + 16 + 4 * v, stride);
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) weights[p] = low_halves(bytes[p]);
        add_dots(low, weights, q + 4 * v, stride);
    }
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; ++r) {
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) dot[r][p] = sixteenth(dot[r][p]) + low[r][p];
    }
}

// The same for many rows, whose sums fill the registers: the block is loaded twice.
template <int n_rows, int n_panels>
WHET_INLINE void add_halves_in_turn(i32x16 (&dot)[n_rows][n_panels], const int8_t* q, size_t stride,
                                    const uint8_t* block, size_t panel_bytes) {
    u8x64 weights[n_panels];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
        load_weights(weights, block, panel_bytes, v);
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) weights[p] = high_halves_in_place(weights[p]);
        add_dots(dot, weights, q + 16 + 4 * v, stride);
    }
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; ++r) {
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) dot[r][p] = sixteenth(dot[r][p]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
        load_weights(weights, block, panel_bytes, v);
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) weights[p] = low_halves(weights[p]);
        add_dots(dot, weights, q + 4 * v, stride);
    }
}

// The integers of 4 inputs: vector v of a block of 4 bits, or of 5 or 6, the bits above the halves put in place.
template <int bits, int v>
WHET_INLINE u8x64 whole_integers(const uint8_t* block) {
    const u8x64 bytes = load(block + 64 * (v % 4)), halves = v < 4 ? low_halves(bytes) : high_halves(bytes);
    if constexpr (bits == 4) {
        return halves;
    } else {
        constexpr int more = bits - 4, per_vector = 8 / more, place = more * (v % per_vector);
        const u8x64 above = load(block + 64 * (4 + v / per_vector)), mask(((1 << more) - 1) << 4);
        return halves | (shift_right<place - 4>(above) & mask);
    }
}

// dot += the products of the vectors from v to `end` of such a block.
template <int bits, int v, int end, class Sums, int n_rows, int n_panels>
WHET_INLINE void add_whole(Sums (&dot)[n_rows][n_panels], const int8_t* q, size_t stride, const uint8_t* block,
                           size_t panel_bytes) {
    u8x64 weights[n_panels];
#pragma GCC unroll 4
    for (int p = 0; p < n_panels; ++p) weights[p] = whole_integers<bits, v>(block + p * panel_bytes);
    add_dots(dot, weights, q + 4 * v, stride);
    if constexpr (v + 1 < end) add_whole<bits, v + 1, end>(dot, q, stride, block, panel_bytes);
}

// The same, the products summed in 16 bits for as long as they fit.
template <int bits, int v, int end, int n_rows, int n_panels>
WHET_INLINE void add_whole_in_pairs(i32x16 (&dot)[n_rows][n_panels], const int8_t* q, size_t stride,
                                    const uint8_t* block, size_t panel_bytes) {
    constexpr int fit = 32767 / (2 * 127 * ((1 << bits) - 1)), last = v + fit < end ? v + fit : end;
    i16x32 pairs[n_rows][n_panels];
    set_zero(pairs);
    add_whole<bits, v, last>(pairs, q, stride, block, panel_bytes);
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; ++r) {
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) dot[r][p] = add_pairs(dot[r][p], pairs[r][p]);
    }
    if constexpr (last < end) add_whole_in_pairs<bits, last, end>(dot, q, stride, block, panel_bytes);
}

// -128 times the sum of the inputs that the s-th scale of a block is for.
template <class Panel>
WHET_INLINE int32_t offset_of(const QuantisedRows& in, size_t at, int s) {
    if constexpr (Panel::kScales == 1) return in.offsets[at];
    return s == 0 ? in.half_offsets[at] : in.offsets[at] - in.half_offsets[at];
}

// The integer sums of what the s-th scale of a block is for.
template <class Panel, int s, int n_rows, int n_panels>
WHET_INLINE void block_sums(i32x16 (&dot)[n_rows][n_panels], const QuantisedRows& in, size_t at, const uint8_t* block,
                            size_t panel_bytes) {
    const int8_t* q = in.q + 32 * at;
    const size_t stride = 32 * in.blocks;
    // The sums of 4 bits begin with theirs 16 times as large, as the high halves are where they stand.
    constexpr int n = 8 / Panel::kScales;  // vectors to a scale
    constexpr bool is_unbiased = kDotTakesSevenBits && Panel::kBits == 8;
    constexpr int bias = !kDotTakesSevenBits && Panel::kBits == 4 ? 16 * Panel::kBias : Panel::kBias;
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; ++r) {
        int32_t offset = 0;
        if constexpr (is_unbiased) {
            offset = minus_below_zero(q + r * stride);
        } else if constexpr (bias != 0) {
            offset = offset_of<Panel>(in, at + r * in.blocks, s) / (128 / bias);
        }
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) dot[r][p] = i32x16(offset);
    }
    if constexpr (is_unbiased) {
        add_unbiased_bytes(dot, q, stride, block, panel_bytes);
    } else if constexpr (Panel::kBits == 8) {
        add_bytes(dot, q, stride, block, panel_bytes);
    } else if constexpr (kDotTakesSevenBits) {
        add_whole_in_pairs<Panel::kBits, n * s, n*(s + 1)>(dot, q, stride, block, panel_bytes);
    } else if constexpr (Panel::kBits != 4) {
        add_whole<Panel::kBits, n * s, n*(s + 1)>(dot, q, stride, block, panel_bytes);
    } else if constexpr (n_rows <= kRowsApart) {
        add_halves_apart(dot, q, stride, block, panel_bytes);
    } else {
        add_halves_in_turn(dot, q, stride, block, panel_bytes);
    }
}

// The s-th scale of block i of a group, and those after it: their products to the sums.
template <class Panel, int s, int n_rows, int n_panels>
WHET_INLINE void add_block(f32x16 (&sum)[n_rows][n_panels], const typename Panel::Scales (&scales)[n_panels],
                           const QuantisedRows& in, size_t at, size_t i, const uint8_t* block, size_t panel_bytes) {
    i32x16 dot[n_rows][n_panels];
    block_sums<Panel, s>(dot, in, at, block, panel_bytes);
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; ++r) {
        const float x_scale = in.scales[at + r * in.blocks];
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) {
            f32x16 scale(x_scale);
            if constexpr (Panel::kScaling != Scaling::kOutput) scale = scales[p].scale(Panel::kScales * i + s) * scale;
            sum[r][p] = fma(to_f32(dot[r][p]), scale, sum[r][p]);
        }
        if constexpr (Panel::kScaling == Scaling::kBlockLowest) {
            const f32x16 inputs(in.sums[at + r * in.blocks]);
#pragma GCC unroll 4
            for (int p = 0; p < n_panels; ++p) sum[r][p] = fma(scales[p].lowest(i), inputs, sum[r][p]);
        }
    }
    if constexpr (s + 1 < Panel::kScales) add_block<Panel, s + 1>(sum, scales, in, at, i, block, panel_bytes);
}

template <class Panel, int n_rows, int n_panels>
__attribute__((noinline)) void quantised_tile(const QuantisedRows& in, size_t row, const uint8_t* panels, size_t panel,
                                              const Outputs& out) {
    constexpr PanelLayout layout = Panel::kLayout;
    const size_t blocks = in.blocks, panel_bytes = layout.bytes(blocks);
    const uint8_t* first = panels + panel * panel_bytes;
    const uint8_t* first_scales = first + blocks * layout.step_bytes;
    f32x16 sum[n_rows][n_panels];
    set_zero(sum);
    for (size_t begin = 0; begin < blocks; begin += layout.group) {
        typename Panel::Scales scales[n_panels];
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) scales[p].open(first_scales + p * panel_bytes, begin);
        for (size_t i = 0; i < layout.group; ++i) {
            const uint8_t* block = first + (begin + i) * layout.step_bytes;
            add_block<Panel, 0>(sum, scales, in, row * blocks + begin + i, i, block, panel_bytes);
        }
    }
    if constexpr (Panel::kScaling == Scaling::kOutput) {
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) {
            const f32x16 scale = load(reinterpret_cast<const float*>(first_scales + p * panel_bytes));
#pragma GCC unroll 4
            for (int r = 0; r < n_rows; ++r) sum[r][p] = sum[r][p] * scale;
        }
    }
    store_tile(sum, out, row, panel);
}

template <class Panel, int n_panels>
WHET_INLINE void quantised_panels(const QuantisedRows& in, const uint8_t* panels, size_t panel, const Outputs& out) {
    const size_t panel_bytes = Panel::kLayout.bytes(in.blocks);
    touch(panels + panel * panel_bytes, n_panels * panel_bytes);
    size_t row = 0;
    for (; row + kQuantisedRows <= in.rows; row += kQuantisedRows) {
        quantised_tile<Panel, kQuantisedRows, n_panels>(in, row, panels, panel, out);
    }
    if (kQuantisedRows > 2 && row + 2 <= in.rows) {
        quantised_tile<Panel, 2, n_panels>(in, row, panels, panel, out);
        row += 2;
    }
    for (; row < in.rows; ++row) quantised_tile<Panel, 1, n_panels>(in, row, panels, panel, out);
}

template <class Panel>
WHET_INLINE void linear_quantised(const QuantisedRows& in, const void* panels, const Outputs& out) {
    const auto* bytes = static_cast<const uint8_t*>(panels);
    const size_t n_panels = (out.n + 15) / 16;
    size_t panel = 0;
    for (; panel + kQuantisedPanels <= n_panels; panel += kQuantisedPanels) {
        quantised_panels<Panel, kQuantisedPanels>(in, bytes, panel, out);
    }
    for (; panel < n_panels; ++panel) quantised_panels<Panel, 1>(in, bytes, panel, out);
}

#define WHET_LINEAR(name, Panel)                                                                             \
    void linear_##name(const LinearTask& t) {                                                                \
        linear_quantised<Panel>({t.quantised, t.rows, t.steps}, t.panels, {t.y, t.ldy, t.n, t.bias, t.add}); \
    }
WHET_LINEAR(int8, Int8Panel)
WHET_LINEAR(q8_0, Q8_0Panel)
WHET_LINEAR(q4_0, Q4_0Panel)
WHET_LINEAR(q4_1, Q4_1Panel)
WHET_LINEAR(q5_0, Q5_0Panel)
WHET_LINEAR(q5_1, Q5_1Panel)
WHET_LINEAR(q4_k, Q4_KPanel)
WHET_LINEAR(q5_k, Q5_KPanel)
WHET_LINEAR(q6_k, Q6_KPanel)
#undef WHET_LINEAR

// --- the inputs

// -128 times the integers in the low bits of sums.
WHET_INLINE void store_offsets(f32x16 sums, int n, int32_t* offsets) {
    const f32x16 rounder(kRounder<float>);
    const auto shifted = bit_cast<i32x16>(fma(sums, f32x16(-128.0f), rounder));
    store_first(offsets, shifted - bit_cast<i32x16>(rounder), n);
}

// Up to 16 blocks of 32 inputs, from block `first` on. A block with a NaN or an infinity gets a NaN scale: so do its
// sums.
WHET_SHARED void quantize_blocks(const float* x, size_t first, size_t blocks, const QuantisedInputs& to) {
    const f32x16 zero(0.0f), limit(__builtin_inff());
    f32x16 lanes[16], halves[16];  // block by block: magnitudes, then totals
    for (f32x16& v : lanes) v = zero;
    for (size_t b = 0; b < blocks; ++b) {
        // min gives its second where one is NaN: a NaN counts as an infinity.
        lanes[b] = max(min(magnitude(load(x + 32 * b)), limit), min(magnitude(load(x + 32 * b + 16)), limit));
    }
    const int n = static_cast<int>(blocks);
    const f32x16 top = max_each(lanes), inverse = f32x16(127.0f) / top;
    const f32x16 scales = top / f32x16(127.0f) + (top - top);
    store_first(to.scales + first, scales, n);
    float inverses[16];
    store(inverses, select((top > zero) & (top < limit) & (inverse < limit), inverse, zero));
    for (int b = 0; b < 16; ++b) lanes[b] = halves[b] = zero;
    int8_t* q = to.q + 32 * first;
    for (size_t b = 0; b < blocks; ++b) {
        const Rounded<float> low(load(x + 32 * b), f32x16(inverses[b]));
        const Rounded<float> high(load(x + 32 * b + 16), f32x16(inverses[b]));
        halves[b] = low.value();
        lanes[b] = low.value() + high.value();
        store_low_bytes(q + 32 * b, bit_cast<i32x16>(low.shifted));  // the integers are the low bits
        store_low_bytes(q + 32 * b + 16, bit_cast<i32x16>(high.shifted));
    }
    const f32x16 totals = sum_each(lanes);
    store_first(to.sums + first, scales * totals, n);
    store_offsets(totals, n, to.offsets + first);
    store_offsets(sum_each(halves), n, to.half_offsets + first);
}

// A row of n inputs, zeros after them to the end of a block.
void quantize_row_f32(const float* x, size_t n, const QuantisedInputs& to) {
    const size_t whole = n / 32;
    for (size_t b = 0; b < whole; b += 16) quantize_blocks(x + 32 * b, b, whole - b < 16 ? whole - b : 16, to);
    if (n % 32 == 0) return;
    float last[32] = {};
    for (size_t i = 0; i < n % 32; ++i) last[i] = x[32 * whole + i];
    quantize_blocks(last, whole, 1, to);
}

}  // namespace
}  // namespace whet::WHET_ISA
