#include "engine/stored_rows.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "engine/formats.h"
#include "engine/quantize.h"
#include "kernels/dispatch.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

constexpr double kCheckNs = 0.1;    // rough cost per number
constexpr size_t kChunkRows = 256;  // 16 panels: enough for the threads, and little memory

// Whether |half| < 2^exponent; false for NaN.
bool is_below(int exponent, uint16_t half) { return (half & 0x7fff) < (exponent + 15) << 10; }
bool is_finite_half(uint16_t half) { return is_below(16, half); }

// For types that are converted to q8_0, also checks that weights are in its range, below 2^22.
template <class Block>
bool are_finite(const uint8_t* row, size_t n_blocks, ptrdiff_t) {
    for (size_t i = 0; i < n_blocks; ++i, row += sizeof(Block)) {
        Block block;
        std::memcpy(&block, row, sizeof block);
        if constexpr (std::is_same_v<Block, BlockMXFP4>) {
            if (block.e > 252) return false;  // 255 is NaN, and 12 times the scale would be infinite
        } else if (!is_below(std::is_same_v<Block, BlockIQ4_XS> ? 10 : 16, block.d)) {
            return false;
        }
        if constexpr (requires { block.m; }) {
            if (!is_finite_half(block.m)) return false;
        }
        if constexpr (requires { block.dmin; }) {
            if (!is_finite_half(block.dmin)) return false;
        }
    }
    return true;
}

template <class Bits, Bits exponent>
bool are_finite_numbers(const uint8_t* row, size_t n, ptrdiff_t stride) {
    const auto* x = reinterpret_cast<const Bits*>(row);
    const auto check = [&](auto step) {  // vectorises: the step is constant, and masks are as wide as numbers
        Bits found = 0;
        for (size_t i = 0; i < n; ++i) {
            const Bits mask = x[static_cast<ptrdiff_t>(i) * step] & exponent;
            found |= static_cast<Bits>(-static_cast<Bits>(mask == exponent));
        }
        return found == 0;
    };
    return stride == 1 ? check(std::integral_constant<ptrdiff_t, 1>()) : check(stride);
}

void convert_q3_k(const uint8_t* row, size_t k, uint8_t* packed) {
    for (size_t i = 0; i < k; i += kSuperBlock, row += sizeof(BlockQ3_K), packed += sizeof(BlockQ6_K)) {
        BlockQ3_K block;
        std::memcpy(&block, row, sizeof block);
        const BlockQ6_K same = q6_k_of(block);
        std::memcpy(packed, &same, sizeof same);
    }
}

template <class Block>
void convert_to_q8_0(const uint8_t* row, size_t k, uint8_t* packed) {
    constexpr size_t n = Block::kLength / kQuantBlock;
    for (size_t i = 0; i < k; i += Block::kLength, row += sizeof(Block), packed += n * sizeof(BlockQ8_0)) {
        Block block;
        UnpackedBlock unpacked;
        BlockQ8_0 blocks[n];
        std::memcpy(&block, row, sizeof block);
        unpack_block(block, unpacked);
        to_q8_0(unpacked, Block::kLength, Block::kGroup, blocks);
        std::memcpy(packed, blocks, sizeof blocks);
    }
}

template <class Bits, Bits exponent>
constexpr StoredTraits numbers(const char* name, uint32_t number, const char* gguf_name,
                               std::optional<RowType> source) {
    const WeightFormat format = source == RowType::kBFloat16 ? WeightFormat::kBFloat16 : WeightFormat::kFloat32;
    return {.name = name,
            .gguf = {number, gguf_name, 1, sizeof(Bits)},
            .is_in_gguf = source.has_value(),
            .is_quantised = false,
            .packed_as = format,
            .source = source,
            .is_finite = are_finite_numbers<Bits, exponent>};
}

template <class Block>
constexpr StoredTraits packed(const char* name, uint32_t number, const char* gguf_name, WeightFormat format) {
    return {.name = name,
            .gguf = {number, gguf_name, Block::kLength, sizeof(Block)},
            .packed_as = format,
            .dequantize_row = dequantize_blocks<Block>,
            .is_finite = are_finite<Block>};
}

