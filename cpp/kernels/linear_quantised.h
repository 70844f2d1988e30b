// The linear layer on quantised weights, in the panels of linear.h: integer products within blocks of 32 inputs.
//
// A weight is w = scale q - min (min = 0 in the formats without one), with q = u - bias for a stored unsigned u. A row
// of inputs is quantised on the fly: in each block of 32, x = x_scale p with p in [-127, 127] (round to nearest even,
// x_scale = max|x| / 127). A block then adds, with a dot product that is exact in int32,
//
//   sum_k w x = scale x_scale (sum_k u p - bias sum_k p) - min sum_k x
//
// to the float32 sum, block by block in order. sum x and -128 sum p are stored with the quantised inputs, the latter
// also for the first 16 of a block. The formats differ in the storage of u and in the scales:
//
//           bits of u   bias   scale, min
//   int8    8      kByteBias   one float32 scale per output
//   q8_0    8      kByteBias   d, one float16 per output and block of 32
//   q4_0    4           8      d, likewise
//   q5_0    5           16     d, likewise
//   q4_1    4                  d, and -m for min: float16 d and m per block of 32
//   q5_1    5                  d and -m, likewise
//   q4_k    4                  d s and dmin m: 6-bit s and m per block of 32, float16 d and dmin per 256
//   q5_k    5                  d s and dmin m, likewise
//   q6_k    6           32     d s: an int8 s per 16, float16 d per 256
//   mxfp4   4           16     2^(e - 128), a byte e per block of 32; u is looked up: q is twice an E2M1 number
//
// A panel (kernels/panel_layout.h) stores the integers of all blocks, 4 inputs x 16 outputs per vector, then the scales
// of all blocks. All formats except int8 are GGUF's block types of these names; panels hold the same numbers.
#pragma once
#include "kernels/linear.h"
#include "simd/dot.h"
#include "simd/lanes.h"
#include "simd/parts.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

struct QuantisedRows : QuantisedInputs {
    size_t rows, blocks;
};

WHET_INLINE u8x64 high_nibbles_unshifted(u8x64 x) { return x & u8x64(0xf0); }

WHET_INLINE i32x16 divide_by_16(i32x16 x) {
    WHET_EACH_PART(p) x.part[p] = x.part[p] >> 4;
    return x;
}

// --- the formats. Scales are unpacked for a group of blocks; scale(i) scales its i-th block, and read_scales reads it
// for some parts of the outputs.

// The scaling of a block's integer sum: one scale per output, applied at the end; a scale per block; scale and min.
enum class Scaling { kOutputScale, kBlockScale, kBlockScaleMin };

struct NoScales {
    WHET_INLINE void unpack(const uint8_t*, size_t) {}
};

template <size_t count>
struct Float16Scales {  // per output and block: float16 d, and m = -min if count is 2
    const uint16_t* scales;
    WHET_INLINE void unpack(const uint8_t* all, size_t block) {
        scales = reinterpret_cast<const uint16_t*>(all) + 16 * count * block;
    }
    WHET_INLINE f32x16 scale(size_t i) const { return load_f16(scales + 16 * count * i); }
    WHET_INLINE f32x16 neg_min(size_t i) const { return load_f16(scales + 16 * count * i + 16); }
    template <class Part, int n_parts>
    WHET_INLINE void read_scales(size_t i, size_t output, Part (&parts)[n_parts]) const {
        for (int p = 0; p < n_parts; ++p) read_f16(scales + 16 * count * i + output + 4 * p, parts[p]);
    }
    template <class Part, int n_parts>
    WHET_INLINE void read_neg_mins(size_t i, size_t output, Part (&parts)[n_parts]) const {
        read_scales(i, 16 + output, parts);
    }
};

// 2^(e - 128), of which the bits are e from bit 23 on, twice as large and normal except for 0
WHET_INLINE f32x16::Native e8m0_scale(NativeU32 bits) {
    return (f32x16::Native)(bits | ((NativeU32)(bits == 0) & 0x400000)) * 0.5f;
}

struct E8M0Scales {  // per output and block, a byte e
    const uint8_t* scales;
    WHET_INLINE void unpack(const uint8_t* all, size_t block) { scales = all + 16 * block; }
    WHET_INLINE f32x16 scale(size_t i) const {
        f32x16 e = load_bytes(scales + 16 * i) + f32x16(kRounder<float>), out;
        WHET_EACH_PART(p) out.part[p] = e8m0_scale((NativeU32)e.part[p] << 23);
        return out;
    }
    template <class Part, int n_parts>
    WHET_INLINE void read_scales(size_t i, size_t output, Part (&parts)[n_parts]) const {
        read_bytes(scales + 16 * i + output, parts);  // 32768 + e, in which e is in bits 8 to 15
        for (int p = 0; p < n_parts; ++p) parts[p] = e8m0_scale((NativeU32)parts[p] << 15);
    }
};

// A finite float16 number d times n x 16 bytes: converted to float once for all rows of a tile, but on use in a tile of
// parts, which uses each of them once.
template <class Byte, size_t n>
struct ByteScales {
    alignas(64) float numbers[kMultipliesParts ? 32 : 16 * n];  // d and -d kByteZero, or d times the bytes
    const Byte* bytes;                                          // of a tile of parts

