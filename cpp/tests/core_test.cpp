// The core without Python, for sanitizers: every kernel on heap buffers of exactly its length, with every tail length,
// and the pool under contention. Numbers are checked against the formulas in long double.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/host_lock.h"
#include "runtime/packing.h"
#include "runtime/processors.h"
#include "runtime/system.h"
#include "runtime/split.h"
#include "runtime/thread_pool.h"
#include "tests/checks.h"

using whet::DeltaTask;
using whet::kDeltaSlice;
using whet::kernels;

namespace {

void expect_near(const char* what, size_t n, long double got, long double expected, long double tolerance) {
    const bool near = std::abs(got - expected) <= tolerance || (std::isnan(got) && std::isnan(expected));
    expect(near, "%s, n = %zu: got %.17Lg, expected %.17Lg", what, n, got, expected);
}

std::mt19937_64 random_bits(7);

// A float32 number truncated to bfloat16.
uint16_t upper_half(float x) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16); }
float widened(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Exactly n elements from the heap, `skew` elements off the allocator's alignment.
template <class T>
struct Buffer {
    std::unique_ptr<T[]> memory;
    T* data;

    Buffer(size_t n, double mean, double deviation, size_t skew = 0)
        : memory(new T[n + skew]), data(memory.get() + skew) {
        std::normal_distribution<double> normal(mean, deviation);
        for (size_t i = 0; i < n; ++i) data[i] = static_cast<T>(normal(random_bits));
    }
    T& operator[](size_t i) { return data[i]; }
};

template <class T, class Kernel>
void test_token_kl(const char* name, Kernel kernel, bool schulman, size_t n, size_t skew) {
    Buffer<T> p(n, -2.0, 1.0, skew), q(n, -2.0, 1.0, skew);
    std::unique_ptr<uint8_t[]> mask(new uint8_t[n]);
    for (size_t i = 0; i < n; ++i) mask[i] = random_bits() % 3 != 0;
    for (const uint8_t* m : {static_cast<const uint8_t*>(nullptr), static_cast<const uint8_t*>(mask.get())}) {
        long double sum = 0, magnitude = 0;
        for (size_t i = 0; i < n; ++i) {
            if (m != nullptr && !m[i]) continue;
            const long double a = p[i], b = q[i], r = static_cast<T>(q[i] - p[i]);
            const long double term = schulman ? std::expm1(r) - r : std::exp(a) * (a - b);
            sum += term;
            magnitude += std::abs(term);
        }
        double total[2] = {0.0, 0.0};
        kernel(p.data, q.data, m, n, total);
        expect_near(name, n, total[0] + total[1], sum, magnitude * (sizeof(T) == 4 ? 1e-6L : 1e-14L));
    }
}

template <class T, class Kernel>
void test_group_advantages(const char* name, Kernel kernel, size_t group_size, size_t n_groups) {
    const size_t n = group_size * n_groups;
    Buffer<T> rewards(n, 1.0, 2.0), out(n, 0.0, 1.0);
    if (n > 2) rewards[n / 2] = static_cast<T>(NAN);
    kernel(rewards.data, n_groups, group_size, 0.0, -1.0, NAN, out.data);
    for (size_t g = 0; g < n_groups; ++g) {
        long double sum = 0, squares = 0, count = 0;
        for (size_t i = g * group_size; i < (g + 1) * group_size; ++i) {
            if (std::isnan(rewards[i])) continue;
            sum += rewards[i];
            ++count;
        }
        const long double mean = sum / count;
        for (size_t i = g * group_size; i < (g + 1) * group_size; ++i) {
            if (!std::isnan(rewards[i])) squares += (rewards[i] - mean) * (rewards[i] - mean);
        }
        const long double deviation = std::sqrt(squares / count);
        for (size_t i = g * group_size; i < (g + 1) * group_size; ++i) {
            const bool zero = std::isnan(rewards[i]) || deviation < 1e-8L;
            expect_near(name, group_size, out[i], zero ? 0.0L : (rewards[i] - mean) / deviation,
                        sizeof(T) == 4 ? 1e-5L : 1e-13L);
        }
    }
}

void test_token_logprobs(size_t n) {
    Buffer<float> logits(n, 0.0, 4.0);
    std::unique_ptr<uint16_t[]> half(new uint16_t[n]);
    for (size_t i = 0; i < n; ++i) {
        half[i] = upper_half(logits[i]);
        logits[i] = widened(half[i]);  // both kernels get the same logits
    }
    for (const size_t token : {size_t{0}, n / 2, n - 1}) {
        long double z = 0, weighted = 0;
        for (size_t i = 0; i < n; ++i) {
            const long double e = std::exp(static_cast<long double>(logits[i]));
            z += e;
            weighted += e * logits[i];
        }
        const long double logprob = logits[token] - std::log(z), entropy = std::log(z) - weighted / z;
        float got[2], got_half[2];
        kernels().token_logprobs_f32(logits.data, n, token, 1.0, &got[0], &got[1]);
        kernels().token_logprobs_bf16(half.get(), n, token, 1.0, &got_half[0], &got_half[1]);
        expect_near("token_logprobs_f32", n, got[0], logprob, 1e-6L * std::abs(logprob) + 1e-12L);
        expect_near("token_logprobs_f32 entropy", n, got[1], entropy, 2e-6L * std::abs(entropy) + 1e-7L);
        expect(got[0] == got_half[0] && got[1] == got_half[1], "token_logprobs_bf16 equals float32");

        // In tiles of any lengths, one of which contains the token.
        for (const size_t part : {size_t{1}, size_t{16}, size_t{100}, size_t{1024}, n}) {
            whet::TokenSums row;
            for (size_t begin = 0; begin < n; begin += part) {
                const size_t length = std::min(part, n - begin);
                kernels().token_logprobs_add_f32(logits.data + begin, length, token < begin ? length : token - begin,
                                                 1.0, true, &row);
            }
            float in_parts[3];
            kernels().token_logprobs_end(row, 1.0, &in_parts[0], &in_parts[1], &in_parts[2]);
            expect_near("token_logprobs_add_f32", n, in_parts[0], logprob, 1e-6L * std::abs(logprob) + 1e-12L);
            expect_near("token_logprobs_add_f32 lse", n, in_parts[1], std::log(z), 1e-6L * std::abs(std::log(z)));
            expect_near("token_logprobs_add_f32 entropy", n, in_parts[2], entropy, 2e-6L * std::abs(entropy) + 1e-7L);
        }
    }
}

void test_gae(size_t n) {
    Buffer<double> rewards(n, 0.0, 1.0), values(n, 0.0, 1.0), advantages(n, 0.0, 0.0), returns(n, 0.0, 0.0);
    std::unique_ptr<uint8_t[]> dones(new uint8_t[n]);
    for (size_t i = 0; i < n; ++i) dones[i] = random_bits() % 8 == 0;
    kernels().gae_f64(rewards.data, values.data, dones.get(), 0.5, n, 0.99, 0.95, advantages.data, returns.data);
    long double next = 0.5L, advantage = 0;
    for (size_t t = n; t-- > 0;) {
        if (dones[t]) next = advantage = 0;
        advantage = rewards[t] + 0.99L * next - values[t] + 0.99L * 0.95L * advantage;
        next = values[t];
        expect_near("gae_f64", n, advantages[t], advantage, 1e-12L);
        expect_near("gae_f64 returns", n, returns[t], advantage + values[t], 1e-12L);
    }
}

void test_memory_probes(size_t n_bytes) {
    constexpr size_t kAligned = 64 / sizeof(float);
    const size_t n = n_bytes / sizeof(float);
    std::unique_ptr<float[]> memory[2] = {std::make_unique<float[]>(n + kAligned),
                                          std::make_unique<float[]>(n + kAligned)};
    float* aligned[2];
    for (int k = 0; k < 2; ++k) {  // the last element ends its buffer
        const auto end = reinterpret_cast<uintptr_t>(memory[k].get() + n + kAligned);
        aligned[k] = memory[k].get() + kAligned - end % 64 / sizeof(float);
    }
    float *x = aligned[0], *out = aligned[1];
    for (size_t i = 0; i < n; ++i) x[i] = static_cast<float>(i % 1000);
    for (const bool streaming : {false, true}) {
        std::fill_n(out, n, -1.0f);
        kernels().probe_copy(out, x, n, streaming, 2);
        expect(std::equal(x, x + n, out), "probe_copy");
    }
    kernels().probe_scale(x, n, 2.0f, 3);
    for (size_t i = 0; i < n; ++i) expect(x[i] == 8.0f * out[i], "probe_scale");

    auto* words = reinterpret_cast<uint64_t*>(out);
    const size_t n_words = n_bytes / sizeof *words;
    std::fill_n(words, n_words, uint64_t{0});
    expect(kernels().probe_read(words, n_bytes, 2) == 0, "probe_read of nothing");
    for (size_t i = 0; i < n_words; ++i) {
        words[i] = uint64_t{1} << (i % 64);
        expect(kernels().probe_read(words, n_bytes, 1) == words[i], "probe_read reads every word");
        words[i] = 0;
    }
}

// Each sum starts at a distinct number and increases by 10 steps of 15, the product of 3 and 5.
template <class A, class B, class Sum>
void test_fma_probe(const char* name, size_t (*kernel)(const A*, const B*, Sum*, size_t), A three, B five, int gain) {
    constexpr size_t kLanes = 64 / sizeof(Sum);
    std::vector<A> a(64 / sizeof(A), three);
    std::vector<B> b(64 / sizeof(B), five);
    std::vector<Sum> sums(whet::kProbeChains * kLanes);
    for (size_t i = 0; i < sums.size(); ++i) sums[i] = static_cast<Sum>(i);
    const size_t steps = kernel(a.data(), b.data(), sums.data(), 10);
    expect(steps % 10 == 0 && steps / 10 >= 1 && steps / 10 <= whet::kProbeChains, "%s", name);
    for (size_t i = 0; i < sums.size(); ++i) {
        const size_t expected = i + (i < steps / 10 * kLanes ? static_cast<size_t>(10 * gain) : 0);
        expect(sums[i] == static_cast<Sum>(expected), "%s", name);
    }
}

void test_probes() {
    for (const size_t n_steps : {0, 1, 3}) test_memory_probes(n_steps * whet::kProbeStep);
    test_fma_probe("probe_fma_f32", kernels().probe_fma_f32, 3.0f, 5.0f, 15);
    test_fma_probe("probe_fma_f64", kernels().probe_fma_f64, 3.0, 5.0, 15);
    test_fma_probe("probe_fma_bf16", kernels().probe_fma_bf16, uint16_t{0x4040}, uint16_t{0x40a0}, 30);
    test_fma_probe("probe_fma_int8", kernels().probe_fma_int8, uint8_t{3}, int8_t{5}, 60);
}

// Norms, softmax and activations on buffers of exactly n, in float32 and bfloat16, against long double.
void test_rows(size_t n, size_t skew) {
    Buffer<float> x(n, 0.5, 1.0, skew), weight(n, 1.0, 0.1, skew), bias(n, 0.0, 1.0, skew), out(n, 0.0, 0.0, skew);
    std::unique_ptr<uint16_t[]> half(new uint16_t[n]), half_residual(new uint16_t[n]), half_out(new uint16_t[n]);
    for (size_t i = 0; i < n; ++i) {
        half[i] = half_residual[i] = upper_half(x[i]);
    }
    long double sum = 0, squares = 0, centred = 0, weights = 0;
    for (size_t i = 0; i < n; ++i) {
        sum += x[i];
        squares += static_cast<long double>(x[i]) * x[i];
        weights += std::exp(static_cast<long double>(x[i]));
    }
    const long double mean = sum / n;
    for (size_t i = 0; i < n; ++i) centred += (x[i] - mean) * (x[i] - mean);
    const long double root = std::sqrt(squares / n + 1e-6L), deviation = std::sqrt(centred / n + 1e-5L);
    const auto expect_row = [&](const char* name, auto expected) {
        for (size_t i = 0; i < n; ++i) expect_near(name, n, out[i], expected(i), 4e-6L);
    };
    const auto& k = kernels();
    for (const bool streaming : {false, true}) {
        k.rms_norm_f32(x.data, nullptr, weight.data, n, 1e-6, streaming, out.data);
        expect_row("rms_norm_f32", [&](size_t i) { return x[i] / root * weight[i]; });
        k.layer_norm_f32(x.data, nullptr, weight.data, bias.data, n, 1e-5, streaming, out.data);
        expect_row("layer_norm_f32", [&](size_t i) { return (x[i] - mean) / deviation * weight[i] + bias[i]; });
        k.swiglu_f32(x.data, bias.data, n, streaming, out.data);
        expect_row("swiglu_f32", [&](size_t i) { return x[i] / (1 + std::exp(-x[i])) * bias[i]; });
    }
    k.softmax_f32(x.data, n, 1.0f, out.data);
    expect_row("softmax_f32", [&](size_t i) { return std::exp(static_cast<long double>(x[i])) / weights; });
    k.log_softmax_f32(x.data, n, 1.0f, out.data);
    expect_row("log_softmax_f32", [&](size_t i) { return x[i] - std::log(weights); });
    k.gelu_f32(x.data, n, false, out.data);
    expect_row("gelu_f32", [&](size_t i) { return x[i] / 2 * std::erfc(-x[i] / std::sqrt(2.0L)); });

    Buffer<float> gate(n, 0.0, 8.0, skew), up(n, 1.0, 8.0, skew);
    k.clamped_swiglu_f32(gate.data, up.data, n, out.data);
    for (size_t i = 0; i < n; ++i) {
        const long double g = std::min(7.0L, gate[i] + 0.0L), u = std::clamp(up[i] + 0.0L, -7.0L, 7.0L);
        expect_near("clamped_swiglu_f32", n, out[i] / 32, g / (1 + std::exp(-1.702L * g)) * (u + 1) / 32, 4e-6L);
    }

    k.relu2_f32(x.data, n, false, out.data);
    expect_row("relu2_f32", [&](size_t i) { return std::pow(std::max(x[i] + 0.0L, 0.0L), 2); });

    k.rms_norm_bf16(half.get(), half_residual.get(), nullptr, n, 1e-6, true, half_out.get());
    k.layer_norm_bf16(half.get(), half_residual.get(), half.get(), half.get(), n, 1e-6, false, half_out.get());
    k.layer_norm_bf16_f32(half.get(), nullptr, weight.data, bias.data, n, 1e-6, false, half_out.get());
    k.softmax_bf16(half.get(), n, 1.0f, half_out.get());
    k.log_softmax_bf16(half.get(), n, 1.0f, half_out.get());
    k.swiglu_bf16(half.get(), half.get(), n, false, half_out.get());
    k.gelu_tanh_bf16(half.get(), n, false, half_out.get());
    k.relu2_bf16(half.get(), n, false, half_out.get());
}

// Rows and factors of exactly n columns; bfloat16 rows are the truncated float32 rows.
void test_lora(size_t rank, size_t rows, size_t n) {
    Buffer<float> x(rows * n, 0.0, 1.0), y(rows * n, 0.0, 1.0), a(rank * n, 0.0, 1.0, 1);
    Buffer<float> hidden(rows * rank, 0.0, 1.0), grad(rank * n, 0.0, 1.0, 3);
    std::unique_ptr<uint16_t[]> half_x(new uint16_t[rows * n]), half_y(new uint16_t[rows * n]);
    for (size_t i = 0; i < rows * n; ++i) {
        half_x[i] = half_y[i] = upper_half(x[i]);
        x[i] = widened(half_x[i]);
    }
    Buffer<float> from_half(rows * rank, 0.0, 1.0), grad_half(rank * n, 0.0, 1.0), grad_before(rank * n, 0.0, 1.0);
    for (size_t i = 0; i < rank * n; ++i) grad_half[i] = grad_before[i] = grad[i];
    std::vector<float> y_before(y.data, y.data + rows * n);
    const auto stride = static_cast<ptrdiff_t>(n);
    kernels().lora_down_f32(rank, x.data, stride, rows, n, a.data, hidden.data);
    kernels().lora_down_bf16(rank, half_x.get(), stride, rows, n, a.data, from_half.data);
    kernels().lora_up_f32(rank, hidden.data, rows, n, a.data, 0.5f, y.data, stride);
    kernels().lora_up_bf16(rank, hidden.data, rows, n, a.data, 0.5f, half_y.get(), stride);
    kernels().lora_outer_f32(rank, hidden.data, x.data, stride, rows, n, 0.5f, grad.data, n);
    kernels().lora_outer_bf16(rank, hidden.data, half_x.get(), stride, rows, n, 0.5f, grad_half.data, n);
    for (size_t row = 0; row < rows; ++row) {
        for (size_t j = 0; j < rank; ++j) {
            long double sum = 0;
            for (size_t i = 0; i < n; ++i) sum += static_cast<long double>(x[row * n + i]) * a[j * n + i];
            expect_near("lora_down_f32", n, hidden[row * rank + j], sum, 1e-4L);
            expect(hidden[row * rank + j] == from_half[row * rank + j], "lora_down_bf16 is lora_down_f32");
        }
        for (size_t i = 0; i < n; ++i) {
            long double delta = 0;
            for (size_t j = 0; j < rank; ++j) delta += 0.5L * hidden[row * rank + j] * a[j * n + i];
            expect_near("lora_up_f32", n, y[row * n + i], y_before[row * n + i] + delta, 1e-4L);
            const float rounded = widened(half_y[row * n + i]);
            const long double exact = x[row * n + i] + delta;
            expect_near("lora_up_bf16", n, rounded, exact, 1e-4L + std::abs(exact) / 256);
        }
    }
    for (size_t j = 0; j < rank; ++j) {
        for (size_t i = 0; i < n; ++i) {
            long double sum = grad_before[j * n + i];
            for (size_t row = 0; row < rows; ++row) sum += 0.5L * hidden[row * rank + j] * x[row * n + i];
            expect_near("lora_outer_f32", n, grad[j * n + i], sum, 1e-3L);
            expect(grad[j * n + i] == grad_half[j * n + i], "lora_outer_bf16 is lora_outer_f32");
        }
    }
}

// Heads of exactly rotary_dim elements, the last of which ends its buffer.
void test_delta_rule(size_t key_dim, size_t value_dim, bool corrects) {
    constexpr size_t n = 7, split = 3;
    const size_t padded = (value_dim + kDeltaSlice - 1) / kDeltaSlice * kDeltaSlice, size = padded * key_dim;
    std::vector<float> q = normal(n * key_dim, 1), k = normal(n * key_dim, 2), v = normal(n * value_dim, 3);
    for (float& x : k) x /= std::sqrt(static_cast<float>(key_dim));  // about unit length: the state does not grow
    std::vector<float> decay(n), beta(n), out(n * value_dim), state(size, NAN);
    for (size_t t = 0; t < n; ++t) {
        decay[t] = 0.5f + 0.07f * static_cast<float>(t), beta[t] = 0.9f - 0.1f * static_cast<float>(t);
    }
    // Rows of q and v differ in length, and a task has one stride: one token at a time.
    const auto token = [&](size_t t, const float* from, float* to, float* into) {
        return DeltaTask{.n = 1,
                         .key_dim = key_dim,
                         .value_dim = value_dim,
                         .q = &q[t * key_dim],
                         .k = &k[t * key_dim],
                         .v = &v[t * value_dim],
                         .stride = 0,
                         .decay = &decay[t],
                         .beta = &beta[t],
                         .gate_stride = 0,
                         .from = from,
                         .to = to,
                         .out = into,
                         .out_stride = 0,
                         .corrects = corrects,
                         .skip = 0.7f};
    };
    std::vector<long double> s(key_dim * value_dim);
    std::vector<float> before(size), again(value_dim);
    for (size_t t = 0; t < n; ++t) {
        float* const row = &out[t * value_dim];
        const bool in_place = t > split;
        if (t == split) before = state;
        kernels().delta_rule_f32(token(t,
                                       t == 0       ? nullptr
                                       : t == split ? before.data()
                                                    : state.data(),
                                       state.data(), row));
        kernels().delta_output_f32(token(t, state.data(), nullptr, again.data()));
        expect(std::equal(again.begin(), again.end(), row), "output of a state, %zu x %zu, token %zu, %d", key_dim,
               value_dim, t, in_place);
        for (size_t j = 0; j < value_dim; ++j) {
            long double u = v[t * value_dim + j], o = corrects ? 0 : 0.7f * u;
            for (size_t i = 0; corrects && i < key_dim; ++i) u -= decay[t] * s[i * value_dim + j] * k[t * key_dim + i];
            for (size_t i = 0; i < key_dim; ++i) {
                long double& at = s[i * value_dim + j];
                at = decay[t] * at + beta[t] * u * k[t * key_dim + i];
                o += at * q[t * key_dim + i];
            }
            expect_near("delta rule", t * value_dim + j, row[j], o, 1e-5L * std::sqrt(static_cast<double>(key_dim)));
        }
    }
    add_to_hash(out);
    // All tokens of rows [q, k, v] in one task: the same bits.
    const size_t stride = 2 * key_dim + value_dim;
    std::vector<float> rows(n * stride), whole(size), found(n * value_dim);
    for (size_t t = 0; t < n; ++t) {
        std::copy_n(&q[t * key_dim], key_dim, &rows[t * stride]);
        std::copy_n(&k[t * key_dim], key_dim, &rows[t * stride + key_dim]);
        std::copy_n(&v[t * value_dim], value_dim, &rows[t * stride + 2 * key_dim]);
    }
    kernels().delta_rule_f32({.n = n,
                              .key_dim = key_dim,
                              .value_dim = value_dim,
                              .q = rows.data(),
                              .k = rows.data() + key_dim,
                              .v = rows.data() + 2 * key_dim,
                              .stride = stride,
                              .decay = decay.data(),
                              .beta = beta.data(),
                              .gate_stride = 1,
                              .from = nullptr,
                              .to = whole.data(),
                              .out = found.data(),
                              .out_stride = value_dim,
                              .corrects = corrects,
                              .skip = 0.7f});
    expect(found == out && whole == state, "delta rule of %zu tokens at once, %zu x %zu", n, key_dim, value_dim);
}

template <class T, class Kernel>
void test_rope(const char* name, Kernel kernel, size_t half, bool neox, size_t skew) {
    const size_t dim = 2 * half, heads = 3;
    Buffer<T> x(heads * dim, 0.0, 1.0, skew);
    Buffer<float> cos_sin(dim, 0.0, 1.0, skew);
    constexpr bool narrow = sizeof(T) == 2;
    const auto value = [](T v) -> long double {
        if constexpr (!narrow) return v;
        return widened(static_cast<uint16_t>(v));
    };
    if constexpr (narrow) {
        for (size_t i = 0; i < heads * dim; ++i) x[i] = static_cast<T>(0x3f00 + random_bits() % 256);  // 0.5 to 2
    }
    for (const bool inverse : {false, true}) {
        const std::vector<T> before(x.data, x.data + heads * dim);
        kernel(x.data, heads, static_cast<ptrdiff_t>(dim), cos_sin.data, dim, inverse);
        for (size_t i = 0; i < heads * half; ++i) {
            const size_t head = i / half * dim, place = i % half;
            const size_t first = head + (neox ? place : 2 * place), second = neox ? first + half : first + 1;
            const long double a = value(before[first]), b = value(before[second]), c = cos_sin[place];
            const long double s = inverse ? -cos_sin[half + place] : cos_sin[half + place];
            const long double room = (std::abs(a) + std::abs(b)) * (std::abs(c) + std::abs(s)) * (narrow ? 4e-3 : 3e-7);
            expect_near(name, half, value(x[first]), a * c - b * s, room);
            expect_near(name, half, value(x[second]), a * s + b * c, room);
        }
    }
}

void test_rope_angles(size_t n) {
    Buffer<double> inv_freq(n, 0.0, 1.0);
    Buffer<float> cos_sin(2 * n, 0.0, 1.0);
    for (const double position : {0.0, 1.0, -12345.0, 1e6}) {
        kernels().rope_cos_sin(position, inv_freq.data, n, 1.5, cos_sin.data);
        for (size_t i = 0; i < n; ++i) {
            const long double angle = static_cast<long double>(position) * inv_freq[i];
            expect_near("rope_cos_sin: cos", n, cos_sin[i], 1.5L * std::cos(angle), 2e-7);
            expect_near("rope_cos_sin: sin", n, cos_sin[n + i], 1.5L * std::sin(angle), 2e-7);
        }
    }
}

void test_rope_at_length(size_t half) {
    for (const size_t skew : {0, 1}) {
        test_rope<float>("rope_neox_f32", kernels().rope_neox_f32, half, true, skew);
        test_rope<float>("rope_gptj_f32", kernels().rope_gptj_f32, half, false, skew);
        test_rope<uint16_t>("rope_neox_bf16", kernels().rope_neox_bf16, half, true, skew);
        test_rope<uint16_t>("rope_gptj_bf16", kernels().rope_gptj_bf16, half, false, skew);
    }
    test_rope_angles(half);
}

// One sequence, `group` query heads over one KV head: causal prefill, and decode for the last query.
void test_attention(size_t n, size_t head_dim, size_t group) {
    const size_t extra = (head_dim + 31) / 32 * 32 + whet::kDecodePartialExtra;
    Buffer<float> q(n * group * head_dim, 0.0, 1.0), k(n * head_dim, 0.0, 1.0), v(n * head_dim, 0.0, 1.0);
    Buffer<float> out(n * group * head_dim, 0.0, 1.0), decoded(group * head_dim, 0.0, 1.0);
    Buffer<float> partial(group * extra, 0.0, 1.0);
    const auto signed_of = [](size_t size) { return static_cast<ptrdiff_t>(size); };
    whet::AttentionTask task{};
    task.q = q.data, task.k = k.data, task.v = v.data, task.out = out.data;
    task.q_token = task.out_token = signed_of(group * head_dim);
    task.q_head = task.out_head = task.k_token = task.v_token = signed_of(head_dim);
    task.n_queries = task.n_keys = signed_of(n), task.kv_group = signed_of(group), task.head_dim = signed_of(head_dim);
    task.window = INT64_MAX, task.causal = true, task.block_size = 32, task.scale = 0.2f;
    std::vector<float> scratch(kernels().attention_scratch(task) / sizeof(float));
    task.scratch = scratch.data();
    kernels().attention_f32(task);

    whet::DecodeTask step{};
    step.q = q.data + (n - 1) * group * head_dim, step.k = k.data, step.v = v.data;
    step.q_head = step.k_token = step.v_token = step.k_head = step.v_head = signed_of(head_dim);
    step.kv_heads = 1, step.kv_group = task.kv_group, step.head_dim = task.head_dim, step.end = task.n_keys;
    step.scale = task.scale, step.partial = partial.data;
    std::vector<float> decode_scratch(kernels().decode_scratch(step) / sizeof(float));
    step.scratch = decode_scratch.data();
    kernels().decode_attention_f32(step);
    for (size_t h = 0; h < group; ++h) {
        kernels().merge_decode_f32(partial.data + h * extra, 1, extra, head_dim, decoded.data + h * head_dim);
    }
    for (size_t row = 0; row < n * group; ++row) {
        std::vector<long double> sums(head_dim, 0);
        long double total = 0;
        for (size_t j = 0; j <= row / group; ++j) {
            long double score = 0;
            for (size_t d = 0; d < head_dim; ++d) score += 1.0L * q[row * head_dim + d] * k[j * head_dim + d];
            const long double weight = std::exp2(0.2f * score);
            total += weight;
            for (size_t d = 0; d < head_dim; ++d) sums[d] += weight * v[j * head_dim + d];
        }
        for (size_t d = 0; d < head_dim; ++d) {
            expect_near("attention_f32", n, out[row * head_dim + d], sums[d] / total, 1e-5L);
            if (row / group + 1 == n) {
                expect_near("decode_attention_f32", n, decoded[row % group * head_dim + d], sums[d] / total, 1e-5L);
            }
        }
    }
    // bfloat16: the same memory, for the sanitizers. Numbers are checked from Python.
    std::vector<uint16_t> half(n * group * head_dim, 0x3f80), half_kv(n * head_dim, 0x3f80), half_out(half.size());
    task.q = half.data(), task.k = task.v = half_kv.data(), task.out = half_out.data();
    kernels().attention_bf16(task);
    step.q = half.data() + (n - 1) * group * head_dim, step.k = step.v = half_kv.data();
    kernels().decode_attention_bf16(step);
    std::vector<uint16_t> half_decoded(head_dim);
    kernels().merge_decode_bf16(partial.data, 1, extra, head_dim, half_decoded.data());
    for (const uint16_t x : half_out) expect(x == 0x3f80, "a mean of ones is one: attention_bf16");
    for (const uint16_t x : half_decoded) expect(x == 0x3f80, "a mean of ones is one: decode_attention_bf16");
}

void test_packing() {
    for (const int64_t n : {0, 1, 63, 64, 65, 1000}) {
        for (const int64_t max_length : {int64_t{16}, int64_t{1} << 40}) {
            std::vector<int64_t> lengths(static_cast<size_t>(n));
            for (int64_t& length : lengths)
                length = static_cast<int64_t>(random_bits() % static_cast<uint64_t>(max_length + 1));
            const whet::Packing packed = whet::pack_sequences(lengths.data(), n, max_length);
            std::vector<int> seen(lengths.size(), 0);
            for (size_t b = 0; b + 1 < packed.bin_begin.size(); ++b) {
                int64_t sum = 0;
                for (int64_t i = packed.bin_begin[b]; i < packed.bin_begin[b + 1]; ++i) {
                    const auto index = static_cast<size_t>(packed.indices[static_cast<size_t>(i)]);
                    sum += lengths[index];
                    ++seen[index];
                }
                expect(sum <= max_length, "a bin does not overflow");
            }
            for (const int count : seen) expect(count == 1, "a sequence is in exactly one bin");
        }
    }
}

void test_pool() {
    whet::set_num_threads(1000);
    expect(whet::num_threads() == whet::max_processors(), "got %d threads on %d processors", whet::num_threads(),
           whet::max_processors());
    for (const int n_threads : {1, 2, 3, 8}) {
        whet::set_num_threads(n_threads, kOversubscribe);
        for (int round = 0; round < 200; ++round) {
            // Occasional long pauses, so that workers are both spinning and asleep.
            if (round % 50 == 49) std::this_thread::sleep_for(std::chrono::milliseconds(2));
            std::vector<int> counts(static_cast<size_t>(round), 0);
            auto count = [&](size_t i) { ++counts[i]; };
            whet::parallel_for(counts.size(), count);
            for (const int c : counts) expect(c == 1, "a task runs exactly once");
        }
        std::atomic<int> nested{0};
        auto inner = [&](size_t) { ++nested; };
        auto outer = [&](size_t) { whet::parallel_for(10, inner); };
        whet::parallel_for(10, outer);
        expect(nested == 100, "nested jobs lose no task");

        std::atomic<int> shared{0};
        std::vector<std::thread> callers;
        for (int c = 0; c < 4; ++c) {
            callers.emplace_back([&] {
                for (int round = 0; round < 50; ++round) {
                    auto add = [&](size_t) { ++shared; };
                    whet::parallel_for(20, add);
                }
            });
        }
        for (std::thread& t : callers) t.join();
        expect(shared == 4 * 50 * 20, "concurrent jobs lose no task");
    }
}

// Time of a job whose tasks are claimed from the last to the first by threads of these speeds; a task takes its size.
double makespan(const whet::DecreasingTasks& tasks, std::vector<double> speeds) {
    std::vector<double> free(speeds.size(), 0.0);
    for (size_t i = tasks.count(); i-- > 0;) {
        const auto thread = static_cast<size_t>(std::min_element(free.begin(), free.end()) - free.begin());
        const auto [begin, end] = tasks[i];
        free[thread] += static_cast<double>(end - begin) / speeds[thread];
    }
    return *std::max_element(free.begin(), free.end());
}

void test_decreasing_tasks() {
    for (const size_t n : {1, 2, 5, 20, 64, 1000}) {
        for (const size_t n_threads : {1, 2, 3, 16, 64}) {
            for (const size_t least : {1, 4}) {
                const whet::DecreasingTasks tasks(n, n_threads, least);
                size_t next = 0, size = n;
                for (size_t i = tasks.count(); i-- > 0;) {
                    const auto [begin, end] = tasks[i];
                    expect(begin == next && end > begin, "tasks cover [0, %zu) in order", n);
                    expect(end - begin <= size + 1, "sizes decrease, up to rounding");
                    next = end, size = end - begin;
                }
                expect(next == n, "the last task ends at %zu, not %zu", n, next);
                const double ideal = static_cast<double>(n) / static_cast<double>(n_threads);
                const double time = makespan(tasks, std::vector<double>(n_threads, 1.0));
                expect(time <= ideal + 2.0, "%zu equal threads: got %g, ideal %g", n_threads, time, ideal);
            }
        }
    }
    for (const size_t n : {20, 64, 1000}) {
        const double time = makespan({n, 2, 1}, {1.0, 0.5}), ideal = static_cast<double>(n) / 1.5;
        expect(time <= 1.15 * ideal, "one of two threads is slow: got %g, ideal %g", time, ideal);
    }
}

// A host that counts acquire() and release() of its lock; acquire() gets the result of release().
int times_released = 0, times_acquired = 0;

void test_host_lock() {
    whet::host_lock = {[]() -> void* { return ++times_released, &times_released; },
                       [](void* state) { times_acquired += state == &times_released; }};
    constexpr double kLittle = 100.0, kMuch = 1e6;
    int held = 0, free = 0;
    auto look = [&](size_t) { ++(times_released == times_acquired ? held : free); };
    whet::parallel_for(1, kLittle, look);
    expect(held == 1 && times_released == 0, "little work does not release the lock");
    whet::parallel_for(1, kMuch, look);
    expect(free == 1 && times_released == 1 && times_acquired == 1, "much work releases the lock");
    bool thrown = false;
    try {
        whet::parallel_split(8, 2, kMuch, [](size_t, size_t) { throw std::runtime_error("from a task"); });
    } catch (const std::runtime_error&) {
        thrown = true;
    }
    expect(thrown && times_released == 2 && times_acquired == 2, "the lock is acquired after an exception");
    whet::host_lock.release = []() -> void* { return nullptr; };  // the thread does not own the lock
    whet::parallel_for(1, kMuch, look);
    expect(times_acquired == 2, "a lock that the thread did not own is not acquired");
    whet::host_lock = {};
}

std::filesystem::path make_temporary_folder() {
    std::random_device random;
    for (;;) {
        const auto path = std::filesystem::temp_directory_path() / ("whet_core_test." + std::to_string(random()));
        if (std::filesystem::create_directory(path)) return path;
    }
}

// cpu_quota() of a process with this proc/self/cgroup and these groups.
double quota_of(const std::string& groups, const std::vector<std::pair<std::string, std::string>>& files) {
    const std::filesystem::path root = make_temporary_folder();
    const auto write = [&](const std::filesystem::path& path, const std::string& text) {
        std::filesystem::create_directories((root / path).parent_path());
        std::ofstream(root / path) << text;
    };
    write("proc/self/cgroup", groups);
    for (const auto& [path, text] : files) write("sys/fs/cgroup/" + path, text);
    const double quota = whet::cpu_quota(root.string());
    std::filesystem::remove_all(root);
    return quota;
}

void test_cpu_quota() {
    const auto expect_quota = [](const char* what, double got, double expected) {
        expect(got == expected, "quota, %s: got %g, expected %g", what, got, expected);
    };
    constexpr double kNone = std::numeric_limits<double>::infinity();
    const std::string v2 = "0::/pod/box\n", v1 = "3:cpuset:/x\n2:cpu,cpuacct:/docker/1\n1:memory:/y\n";
    expect_quota("no files", quota_of(v2, {}), kNone);
    expect_quota("no groups", quota_of("", {{"cpu.max", "50000 100000\n"}}), kNone);
    expect_quota("v2", quota_of(v2, {{"pod/box/cpu.max", "250000 100000\n"}}), 2.5);
    expect_quota("v2, max", quota_of(v2, {{"pod/box/cpu.max", "max 100000\n"}}), kNone);
    expect_quota("v2, minimum of a group and its parent",
                 quota_of(v2, {{"pod/box/cpu.max", "300000 100000\n"}, {"pod/cpu.max", "100000 50000\n"}}), 2.0);
    expect_quota("v2, parent only", quota_of(v2, {{"pod/box/cpu.max", "max 1000\n"}, {"pod/cpu.max", "1500 1000\n"}}),
                 1.5);
    expect_quota("v2, in a container", quota_of("0::/\n", {{"cpu.max", "400000 100000\n"}}), 4.0);
    expect_quota("v2, the host's path", quota_of(v2, {{"cpu.max", "400000 100000\n"}}), 4.0);
    expect_quota(
        "v1",
        quota_of(v1, {{"cpu/docker/1/cpu.cfs_quota_us", "50000\n"}, {"cpu/docker/1/cpu.cfs_period_us", "100000\n"}}),
        0.5);
    expect_quota(
        "v1, none",
        quota_of(v1, {{"cpu/docker/1/cpu.cfs_quota_us", "-1\n"}, {"cpu/docker/1/cpu.cfs_period_us", "100000\n"}}),
        kNone);
    expect_quota("v1, in a container",
                 quota_of(v1, {{"cpu/cpu.cfs_quota_us", "700000\n"}, {"cpu/cpu.cfs_period_us", "100000\n"}}), 7.0);
    expect_quota("no numbers", quota_of(v2, {{"pod/box/cpu.max", "\n"}}), kNone);
    expect(whet::n_processors() >= 1, "n_processors: got %d, expected at least 1", whet::n_processors());
}

void test_system_memory() {
    const size_t page = whet::page_bytes();
    expect(page >= 4096 && (page & (page - 1)) == 0, "page_bytes: got %zu, expected a power of two", page);
    for (const size_t alignment : {size_t{16}, size_t{64}, page, size_t{2} << 20}) {
        for (const size_t bytes : {size_t{0}, size_t{1}, alignment + 1}) {
            void* const memory = whet::allocate_aligned(alignment, bytes);
            expect(memory != nullptr && reinterpret_cast<uintptr_t>(memory) % alignment == 0,
                   "allocate_aligned(%zu, %zu)", alignment, bytes);
            std::memset(memory, 1, bytes);
            whet::free_aligned(memory);
        }
    }
    for (const size_t bytes : {size_t{0}, size_t{1}, size_t{100000}, size_t{3} << 20}) {
        auto* const memory = static_cast<uint8_t*>(whet::allocate_zeroed(bytes));
        expect(memory != nullptr && reinterpret_cast<uintptr_t>(memory) % 64 == 0, "allocate_zeroed(%zu)", bytes);
        expect(std::all_of(memory, memory + bytes, [](uint8_t x) { return x == 0; }), "%zu bytes are zero", bytes);
        std::memset(memory, 1, bytes);
        // Keeps what is not a whole page, and the addresses.
        if (bytes > 1) whet::release_pages(memory + 1, bytes - 1);
        expect(bytes == 0 || memory[0] == 1, "the first of %zu bytes is kept", bytes);
        std::memset(memory, 2, bytes);
        expect(std::all_of(memory, memory + bytes, [](uint8_t x) { return x == 2; }), "%zu bytes are writable", bytes);
        whet::prefer_huge_pages(memory, bytes);
        whet::free_zeroed(memory, bytes);
    }
    const whet::ProcessMemory process = whet::read_process_memory();
    expect(process.resident > 1 << 20 && process.peak >= process.resident, "resident %zu, peak %zu", process.resident,
           process.peak);
    const whet::MachineMemory machine = whet::read_machine_memory();
    expect(machine.total > process.resident && machine.available > 0 && machine.available <= machine.total,
           "machine: total %zu, available %zu", machine.total, machine.available);
    expect(whet::n_schedulable_processors() >= 1, "processors: got %d", whet::n_schedulable_processors());
}

}  // namespace