template <class Block>
constexpr StoredTraits converted(const char* name, uint32_t number, const char* gguf_name) {
    StoredTraits traits = packed<Block>(name, number, gguf_name, WeightFormat::kQ8_0);
    traits.convert_row = convert_to_q8_0<Block>;
    return traits;
}

constexpr size_t kTypes = static_cast<size_t>(StoredType::kCount);

// Indexed by StoredType.
constexpr std::array<StoredTraits, kTypes> make_table() {
    std::array<StoredTraits, kTypes> table = {{
        numbers<uint32_t, 0x7f800000>("float32", 0, "F32", RowType::kFloat32),
        numbers<uint16_t, 0x7f80>("bfloat16", 30, "BF16", RowType::kBFloat16),
        numbers<uint16_t, 0x7c00>("float16", 1, "F16", RowType::kFloat16),
        numbers<uint64_t, 0x7ff0000000000000>("float64", 28, "F64", {}),
        packed<BlockQ8_0>("q8_0", 8, "Q8_0", WeightFormat::kQ8_0),
        packed<BlockQ4_0>("q4_0", 2, "Q4_0", WeightFormat::kQ4_0),
        packed<BlockQ4_1>("q4_1", 3, "Q4_1", WeightFormat::kQ4_1),
        packed<BlockQ5_0>("q5_0", 6, "Q5_0", WeightFormat::kQ5_0),
        packed<BlockQ5_1>("q5_1", 7, "Q5_1", WeightFormat::kQ5_1),
        packed<BlockQ4_K>("q4_k", 12, "Q4_K", WeightFormat::kQ4_K),
        packed<BlockQ5_K>("q5_k", 13, "Q5_K", WeightFormat::kQ5_K),
        packed<BlockQ6_K>("q6_k", 14, "Q6_K", WeightFormat::kQ6_K),
        converted<BlockQ2_K>("q2_k", 10, "Q2_K"),
        packed<BlockQ3_K>("q3_k", 11, "Q3_K", WeightFormat::kQ6_K),
        converted<BlockIQ4_NL>("iq4_nl", 20, "IQ4_NL"),
        converted<BlockIQ4_XS>("iq4_xs", 23, "IQ4_XS"),
        packed<BlockMXFP4>("mxfp4", 39, "MXFP4", WeightFormat::kMXFP4),
        converted<BlockTQ1_0>("tq1_0", 34, "TQ1_0"),
        converted<BlockTQ2_0>("tq2_0", 35, "TQ2_0"),
    }};
    table[static_cast<size_t>(StoredType::kQ3_K)].convert_row = convert_q3_k;
    return table;
}

constexpr std::array<StoredTraits, kTypes> kTable = make_table();

const uint8_t* row_at(const StoredRows& rows, size_t i) {
    const StoredTraits& stored = traits(rows.type);
    const ptrdiff_t size = stored.is_quantised ? 1 : static_cast<ptrdiff_t>(stored.gguf.block_bytes);
    return static_cast<const uint8_t*>(rows.data) + static_cast<ptrdiff_t>(i) * rows.row_stride * size;
}

// Processes rows in chunks: make(row, memory) converts each row to `bytes` bytes, consume(first, count, memory) uses
// them.
template <class Make, class Consume>
void for_each_chunk(size_t n, size_t bytes, Make&& make, Consume&& consume) {
    std::vector<uint8_t> memory(std::min(n, kChunkRows) * bytes);
    for (size_t first = 0; first < n; first += kChunkRows) {
        const size_t count = std::min(n - first, kChunkRows);
        auto make_row = [&](size_t i) { make(first + i, memory.data() + i * bytes); };
        parallel_for(count, make_row);
        consume(first, count, memory.data());
    }
}

}  // namespace

size_t StoredTraits::row_length(size_t width) const {
    if (!is_quantised) return width;
    if (width % gguf.block_bytes != 0) throw std::invalid_argument("not a whole number of blocks");
    return width / gguf.block_bytes * gguf.block;
}

