#include "engine/formats.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "engine/quantize.h"
#include "runtime/ceil_div.h"

namespace whet {
namespace {

// Offset of word w of output j.
size_t word_at(size_t w, size_t j) { return 4 * (kPanel * w + j); }

uint32_t get_word(const uint8_t* from) {
    uint32_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

void put_word(uint32_t word, uint8_t* to) { std::memcpy(to, &word, sizeof word); }

// ---------------------------------------------------------------- plain numbers

template <class T>
void unpack_numbers(const uint8_t* panel, size_t j, size_t k, uint8_t* row) {
    const size_t bytes = k * sizeof(T);
    for (size_t w = 0; 4 * w < bytes; ++w) {
        std::memcpy(row + 4 * w, panel + word_at(w, j), std::min<size_t>(4, bytes - 4 * w));
    }
}

void copy_float32(const uint8_t* row, size_t k, float* x) { std::memcpy(x, row, k * sizeof *x); }

void widen_bfloat16(const uint8_t* row, size_t k, float* x) {
    kernels().f32_from_bf16(reinterpret_cast<const uint16_t*>(row), k, x);
}

// ---------------------------------------------------------------- integers

// Writes and reads the 32 integers of a step as words of output j (kernels/panel_layout.h).
template <int bits>
void put_step(const uint8_t* u, uint8_t* panel, size_t j) {
    if constexpr (bits == 8) {
        for (size_t w = 0; w < 8; ++w) put_word(get_word(u + 4 * w), panel + word_at(w, j));
        return;
    }
    for (size_t w = 0; w < 4; ++w) {
        const uint32_t low = get_word(u + 4 * w), high = get_word(u + 16 + 4 * w);
        put_word((low & 0x0f0f0f0f) | (high & 0x0f0f0f0f) << 4, panel + word_at(w, j));
    }
    constexpr size_t more = bits - 4, per_word = more == 0 ? 8 : 8 / more;  // bits above the nibble, vectors per word
    for (size_t w = 0; w < more; ++w) {
        uint32_t word = 0;
        for (size_t v = 0; v < per_word; ++v) {
            word |= (get_word(u + 4 * (w * per_word + v)) >> 4 & 0x0f0f0f0f) << more * v;
        }
        put_word(word, panel + word_at(4 + w, j));
    }
}

template <int bits>
void get_step(const uint8_t* panel, size_t j, uint8_t* u) {
    if constexpr (bits == 8) {
        for (size_t w = 0; w < 8; ++w) put_word(get_word(panel + word_at(w, j)), u + 4 * w);
        return;
    }
    constexpr size_t more = bits - 4, per_word = more == 0 ? 8 : 8 / more;
    constexpr uint32_t mask = 0x01010101 * ((1 << more) - 1);
    for (size_t v = 0; v < 8; ++v) {
        uint32_t word = get_word(panel + word_at(v % 4, j)) >> (v < 4 ? 0 : 4) & 0x0f0f0f0f;
        if constexpr (more != 0) {
            word |= (get_word(panel + word_at(4 + v / per_word, j)) >> more * (v % per_word) & mask) << 4;
        }
        put_word(word, u + 4 * v);
    }
}

// ---------------------------------------------------------------- int8

size_t int8_scale_at(size_t k, size_t j) { return ceil_div(k, kQuantBlock) * kInt8Layout.step_bytes + 4 * j; }

// Integers are stored with kByteBias, and zero-padded.
void pack_int8(const uint8_t* row, size_t k, uint8_t* panel, size_t j) {
    std::memcpy(panel + int8_scale_at(k, j), row + k, 4);
    for (size_t i = 0; i < k; i += kQuantBlock, panel += kInt8Layout.step_bytes) {
        uint8_t u[kQuantBlock];
        for (size_t l = 0; l < kQuantBlock; ++l) u[l] = (i + l < k ? row[i + l] : 0) ^ kByteBias;
        put_step<8>(u, panel, j);
    }
}

void unpack_int8(const uint8_t* panel, size_t j, size_t k, uint8_t* row) {
    std::memcpy(row + k, panel + int8_scale_at(k, j), 4);
    for (size_t i = 0; i < k; i += kQuantBlock, panel += kInt8Layout.step_bytes) {
        uint8_t u[kQuantBlock];
        get_step<8>(panel, j, u);
        for (size_t l = 0; l < kQuantBlock && i + l < k; ++l) row[i + l] = u[l] ^ kByteBias;
    }
}

// ---------------------------------------------------------------- blocks

// Scales of a block in a panel: the group scales' bytes, then the float16 numbers, each for 16 outputs. Calls
// move(byte or float16 of the block, address in the panel) for each.
template <class Block, class Move>
void move_scales(Block& block, uint8_t* scales, size_t j, Move&& move) {
    if constexpr (requires { block.factors; }) {
        for (auto& factor : block.factors) move(factor, scales + j), scales += kPanel;
    }
    if constexpr (requires { block.e; })
        return move(block.e, scales + j);
    else
        move(block.d, scales + 2 * j);
    if constexpr (requires { block.m; }) move(block.m, scales + 2 * (kPanel + j));
    if constexpr (requires { block.dmin; }) move(block.dmin, scales + 2 * (kPanel + j));
}

template <class Block, const PanelLayout& layout>
void pack_blocks(const uint8_t* row, size_t k, uint8_t* panel, size_t j) {
    uint8_t* scales = panel + k / kQuantBlock * layout.step_bytes;
    for (size_t i = 0; i < k; i += Block::kLength, row += sizeof(Block), scales += layout.group_bytes) {
        Block block;
        uint8_t u[Block::kLength];
        std::memcpy(&block, row, sizeof block);
        get_integers(block, u);
        for (size_t l = 0; l < Block::kLength; l += kQuantBlock, panel += layout.step_bytes) {
            put_step<Block::kBits>(u + l, panel, j);
        }
        move_scales(block, scales, j, [](auto& of, uint8_t* at) { std::memcpy(at, &of, sizeof of); });
    }
}

template <class Block, const PanelLayout& layout>
void unpack_blocks(const uint8_t* panel, size_t j, size_t k, uint8_t* row) {
    // Only read: move_scales is shared with pack_blocks.
    uint8_t* scales = const_cast<uint8_t*>(panel) + k / kQuantBlock * layout.step_bytes;
    for (size_t i = 0; i < k; i += Block::kLength, row += sizeof(Block), scales += layout.group_bytes) {
        Block block{};
        uint8_t u[Block::kLength];
        for (size_t l = 0; l < Block::kLength; l += kQuantBlock, panel += layout.step_bytes) {
            get_step<Block::kBits>(panel, j, u + l);
        }
        put_integers(u, block);
        move_scales(block, scales, j, [](auto& of, const uint8_t* at) { std::memcpy(&of, at, sizeof of); });
        std::memcpy(row, &block, sizeof block);
    }
}

struct Range {
    double largest, vanishing;
};

template <class Block>
constexpr Range range_of_block() {
    constexpr double most = Block::kBits == 8 ? 127 : Block::kBias ? Block::kBias - 1 : (1 << Block::kBits) - 1;
    constexpr double half = 65504.0, unit = 0x1p-23;
    if constexpr (requires(Block block) { block.e; }) return {std::numeric_limits<float>::max(), 0x1p-120};
    if constexpr (requires(Block block) { block.dmin; }) return {63 * half, 63 * most * unit};
    if constexpr (requires(Block block) { block.m; }) return {half, most * unit};
    if constexpr (requires(Block block) { block.factors; }) return {127 * most * half, 127 * most * unit};
    return {most * half, most * unit};
}

template <class Block, const PanelLayout& layout>
constexpr FormatTraits block_traits(const char* name, void (*Kernels::*pack_panel)(const PanelTask&),
                                    void (*Kernels::*unpack_panel)(const UnpackTask&),
                                    void (*Kernels::*linear)(const LinearTask&)) {
    return {.name = name,
            .block_length = Block::kLength,
            .block_bytes = sizeof(Block),
            .panel = layout,
            .largest = range_of_block<Block>().largest,
            .vanishing = range_of_block<Block>().vanishing,
            .pack_row = pack_blocks<Block, layout>,
            .unpack_row = unpack_blocks<Block, layout>,
            .quantize_row = std::is_same_v<Block, BlockQ8_0> ? quantize_q8_0 : nullptr,
            .dequantize_row = dequantize_blocks<Block>,
            .pack_panel = pack_panel,
            .unpack_panel = unpack_panel,
            .linear = linear};
}

}  // namespace

const std::array<FormatTraits, static_cast<size_t>(WeightFormat::kCount)>& format_table() {
    static constexpr std::array<FormatTraits, static_cast<size_t>(WeightFormat::kCount)> table = {{
        {.name = "float32",
         .block_length = 1,
         .block_bytes = 4,
         .source = RowType::kFloat32,
         .panel = kFloat32Layout,
         .largest = std::numeric_limits<float>::max(),
         .vanishing = 0x1p-140,
         .unpack_row = unpack_numbers<float>,
         .dequantize_row = copy_float32,
         .pack_panel = &Kernels::pack_panel_f32,
         .unpack_panel = &Kernels::unpack_panel_f32,
         .linear = &Kernels::linear_f32},
        {.name = "bfloat16",
         .block_length = 1,
         .block_bytes = 2,
         .source = RowType::kBFloat16,
         .panel = kBFloat16Layout,
         .largest = 0x1.fefffep127,  // above it, rounding gives infinity
         .vanishing = 0x1p-132,
         .unpack_row = unpack_numbers<uint16_t>,
         .dequantize_row = widen_bfloat16,
         .pack_panel = &Kernels::pack_panel_bf16,
         .unpack_panel = &Kernels::unpack_panel_bf16,
         .linear = &Kernels::linear_bf16},
        {.name = "int8",
         .block_length = 1,
         .block_bytes = 1,
         .row_scale_bytes = 4,
         .panel = kInt8Layout,
         .largest = std::numeric_limits<float>::max(),
         .vanishing = 127 * 0x1p-140,
         .pack_row = pack_int8,
         .unpack_row = unpack_int8,
         .quantize_row = quantize_int8,
         .dequantize_row = dequantize_int8,
         .pack_panel = &Kernels::pack_panel_int8,
         .unpack_panel = &Kernels::unpack_panel_int8,
         .linear = &Kernels::linear_int8},
        block_traits<BlockQ8_0, kQ8_0Layout>("q8_0", &Kernels::pack_panel_q8_0, &Kernels::unpack_panel_q8_0,
                                             &Kernels::linear_q8_0),
        block_traits<BlockQ4_0, kQ4_0Layout>("q4_0", &Kernels::pack_panel_q4_0, &Kernels::unpack_panel_q4_0,
                                             &Kernels::linear_q4_0),
        block_traits<BlockQ4_1, kQ4_1Layout>("q4_1", &Kernels::pack_panel_q4_1, &Kernels::unpack_panel_q4_1,
                                             &Kernels::linear_q4_1),
        block_traits<BlockQ5_0, kQ5_0Layout>("q5_0", &Kernels::pack_panel_q5_0, &Kernels::unpack_panel_q5_0,
                                             &Kernels::linear_q5_0),
        block_traits<BlockQ5_1, kQ5_1Layout>("q5_1", &Kernels::pack_panel_q5_1, &Kernels::unpack_panel_q5_1,
                                             &Kernels::linear_q5_1),
        block_traits<BlockQ4_K, kQ4_KLayout>("q4_k", &Kernels::pack_panel_q4_k, &Kernels::unpack_panel_q4_k,
                                             &Kernels::linear_q4_k),
        block_traits<BlockQ5_K, kQ5_KLayout>("q5_k", &Kernels::pack_panel_q5_k, &Kernels::unpack_panel_q5_k,
                                             &Kernels::linear_q5_k),
        block_traits<BlockQ6_K, kQ6_KLayout>("q6_k", &Kernels::pack_panel_q6_k, &Kernels::unpack_panel_q6_k,
                                             &Kernels::linear_q6_k),
        block_traits<BlockMXFP4, kMXFP4Layout>("mxfp4", &Kernels::pack_panel_mxfp4, &Kernels::unpack_panel_mxfp4,
                                               &Kernels::linear_mxfp4),
    }};
    return table;
}

}  // namespace whet