    WHET_INLINE void unpack(const Byte* from, f32x16 d) {
        if constexpr (kMultipliesParts) {
            bytes = from;
            store(numbers, d);
            return store(numbers + 16, d * f32x16(-kByteZero<Byte>));
        }
        for (size_t i = 0; i < n; ++i) store(numbers + 16 * i, d * load_bytes(from + 16 * i));
    }
    WHET_INLINE f32x16 get(size_t i) const {
        if constexpr (kMultipliesParts) return load(numbers) * load_bytes(bytes + 16 * i);
        return load(numbers + 16 * i);
    }
    template <class Part, int n_parts>
    WHET_INLINE void read(size_t i, size_t output, Part (&parts)[n_parts]) const {
        read_bytes(bytes + 16 * i + output, parts);
#pragma GCC unroll 4
        for (int p = 0; p < n_parts; ++p) {
            const float* at = numbers + output + 4 * p;
            Part d;
            __builtin_memcpy(&d, at, sizeof d);
            parts[p] = fma(d, parts[p], load_copy<Part>(at + 16));
        }
    }
};

struct Q6KScales {  // d times 16 int8, one per 16 inputs
    ByteScales<int8_t, 16> scales;

    WHET_INLINE void unpack(const uint8_t* all, size_t block) {
        const uint8_t* bytes = all + block / kQ6_KLayout.group * kQ6_KLayout.group_bytes;
        scales.unpack(reinterpret_cast<const int8_t*>(bytes), load_f16(reinterpret_cast<const uint16_t*>(bytes + 256)));
    }
    WHET_INLINE f32x16 scale(size_t i) const { return scales.get(i); }
    template <class Part, int n_parts>
    WHET_INLINE void read_scales(size_t i, size_t output, Part (&parts)[n_parts]) const {
        scales.read(i, output, parts);
    }
};

// 12 x 16 bytes (the format's 12 bytes for 16 outputs), d, then dmin. With bytes 0-3, 4-7 and 8-11 as a, b, c: the
// factors of blocks 0-3 are the low 6 bits of a and b; the factors of blocks 4-7 have their low 4 bits in the nibbles
// of c and their high 2 bits in the top 2 bits of a and b.
struct KQuantScales {
    uint8_t factors[2][8 * 16];
    ByteScales<uint8_t, 8> scales, neg_mins;

    WHET_INLINE void unpack(const uint8_t* all, size_t block) {
        const uint8_t* bytes = all + block / kQ4_KLayout.group * kQ4_KLayout.group_bytes;
        const u8x64 a = load(bytes), b = load(bytes + 64), c = load(bytes + 128), six_bits(63), top_bits(0x30);
        store(factors[0], a & six_bits);
        store(factors[1], b & six_bits);
        store(factors[0] + 64, low_nibbles(c) | (shift_right<2>(a) & top_bits));
        store(factors[1] + 64, high_nibbles(c) | (shift_right<2>(b) & top_bits));
        scales.unpack(factors[0], load_f16(reinterpret_cast<const uint16_t*>(bytes + 192)));
        neg_mins.unpack(factors[1], -load_f16(reinterpret_cast<const uint16_t*>(bytes + 224)));
    }
    WHET_INLINE f32x16 scale(size_t i) const { return scales.get(i); }
    WHET_INLINE f32x16 neg_min(size_t i) const { return neg_mins.get(i); }
    template <class Part, int n_parts>
    WHET_INLINE void read_scales(size_t i, size_t output, Part (&parts)[n_parts]) const {
        scales.read(i, output, parts);
    }
    template <class Part, int n_parts>
    WHET_INLINE void read_neg_mins(size_t i, size_t output, Part (&parts)[n_parts]) const {
        neg_mins.read(i, output, parts);
    }
};
static_assert(kQ4_KLayout.group_bytes == kQ5_KLayout.group_bytes);

constexpr int kE2M1 = 3;  // in place of a number of bits: nibbles that are looked up

// Unpacks vector v of a block, the integers of 4 inputs: nibbles, plus the high bits in the formats of 5 and 6 bits.
template <int bits, int v>
WHET_INLINE u8x64 unpack_integers(const uint8_t* block) {
    if constexpr (bits == 8) return load(block + 64 * v);
    const u8x64 bytes = load(block + 64 * (v % 4)), nibbles = v < 4 ? low_nibbles(bytes) : high_nibbles(bytes);
    if constexpr (bits == 4) {
        return nibbles;
    } else if constexpr (bits == kE2M1) {
        return look_up_e2m1(nibbles);
    } else if constexpr (bits < 8) {
        constexpr int extra_bits = bits - 4, per_vector = 8 / extra_bits, place = extra_bits * (v % per_vector);
        const u8x64 high_bits = load(block + 64 * (4 + v / per_vector)), mask(((1 << extra_bits) - 1) << 4);
        return nibbles | (shift_right<place - 4>(high_bits) & mask);
    }
}

template <const PanelLayout& layout, int bits, int bias, Scaling scaling, class ScalesOf>
struct Panel {
    static constexpr PanelLayout kLayout = layout;
    static constexpr int kBits = bits, kBias = bias;
    static constexpr bool kHasNibbles = bits == 4;  // which may be multiplied unshifted
    static constexpr Scaling kScaling = scaling;
    static constexpr int kScales = bits == 6 ? 2 : 1;  // per block of 32
    using Scales = ScalesOf;

