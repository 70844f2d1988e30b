// Matrix products without Python, for sanitizers: on heap buffers of exactly their size, against loops in double.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "quantize_reference.h"
#include "engine/gemm.h"
#include "engine/linear.h"
#include "engine/stored_rows.h"
#include "tests/checks.h"

using whet::WeightFormat;

namespace {

void expect_near(const char* what, size_t m, size_t n, size_t k, double got, double expected, double tolerance) {
    expect(std::abs(got - expected) <= tolerance, "%s, %zu x %zu x %zu: got %.9g, expected %.9g", what, m, n, k, got,
           expected);
}

// A row of the weight in the format, and its dequantised float32 numbers.
std::vector<uint8_t> rows_of(WeightFormat format, std::vector<float>& w, size_t n, size_t k) {
    const whet::FormatTraits& f = whet::traits(format);
    const size_t bytes = f.row_bytes(k);
    std::vector<uint8_t> rows(n * bytes);
    for (size_t j = 0; j < n; ++j) {
        uint8_t* row = rows.data() + j * bytes;
        float* values = w.data() + j * k;
        if (format == WeightFormat::kFloat32) {
            std::memcpy(row, values, bytes);
        } else if (format == WeightFormat::kBFloat16) {
            whet::kernels().bf16_from_f32(values, k, reinterpret_cast<uint16_t*>(row));
        } else {
            whet::quantize_row(f, values, k, row);
        }
        f.dequantize_row(row, k, values);
    }
    return rows;
}

void test_linear(WeightFormat format, const char* name, size_t m, size_t n, size_t k) {
    // Integers up to 127 are exact in bfloat16, and in int8 if the largest of each block is 127.
    std::vector<float> x = normal(m * k, 1), w = normal(n * k, 2);
    for (size_t i = 0; i < x.size(); ++i)
        x[i] = i % k % 32 == 0 ? 127.0f : std::round(std::clamp(x[i], -3.0f, 3.0f) * 30.0f);
    const std::vector<uint8_t> rows = rows_of(format, w, n, k);
    whet::PackedWeight packed(format, n, k);
    packed.pack_rows(0, n, rows.data(), whet::RowType::kPacked,
                     static_cast<ptrdiff_t>(whet::traits(format).row_bytes(k)), 1);
    std::vector<uint8_t> back(rows.size());
    packed.unpack(back.data(), whet::traits(format).row_bytes(k));
    expect(back == rows, "%s: %zu x %zu comes back from the panels", name, n, k);
    std::vector<float> y(m * n);
    whet::linear(packed, x.data(), false, k, m, nullptr, y.data(), n);
    add_to_hash(y);
    std::vector<float> single(n);
    whet::linear(packed, x.data() + (m - 1) * k, false, k, 1, nullptr, single.data(), n);
    expect(std::equal(single.begin(), single.end(), y.end() - static_cast<ptrdiff_t>(n)),
           "%s, %zu x %zu x %zu: a row does not depend on its neighbours", name, m, n, k);
    for (size_t i = 0; i < m; ++i) {
        for (size_t j = 0; j < n; ++j) {
            double expected = 0.0, size = 0.0;
            for (size_t l = 0; l < k; ++l) {
                const double product = static_cast<double>(x[i * k + l]) * w[j * k + l];
                expected += product, size += std::abs(product);
            }
            expect_near(name, m, n, k, y[i * n + j], expected, 1e-5 * size);
        }
    }
    std::vector<float> sums(m * (n + 1), 3.0f);  // wider than n: the padding of rows must not change
    whet::add_linear(packed, x.data(), k, m, sums.data(), n + 1);
    for (size_t i = 0; i < m * (n + 1); ++i) {
        const size_t row = i / (n + 1), column = i % (n + 1);
        const float expected = 3.0f + (column < n ? y[row * n + column] : 0.0f);
        expect(sums[i] == expected, "%s: %zu x %zu x %zu added at %zu", name, m, n, k, i);
    }
}

// A number in the type of a source, and its float32 value.
float put_number(whet::RowType source, float x, uint8_t* to) {
    if (source == whet::RowType::kFloat32) return std::memcpy(to, &x, sizeof x), x;
    uint16_t bits = 0;
    if (source == whet::RowType::kBFloat16) {
        whet::kernels().bf16_from_f32(&x, 1, &bits);
        whet::kernels().f32_from_bf16(&bits, 1, &x);
    } else {  // a float16 with few bits: a sign and a power of two
        int exponent = 0;
        const float half = std::frexp(x, &exponent);
        exponent = std::clamp(exponent, -10, 10);
        bits = static_cast<uint16_t>((half < 0 ? 0x8000 : 0) | (exponent + 15) << 10);
        x = std::ldexp(half < 0 ? -1.0f : 1.0f, exponent);
    }
    std::memcpy(to, &bits, sizeof bits);
    return x;
}

// Packs rows [first, first + count) of numbers with the given strides, against the same rows in the format's layout.
void test_packing(WeightFormat format, const char* name, size_t n, size_t k, size_t first, size_t count,
                  whet::RowType source, size_t row_stride, size_t column_stride) {
    const size_t size = source == whet::RowType::kFloat32 ? 4 : 2, bytes = whet::traits(format).row_bytes(k);
    std::vector<float> values = normal(count * k, 6), before = normal(n * k, 7);
    std::vector<uint8_t> numbers(((count - 1) * row_stride + (k - 1) * column_stride + 1) * size);
    for (size_t i = 0; i < count; ++i) {
        for (size_t j = 0; j < k; ++j) {
            float& x = values[i * k + j];
            x = put_number(source, x, numbers.data() + (i * row_stride + j * column_stride) * size);
        }
    }
    const std::vector<uint8_t> old_rows = rows_of(format, before, n, k), rows = rows_of(format, values, count, k);
    std::vector<uint8_t> expected = old_rows, back(n * bytes);
    std::copy(rows.begin(), rows.end(), expected.begin() + static_cast<ptrdiff_t>(first * bytes));
    whet::PackedWeight packed(format, n, k);
    packed.pack_rows(0, n, old_rows.data(), whet::RowType::kPacked, static_cast<ptrdiff_t>(bytes), 1);
    packed.pack_rows(first, count, numbers.data(), source, static_cast<ptrdiff_t>(row_stride),
                     static_cast<ptrdiff_t>(column_stride));
    packed.unpack(back.data(), bytes);
    bool same = back == expected;
    for (size_t i = 0; i < count; ++i) {  // `values` are dequantised at this point
        std::vector<float> row(k);
        packed.row(first + i, row.data());
        same = same && std::equal(row.begin(), row.end(), values.begin() + static_cast<ptrdiff_t>(i * k));
    }
    expect(same, "%s: rows %zu + %zu of %zu x %zu, source %d, strides %zu and %zu: the same numbers", name, first,
           count, n, k, static_cast<int>(source), row_stride, column_stride);
}

void test_packing_in_every_way(WeightFormat format, const char* name) {
    const size_t block = whet::traits(format).block_length, n = 37;
    for (const size_t k : {block, block == 1 ? 35 : 2 * block}) {
        for (const auto& [first, count] : {std::pair<size_t, size_t>{0, 37}, {16, 16}, {5, 3}, {9, 20}, {36, 1}}) {
            for (const auto source : {whet::RowType::kFloat32, whet::RowType::kBFloat16, whet::RowType::kFloat16}) {
                test_packing(format, name, n, k, first, count, source, k, 1);
                test_packing(format, name, n, k, first, count, source, 1, count);
                test_packing(format, name, n, k, first, count, source, 3 * k, 3);
            }
        }
    }
}

void test_gemm(size_t m, size_t n, size_t k) {
    std::vector<float> a = normal(m * k, 3), b = normal(k * n, 4), c = normal(m * n, 5), y(m);
    const std::vector<float> before = c;
    whet::gemm(false, m, n, k, 2.0f, a.data(), static_cast<ptrdiff_t>(k), 1, b.data(), static_cast<ptrdiff_t>(n), 1,
               0.5f, c.data(), static_cast<ptrdiff_t>(n));
    whet::gemv(false, m, k, 1.0f, a.data(), static_cast<ptrdiff_t>(k), 1, b.data(), 0.0f, y.data());
    for (size_t i = 0; i < m; ++i) {
        double vector = 0.0;
        for (size_t l = 0; l < k; ++l) vector += static_cast<double>(a[i * k + l]) * b[l];
        expect_near("gemv", m, n, k, y[i], vector, 1e-4);
        for (size_t j = 0; j < n; ++j) {
            double product = 0.0;
            for (size_t l = 0; l < k; ++l) product += static_cast<double>(a[i * k + l]) * b[l * n + j];
            expect_near("gemm", m, n, k, c[i * n + j], 2.0 * product + 0.5 * before[i * n + j], 1e-4);
        }
    }
}

// Finite rows of a stored type: normally distributed numbers, blocks of random bits.
std::vector<uint8_t> stored_rows_of(whet::StoredType type, size_t n, size_t k) {
    const whet::StoredTraits& stored = whet::traits(type);
    const size_t bytes = k / stored.gguf.block * stored.gguf.block_bytes;
    std::vector<uint8_t> rows(n * bytes);
    const std::vector<float> w = normal(n * k, 3);
    std::minstd_rand random(7);
    for (size_t i = 0; i < n; ++i) {
        uint8_t* row = rows.data() + i * bytes;
        for (size_t j = 0; j < k && !stored.is_quantised; ++j) {
            const double wide = w[i * k + j];
            if (stored.source) {
                put_number(*stored.source, w[i * k + j], row + j * stored.gguf.block_bytes);
            } else {
                std::memcpy(row + j * sizeof wide, &wide, sizeof wide);
            }
        }
        while (stored.is_quantised) {
            for (size_t j = 0; j < bytes; ++j) row[j] = static_cast<uint8_t>(random() >> 7);
            if (stored.is_finite(row, k / stored.gguf.block, 1)) break;
        }
    }
    return rows;
}

// Unpacks and packs rows of every stored type, against their float32 numbers: equal, or within the error of conversion.
void test_stored_rows(whet::StoredType type, size_t n, size_t k) {
    using whet::StoredType;
    const whet::StoredTraits& stored = whet::traits(type);
    const std::vector<uint8_t> bytes = stored_rows_of(type, n, k);
    const auto stride = static_cast<ptrdiff_t>(stored.is_quantised ? bytes.size() / n : k);
    const whet::StoredRows rows{type, bytes.data(), n, k, stride, 1};
    std::vector<float> values(n * k), row(k);
    unpack_rows(rows, values.data());
    bool same = true;
    for (size_t f = 0; f < whet::format_table().size(); ++f) {
        const auto format = static_cast<WeightFormat>(f);
        if (k % whet::traits(format).block_length != 0) continue;
        whet::PackedWeight packed(format, n + 1, k), plain(format, n + 1, k);
        pack_rows(rows, packed, 1);
        const bool keeps_integers = stored.is_quantised && format == stored.packed_as;
        if (!keeps_integers) {
            plain.pack_rows(1, n, values.data(), whet::RowType::kFloat32, static_cast<ptrdiff_t>(k), 1);
            same = same && std::memcmp(packed.panel(0), plain.panel(0), plain.size_bytes()) == 0;
            continue;
        }
        const bool is_rounded = type == StoredType::kIQ4_XS || type == StoredType::kQ2_K;
        for (size_t i = 0; i < n; ++i) {
            packed.row(1 + i, row.data());
            for (size_t j = 0; j < k; ++j) {
                const float* w = values.data() + i * k;
                float largest = 0.0f;
                for (size_t l = j / 32 * 32; l < j / 32 * 32 + 32; ++l) largest = std::max(largest, std::fabs(w[l]));
                const float bound = is_rounded ? largest / 254.0f + std::fabs(w[j]) * 0x1p-11f + 0x1p-18f : 0.0f;
                same = same && std::fabs(row[j] - w[j]) <= bound;
            }
        }
    }
    expect(same, "stored rows of %s, %zu x %zu", stored.name, n, k);
}

// Concatenated parts in several formats give the results of each part.
void test_parts(const std::vector<WeightFormat>& formats, size_t m, size_t n, size_t k) {
    const std::vector<float> x = normal(m * k, 5), bias = normal(n * formats.size(), 6);
    const size_t width = n * formats.size();
    std::vector<float> y(m * width), expected(m * width);
    std::vector<whet::PackedWeight> parts;
    for (size_t i = 0; i < formats.size(); ++i) {
        const std::vector<float> w = normal(n * k, static_cast<int>(i));
        parts.emplace_back(formats[i], n, k)
            .pack_rows(0, n, w.data(), whet::RowType::kFloat32, static_cast<ptrdiff_t>(k), 1);
        whet::linear(parts.back(), x.data(), false, k, m, bias.data() + i * n, expected.data() + i * n, width);
    }
    whet::linear(parts, x.data(), false, k, m, bias.data(), y.data(), width);
    expect(y == expected, "parts of several formats, %zu rows", m);
}

}  // namespace

