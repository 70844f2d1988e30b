#include "engine/packing_loss.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <vector>

#include "engine/formats.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

constexpr double kReadNs = 0.2, kDequantizeNs = 0.7;  // rough cost per number
constexpr size_t kChunkRows = 256;                    // 16 panels: enough for the threads, and little memory
constexpr size_t kSampledRows = 16;                   // rows per sampled row of converted types
constexpr size_t kLanes = 16;

// Magnitudes as float32 bits, which compare as integers. float16 differs from float32 in the bias of the exponent: NaN
// and infinity become 65536 and more.
uint32_t magnitude(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffff; }
struct FromFloat32 {
    using Number = float;
    static uint32_t magnitude_of(float x) { return magnitude(x); }
    static constexpr float kInfinite = INFINITY;
};
struct FromBFloat16 {
    using Number = uint16_t;
    static uint32_t magnitude_of(uint16_t x) { return static_cast<uint32_t>(x & 0x7fff) << 16; }
    static constexpr float kInfinite = INFINITY;
};
struct FromFloat16 {
    using Number = uint16_t;
    static uint32_t magnitude_of(uint16_t x) {
        return magnitude(std::bit_cast<float>(static_cast<uint32_t>(x & 0x7fff) << 13) * 0x1p+112f);
    }
    static constexpr float kInfinite = 65536.0f;
};

bool has_range_of_float32(const FormatTraits& format) { return format.vanishing < 1e-30; }

struct RowRange {
    float largest;
    double squares;
};

// Squares are summed in float32: below 1e-19 they underflow, which makes the norm too small, never too large. For
// formats with the range of float32, the square of the largest weight is a sufficient lower bound, and cannot overflow.
template <class From>
RowRange range_of_row(const void* row, size_t n, bool sums_squares) {
    const auto* x = static_cast<const typename From::Number*>(row);
    uint32_t top[kLanes] = {};
    float squares[kLanes] = {};
    const auto add = [&](size_t i, size_t lane) {
        const uint32_t bits = From::magnitude_of(x[i]);
        const float size = std::bit_cast<float>(bits);
        top[lane] = static_cast<int32_t>(bits) > static_cast<int32_t>(top[lane]) ? bits : top[lane];
        squares[lane] += size * size;
    };
    const size_t whole = n - n % kLanes;
    for (size_t i = 0; i < whole; i += kLanes) {
        for (size_t lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
    }
    for (size_t i = whole; i < n; ++i) add(i, 0);
    const float largest = std::bit_cast<float>(*std::max_element(top, top + kLanes));
    const double sum = std::accumulate(squares, squares + kLanes, 0.0);
    return {largest < From::kInfinite ? largest : INFINITY,
            sums_squares ? sum : static_cast<double>(largest) * largest};
}

RowRange range_of_numbers(const StoredRows& rows, size_t i, bool sums_squares) {
    const auto measure = [&](auto from) {
        using From = decltype(from);
        const auto* first = static_cast<const typename From::Number*>(rows.data);
        return range_of_row<From>(first + static_cast<ptrdiff_t>(i) * rows.row_stride, rows.k, sums_squares);
    };
    switch (rows.type) {
        case StoredType::kFloat32:
            return measure(FromFloat32());
        case StoredType::kBFloat16:
            return measure(FromBFloat16());
        default:
            return measure(FromFloat16());
    }
}

double largest_float64(const StoredRows& rows) {
    double largest = 0.0;
    for (size_t i = 0; i < rows.n; ++i) {
        const auto* x = static_cast<const double*>(rows.data) + static_cast<ptrdiff_t>(i) * rows.row_stride;
        for (size_t j = 0; j < rows.k; ++j) {
            largest = std::max(largest, std::fabs(x[static_cast<ptrdiff_t>(j) * rows.column_stride]));
        }
    }
    return largest;
}

// The largest weight and the squared norm of every step-th row.
void sum_rows(const StoredRows& rows, size_t step, PackingLoss& sum) {
    const StoredTraits& stored = traits(rows.type);
    const bool sums_squares = !has_range_of_float32(traits(sum.format));
    const size_t n = (rows.n + step - 1) / step;
    const double number_ns = stored.is_quantised ? kDequantizeNs : kReadNs;
    std::vector<RowRange> ranges(n);
    parallel_for(n, number_ns * static_cast<double>(n * rows.k), [&](size_t i) {
        RowRange& row = ranges[i];
        if (!stored.source || rows.column_stride != 1) {  // blocks or float64, or a slice of columns
            std::vector<float> numbers(rows.k);
            unpack_rows(rows.range(i * step, 1), numbers.data());
            row = range_of_row<FromFloat32>(numbers.data(), rows.k, sums_squares);
        } else {
            row = range_of_numbers(rows, i * step, sums_squares);
        }
    });
    for (const RowRange& row : ranges) {
        sum.largest = std::max(sum.largest, static_cast<double>(row.largest));
        sum.squared_norm += row.squares;
    }
}

// Packs rows in chunks and compares.
void compare_packed(const StoredRows& rows, WeightFormat format, PackingLoss& loss) {
    loss.squared_norm = loss.squared_lost = 0.0;
    std::vector<float> before(std::min(rows.n, kChunkRows) * rows.k), after(before.size());
    for (size_t first = 0; first < rows.n; first += kChunkRows) {
        const StoredRows some = rows.range(first, std::min(rows.n - first, kChunkRows));
        PackedWeight packed(format, some.n, some.k);
        pack_rows(some, packed, 0);
        unpack_rows(some, before.data());
        packed.rows(0, some.n, after.data(), false);
        for (size_t i = 0; i < some.n * some.k; ++i) {
            const double x = before[i], lost = x - after[i];
            loss.squared_norm += x * x, loss.squared_lost += lost * lost;
        }
    }
}

}  // namespace

PackingLoss measure_packing_loss(const StoredRows& rows, WeightFormat format) {
    const StoredTraits& stored = traits(rows.type);
    const FormatTraits& packed = traits(format);
    const bool keeps_blocks = stored.is_quantised && stored.packed_as == format;
    const bool is_in_range = stored.source && has_range_of_float32(packed) &&
                             (stored.source != RowType::kFloat32 || format != WeightFormat::kBFloat16);
    PackingLoss loss{.format = format};
    if (keeps_blocks || is_in_range) {
        if (!is_finite(rows)) return {format, INFINITY, packed.largest};
        if (stored.convert_row == nullptr) return {format, 0.0, packed.largest};
        sum_rows(rows, kSampledRows, loss);
        loss.largest = std::min(loss.largest, packed.largest);  // is_finite has checked the limit
    } else {
        if (stored.is_quantised && !is_finite(rows)) return {format, INFINITY, packed.largest};
        sum_rows(rows.in_memory_order(), 1, loss);
        if (rows.type == StoredType::kFloat64 && loss.largest == INFINITY && is_finite(rows)) {
            loss.largest = largest_float64(rows);
        }
    }
    loss.limit = packed.largest;
    if (loss.largest > loss.limit) return loss;
    // Only weights below `vanishing` can be in blocks without a usable scale. This bound excludes rounding, which costs
    // other blocks at most 0.38 of their norm.
    loss.squared_lost = static_cast<double>(rows.n * rows.k) * packed.vanishing * packed.vanishing;
    if (loss.squared_lost * 9.0 > loss.squared_norm) compare_packed(rows, format, loss);
    return loss;
}

}  // namespace whet
