#include "engine/formats.h"

#include <algorithm>
#include <cstring>

#include "engine/quantize.h"
#include "runtime/ceil_div.h"

namespace whet {
namespace {

// Where word w of output j begins.
size_t word_at(size_t w, size_t j) { return 4 * (kPanel * w + j); }

constexpr uint32_t kFlip = 0x80808080;  // panels hold signed bytes 128 higher, as unsigned ones

// `bytes` bytes of a row to n_words words of an output, with zeros after them.
void put_words(const uint8_t* from, size_t bytes, size_t n_words, uint32_t flip, uint8_t* panel, size_t j) {
    for (size_t w = 0; w < n_words; ++w) {
        uint32_t word = 0;
        if (4 * w < bytes) std::memcpy(&word, from + 4 * w, std::min<size_t>(4, bytes - 4 * w));
        word ^= flip;
        std::memcpy(panel + word_at(w, j), &word, 4);
    }
}

void get_words(const uint8_t* panel, size_t j, uint32_t flip, uint8_t* to, size_t bytes) {
    for (size_t w = 0; 4 * w < bytes; ++w) {
        uint32_t word;
        std::memcpy(&word, panel + word_at(w, j), 4);
        word ^= flip;
        std::memcpy(to + 4 * w, &word, std::min<size_t>(4, bytes - 4 * w));
    }
}

// ---------------------------------------------------------------- plain numbers

template <class T>
void unpack_numbers(const uint8_t* panel, size_t j, size_t k, uint8_t* row) {
    get_words(panel, j, 0, row, k * sizeof(T));
}

void copy_float32(const uint8_t* row, size_t k, float* x) { std::memcpy(x, row, k * sizeof *x); }

void widen_bfloat16(const uint8_t* row, size_t k, float* x) {
    kernels().f32_from_bf16(reinterpret_cast<const uint16_t*>(row), k, x);
}

// ---------------------------------------------------------------- int8

size_t int8_scale_at(size_t k, size_t j) { return ceil_div(k, kQuantBlock) * kInt8Layout.step_bytes + 4 * j; }

void pack_int8(const uint8_t* row, size_t k, uint8_t* panel, size_t j) {
    put_words(row, k, ceil_div(k, kQuantBlock) * kQuantBlock / 4, kFlip, panel, j);
    std::memcpy(panel + int8_scale_at(k, j), row + k, 4);
}

void unpack_int8(const uint8_t* panel, size_t j, size_t k, uint8_t* row) {
    get_words(panel, j, kFlip, row, k);
    std::memcpy(row + k, panel + int8_scale_at(k, j), 4);
}

// ---------------------------------------------------------------- blocks of a scale d and integers q

template <class Block, const PanelLayout& layout, uint32_t flip>
void pack_blocks(const uint8_t* row, size_t k, uint8_t* panel, size_t j) {
    uint8_t* scales = panel + k / Block::kLength * layout.step_bytes + 2 * j;
    for (size_t i = 0; i < k; i += Block::kLength, row += sizeof(Block)) {
        put_words(row + offsetof(Block, q), sizeof(Block::q), sizeof(Block::q) / 4, flip, panel, j);
        std::memcpy(scales, row + offsetof(Block, d), 2);
        panel += layout.step_bytes, scales += layout.group_bytes;
    }
}

template <class Block, const PanelLayout& layout, uint32_t flip>
void unpack_blocks(const uint8_t* panel, size_t j, size_t k, uint8_t* row) {
    const uint8_t* scales = panel + k / Block::kLength * layout.step_bytes + 2 * j;
    for (size_t i = 0; i < k; i += Block::kLength, row += sizeof(Block)) {
        get_words(panel, j, flip, row + offsetof(Block, q), sizeof(Block::q));
        std::memcpy(row + offsetof(Block, d), scales, 2);
        panel += layout.step_bytes, scales += layout.group_bytes;
    }
}

// ---------------------------------------------------------------- q4_k

constexpr size_t kFactors = sizeof(BlockQ4_K::factors), kQ4_KSteps = kQ4_KLayout.group;

// The scales of a group in a panel: the factors' bytes, d and dmin, each of 16 outputs side by side.
size_t factor_at(size_t i, size_t j) { return kPanel * i + j; }
size_t d_at(size_t j) { return kPanel * kFactors + 2 * j; }
size_t dmin_at(size_t j) { return kPanel * (kFactors + 2) + 2 * j; }

// A byte of a block holds inputs 32 apart; in a panel, inputs 16 apart, as in q4_0.
void pack_q4_k(const uint8_t* row, size_t k, uint8_t* panel, size_t j) {
    uint8_t* scales = panel + k / kQuantBlock * kQ4_KLayout.step_bytes;
    for (size_t i = 0; i < k; i += BlockQ4_K::kLength, row += sizeof(BlockQ4_K), scales += kQ4_KLayout.group_bytes) {
        BlockQ4_K block;
        std::memcpy(&block, row, sizeof block);
        for (size_t step = 0; step < kQ4_KSteps; ++step, panel += kQ4_KLayout.step_bytes) {
            const uint8_t* q = block.q + step / 2 * 32;
            const int shift = step % 2 == 0 ? 0 : 4;
            uint8_t bytes[16];
            for (size_t b = 0; b < 16; ++b) {
                bytes[b] = static_cast<uint8_t>((q[b] >> shift & 15) | (q[b + 16] >> shift & 15) << 4);
            }
            put_words(bytes, 16, 4, 0, panel, j);
        }
        for (size_t b = 0; b < kFactors; ++b) scales[factor_at(b, j)] = block.factors[b];
        std::memcpy(scales + d_at(j), &block.d, 2);
        std::memcpy(scales + dmin_at(j), &block.dmin, 2);
    }
}

void unpack_q4_k(const uint8_t* panel, size_t j, size_t k, uint8_t* row) {
    const uint8_t* scales = panel + k / kQuantBlock * kQ4_KLayout.step_bytes;
    for (size_t i = 0; i < k; i += BlockQ4_K::kLength, row += sizeof(BlockQ4_K), scales += kQ4_KLayout.group_bytes) {
        BlockQ4_K block{};
        for (size_t step = 0; step < kQ4_KSteps; ++step, panel += kQ4_KLayout.step_bytes) {
            uint8_t* q = block.q + step / 2 * 32;
            const int shift = step % 2 == 0 ? 0 : 4;
            uint8_t bytes[16];
            get_words(panel, j, 0, bytes, 16);
            for (size_t b = 0; b < 16; ++b) {
                q[b] |= static_cast<uint8_t>((bytes[b] & 15) << shift);
                q[b + 16] |= static_cast<uint8_t>(bytes[b] >> 4 << shift);
            }
        }
        for (size_t b = 0; b < kFactors; ++b) block.factors[b] = scales[factor_at(b, j)];
        std::memcpy(&block.d, scales + d_at(j), 2);
        std::memcpy(&block.dmin, scales + dmin_at(j), 2);
        std::memcpy(row, &block, sizeof block);
    }
}

}  // namespace

const std::array<FormatTraits, static_cast<size_t>(WeightFormat::kCount)>& format_table() {
    static constexpr std::array<FormatTraits, static_cast<size_t>(WeightFormat::kCount)> table = {{
        {.name = "float32",
         .block_length = 1,
         .block_bytes = 4,
         .source = Source::kFloat32,
         .panel = kFloat32Layout,
         .unpack_row = unpack_numbers<float>,
         .dequantize_row = copy_float32,
         .pack_panel = &Kernels::pack_panel_f32,
         .linear = &Kernels::linear_f32},
        {.name = "bfloat16",
         .block_length = 1,
         .block_bytes = 2,
         .source = Source::kBFloat16,
         .panel = kBFloat16Layout,
         .unpack_row = unpack_numbers<uint16_t>,
         .dequantize_row = widen_bfloat16,
         .pack_panel = &Kernels::pack_panel_bf16,
         .linear = &Kernels::linear_bf16},
        {.name = "int8",
         .block_length = 1,
         .block_bytes = 1,
         .row_scale_bytes = 4,
         .panel = kInt8Layout,
         .pack_row = pack_int8,
         .unpack_row = unpack_int8,
         .quantize_row = quantize_int8,
         .dequantize_row = dequantize_int8,
         .pack_panel = &Kernels::pack_panel_int8,
         .linear = &Kernels::linear_int8},
        {.name = "q8_0",
         .block_length = BlockQ8_0::kLength,
         .block_bytes = sizeof(BlockQ8_0),
         .panel = kQ8_0Layout,
         .pack_row = pack_blocks<BlockQ8_0, kQ8_0Layout, kFlip>,
         .unpack_row = unpack_blocks<BlockQ8_0, kQ8_0Layout, kFlip>,
         .quantize_row = quantize_blocks<BlockQ8_0>,
         .dequantize_row = dequantize_blocks<BlockQ8_0>,
         .pack_panel = &Kernels::pack_panel_q8_0,
         .linear = &Kernels::linear_q8_0},
        {.name = "q4_0",
         .block_length = BlockQ4_0::kLength,
         .block_bytes = sizeof(BlockQ4_0),
         .panel = kQ4_0Layout,
         .pack_row = pack_blocks<BlockQ4_0, kQ4_0Layout, 0>,
         .unpack_row = unpack_blocks<BlockQ4_0, kQ4_0Layout, 0>,
         .quantize_row = quantize_blocks<BlockQ4_0>,
         .dequantize_row = dequantize_blocks<BlockQ4_0>,
         .pack_panel = &Kernels::pack_panel_q4_0,
         .linear = &Kernels::linear_q4_0},
        {.name = "q4_k",
         .block_length = BlockQ4_K::kLength,
         .block_bytes = sizeof(BlockQ4_K),
         .panel = kQ4_KLayout,
         .pack_row = pack_q4_k,
         .unpack_row = unpack_q4_k,
         .quantize_row = quantize_blocks<BlockQ4_K>,
         .dequantize_row = dequantize_blocks<BlockQ4_K>,
         .pack_panel = &Kernels::pack_panel_q4_k,
         .linear = &Kernels::linear_q4_k},
    }};
    return table;
}

}  // namespace whet
