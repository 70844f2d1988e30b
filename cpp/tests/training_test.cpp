// The kernels of a training step without Python, for sanitizers: on heap buffers of exactly their size, against loops
// in double. Exit code 77: this machine lacks the instruction set in WHET_ISA.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "engine/attention.h"
#include "engine/training.h"
#include "engine/training_attention.h"
#include "runtime/thread_pool.h"
#include "tests/checks.h"

using whet::kernels;

namespace {

// Norm of the error relative to the norm of the reference, or of its terms that cancel.
template <class T>
void expect_close(const char* what, size_t n, const std::vector<T>& got, const std::vector<double>& right,
                  double tolerance, double terms = 1e-15) {
    double error = 0.0, size = terms * terms;
    for (size_t i = 0; i < right.size(); ++i) {
        error += (got[i] - right[i]) * (got[i] - right[i]);
        size += right[i] * right[i];
    }
    expect(std::sqrt(error / size) <= tolerance, "%s, %zu: off by %.3g", what, n, std::sqrt(error / size));
}

// Numbers that are exact in bfloat16.
std::vector<float> narrow_normal(size_t n, unsigned seed) {
    std::vector<float> x = normal(n, seed);
    std::vector<uint16_t> narrow(n);
    kernels().bf16_from_f32(x.data(), n, narrow.data());
    kernels().f32_from_bf16(narrow.data(), n, x.data());
    return x;
}

std::vector<uint16_t> narrowed(const std::vector<float>& x) {
    std::vector<uint16_t> narrow(x.size());
    kernels().bf16_from_f32(x.data(), x.size(), narrow.data());
    return narrow;
}

std::vector<float> widened(const std::vector<uint16_t>& x) {
    std::vector<float> wide(x.size());
    kernels().f32_from_bf16(x.data(), x.size(), wide.data());
    return wide;
}

// ---------------------------------------------------------------- weights

// In chunks, on all threads.
void test_rounding(size_t n) {
    const std::vector<float> x = normal(n, 1);
    std::vector<uint16_t> rounded(n, 0x7fc1);
    whet::bf16_from_f32(x.data(), n, rounded.data());
    expect(rounded == narrowed(x), "bf16_from_f32, %zu", n);
}

void test_rounded_linear(size_t m, size_t n, size_t k) {
    const std::vector<float> x = narrow_normal(m * k, 1), w = normal(n * k, 2), rounded = widened(narrowed(w));
    const std::vector<uint16_t> inputs = narrowed(x);
    std::vector<float> columns(n * k), y(m * n);
    std::vector<double> right(m * n);
    for (size_t r = 0; r < n; ++r) {
        for (size_t j = 0; j < k; ++j) columns[j * n + r] = w[r * k + j];
    }
    for (size_t i = 0; i < m; ++i) {
        for (size_t r = 0; r < n; ++r) {
            for (size_t j = 0; j < k; ++j) right[i * n + r] += double(x[i * k + j]) * rounded[r * k + j];
        }
    }
    kernels().rounded_linear_rows(w.data(), k, n, k, inputs.data(), k, m, y.data(), n);
    expect_close("rounded_linear_rows", m * 10000 + n, y, right, 1e-6);
    kernels().rounded_linear_columns(columns.data(), n, n, k, inputs.data(), k, m, y.data(), n);
    expect_close("rounded_linear_columns", m * 10000 + n, y, right, 1e-6);
}

// ---------------------------------------------------------------- row by row

void test_rms_norm(size_t n) {
    const std::vector<float> x = narrow_normal(n, 1), weight = narrow_normal(n, 2), grad = narrow_normal(n, 3);
    const double eps = 1e-5;
    double square = 0.0, pull = 0.0;
    for (size_t i = 0; i < n; ++i) square += double(x[i]) * x[i], pull += double(grad[i]) * weight[i] * x[i];
    const double count = static_cast<double>(n), r = 1.0 / std::sqrt(square / count + eps);
    std::vector<double> out(n), grad_x(n), grad_weight(n);
    for (size_t i = 0; i < n; ++i) {
        out[i] = x[i] * r * weight[i];
        grad_x[i] = r * (double(grad[i]) * weight[i] - x[i] * r * r * pull / count);
        grad_weight[i] = 1.0 + double(grad[i]) * x[i] * r;
    }
    std::vector<uint16_t> narrow_out(n);
    kernels().rms_norm_f32_bf16(x.data(), weight.data(), n, eps, narrow_out.data());
    expect_close("rms_norm_f32_bf16", n, widened(narrow_out), out, 4e-3);

    std::vector<float> to_x(n), to_weight(n, 1.0f);
    kernels().rms_norm_backward_f32(x.data(), weight.data(), grad.data(), n, eps, to_x.data(), to_weight.data());
    // With n = 1 most terms cancel: 1 - x^2 r^2 is eps r^2.
    const double tolerance = n == 1 ? 0.1 : 1e-6;
    expect_close("rms_norm_backward_f32, x", n, to_x, grad_x, tolerance);
    expect_close("rms_norm_backward_f32, weight", n, to_weight, grad_weight, 1e-6);

    const std::vector<uint16_t> narrow_x = narrowed(x), narrow_grad = narrowed(grad);
    to_weight.assign(n, 1.0f);
    kernels().rms_norm_backward_f32_bf16(x.data(), weight.data(), narrow_grad.data(), n, eps, to_x.data(),
                                         to_weight.data());
    expect_close("rms_norm_backward_f32_bf16, x", n, to_x, grad_x, tolerance);
    std::vector<uint16_t> narrow_to_x(n);
    to_weight.assign(n, 1.0f);
    kernels().rms_norm_backward_bf16(narrow_x.data(), weight.data(), narrow_grad.data(), n, eps, narrow_to_x.data(),
                                     to_weight.data());
    expect_close("rms_norm_backward_bf16, x", n, widened(narrow_to_x), grad_x, n == 1 ? 0.1 : 4e-3);
    expect_close("rms_norm_backward_bf16, weight", n, to_weight, grad_weight, 1e-6);
}

void test_clamped_swiglu(size_t n) {
    std::vector<float> gate = narrow_normal(n, 1), up = narrow_normal(n, 2);
    const std::vector<float> grad = narrow_normal(n, 3);
    std::vector<double> grad_gate(n), grad_up(n);
    for (size_t i = 0; i < n; ++i) {
        gate[i] = i == 0 ? 7.0f : 6.0f * gate[i], up[i] = i == 1 ? -7.0f : 6.0f * up[i];
        const double g = std::min(7.0, double{gate[i]}), u = std::clamp(double{up[i]}, -7.0, 7.0);
        const double s = 1.0 / (1.0 + std::exp(-1.702 * g));
        grad_gate[i] = gate[i] > 7.0f ? 0.0 : grad[i] * (u + 1.0) * s * (1.0 + 1.702 * g * (1.0 - s));
        grad_up[i] = std::abs(up[i]) > 7.0f ? 0.0 : grad[i] * g * s;
    }
    kernels().clamped_swiglu_backward_f32(gate.data(), up.data(), grad.data(), n, gate.data(), up.data());
    expect_close("clamped_swiglu_backward_f32, gate", n, gate, grad_gate, 1e-6);
    expect_close("clamped_swiglu_backward_f32, up", n, up, grad_up, 1e-6);
}

void test_swiglu(size_t n) {
    const std::vector<float> gate = narrow_normal(n, 1), up = narrow_normal(n, 2), grad = narrow_normal(n, 3);
    std::vector<double> grad_gate(n), grad_up(n);
    for (size_t i = 0; i < n; ++i) {
        const double s = 1.0 / (1.0 + std::exp(-double(gate[i])));
        grad_gate[i] = double(grad[i]) * up[i] * s * (1.0 + gate[i] * (1.0 - s));
        grad_up[i] = double(grad[i]) * gate[i] * s;
    }
    std::vector<float> to_gate(n), to_up(n);
    kernels().swiglu_backward_f32(gate.data(), up.data(), grad.data(), n, to_gate.data(), to_up.data());
    expect_close("swiglu_backward_f32, gate", n, to_gate, grad_gate, 1e-6);
    expect_close("swiglu_backward_f32, up", n, to_up, grad_up, 1e-6);
    const std::vector<uint16_t> narrow_gate = narrowed(gate), narrow_up = narrowed(up), narrow_grad = narrowed(grad);
    std::vector<uint16_t> narrow_to_gate(n), narrow_to_up(n);
    kernels().swiglu_backward_bf16(narrow_gate.data(), narrow_up.data(), narrow_grad.data(), n, narrow_to_gate.data(),
                                   narrow_to_up.data());
    expect_close("swiglu_backward_bf16, gate", n, widened(narrow_to_gate), grad_gate, 4e-3);
    expect_close("swiglu_backward_bf16, up", n, widened(narrow_to_up), grad_up, 4e-3);
}

void test_token_logprobs(size_t n, size_t token) {
    const std::vector<float> logits = narrow_normal(n, 1);
    const double temperature = 0.7, grad = 1.5;
    double sum = 0.0;
    for (const float z : logits) sum += std::exp(z / temperature);
    const double lse = std::log(sum), logprob = token < n ? logits[token] / temperature - lse : -1.0;
    std::vector<double> right(n);
    for (size_t i = 0; i < n; ++i)
        right[i] = grad / temperature * ((i == token) - std::exp(logits[i] / temperature - lse));
    std::vector<float> out = logits;  // in place
    kernels().token_logprobs_backward_f32(out.data(), n, token, temperature, static_cast<float>(lse),
                                          static_cast<float>(logprob), static_cast<float>(grad), out.data());
    if (n > 1 || token >= n) expect_close("token_logprobs_backward_f32", n, out, right, 1e-6);
    std::vector<uint16_t> narrow(n);
    kernels().token_logprobs_backward_bf16(logits.data(), n, token, temperature, static_cast<float>(lse),
                                           static_cast<float>(logprob), static_cast<float>(grad), narrow.data());
    if (n > 1 || token >= n) expect_close("token_logprobs_backward_bf16", n, widened(narrow), right, 4e-3);
}

void test_adamw(size_t n) {
    const std::vector<float> start = narrow_normal(n, 1), grad = narrow_normal(n, 2);
    const std::vector<float> start_m = narrow_normal(n, 3);
    std::vector<float> p = start, m = start_m, v(n, 0.5f);
    const whet::AdamWStep step{0.99f, 0.98f, 0.1f, 0.02f, 0.7f, 1e-8f, 0.01f, 0.5f};
    std::vector<double> right_p(n), right_m(n), right_v(n);
    for (size_t i = 0; i < n; ++i) {
        const double g = 0.5 * grad[i];
        right_m[i] = start_m[i] + double(0.1f) * (g - start_m[i]);
        right_v[i] = double(0.98f) * 0.5 + double(0.02f) * g * g;
        right_p[i] = double(0.99f) * start[i] - double(0.01f) * right_m[i] / (std::sqrt(right_v[i]) / double(0.7f));
    }
    kernels().adamw_f32(step, n, p.data(), grad.data(), m.data(), v.data());
    expect_close("adamw_f32, p", n, p, right_p, 1e-6);
    expect_close("adamw_f32, m", n, m, right_m, 1e-6);
    expect_close("adamw_f32, v", n, v, right_v, 1e-6);
}

// The definition: 0, or an eighth of an octave by linear steps below the largest magnitude of the block.
float decoded_moment(unsigned code, unsigned top, float largest) {
    const auto magnitude = [](unsigned of) { return std::ldexp(1.0f + float((of - 1) % 8) / 8.0f, int(of - 1) / 8); };
    const float lowest = largest * (1.0f / magnitude(top));
    const float size = (code & top) == 0 ? 0.0f : magnitude(code & top) * lowest;
    return code > top ? -size : size;
}

void test_adamw_8bit(size_t n) {
    const whet::AdamW settings{
        .lr = 0.01, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1, .t = 3.0, .grad_scale = 0.5};
    const std::vector<float> start = narrow_normal(n, 1), grad = narrow_normal(n, 2);
    const size_t n_blocks = (n + whet::kMomentBlock - 1) / whet::kMomentBlock;
    std::vector<uint8_t> m(n), v(n);
    std::vector<float> p = start, m_scales(n_blocks, 0.25f), v_scales(n_blocks, 0.5f), right_p = start;
    std::vector<float> right_m(n), right_v(n);
    std::mt19937 bits(3);
    for (size_t i = 0; i < n; ++i) {
        m[i] = uint8_t(bits()), v[i] = i % 7 == 0 ? 0 : uint8_t(bits());
        right_m[i] = decoded_moment(m[i], 127, 0.25f), right_v[i] = decoded_moment(v[i], 255, 0.5f);
    }
    whet::adamw_8bit(settings, n, p.data(), grad.data(), {m.data(), v.data(), m_scales.data(), v_scales.data()}, 5);
    whet::adamw(settings, n, right_p.data(), grad.data(), right_m.data(), right_v.data());
    expect(p == right_p, "adamw_8bit, %zu: the parameters of adamw on the decoded moments", n);
    for (size_t i = 0; i < n; ++i) {
        const float m_scale = m_scales[i / whet::kMomentBlock], v_scale = v_scales[i / whet::kMomentBlock];
        const float found_m = decoded_moment(m[i], 127, m_scale), found_v = decoded_moment(v[i], 255, v_scale);
        const float step_m = std::max(std::fabs(right_m[i]) / 8.0f, decoded_moment(1, 127, m_scale));
        const float step_v = std::max(right_v[i] / 8.0f, decoded_moment(1, 255, v_scale));
        expect(std::fabs(right_m[i]) <= m_scale && right_v[i] <= v_scale, "adamw_8bit, %zu: scales", n);
        expect(std::fabs(found_m - right_m[i]) <= 1.001f * step_m, "adamw_8bit, %zu: m[%zu]", n, i);
        expect(std::fabs(found_v - right_v[i]) <= 1.001f * step_v, "adamw_8bit, %zu: v[%zu]", n, i);
        expect((found_v > 0.0f) == (right_v[i] > 0.0f), "adamw_8bit, %zu: v[%zu] is above 0", n, i);
    }
    add_to_hash(p);
    add_to_hash(m);
    add_to_hash(v);
}

// ---------------------------------------------------------------- attention

struct AttentionShape {
    size_t n_queries, n_keys, head_dim, group;
    int64_t window;
    float cap = 0.0f;
    float sink = -INFINITY;  // of head 0; the next ones have twice, three times ... as much
};

// One sequence whose keys are every other token, in reverse: forward with log-sum-exp, and backward.
template <class T, class Forward, class Backward>
void test_attention(const char* what, const AttentionShape& s, Forward forward, Backward backward, double tolerance,
                    T (*to)(float), float (*from)(T)) {
    const size_t rows = s.n_queries * s.group, d = s.head_dim, tokens = 2 * s.n_keys;
    const auto typed = [&](const std::vector<float>& x) {
        std::vector<T> y(x.size());
        for (size_t i = 0; i < x.size(); ++i) y[i] = to(x[i]);
        return y;
    };
    const std::vector<float> q = narrow_normal(rows * d, 1), k = narrow_normal(tokens * d, 2),
                             v = narrow_normal(tokens * d, 3);
    const std::vector<float> grad = narrow_normal(rows * d, 4);
    const std::vector<T> tq = typed(q), tk = typed(k), tv = typed(v), tgrad = typed(grad);
    std::vector<int64_t> key_rows(s.n_keys);
    for (size_t j = 0; j < s.n_keys; ++j) key_rows[j] = static_cast<int64_t>(tokens - 1 - 2 * j);
    std::vector<T> out(rows * d), grad_q(rows * d);
    std::vector<float> lse(rows), grad_k(s.n_keys * d), grad_v(s.n_keys * d);
    const auto signed_of = [](size_t n) { return static_cast<ptrdiff_t>(n); };

    whet::AttentionBackwardTask task{};
    task.q = tq.data(), task.k = tk.data(), task.v = tv.data(), task.out = out.data();
    task.q_token = task.out_token = signed_of(s.group * d), task.q_head = task.out_head = signed_of(d);
    task.k_token = task.v_token = signed_of(d);
    task.n_queries = signed_of(s.n_queries), task.kv_group = signed_of(s.group), task.head_dim = signed_of(d);
    task.n_keys = signed_of(s.n_keys), task.position = task.n_keys - task.n_queries;
    task.window = s.window, task.causal = true, task.block_size = 64, task.scale = 0.3f;
    task.softcap = s.cap;
    std::vector<float> sinks(s.group);
    for (size_t i = 0; i < s.group; ++i) sinks[i] = s.sink * static_cast<float>(i + 1);
    task.sinks = s.sink == -INFINITY ? nullptr : sinks.data();
    task.key_rows = key_rows.data(), task.lse = lse.data(), task.lse_token = task.kv_group;
    std::vector<float> scratch(kernels().attention_scratch(task) / sizeof(float));
    task.scratch = scratch.data();
    forward(task);
    std::vector<float> backward_scratch(kernels().attention_backward_scratch(task) / sizeof(float));
    task.scratch = backward_scratch.data();
    task.grad_out = tgrad.data(), task.grad_q = grad_q.data();
    task.grad_k = grad_k.data(), task.grad_v = grad_v.data();
    backward(task);

    std::vector<double> right_out(rows * d), right_q(rows * d), right_k(s.n_keys * d), right_v(s.n_keys * d);
    const double ln2 = 0.693147180559945309, scale = double(0.3f);
    double terms_q = 0.0, terms_k = 0.0;
    for (size_t row = 0; row < rows; ++row) {
        const auto end = static_cast<int64_t>(s.n_keys - s.n_queries + row / s.group) + 1;
        const int64_t begin = end > s.window ? end - s.window : 0;
        std::vector<double> p(s.n_keys, 0.0), slopes(s.n_keys, 1.0);
        double total = std::exp(double{sinks[row % s.group]}), delta = 0.0;
        for (int64_t j = begin; j < end; ++j) {
            double score = 0.0;
            for (size_t c = 0; c < d; ++c) score += double(q[row * d + c]) * k[size_t(key_rows[j]) * d + c];
            score *= scale;
            if (s.cap > 0.0f) {
                const double bounded = std::tanh(score / s.cap);
                score = s.cap * bounded, slopes[j] = 1.0 - bounded * bounded;
            }
            total += p[j] = std::exp2(score);
        }
        for (int64_t j = begin; j < end; ++j) {
            p[j] /= total;
            for (size_t c = 0; c < d; ++c) right_out[row * d + c] += p[j] * v[size_t(key_rows[j]) * d + c];
        }
        for (size_t c = 0; c < d; ++c) delta += right_out[row * d + c] * grad[row * d + c];
        for (int64_t j = begin; j < end; ++j) {
            double dp = 0.0;
            for (size_t c = 0; c < d; ++c) dp += double(grad[row * d + c]) * v[size_t(key_rows[j]) * d + c];
            const double factor = slopes[j] * scale * ln2;
            const double ds = p[j] * (dp - delta) * factor, term = p[j] * dp * factor;
            for (size_t c = 0; c < d; ++c) {
                terms_q += std::pow(term * k[size_t(key_rows[j]) * d + c], 2);
                terms_k += std::pow(term * q[row * d + c], 2);
                right_q[row * d + c] += ds * k[size_t(key_rows[j]) * d + c];
                right_k[size_t(j) * d + c] += ds * q[row * d + c];
                right_v[size_t(j) * d + c] += p[j] * grad[row * d + c];
            }
        }
    }
    std::vector<float> wide_out(rows * d), wide_q(rows * d);
    for (size_t i = 0; i < rows * d; ++i) wide_out[i] = from(out[i]), wide_q[i] = from(grad_q[i]);
    const size_t n = s.n_keys;
    std::printf("%s: %zu queries, %zu keys, %zu x %zu, window %lld\n", what, s.n_queries, n, s.group, d,
                static_cast<long long>(s.window));
    expect_close("out", n, wide_out, right_out, tolerance);
    // With one key both are zero: dp - delta is a difference of equal numbers.
    const bool zero = s.n_keys == 1;
    expect_close("grad q", n, wide_q, right_q, tolerance, zero ? std::sqrt(terms_q) : 1e-15);
    expect_close("grad k", n, grad_k, right_k, tolerance, zero ? std::sqrt(terms_k) : 1e-15);
    expect_close("grad v", n, grad_v, right_v, tolerance);
}

uint16_t to_bf16(float x) {
    uint16_t y;
    kernels().bf16_from_f32(&x, 1, &y);
    return y;
}
float from_bf16(uint16_t x) {
    float y;
    kernels().f32_from_bf16(&x, 1, &y);
    return y;
}

// ---------------------------------------------------------------- over the pool

constexpr size_t kHeads = 4, kKvHeads = 2, kHeadDim = 32;

struct Packed {
    std::vector<int64_t> q_offsets, k_offsets, key_rows;
    std::vector<float> q, k, v, grad;  // (tokens, heads, head_dim)
};
struct PackedResult {
    std::vector<float> out, grad_q, grad_k, grad_v;
};

PackedResult forward_and_backward(const Packed& x) {
    const size_t tokens = x.q.size() / (kHeads * kHeadDim);
    PackedResult y{std::vector<float>(x.q.size()), std::vector<float>(x.q.size()), std::vector<float>(x.k.size()),
                   std::vector<float>(x.k.size())};
    std::vector<float> lse(tokens * kHeads);
    std::vector<int64_t> reader_offsets(1, 0), readers;
    for (size_t token = 0; token < tokens; ++token) {
        for (size_t i = 0; i < x.key_rows.size(); ++i) {
            if (x.key_rows[i] == static_cast<int64_t>(token)) readers.push_back(static_cast<int64_t>(i));
        }
        reader_offsets.push_back(static_cast<int64_t>(readers.size()));
    }
    whet::TrainingAttention a;
    a.n_tokens = static_cast<int64_t>(tokens), a.n_heads = kHeads, a.n_kv_heads = kKvHeads, a.head_dim = kHeadDim;
    a.n_sequences = static_cast<int64_t>(x.q_offsets.size()) - 1;
    a.q_offsets = x.q_offsets.data(), a.k_offsets = x.k_offsets.data(), a.key_rows = x.key_rows.data();
    a.window = whet::kNoWindow, a.scale = 0.2;
    a.q = {x.q.data(), kHeads * kHeadDim, kHeadDim};
    a.k = {x.k.data(), kKvHeads * kHeadDim, kHeadDim}, a.v = {x.v.data(), kKvHeads * kHeadDim, kHeadDim};
    a.out = y.out.data(), a.lse = lse.data();
    whet::attention_forward(a);
    whet::attention_backward(a, {.out = x.grad.data(),
                                 .q = y.grad_q.data(),
                                 .k = y.grad_k.data(),
                                 .v = y.grad_v.data(),
                                 .reader_offsets = reader_offsets.data(),
                                 .readers = readers.data()});
    return y;
}

// A prompt shared by two completions and stored once, against separate sequences: bit-identical results, and gradients
// of the prompt that are sums over its sequences.
void test_shared_prompt(size_t n_prompt, size_t n_first, size_t n_second) {
    const size_t tokens = n_prompt + n_first + n_second, q_row = kHeads * kHeadDim, k_row = kKvHeads * kHeadDim;
    const size_t starts[] = {0, n_prompt, n_prompt + n_first, tokens};
    Packed all{{0},
               {0},
               {},
               normal(tokens * q_row, 1),
               normal(tokens * k_row, 2),
               normal(tokens * k_row, 3),
               normal(tokens * q_row, 4)};
    std::vector<float> right_out(tokens * q_row);
    std::vector<double> right_q(tokens * q_row), right_k(tokens * k_row), right_v(tokens * k_row);
    for (size_t s = 0; s < 3; ++s) {
        std::vector<size_t> rows;  // tokens of the sequence: the prompt's, then its completion's
        for (size_t token = 0; s > 0 && token < n_prompt; ++token) rows.push_back(token);
        const size_t first = rows.size();
        for (size_t token = starts[s]; token < starts[s + 1]; ++token) rows.push_back(token);
        all.key_rows.insert(all.key_rows.end(), rows.begin(), rows.end());
        all.q_offsets.push_back(static_cast<int64_t>(starts[s + 1]));
        all.k_offsets.push_back(static_cast<int64_t>(all.key_rows.size()));
        const auto n = static_cast<int64_t>(rows.size());
        Packed own{{0, n}, {0, n}, {}, {}, {}, {}, std::vector<float>(rows.size() * q_row)};
        for (size_t i = 0; i < rows.size(); ++i) {
            own.key_rows.push_back(static_cast<int64_t>(i));
            const auto take = [&](const std::vector<float>& from, size_t width, std::vector<float>& to) {
                to.insert(to.end(), &from[rows[i] * width], &from[rows[i] * width] + width);
            };
            take(all.q, q_row, own.q), take(all.k, k_row, own.k), take(all.v, k_row, own.v);
            for (size_t c = 0; i >= first && c < q_row; ++c) own.grad[i * q_row + c] = all.grad[rows[i] * q_row + c];
        }
        const PackedResult y = forward_and_backward(own);
        for (size_t i = 0; i < rows.size(); ++i) {
            for (size_t c = 0; i >= first && c < q_row; ++c) {
                right_out[rows[i] * q_row + c] = y.out[i * q_row + c];
                right_q[rows[i] * q_row + c] = y.grad_q[i * q_row + c];
            }
            for (size_t c = 0; c < k_row; ++c) {
                right_k[rows[i] * k_row + c] += y.grad_k[i * k_row + c];
                right_v[rows[i] * k_row + c] += y.grad_v[i * k_row + c];
            }
        }
    }
    whet::set_num_threads(1);
    const PackedResult serial = forward_and_backward(all);
    whet::set_num_threads(3, kOversubscribe);
    const PackedResult threaded = forward_and_backward(all);
    const bool same_bits = serial.out == right_out && serial.out == threaded.out && serial.grad_q == threaded.grad_q &&
                           serial.grad_k == threaded.grad_k && serial.grad_v == threaded.grad_v;
    expect(same_bits, "packed attention, %zu tokens: the same bits", tokens);
    expect_close("packed attention, grad q", tokens, serial.grad_q, right_q, 1e-5);
    expect_close("packed attention, grad k", tokens, serial.grad_k, right_k, 1e-5);
    expect_close("packed attention, grad v", tokens, serial.grad_v, right_v, 1e-5);
}

// The first steps of AdamW on a constant gradient have the size of the learning rate for any beta1 and beta2.
void test_bias_correction(size_t n) {
    std::vector<float> p(n, 1.0f), m(n), v(n);
    const std::vector<float> grad(n, -0.25f);
    for (int t = 1; t <= 3; ++t) {
        whet::adamw({.lr = 0.125,
                     .beta1 = 0.9,
                     .beta2 = 0.999,
                     .eps = 0.0,
                     .weight_decay = 0.0,
                     .t = double(t),
                     .grad_scale = 2.0},
                    n, p.data(), grad.data(), m.data(), v.data());
        expect_close("adamw, bias correction", n, p, std::vector<double>(n, 1.0 + 0.125 * t), 1e-6);
    }
}

}  // namespace

