// Unpacks one panel of 16 outputs to rows of numbers: the inverse of pack.h and pack_quantised.h, equal to the format's
// dequantize_row (engine/formats.h) to the bit. bfloat16 output is that number, rounded to nearest even.
//
// Unpacking goes through tiles of inputs x 16 outputs. Words are transposed in registers before they are unpacked, one
// shuffle for 4 inputs of a quantised format or 2 of bfloat16, and then converted row by row with their output's
// scales.
#pragma once
#include "kernels/linear_quantised.h"
#include "kernels/panel_task.h"
#include "kernels/rows.h"
#include "simd/lanes.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

namespace unpack {

// Stores 16 words of 16 outputs transposed: `tile` is output-major.
template <class T>
WHET_INLINE void put_transposed(f32x16 (&words)[16], T* tile) {
    transpose(words);
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) store(reinterpret_cast<float*>(tile) + 16 * j, words[j]);
}

// Reads words [first, first + 16) of the panel's n words per output, padded with zeros.
template <class T>
WHET_INLINE void read_words(const void* panel, size_t first, size_t n, T* tile) {
    const float* from = static_cast<const float*>(panel) + 16 * first;
    f32x16 words[16];
    if (n - first >= 16) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) words[i] = load(from + 16 * i);
    } else {
        for (size_t i = 0; i < 16; ++i) words[i] = i < n - first ? load(from + 16 * i) : f32x16(0.0f);
    }
    put_transposed(words, tile);
}

// A tile reads inputs from `at` on for all outputs, and writes the first n of output j to a row.

struct Float32Tile {
    static constexpr size_t kInputs = 16;
    alignas(64) float numbers[16 * kInputs];

    WHET_INLINE void read(const UnpackTask& task, size_t at) { read_words(task.panel, at, task.k, numbers); }
    template <class T>
    WHET_INLINE void put(size_t j, size_t n, T* row) const {
        rows::put(row, load(numbers + kInputs * j), static_cast<int>(n));
    }
};

struct BFloat16Tile {
    static constexpr size_t kInputs = 32;
    alignas(64) uint16_t numbers[16 * kInputs];

    WHET_INLINE void read(const UnpackTask& task, size_t at) {
        read_words(task.panel, at / 2, (task.k + 1) / 2, numbers);
    }
    WHET_INLINE void put(size_t j, size_t n, uint16_t* row) const {
        __builtin_memcpy(row, numbers + kInputs * j, n * sizeof *row);
    }
    WHET_INLINE void put(size_t j, size_t n, float* row) const {
        rows::each(0, n, [&](size_t i, int count) WHET_INLINE_LAMBDA {
            rows::put(row + i, load_bf16(numbers + kInputs * j + i), count);
        });
    }
};

// Inputs 4 v to 4 v + 3 of a block as signed bytes q of a word.
template <class Panel, int v>
WHET_INLINE f32x16 four_integers(const uint8_t* block) {
    const u8x64 u = unpack_integers<Panel::kBits, v>(block);
    return bit_cast<f32x16>(u - u8x64(Panel::kBias));
}

template <class Panel, int v = 0>
WHET_INLINE void read_block(const uint8_t* block, f32x16* words) {
    words[v] = four_integers<Panel, v>(block);
    if constexpr (v < 7) read_block<Panel, v + 1>(block, words);
}

// Two blocks of 32 inputs; the second may not exist.
template <class Panel>
struct QuantisedTile {
    static constexpr PanelLayout kLayout = Panel::kLayout;
    static constexpr size_t kInputs = 2 * kQuantBlock, kGroup = kLayout.group < 2 ? 2 : kLayout.group;
    alignas(64) int8_t q[16 * kInputs];
    float scales[4][16], neg_mins[4][16];  // per 16 inputs
    typename Panel::Scales group;