int main() {
    return run_tests([] {
        for (size_t i = 0; i < whet::format_table().size(); ++i) {
            const auto format = static_cast<WeightFormat>(i);
            const char* name = whet::traits(format).name;
            const size_t block = whet::traits(format).block_length;
            for (size_t m : {1, 3, 9}) {
                for (size_t n : {1, 17, 50}) {
                    for (size_t k : {size_t{1}, size_t{3}})
                        test_linear(format, name, m, n, k * block + (block == 1 ? k : 0));
                }
            }
            if (block == 1) test_linear(format, name, 11, 49, 67);
            test_linear(format, name, 101, 17, 768);  // rows are split across threads
            test_packing_in_every_way(format, name);
        }
        for (size_t m : {1, 4, 9}) {
            for (size_t n : {1, 16, 49}) {
                for (size_t k : {1, 17, 32}) test_gemm(m, n, k);
            }
        }
        for (int i = 0; i < static_cast<int>(whet::StoredType::kCount); ++i) {
            for (size_t n : {1, 15, 300}) test_stored_rows(static_cast<whet::StoredType>(i), n, 512);
        }
        for (const auto& formats :
             {std::vector{WeightFormat::kQ4_K, WeightFormat::kQ6_K, WeightFormat::kQ8_0},
              std::vector{WeightFormat::kQ5_0, WeightFormat::kFloat32, WeightFormat::kBFloat16}}) {
            for (size_t m : {1, 5, 40}) test_parts(formats, m, 35, 512);
        }
    });
}