    template <int v>
    static WHET_INLINE u8x64 integers(const uint8_t* block) {
        return unpack_integers<bits, v>(block);
    }
};

// A panel of which the integers have been unpacked to bytes.
template <class Packed>
struct UnpackedPanel : Packed {
    static constexpr bool kHasNibbles = false;
    template <int v>
    static WHET_INLINE u8x64 integers(const uint8_t* block) {
        return load(block + 64 * v);
    }
};

using Int8Panel = Panel<kInt8Layout, 8, kByteBias, Scaling::kOutputScale, NoScales>;
using Q8_0Panel = Panel<kQ8_0Layout, 8, kByteBias, Scaling::kBlockScale, Float16Scales<1>>;
using Q4_0Panel = Panel<kQ4_0Layout, 4, 8, Scaling::kBlockScale, Float16Scales<1>>;
using MXFP4Panel = Panel<kMXFP4Layout, kE2M1, 16, Scaling::kBlockScale, E8M0Scales>;
using Q4_1Panel = Panel<kQ4_1Layout, 4, 0, Scaling::kBlockScaleMin, Float16Scales<2>>;
using Q5_0Panel = Panel<kQ5_0Layout, 5, 16, Scaling::kBlockScale, Float16Scales<1>>;
using Q5_1Panel = Panel<kQ5_1Layout, 5, 0, Scaling::kBlockScaleMin, Float16Scales<2>>;
using Q4_KPanel = Panel<kQ4_KLayout, 4, 0, Scaling::kBlockScaleMin, KQuantScales>;
using Q5_KPanel = Panel<kQ5_KLayout, 5, 0, Scaling::kBlockScaleMin, KQuantScales>;
using Q6_KPanel = Panel<kQ6_KLayout, 6, 32, Scaling::kBlockScale, Q6KScales>;

#if defined(__AVX512F__)
constexpr int kQuantisedRows = 4, kQuantisedPanels = 3;  // each with an int32 and a float32 sum in registers
#elif defined(__aarch64__)
constexpr int kQuantisedRows = 8, kQuantisedPanels = 1;  // part by part
#elif defined(__AVX2__)
constexpr int kQuantisedRows = 4, kQuantisedPanels = 1;
#elif defined(__wasm_relaxed_simd__)
constexpr int kQuantisedRows = 2, kQuantisedPanels = 1;
#else
constexpr int kQuantisedRows = 1, kQuantisedPanels = 1;
#endif
#if defined(WHET_AVX2) || defined(__AVX512F__)
constexpr bool kUnpacksPasses = true;
#else
constexpr bool kUnpacksPasses = false;
#endif
constexpr size_t kPassBlocks = 8;               // of a pass through a panel: they stay in the L1 cache
constexpr size_t kUnpackedBlock = 32 * kPanel;  // bytes
constexpr int kMaxSplitRows = 1;  // up to this many rows, low and high nibbles have separate sums: one load per vector

template <class T, int n_rows, int n_panels>
WHET_INLINE void set_zero(Vec<T> (&v)[n_rows][n_panels]) {
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; ++r) {
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) v[r][p] = Vec<T>(T(0));
    }
}

// Broadcasts four inputs of a row to all outputs.
WHET_INLINE i8x64 four_inputs(const int8_t* q) {
    int32_t four;
    __builtin_memcpy(&four, q, sizeof four);
    return bit_cast<i8x64>(i32x16(four));
}

WHET_INLINE i32x16 add_products(i32x16 dot, u8x64 w, i8x64 x) { return dot_int8(dot, w, x); }
WHET_INLINE i16x32 add_products(i16x32 dot, u8x64 w, i8x64 x) { return dot_pairs(dot, w, x); }

// dot[r][p] += four inputs of row r times the bytes of weights[p].
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

// Loads vector v of a block of each panel.
template <int n_panels>
WHET_INLINE void load_weights(u8x64 (&weights)[n_panels], const uint8_t* block, size_t panel_bytes, int v) {
#pragma GCC unroll 4
    for (int p = 0; p < n_panels; ++p) weights[p] = load(block + p * panel_bytes + 64 * v);
}

// dot += the products of a block of bytes.
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

// add_bytes in products of 16 bits: even and odd bytes separately, the inputs of a block widened once for all panels.
template <int n_rows, int n_panels>
WHET_INLINE void add_widened_bytes(i32x16 (&dot)[n_rows][n_panels], const int8_t* q, size_t stride,
                                   const uint8_t* block, size_t panel_bytes) {
    int32_t even[n_rows][8], odd[n_rows][8];  // inputs 0 and 2, and 1 and 3, of each four
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; ++r) widen_pairs(q + r * stride, even[r], odd[r]);
    __asm__("" : "+m"(even), "+m"(odd));  // broadcast from memory: not with shuffles
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) {
        u8x64 weights[n_panels];
        load_weights(weights, block, panel_bytes, v);
#pragma GCC unroll 4
        for (int r = 0; r < n_rows; ++r) {
            const auto x = bit_cast<i16x32>(i32x16(even[r][v])), y = bit_cast<i16x32>(i32x16(odd[r][v]));
#pragma GCC unroll 4
            for (int p = 0; p < n_panels; ++p) dot[r][p] = dot_widened(dot[r][p], weights[p], x, y);
        }
    }
}

