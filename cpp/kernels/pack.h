// Packs numbers of any RowType and strides to one panel of 16 outputs for linear.h: float32, or pairs of bfloat16.
//
// Packing goes through tiles: some inputs of the 16 outputs, one vector per input. A row-major weight (Linear) is
// transposed in registers, 16 rows by 16 inputs; in a column-major weight (Conv1D) a vector is 16 neighbours. Rounding
// to bfloat16 is as in convert.h; bfloat16 bits are copied.
#pragma once
#include "kernels/panel_task.h"
#include "simd/dot.h"
#include "simd/lanes.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

namespace pack {

constexpr size_t kTile = kQuantBlock;  // inputs

// Loads 16 neighbours as float32.
template <RowType source>
WHET_SHARED f32x16 widen(const uint8_t* x) {
    if constexpr (source == RowType::kFloat32) return load(reinterpret_cast<const float*>(x));
    if constexpr (source == RowType::kBFloat16) return load_bf16(reinterpret_cast<const uint16_t*>(x));
    if constexpr (source == RowType::kFloat16) return load_f16(reinterpret_cast<const uint16_t*>(x));
}

// Reads input `at` of the task's outputs, with any strides; zeros in the other lanes.
template <RowType source>
WHET_INLINE f32x16 read_column(const PanelTask& task, size_t at) {
    constexpr ptrdiff_t size = source == RowType::kFloat32 ? 4 : 2;
    const uint8_t* x = static_cast<const uint8_t*>(task.x) + static_cast<ptrdiff_t>(at) * task.column_stride;
    if (task.row_stride == size && task.count == 16) {
        __builtin_prefetch(x + static_cast<ptrdiff_t>(kTile) * task.column_stride);  // each input is on another page
        return widen<source>(x);
    }
    uint8_t lanes[16 * size] = {};
    for (size_t j = task.first; j < task.first + task.count; ++j, x += task.row_stride) {
        __builtin_memcpy(lanes + j * size, x, size);
    }
    return widen<source>(lanes);
}

// Reads inputs [at, at + n) of 16 rows, n <= 16; lanes outside the task repeat its first or last row.
template <RowType source>
WHET_INLINE void read_transposed(const PanelTask& task, size_t at, size_t n, float* tile) {
    constexpr ptrdiff_t size = source == RowType::kFloat32 ? 4 : 2;
    f32x16 words[16];
    WHET_UNROLL(16)
    for (size_t j = 0; j < 16; ++j) {
        const size_t after = j < task.first ? 0 : j - task.first, row = after < task.count ? after : task.count - 1;
        const uint8_t* x = static_cast<const uint8_t*>(task.x) + static_cast<ptrdiff_t>(row) * task.row_stride +
                           static_cast<ptrdiff_t>(at) * size;
        if (n == 16) {
            __builtin_prefetch(x + 256);  // 16 rows are more streams than the hardware prefetcher tracks
            words[j] = widen<source>(x);
        } else {
            uint8_t last[16 * size] = {};
            __builtin_memcpy(last, x, n * size);
            words[j] = widen<source>(last);
        }
    }
    transpose(words);
    for (size_t i = 0; i < n; ++i) store(tile + 16 * i, words[i]);
}

template <RowType source>
__attribute__((noinline)) void read_tile(const PanelTask& task, size_t at, size_t n, float* tile) {
    if (task.column_stride != (source == RowType::kFloat32 ? 4 : 2)) {
        for (size_t i = 0; i < n; ++i) store(tile + 16 * i, read_column<source>(task, at + i));
        return;
    }
    size_t i = 0;
    for (; i + 16 <= n; i += 16) read_transposed<source>(task, at + i, 16, tile + 16 * i);
    if (i < n) read_transposed<source>(task, at + i, n - i, tile + 16 * i);
}

// Reads inputs [at, at + n) of the task's outputs, n <= kTile: input at + i is the vector at tile + 16 i.
WHET_INLINE void read_tile(const PanelTask& task, size_t at, size_t n, float* tile) {
    if (task.source == RowType::kFloat32) {
        read_tile<RowType::kFloat32>(task, at, n, tile);
    } else if (task.source == RowType::kBFloat16) {
        read_tile<RowType::kBFloat16>(task, at, n, tile);
    } else {
        read_tile<RowType::kFloat16>(task, at, n, tile);
    }
}

// Stores the task's lanes of 16 words, half-words or bytes.
template <class T>
WHET_INLINE void put(T* out, const T* lanes, const PanelTask& task) {
    __builtin_memcpy(out + task.first, lanes + task.first, task.count * sizeof(T));
}
WHET_INLINE void put(float* out, f32x16 words, const PanelTask& task) {
    if (task.count == 16) return store(out, words);
    float lanes[16];
    store(lanes, words);
    put(out, lanes, task);
}

// Pairs of bfloat16 from floats that are exact in bfloat16.
WHET_INLINE f32x16 pack_bf16_pairs(f32x16 even, f32x16 odd) {
    f32x16 pairs;
    WHET_EACH_PART(p) {
        pairs.part[p] = (f32x16::Native)(((NativeU32)even.part[p] >> 16) | ((NativeU32)odd.part[p] & 0xffff0000u));
    }
    return pairs;
}

}  // namespace pack

void pack_panel_f32(const PanelTask& task) {
    auto* panel = static_cast<float*>(task.panel);
    for (size_t at = 0; at < task.k; at += pack::kTile) {
        const size_t n = task.k - at < pack::kTile ? task.k - at : pack::kTile;
        if (task.count == 16) {
            pack::read_tile(task, at, n, panel + 16 * at);
            continue;
        }
        alignas(64) float tile[16 * pack::kTile];
        pack::read_tile(task, at, n, tile);
        for (size_t i = 0; i < n; ++i) pack::put(panel + 16 * (at + i), tile + 16 * i, task);
    }
}

void pack_panel_bf16(const PanelTask& task) {
    auto* panel = static_cast<float*>(task.panel);
    for (size_t at = 0; at < task.k; at += pack::kTile) {
        const size_t n = task.k - at < pack::kTile ? task.k - at : pack::kTile;
        alignas(64) float tile[16 * pack::kTile];
        pack::read_tile(task, at, n, tile);
        if (n % 2 != 0) store(tile + 16 * n, f32x16(0.0f));
        for (size_t i = 0; i < n; i += 2, panel += 16) {
            const f32x16 even = load(tile + 16 * i), odd = load(tile + 16 * i + 16);
            const bool exact = task.source == RowType::kBFloat16;
            pack::put(panel, exact ? pack::pack_bf16_pairs(even, odd) : bit_cast<f32x16>(zip_bf16(even, odd)), task);
        }
    }
}

}  // namespace
}  // namespace whet::WHET_ISA