int main() {
    return run_tests([] {
        for (size_t n = 0; n <= 150; ++n) {
            for (const size_t skew : {0, 1, 3}) {
                test_token_kl<float>("token_kl_f32", kernels().token_kl_f32, false, n, skew);
                test_token_kl<double>("token_kl_f64", kernels().token_kl_f64, false, n, skew);
                test_token_kl<float>("token_kl_schulman_f32", kernels().token_kl_schulman_f32, true, n, skew);
                test_token_kl<double>("token_kl_schulman_f64", kernels().token_kl_schulman_f64, true, n, skew);
            }
            if (n == 0) continue;
            for (const size_t n_groups : {1, 3, 8}) {
                test_group_advantages<float>("group_advantages_f32", kernels().group_advantages_f32, n, n_groups);
                test_group_advantages<double>("group_advantages_f64", kernels().group_advantages_f64, n, n_groups);
            }
            test_token_logprobs(n);
            test_gae(n);
            test_rope_at_length(n);
            for (const size_t skew : {0, 1, 3}) test_rows(n, skew);
        }
        for (const size_t n : {256, 257, 511, 1000}) test_rows(n, 1);
        for (const size_t n : {1023, 1024, 1025, 2047, 5000}) test_token_logprobs(n);
        test_probes();
        for (size_t rank = 1; rank <= 8; ++rank) {
            for (const size_t n : {1, 15, 16, 17, 31, 33, 63, 64, 65, 130, 511, 512, 513, 600}) {
                test_lora(rank, rank % 4 + 1, n);  // up to the maximum rows of lora_down
            }
        }
        for (const size_t n : {1, 2, 15, 16, 17, 33, 65, 70}) {
            for (const size_t head_dim : {32, 40, 64, 72, 128}) {
                for (const size_t group : {1, 2, 3, 5}) test_attention(n, head_dim, group);
            }
        }
        for (const size_t key_dim : {1, 2, 7, 16, 33, 128}) {
            for (const size_t value_dim : {1, 15, 16, 17, 33, 64, 80, 128}) {
                for (const bool corrects : {true, false}) test_delta_rule(key_dim, value_dim, corrects);
            }
        }
        test_packing();
        test_cpu_quota();
        test_system_memory();
        test_pool();
        test_decreasing_tasks();
        test_host_lock();
    });
}