// add_bytes without the bias of 128, for instruction sets that multiply only 7 bits of one factor: x w is |x| w for
// x >= 0, and |x| (-w - 1) + |x| for x < 0. w is u with its highest bit flipped, and -w - 1 is u with all other bits
// flipped. The caller starts the sums with minus_sum_of_negatives.
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

// dot += the products of a block of nibbles: high nibbles are multiplied unshifted, as 8-bit integers, and their sum is
// divided by 16. Low nibbles have a separate sum, so that each vector is loaded once.
template <int n_rows, int n_panels>
WHET_INLINE void add_nibbles_split(i32x16 (&dot)[n_rows][n_panels], const int8_t* q, size_t stride,
                                   const uint8_t* block, size_t panel_bytes) {
    i32x16 low[n_rows][n_panels];
    set_zero(low);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
        u8x64 bytes[n_panels], weights[n_panels];
        load_weights(bytes, block, panel_bytes, v);
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) weights[p] = high_nibbles_unshifted(bytes[p]);
        add_dots(dot, weights, q + 16 + 4 * v, stride);
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) weights[p] = low_nibbles(bytes[p]);
        add_dots(low, weights, q + 4 * v, stride);
    }
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; ++r) {
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) dot[r][p] = divide_by_16(dot[r][p]) + low[r][p];
    }
}

// add_nibbles_split for many rows, whose sums fill the registers: the block is loaded twice.
template <int n_rows, int n_panels>
WHET_INLINE void add_nibbles_in_two_passes(i32x16 (&dot)[n_rows][n_panels], const int8_t* q, size_t stride,
                                           const uint8_t* block, size_t panel_bytes) {
    u8x64 weights[n_panels];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
        load_weights(weights, block, panel_bytes, v);
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) weights[p] = high_nibbles_unshifted(weights[p]);
        add_dots(dot, weights, q + 16 + 4 * v, stride);
    }
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; ++r) {
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) dot[r][p] = divide_by_16(dot[r][p]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
        load_weights(weights, block, panel_bytes, v);
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) weights[p] = low_nibbles(weights[p]);
        add_dots(dot, weights, q + 4 * v, stride);
    }
}

// dot += the products of vectors [v, end) of a block.
template <class Panel, int v, int end, class Sums, int n_rows, int n_panels>
WHET_INLINE void add_unpacked(Sums (&dot)[n_rows][n_panels], const int8_t* q, size_t stride, const uint8_t* block,
                              size_t panel_bytes) {
    u8x64 weights[n_panels];
#pragma GCC unroll 4
    for (int p = 0; p < n_panels; ++p) weights[p] = Panel::template integers<v>(block + p * panel_bytes);
    add_dots(dot, weights, q + 4 * v, stride);
    if constexpr (v + 1 < end) add_unpacked<Panel, v + 1, end>(dot, q, stride, block, panel_bytes);
}

// add_unpacked with 16-bit sums, widened before they can overflow.
template <class Panel, int v, int end, int n_rows, int n_panels>
WHET_INLINE void add_unpacked_in_16_bits(i32x16 (&dot)[n_rows][n_panels], const int8_t* q, size_t stride,
                                         const uint8_t* block, size_t panel_bytes) {
    constexpr int largest = Panel::kBits == kE2M1 ? 28 : (1 << Panel::kBits) - 1;
    constexpr int fit = 32767 / (2 * 127 * largest), last = v + fit < end ? v + fit : end;
    i16x32 pairs[n_rows][n_panels];
    set_zero(pairs);
    add_unpacked<Panel, v, last>(pairs, q, stride, block, panel_bytes);
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; ++r) {
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) dot[r][p] = add_pairs(dot[r][p], pairs[r][p]);
    }
    if constexpr (last < end) add_unpacked_in_16_bits<Panel, last, end>(dot, q, stride, block, panel_bytes);
}

// -128 times the sum of the inputs of the s-th scale of a block.
template <class Panel>
WHET_INLINE int32_t offset_of(const QuantisedRows& in, size_t at, int s) {
    if constexpr (Panel::kScales == 1) return in.offsets[at];
    return s == 0 ? in.half_offsets[at] : in.offsets[at] - in.half_offsets[at];
}