const StoredTraits& traits(StoredType type) { return kTable.at(static_cast<size_t>(type)); }

std::span<const GgufTensorType> gguf_types() {
    static const std::vector<GgufTensorType> types = [] {
        std::vector<GgufTensorType> found;
        for (const StoredTraits& stored : kTable) {
            if (stored.is_in_gguf) found.push_back(stored.gguf);
        }
        return found;
    }();
    return types;
}

StoredRows StoredRows::range(size_t first, size_t count) const {
    StoredRows some = *this;
    some.data = row_at(*this, first);
    some.n = count;
    return some;
}

StoredRows StoredRows::in_memory_order() const {
    if (row_stride != 1 || column_stride == 1 || traits(type).is_quantised) return *this;
    return {type, data, k, n, column_stride, row_stride};
}

bool is_finite(const StoredRows& given) {
    const StoredRows rows = given.in_memory_order();
    const StoredTraits& stored = traits(rows.type);
    std::atomic<bool> finite{true};
    auto check = [&](size_t i) {
        if (!stored.is_finite(row_at(rows, i), rows.k / stored.gguf.block, rows.column_stride)) finite = false;
    };
    parallel_for(rows.n, kCheckNs * static_cast<double>(rows.n * rows.k), check);
    return finite;
}

void unpack_row(const StoredRows& rows, size_t i, float* to) {
    const StoredTraits& stored = traits(rows.type);
    const uint8_t* row = row_at(rows, i);
    if (stored.is_quantised) return stored.dequantize_row(row, rows.k, to);
    if (rows.type == StoredType::kBFloat16 && rows.column_stride == 1) {
        return kernels().f32_from_bf16(reinterpret_cast<const uint16_t*>(row), rows.k, to);
    }
    if (stored.source) return unpack_rows(rows.range(i, 1), to);
    const auto* from = reinterpret_cast<const double*>(row);
    for (size_t j = 0; j < rows.k; ++j)
        to[j] = static_cast<float>(from[static_cast<ptrdiff_t>(j) * rows.column_stride]);
}

void unpack_rows(const StoredRows& rows, float* out) {
    const StoredTraits& stored = traits(rows.type);
    if (stored.source) {  // packs and unpacks float32 panels: the kernels widen numbers
        PackedWeight panels(WeightFormat::kFloat32, rows.n, rows.k);
        panels.pack_rows(0, rows.n, rows.data, *stored.source, rows.row_stride, rows.column_stride);
        return panels.unpack(out, rows.k * sizeof(float));
    }
    auto unpack = [&](size_t i) { unpack_row(rows, i, out + i * rows.k); };
    parallel_for(rows.n, unpack);
}

void pack_rows(const StoredRows& rows, PackedWeight& to, size_t first) {
    const StoredTraits& stored = traits(rows.type);
    if (stored.source) {
        return to.pack_rows(first, rows.n, rows.data, *stored.source, rows.row_stride, rows.column_stride);
    }
    const FormatTraits& packed = traits(stored.packed_as);
    const bool keeps_integers = stored.is_quantised && &packed == &to.format();
    if (keeps_integers && stored.convert_row == nullptr) {
        return to.pack_rows(first, rows.n, rows.data, RowType::kPacked, rows.row_stride, 1);
    }
    const auto pack = [&](RowType source, size_t width) {
        return [&to, first, source, width](size_t begin, size_t count, const uint8_t* memory) {
            to.pack_rows(first + begin, count, memory, source, static_cast<ptrdiff_t>(width), 1);
        };
    };
    if (keeps_integers) {
        const auto convert = [&](size_t i, uint8_t* row) { stored.convert_row(row_at(rows, i), rows.k, row); };
        const size_t bytes = packed.row_bytes(rows.k);
        return for_each_chunk(rows.n, bytes, convert, pack(RowType::kPacked, bytes));
    }
    const auto unpack = [&](size_t i, uint8_t* row) { unpack_row(rows, i, reinterpret_cast<float*>(row)); };
    for_each_chunk(rows.n, rows.k * sizeof(float), unpack, pack(RowType::kFloat32, rows.k));
}

}  // namespace whet
