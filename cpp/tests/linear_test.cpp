// The products without Python, on heap buffers of exactly their size: what the sanitizers see while it runs, and
// numbers against plain loops in double. Exit code 77: the instruction set in WHET_ISA is not on this machine.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

#include "engine/linear.h"
#include "engine/quantize.h"
#include "kernels/dispatch.h"

using whet::WeightFormat;

namespace {

int failures = 0;

void expect_near(const char* what, size_t m, size_t n, size_t k, double got, double expected, double tolerance) {
    if (std::abs(got - expected) <= tolerance) return;
    std::printf("%s, %zu x %zu x %zu: got %.9g, expected %.9g\n", what, m, n, k, got, expected);
    ++failures;
}

std::vector<float> normal(size_t n, unsigned seed) {
    std::mt19937 bits(seed);
    std::normal_distribution<float> distribution;
    std::vector<float> x(n);
    for (float& one : x) one = distribution(bits);
    x.shrink_to_fit();
    return x;
}

// A row of the weight in the format, and the float32 numbers that it holds.
std::vector<uint8_t> rows_of(WeightFormat format, std::vector<float>& w, size_t n, size_t k) {
    const size_t bytes = whet::row_bytes(format, k);
    std::vector<uint8_t> rows(n * bytes);
    for (size_t j = 0; j < n; ++j) {
        uint8_t* row = rows.data() + j * bytes;
        float* values = w.data() + j * k;
        if (format == WeightFormat::kFloat32) {
            std::memcpy(row, values, bytes);
        } else if (format == WeightFormat::kBFloat16) {
            whet::kernels().bf16_from_f32(values, k, reinterpret_cast<uint16_t*>(row));
            whet::kernels().f32_from_bf16(reinterpret_cast<uint16_t*>(row), k, values);
        } else {
            whet::quantize_row(format, values, k, row);
            whet::dequantize_row(format, row, k, values);
        }
    }
    return rows;
}

void test_linear(WeightFormat format, const char* name, size_t m, size_t n, size_t k) {
    // Whole numbers up to 127 are exact in bfloat16, and in int8 if each block's largest is 127.
    std::vector<float> x = normal(m * k, 1), w = normal(n * k, 2);
    for (size_t i = 0; i < x.size(); ++i)
        x[i] = i % k % 32 == 0 ? 127.0f : std::round(std::clamp(x[i], -3.0f, 3.0f) * 30.0f);
    const std::vector<uint8_t> rows = rows_of(format, w, n, k);
    whet::PackedWeight packed(format, n, k);
    packed.pack_rows(0, n, rows.data(), whet::Source::kPacked, static_cast<ptrdiff_t>(whet::row_bytes(format, k)), 1);
    std::vector<uint8_t> back(rows.size());
    packed.unpack(back.data(), whet::row_bytes(format, k));
    if (back != rows) std::printf("%s: %zu x %zu does not come back from the panels\n", name, n, k), ++failures;
    std::vector<float> y(m * n);
    whet::linear(packed, x.data(), false, k, m, nullptr, y.data(), n);
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

}  // namespace

int main() {
    try {
        std::printf("instruction set: %s\n", whet::kernels().isa);
    } catch (const std::runtime_error& error) {
        std::printf("%s\n", error.what());
        return 77;
    }
    const struct {
        WeightFormat format;
        const char* name;
    } formats[] = {{WeightFormat::kFloat32, "float32"}, {WeightFormat::kBFloat16, "bfloat16"},
                   {WeightFormat::kInt8, "int8"},       {WeightFormat::kQ8_0, "q8_0"},
                   {WeightFormat::kQ4_0, "q4_0"},       {WeightFormat::kQ4_K, "q4_k"}};
    for (const auto& [format, name] : formats) {
        const size_t block = whet::block_length(format);
        for (size_t m : {1, 3, 9}) {
            for (size_t n : {1, 17, 50}) {
                for (size_t k : {size_t{1}, size_t{3}})
                    test_linear(format, name, m, n, k * block + (block == 1 ? k : 0));
            }
        }
        if (block == 1) test_linear(format, name, 11, 49, 67);
    }
    for (size_t m : {1, 4, 9}) {
        for (size_t n : {1, 16, 49}) {
            for (size_t k : {1, 17, 32}) test_gemm(m, n, k);
        }
    }
    std::printf("%s\n", failures == 0 ? "ok" : "failed");
    return failures == 0 ? 0 : 1;
}