// The integer sums over the inputs of the s-th scale of a block.
template <class Panel, int s, int n_rows, int n_panels>
WHET_INLINE void block_sums(i32x16 (&dot)[n_rows][n_panels], const QuantisedRows& in, size_t at, const uint8_t* block,
                            size_t panel_bytes) {
    const int8_t* q = in.q + 32 * at;
    const size_t stride = 32 * in.blocks;
    // Sums of nibbles start with 16 times their offset, because the high nibbles are multiplied unshifted.
    constexpr int n = 8 / Panel::kScales;  // vectors per scale
    constexpr bool is_unbiased = kOnlyDotInt7 && !kWidensBytes && Panel::kBits == 8;
    constexpr int bias = !kOnlyDotInt7 && Panel::kHasNibbles ? 16 * Panel::kBias : Panel::kBias;
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; ++r) {
        int32_t offset = 0;
        if constexpr (is_unbiased) {
            offset = minus_sum_of_negatives(q + r * stride);
        } else if constexpr (bias != 0) {
            constexpr int shift = __builtin_ctz(128 / bias);  // offsets are multiples of 128
            offset = offset_of<Panel>(in, at + r * in.blocks, s) >> shift;
        }
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) dot[r][p] = i32x16(offset);
    }
    if constexpr (Panel::kBits == 8 && kWidensBytes) {
        add_widened_bytes(dot, q, stride, block, panel_bytes);
    } else if constexpr (is_unbiased) {
        add_unbiased_bytes(dot, q, stride, block, panel_bytes);
    } else if constexpr (Panel::kBits == 8) {
        add_bytes(dot, q, stride, block, panel_bytes);
    } else if constexpr (kOnlyDotInt7) {
        add_unpacked_in_16_bits<Panel, n * s, n*(s + 1)>(dot, q, stride, block, panel_bytes);
    } else if constexpr (!Panel::kHasNibbles) {
        add_unpacked<Panel, n * s, n*(s + 1)>(dot, q, stride, block, panel_bytes);
    } else if constexpr (n_rows <= kMaxSplitRows) {
        add_nibbles_split(dot, q, stride, block, panel_bytes);
    } else {
        add_nibbles_in_two_passes(dot, q, stride, block, panel_bytes);
    }
}

// Adds the scaled products of block i of a group, from its s-th scale on.
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
            if constexpr (Panel::kScaling != Scaling::kOutputScale)
                scale = scales[p].scale(Panel::kScales * i + s) * scale;
            sum[r][p] = fma(to_f32(dot[r][p]), scale, sum[r][p]);
        }
        if constexpr (Panel::kScaling == Scaling::kBlockScaleMin) {
            const f32x16 inputs(in.sums[at + r * in.blocks]);
#pragma GCC unroll 4
            for (int p = 0; p < n_panels; ++p) sum[r][p] = fma(scales[p].neg_min(i), inputs, sum[r][p]);
        }
    }
    if constexpr (s + 1 < Panel::kScales) add_block<Panel, s + 1>(sum, scales, in, at, i, block, panel_bytes);
}

// Up to this many rows, tiles have one panel: memory is read as one stream.
template <class Panel>
constexpr size_t kOnePanelRows = Panel::kBits < 8 ? 2 : 0;

// Prefetches `bytes` from `from` on in the n_panels after a tile, into the L2 cache: panels of long rows do not fit in
// L1. Integers of fewer than 8 bits take so many instructions per cache line that few loads are outstanding: products
// of a few rows with matrices in memory are 1.5 to 3 times as fast with prefetching. Bytes are read fast enough without
// it.
template <class Panel, int n_panels>
WHET_INLINE void prefetch_next(const uint8_t* from, size_t bytes, size_t panel_bytes) {
    if constexpr (Panel::kBits == 8) return;
#pragma GCC unroll 4
    for (int p = n_panels; p < 2 * n_panels; ++p) {
        for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + p * panel_bytes + at, 0, 2);
    }
}

// Adds the scaled products of all blocks. `first` is the first panel. The first rows prefetch.
template <class Panel, int n_rows, int n_panels>
WHET_INLINE void add_blocks(f32x16 (&sum)[n_rows][n_panels], const QuantisedRows& in, size_t row,
                            const uint8_t* first) {
    constexpr PanelLayout layout = Panel::kLayout;
    const size_t blocks = in.blocks, panel_bytes = layout.bytes(blocks);
    const uint8_t* first_scales = first + blocks * layout.step_bytes;
    for (size_t begin = 0; begin < blocks; begin += layout.group) {
        typename Panel::Scales scales[n_panels];
        const uint8_t* group_scales = first_scales + begin / layout.group * layout.group_bytes;
        if (row == 0) prefetch_next<Panel, n_panels>(group_scales, layout.group_bytes, panel_bytes);
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) scales[p].unpack(first_scales + p * panel_bytes, begin);
        for (size_t i = 0; i < layout.group; ++i) {
            const uint8_t* block = first + (begin + i) * layout.step_bytes;
            if (row == 0) prefetch_next<Panel, n_panels>(block, layout.step_bytes, panel_bytes);
            add_block<Panel, 0>(sum, scales, in, row * blocks + begin + i, i, block, panel_bytes);
        }
    }
}

// --- the same part by part (simd/parts.h). A tile of n_rows keeps n_parts of a panel in registers, and goes through
// the panel in passes of some blocks, which stay in the L1 cache until the last part has used them.

template <int n_rows>
constexpr int kTileParts = n_rows >= 8   ? 1
                           : n_rows >= 4 ? 2
                                         : 4;

// The bias subtracted from the weights of tiles of many rows; with few rows, sums are corrected instead.
template <class Panel, int n_rows>
constexpr uint8_t kWeightBias = n_rows > 4 ? Panel::kBias : 0;