    WHET_INLINE void read(const UnpackTask& task, size_t at) {
        const size_t blocks = (task.k + kQuantBlock - 1) / kQuantBlock, first = at / kQuantBlock;
        const auto* bytes = static_cast<const uint8_t*>(task.panel);
        const bool both = first + 1 < blocks;
        f32x16 words[16];
        read_block<Panel>(bytes + first * kLayout.step_bytes, words);
        if (both) {
            read_block<Panel>(bytes + (first + 1) * kLayout.step_bytes, words + 8);
        } else {
            for (int v = 8; v < 16; ++v) words[v] = f32x16(0.0f);
        }
        put_transposed(words, q);
        const uint8_t* all_scales = bytes + blocks * kLayout.step_bytes;
        if (Panel::kScaling != Scaling::kOutputScale && first % kGroup == 0) group.unpack(all_scales, first);
        for (size_t i = 0; i < 4; ++i) {
            const size_t block = first % kGroup + i / 2;
            if (!both && i >= 2) break;
            if constexpr (Panel::kScaling == Scaling::kOutputScale) {
                store(scales[i], load(reinterpret_cast<const float*>(all_scales)));
            } else {
                store(scales[i], group.scale(Panel::kScales * block + (Panel::kScales == 2 ? i % 2 : 0)));
            }
            if constexpr (Panel::kScaling == Scaling::kBlockScaleMin) store(neg_mins[i], group.neg_min(block));
        }
    }
    template <class T>
    WHET_INLINE void put(size_t j, size_t n, T* row) const {
        rows::each(0, n, [&](size_t i, int count) WHET_INLINE_LAMBDA {
            f32x16 x = f32x16(scales[i / 16][j]) * load_bytes(q + kInputs * j + i);
            if constexpr (Panel::kScaling == Scaling::kBlockScaleMin) x += f32x16(neg_mins[i / 16][j]);
            rows::put(row + i, x, count);
        });
    }
};

template <class Tile, class T>
WHET_INLINE void put_rows_of(const UnpackTask& task) {
    Tile tile;
    for (size_t at = 0; at < task.k; at += Tile::kInputs) {
        tile.read(task, at);
        T* row = static_cast<T*>(task.rows) + at;
        const size_t n = task.k - at;
        for (size_t j = task.first; j < task.first + task.count; ++j, row += task.k) {
            n < Tile::kInputs ? tile.put(j, n, row) : tile.put(j, Tile::kInputs, row);
        }
    }
}

template <class Tile>
WHET_INLINE void put_rows(const UnpackTask& task) {
    task.bf16 ? put_rows_of<Tile, uint16_t>(task) : put_rows_of<Tile, float>(task);
}

}  // namespace unpack

constexpr auto unpack_panel_f32 = unpack::put_rows<unpack::Float32Tile>;
constexpr auto unpack_panel_bf16 = unpack::put_rows<unpack::BFloat16Tile>;
constexpr auto unpack_panel_int8 = unpack::put_rows<unpack::QuantisedTile<Int8Panel>>;
constexpr auto unpack_panel_q8_0 = unpack::put_rows<unpack::QuantisedTile<Q8_0Panel>>;
constexpr auto unpack_panel_q4_0 = unpack::put_rows<unpack::QuantisedTile<Q4_0Panel>>;
constexpr auto unpack_panel_mxfp4 = unpack::put_rows<unpack::QuantisedTile<MXFP4Panel>>;
constexpr auto unpack_panel_q4_1 = unpack::put_rows<unpack::QuantisedTile<Q4_1Panel>>;
constexpr auto unpack_panel_q5_0 = unpack::put_rows<unpack::QuantisedTile<Q5_0Panel>>;
constexpr auto unpack_panel_q5_1 = unpack::put_rows<unpack::QuantisedTile<Q5_1Panel>>;
constexpr auto unpack_panel_q4_k = unpack::put_rows<unpack::QuantisedTile<Q4_KPanel>>;
constexpr auto unpack_panel_q5_k = unpack::put_rows<unpack::QuantisedTile<Q5_KPanel>>;
constexpr auto unpack_panel_q6_k = unpack::put_rows<unpack::QuantisedTile<Q6_KPanel>>;

}  // namespace
}  // namespace whet::WHET_ISA
