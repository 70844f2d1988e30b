#include "engine/stored_rows.h"

#include <algorithm>
#include <optional>

#include "engine/formats.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

constexpr size_t kRowsAtATime = 256;  // 16 panels: enough for the threads, and little memory

std::optional<WeightFormat> block_format(StoredType type) {
    switch (type) {
        case StoredType::kQ8_0:
            return WeightFormat::kQ8_0;
        case StoredType::kQ4_0:
            return WeightFormat::kQ4_0;
        case StoredType::kQ4_K:
            return WeightFormat::kQ4_K;
        default:
            return {};
    }
}

// Of the types that the packing kernels read.
std::optional<Source> number_source(StoredType type) {
    switch (type) {
        case StoredType::kFloat32:
            return Source::kFloat32;
        case StoredType::kBFloat16:
            return Source::kBFloat16;
        case StoredType::kFloat16:
            return Source::kFloat16;
        default:
            return {};
    }
}

const uint8_t* row_at(const StoredRows& rows, size_t i) {
    const ptrdiff_t size = rows.type == StoredType::kFloat32   ? 4
                           : rows.type == StoredType::kFloat64 ? 8
                           : block_format(rows.type)           ? 1
                                                               : 2;
    return static_cast<const uint8_t*>(rows.data) + static_cast<ptrdiff_t>(i) * rows.row_stride * size;
}

}  // namespace

size_t stored_width(StoredType type, size_t k) {
    const auto blocks = block_format(type);
    return blocks ? traits(*blocks).row_bytes(k) : k;
}

void unpack_rows(const StoredRows& rows, float* out) {
    if (const auto source = number_source(rows.type)) {  // panels of float32 are how the kernels widen numbers
        PackedWeight panels(WeightFormat::kFloat32, rows.n, rows.k);
        panels.pack_rows(0, rows.n, rows.data, *source, rows.row_stride, rows.column_stride);
        return panels.unpack(out, rows.k * sizeof(float));
    }
    const auto blocks = block_format(rows.type);
    auto unpack_row = [&](size_t i) {
        float* to = out + i * rows.k;
        if (blocks) return traits(*blocks).dequantize_row(row_at(rows, i), rows.k, to);
        const auto* from = reinterpret_cast<const double*>(row_at(rows, i));
        for (size_t j = 0; j < rows.k; ++j)
            to[j] = static_cast<float>(from[static_cast<ptrdiff_t>(j) * rows.column_stride]);
    };
    parallel_for(rows.n, unpack_row);
}

void pack_rows(const StoredRows& rows, PackedWeight& to, size_t first) {
    if (const auto source = number_source(rows.type)) {
        return to.pack_rows(first, rows.n, rows.data, *source, rows.row_stride, rows.column_stride);
    }
    const auto blocks = block_format(rows.type);
    if (blocks && &traits(*blocks) == &to.format()) {
        return to.pack_rows(first, rows.n, rows.data, Source::kPacked, rows.row_stride, 1);
    }
    std::vector<float> values(std::min(rows.n, kRowsAtATime) * rows.k);
    for (size_t begin = 0; begin < rows.n; begin += kRowsAtATime) {
        StoredRows some = rows;
        some.data = row_at(rows, begin);
        some.n = std::min(rows.n - begin, kRowsAtATime);
        unpack_rows(some, values.data());
        to.pack_rows(first + begin, some.n, values.data(), Source::kFloat32, static_cast<ptrdiff_t>(rows.k), 1);
    }
}

}  // namespace whet