// Unpacks inputs [8 i, 8 i + 8) of the part at `block`, less `bias`: two vectors, arranged for tiles of n_rows. Nibbles
// less a bias are 16 times as large, which saves an operation for each vector.
template <int bits, uint8_t bias, int i, int n_rows>
WHET_INLINE void unpack_eight(const uint8_t* block, u8x64::Native& first, u8x64::Native& second) {
    if constexpr (bits == 4) {
        const uint8_t* bytes = block + 64 * (2 * i % 4);
        first = load(bytes).part[0], second = load(bytes + 64).part[0];
        arrange<n_rows>(first, second);
        if constexpr (bias == 0) {
            first = i < 2 ? first & 15 : first >> 4, second = i < 2 ? second & 15 : second >> 4;
        } else {
            constexpr uint8_t both = 0x11 * bias;
            first ^= both, second ^= both;
            first = i < 2 ? first << 4 : first & 0xf0, second = i < 2 ? second << 4 : second & 0xf0;
        }
    } else {
        first = unpack_integers<bits, 2 * i>(block).part[0] - bias;
        second = unpack_integers<bits, 2 * i + 1>(block).part[0] - bias;
        arrange<n_rows>(first, second);
    }
}
template <int bits, uint8_t bias>
constexpr int kFactor = bits == 4 && bias != 0 ? 16 : 1;

// Adds the products of inputs [8 i, 8 end) of a block.
template <int bits, uint8_t bias, int i, int end, int n_rows, int n_parts>
WHET_INLINE void add_part_products(i32x16::Native (&dot)[n_rows][n_parts], const int8_t* q, size_t width,
                                   const uint8_t* block) {
#pragma GCC unroll 4
    for (int p = 0; p < n_parts; ++p) {
        u8x64::Native first, second;
        unpack_eight<bits, bias, i, n_rows>(block + 16 * p, first, second);
        add_eight_inputs(dot, p, first, second, q + 8 * kPairedRows * i, width);
    }
    if constexpr (i + 1 < end) add_part_products<bits, bias, i + 1, end>(dot, q, width, block);
}

// Adds the scaled products of block i of a pass, from its s-th scale on, to n_parts from `output` on.
template <class Panel, int s, int n_rows, int n_parts>
WHET_INLINE void add_block_part(f32x16::Native (&sum)[n_rows][n_parts], const typename Panel::Scales& scales,
                                const QuantisedRows& in, size_t at, size_t i, const int8_t* q, const uint8_t* block,
                                size_t output) {
    i32x16::Native dot[n_rows][n_parts];
    constexpr uint8_t bias = kWeightBias<Panel, n_rows>;
    constexpr int factor = kFactor<Panel::kBits, bias>, n = 4 / Panel::kScales;
    set_zero<factor>(dot);
    add_part_products<Panel::kBits, bias, n * s, n*(s + 1)>(dot, q, 32 * in.blocks, block);
    separate_rows(dot);
    if constexpr (Panel::kBias != bias) {
        constexpr int shift = __builtin_ctz(128 / Panel::kBias);  // offsets are multiples of 128
#pragma GCC unroll 4
        for (int r = 0; r < n_rows; ++r) {
            const auto offset = i32x16(offset_of<Panel>(in, at + r * in.blocks, s)).part[0] >> shift;
#pragma GCC unroll 4
            for (int p = 0; p < n_parts; ++p) dot[r][p] += offset;
        }
    }
    f32x16::Native scale[n_parts], neg_min[n_parts];
    if constexpr (Panel::kScaling != Scaling::kOutputScale) scales.read_scales(Panel::kScales * i + s, output, scale);
    if constexpr (Panel::kScaling == Scaling::kBlockScaleMin) scales.read_neg_mins(i, output, neg_min);
#pragma GCC unroll 8
    for (int r = 0; r < n_rows; ++r) {
        const auto x_scale = f32x16(in.scales[at + r * in.blocks]).part[0];
#pragma GCC unroll 4
        for (int p = 0; p < n_parts; ++p) {
            const auto product = Panel::kScaling == Scaling::kOutputScale ? x_scale : scale[p] * x_scale;
            sum[r][p] = fma(to_f32<factor>(dot[r][p]), product, sum[r][p]);
        }
        if constexpr (Panel::kScaling == Scaling::kBlockScaleMin) {
            const auto inputs = f32x16(in.sums[at + r * in.blocks]).part[0];
#pragma GCC unroll 4
            for (int p = 0; p < n_parts; ++p) sum[r][p] = fma(neg_min[p], inputs, sum[r][p]);
        }
    }
    if constexpr (s + 1 < Panel::kScales) add_block_part<Panel, s + 1>(sum, scales, in, at, i, q, block, output);
}

// Adds the scaled products of a pass of `count` blocks to n_parts of `sums`, the sums of 16 outputs of each row.
template <class Panel, int n_rows, int n_parts>
WHET_INLINE void add_pass_part(float* sums, const typename Panel::Scales& scales, const QuantisedRows& in, size_t at,
                               size_t count, const int8_t* q, const uint8_t* block, size_t output) {
    f32x16::Native sum[n_rows][n_parts];
    constexpr size_t bytes = sizeof sum[0];
#pragma GCC unroll 8
    for (int r = 0; r < n_rows; ++r) __builtin_memcpy(sum[r], sums + 16 * r + output, bytes);
    for (size_t i = 0; i < count; ++i, block += Panel::kLayout.step_bytes, q += 32 * kPairedRows) {
        add_block_part<Panel, 0>(sum, scales, in, at + i, i, q, block, output);
    }
#pragma GCC unroll 8
    for (int r = 0; r < n_rows; ++r) __builtin_memcpy(sums + 16 * r + output, sum[r], bytes);
}