int main() {
    return run_tests([] {
        for (const size_t n : {1, 2, 15, 16, 17, 33, 130, 576}) {
            for (const size_t m : {1, 3, 4, 9}) test_rounded_linear(m, n, n + 5);
            test_rms_norm(n);
            test_swiglu(n);
            test_clamped_swiglu(n);
            test_adamw(n);
            test_adamw_8bit(n);
            for (const size_t token : {size_t{0}, n - 1, n}) test_token_logprobs(n, token);
        }
        constexpr int64_t kAll = INT64_MAX;
        const AttentionShape shapes[] = {{1, 1, 8, 1, kAll},
                                         {7, 7, 8, 3, kAll},
                                         {5, 40, 16, 2, kAll},
                                         {33, 33, 40, 3, 6},
                                         {70, 70, 64, 1, kAll},
                                         {3, 129, 64, 3, kAll},
                                         {66, 131, 64, 3, 50},
                                         {20, 90, 128, 2, kAll},
                                         {9, 65, 256, 1, kAll},
                                         {33, 33, 40, 3, 6, 1.0f},
                                         {70, 70, 64, 1, kAll, 2.5f},
                                         {33, 33, 40, 3, 6, 0, 2},
                                         {70, 70, 64, 3, kAll, 2.5f, -1},
                                         {5, 40, 16, 2, kAll, 0, -60},
                                         {5, 40, 16, 2, kAll, 0, 9}};
        for (const AttentionShape& shape : shapes) {
            test_attention<float>(
                "attention_f32", shape, kernels().attention_f32, kernels().attention_backward_f32, 1e-5,
                +[](float x) { return x; }, +[](float x) { return x; });
            test_attention<uint16_t>("attention_bf16", shape, kernels().attention_bf16,
                                     kernels().attention_backward_bf16, 2e-2, to_bf16, from_bf16);
        }
        test_shared_prompt(1, 1, 2);
        test_shared_prompt(70, 5, 90);
        test_bias_correction(200000);
        test_rounding(200000);
    });
}