template <class Panel, int n_rows>
WHET_INLINE void add_blocks_by_part(float* sums, const QuantisedRows& in, size_t row, const uint8_t* panel) {
    constexpr int n_parts = kTileParts<n_rows>;
    constexpr size_t step_bytes = Panel::kLayout.step_bytes;
    const int8_t* q = in.q + inputs_offset(row, 32 * in.blocks);
    for (size_t begin = 0; begin < in.blocks; begin += kPassBlocks) {
        const size_t count = in.blocks - begin < kPassBlocks ? in.blocks - begin : kPassBlocks;
        typename Panel::Scales scales;
        scales.unpack(panel + in.blocks * step_bytes, begin);
        for (size_t output = 0; output < 16; output += 4 * n_parts) {
            add_pass_part<Panel, n_rows, n_parts>(sums, scales, in, row * in.blocks + begin, count,
                                                  q + 32 * kPairedRows * begin, panel + begin * step_bytes + 4 * output,
                                                  output);
        }
    }
}

template <class Panel, int n_rows, int n_panels>
__attribute__((noinline)) void quantised_tile(const QuantisedRows& in, size_t row, const uint8_t* panels, size_t panel,
                                              const Outputs& out) {
    constexpr PanelLayout layout = Panel::kLayout;
    const size_t panel_bytes = layout.bytes(in.blocks);
    const uint8_t* first = panels + panel * panel_bytes;
    f32x16 sum[n_rows][n_panels];
    set_zero(sum);
    if constexpr (kMultipliesParts) {
        add_blocks_by_part<Panel, n_rows>(reinterpret_cast<float*>(sum), in, row, first);
    } else {
        add_blocks<Panel>(sum, in, row, first);
    }
    if constexpr (Panel::kScaling == Scaling::kOutputScale) {
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) {
            const uint8_t* scales = first + p * panel_bytes + in.blocks * layout.step_bytes;
            const f32x16 scale = load(reinterpret_cast<const float*>(scales));
#pragma GCC unroll 8
            for (int r = 0; r < n_rows; ++r) sum[r][p] = sum[r][p] * scale;
        }
    }
    store_tile(sum, out, row, panel);
}

// --- many rows: the integers of a pass of some blocks are unpacked once for all rows, and their sums are kept in
// memory.

constexpr size_t kLeastUnpackedRows = 16, kMostUnpackedRows = 256;

template <int v, class Panel>
WHET_INLINE void unpack_block(uint8_t* bytes, const uint8_t* block) {
    store(bytes + 64 * v, Panel::template integers<v>(block));
    if constexpr (v + 1 < 8) unpack_block<v + 1, Panel>(bytes, block);
}

template <int n_rows, int n_panels>
WHET_INLINE void load_sums(f32x16 (&sum)[n_rows][n_panels], const float* sums) {
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; ++r) {
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) sum[r][p] = load(sums + 16 * (r * n_panels + p));
    }
}

// Adds the scaled products of `count` unpacked blocks of n_rows rows to their sums.
template <class Panel, int n_rows, int n_panels>
WHET_INLINE void add_unpacked_pass(float* sums, const typename Panel::Scales (&scales)[n_panels],
                                   const QuantisedRows& in, size_t at, size_t count, const uint8_t* bytes) {
    f32x16 sum[n_rows][n_panels];
    load_sums(sum, sums);
    for (size_t i = 0; i < count; ++i) {
        add_block<UnpackedPanel<Panel>, 0>(sum, scales, in, at + i, i, bytes + kUnpackedBlock * i,
                                           kPassBlocks * kUnpackedBlock);
    }
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; ++r) {
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) store(sums + 16 * (r * n_panels + p), sum[r][p]);
    }
}

template <class Panel, int n_panels>
__attribute__((noinline)) void quantised_rows(const QuantisedRows& in, const uint8_t* panels, size_t panel,
                                              const Outputs& out) {
    constexpr PanelLayout layout = Panel::kLayout;
    constexpr size_t width = 16 * n_panels;
    alignas(64) float sums[width * kMostUnpackedRows];
    alignas(64) uint8_t bytes[n_panels][kPassBlocks * kUnpackedBlock];
    const size_t panel_bytes = layout.bytes(in.blocks);
    const uint8_t* first = panels + panel * panel_bytes;
    __builtin_memset(sums, 0, width * in.rows * sizeof *sums);
    for (size_t begin = 0; begin < in.blocks; begin += kPassBlocks) {
        const size_t count = in.blocks - begin < kPassBlocks ? in.blocks - begin : kPassBlocks;
        typename Panel::Scales scales[n_panels];
        for (int p = 0; p < n_panels; ++p) {
            scales[p].unpack(first + p * panel_bytes + in.blocks * layout.step_bytes, begin);
            for (size_t i = 0; i < count; ++i) {
                const uint8_t* block = first + p * panel_bytes + (begin + i) * layout.step_bytes;
                prefetch_next<Panel, 1>(block + (n_panels - 1) * panel_bytes, layout.step_bytes, panel_bytes);
                unpack_block<0, Panel>(bytes[p] + kUnpackedBlock * i, block);
            }
        }
        size_t row = 0;
        for (; row + 4 <= in.rows; row += 4) {
            add_unpacked_pass<Panel, 4>(sums + width * row, scales, in, row * in.blocks + begin, count, bytes[0]);
        }
        for (; row < in.rows; ++row) {
            add_unpacked_pass<Panel, 1>(sums + width * row, scales, in, row * in.blocks + begin, count, bytes[0]);
        }
    }
    for (size_t row = 0; row < in.rows; ++row) {
        f32x16 sum[1][n_panels];
        load_sums(sum, sums + width * row);
        store_tile(sum, out, row, panel);
    }
}

template <class Panel, int n_panels>
WHET_INLINE void quantised_panels(const QuantisedRows& in, const uint8_t* panels, size_t panel, const Outputs& out) {
    const size_t panel_bytes = Panel::kLayout.bytes(in.blocks);
    touch(panels + panel * panel_bytes, n_panels * panel_bytes);
    if constexpr (kUnpacksPasses && Panel::kBits < 8) {
        if (in.rows >= kLeastUnpackedRows && in.rows <= kMostUnpackedRows) {
            return quantised_rows<Panel, n_panels>(in, panels, panel, out);
        }
    }
    size_t row = 0;
    for (; row + kQuantisedRows <= in.rows; row += kQuantisedRows) {
        quantised_tile<Panel, kQuantisedRows, n_panels>(in, row, panels, panel, out);
    }
    if constexpr (kQuantisedRows > 4) {
        if (row + 4 <= in.rows) {
            quantised_tile<Panel, 4, n_panels>(in, row, panels, panel, out);
            row += 4;
        }
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
    if (in.rows > kOnePanelRows<Panel>) {
        for (; panel + kQuantisedPanels <= n_panels; panel += kQuantisedPanels) {
            quantised_panels<Panel, kQuantisedPanels>(in, bytes, panel, out);
        }
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
WHET_LINEAR(mxfp4, MXFP4Panel)
WHET_LINEAR(q4_1, Q4_1Panel)
WHET_LINEAR(q5_0, Q5_0Panel)
WHET_LINEAR(q5_1, Q5_1Panel)
WHET_LINEAR(q4_k, Q4_KPanel)
WHET_LINEAR(q5_k, Q5_KPanel)
WHET_LINEAR(q6_k, Q6_KPanel)
#undef WHET_LINEAR

// --- the inputs

// Stores -128 times the sums, as integers.
WHET_INLINE void store_offsets(f32x16 sums, int n, int32_t* offsets) {
    const f32x16 rounder(kRounder<float>);
    const auto shifted = bit_cast<i32x16>(fma(sums, f32x16(-128.0f), rounder));
    store_first(offsets, shifted - bit_cast<i32x16>(rounder), n);
}

// Quantises up to 16 blocks of 32 inputs, from block `first` on. NaN or infinity makes the scale and sum of a block
// NaN.
WHET_SHARED void quantize_blocks(const float* x, size_t first, size_t blocks, const QuantisedInputs& to) {
    const f32x16 zero(0.0f), limit(__builtin_inff());
    f32x16 lanes[16], first_halves[16];  // per block: magnitudes, then totals
    for (f32x16& v : lanes) v = zero;
    for (size_t b = 0; b < blocks; ++b) {
        // min returns its second argument if one is NaN, so NaN counts as infinity.
        lanes[b] = max(min(magnitude(load(x + 32 * b)), limit), min(magnitude(load(x + 32 * b + 16)), limit));
    }
    const int n = static_cast<int>(blocks);
    const f32x16 maximum = max_each(lanes), inverse = f32x16(127.0f) / maximum;
    const f32x16 scales = maximum / f32x16(127.0f) + (maximum - maximum);
    store_first(to.scales + first, scales, n);
    float inverses[16];
    store(inverses, select((maximum > zero) & (maximum < limit) & (inverse < limit), inverse, zero));
    for (int b = 0; b < 16; ++b) lanes[b] = first_halves[b] = zero;
    int8_t* q = to.q + 32 * kPairedRows * first;
    for (size_t b = 0; b < blocks; ++b) {
        const Rounded<float> low(load(x + 32 * b), f32x16(inverses[b]));
        const Rounded<float> high(load(x + 32 * b + 16), f32x16(inverses[b]));
        first_halves[b] = low.value();
        lanes[b] = low.value() + high.value();
        store_inputs(q, 32 * b, bit_cast<i32x16>(low.shifted));  // the low bits are the integers
        store_inputs(q, 32 * b + 16, bit_cast<i32x16>(high.shifted));
    }
    const f32x16 totals = sum_each(lanes);
    store_first(to.sums + first, scales * totals, n);
    store_offsets(totals, n, to.offsets + first);
    store_offsets(sum_each(first_halves), n, to.half_offsets + first);
}

// Offset of a row of `width` integers among quantised inputs.
size_t quantised_row_offset(size_t row, size_t width) { return inputs_offset(row, width); }

// Quantises a row of n inputs, padded with zeros to whole blocks.
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
