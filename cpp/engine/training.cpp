#include "engine/training.h"

#include <algorithm>
#include <cmath>

#include "kernels/dispatch.h"
#include "runtime/ceil_div.h"
#include "runtime/split.h"

namespace whet {
namespace {

constexpr size_t kTaskElements = 16384;

// Rough estimate in nanoseconds on one core.
double work_of(size_t elements) { return static_cast<double>(elements) * 0.3; }

size_t rows_per_task(size_t n) { return std::max<size_t>(1, kTaskElements / std::max<size_t>(1, n)); }

// The kernel of this type of gradient.
template <class T, class F32, class BF16>
auto kernel_of(F32 f32, BF16 bf16) {
    if constexpr (sizeof(T) == sizeof(float)) {
        return f32;
    } else {
        return bf16;
    }
}

// Column of a token in a tile [first, first + n) of the vocabulary; n or more if the token is not in it.
size_t column_of(int64_t token, size_t first, size_t n) {
    const auto id = static_cast<size_t>(token);
    return id < first ? n : id - first;
}

}  // namespace

void bf16_from_f32(const float* x, size_t n, uint16_t* out) {
    parallel_split(n, 65536, work_of(n),
                   [&](size_t begin, size_t end) { kernels().bf16_from_f32(x + begin, end - begin, out + begin); });
}

void rounded_linear(bool by_columns, const float* weight, size_t n, size_t k, const uint16_t* x, size_t m,
                    const float* bias, uint16_t* out) {
    // Columns of out per task: many, for long sequential reads, but few enough to balance the threads.
    const size_t columns = std::clamp<size_t>(n / 8 / 64 * 64, 64, 1024);
    const auto kernel = by_columns ? kernels().rounded_linear_columns : kernels().rounded_linear_rows;
    parallel_split(n, columns, work_of(n * k), [&](size_t begin, size_t end) {
        const size_t count = end - begin;
        std::vector<float> sums(m * count);
        kernel(weight + begin * (by_columns ? 1 : k), by_columns ? n : k, count, k, x, k, m, sums.data(), count);
        for (size_t i = 0; i < m; ++i) {
            float* row = sums.data() + i * count;
            for (size_t j = 0; bias != nullptr && j < count; ++j) row[j] += bias[begin + j];
            kernels().bf16_from_f32(row, count, out + i * n + begin);
        }
    });
}

void rms_norm_to_bf16(const float* x, const float* weight, size_t rows, size_t n, double eps, uint16_t* out) {
    parallel_split(rows, rows_per_task(n), work_of(rows * n), [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) kernels().rms_norm_f32_bf16(x + i * n, weight, n, eps, out + i * n);
    });
}

template <class T, class Grad>
void rms_norm_backward(const T* x, const float* weight, const Grad* grad, size_t rows, size_t n, double eps, T* grad_x,
                       float* grad_weight) {
    const Kernels& k = kernels();
    const auto kernel =
        kernel_of<T>(kernel_of<Grad>(k.rms_norm_backward_f32, k.rms_norm_backward_f32_bf16), k.rms_norm_backward_bf16);
    const size_t chunk = std::max<size_t>(64, rows_per_task(n)), chunks = ceil_div(rows, chunk);
    std::vector<float> sums(chunks * n);
    parallel_split(rows, chunk, work_of(rows * n), [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) {
            kernel(x + i * n, weight, grad + i * n, n, eps, grad_x + i * n, sums.data() + begin / chunk * n);
        }
    });
    for (size_t i = 0; i < n; ++i) {
        double sum = 0.0;
        for (size_t p = 0; p < chunks; ++p) sum += sums[p * n + i];
        grad_weight[i] = static_cast<float>(sum);
    }
}
template void rms_norm_backward(const float*, const float*, const float*, size_t, size_t, double, float*, float*);
template void rms_norm_backward(const float*, const float*, const uint16_t*, size_t, size_t, double, float*, float*);
template void rms_norm_backward(const uint16_t*, const float*, const uint16_t*, size_t, size_t, double, uint16_t*,
                                float*);

template <class T>
void swiglu_backward(const T* gate, const T* up, const T* grad, size_t n, T* grad_gate, T* grad_up) {
    const auto kernel = kernel_of<T>(kernels().swiglu_backward_f32, kernels().swiglu_backward_bf16);
    parallel_split(n, kTaskElements, work_of(n), [&](size_t begin, size_t end) {
        kernel(gate + begin, up + begin, grad + begin, end - begin, grad_gate + begin, grad_up + begin);
    });
}
template void swiglu_backward(const float*, const float*, const float*, size_t, float*, float*);
template void swiglu_backward(const uint16_t*, const uint16_t*, const uint16_t*, size_t, uint16_t*, uint16_t*);

template <class T>
void softcap_backward(const float* y, size_t n, float cap, T* grad) {
    const auto kernel = kernel_of<T>(kernels().softcap_backward_f32, kernels().softcap_backward_bf16);
    parallel_split(n, kTaskElements, work_of(n),
                   [&](size_t begin, size_t end) { kernel(y + begin, end - begin, cap, grad + begin); });
}
template void softcap_backward(const float*, size_t, float, float*);
template void softcap_backward(const float*, size_t, float, uint16_t*);

TokenLogprobs::TokenLogprobs(const int64_t* tokens, size_t rows, double temperature, bool with_entropy)
    : tokens_(tokens, tokens + rows), temperature_(temperature), with_entropy_(with_entropy), sums_(rows) {}

void TokenLogprobs::add(const float* logits, size_t first_row, size_t rows, size_t first, size_t n) {
    parallel_split(rows, rows_per_task(n), work_of(rows * n), [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) {
            const size_t row = first_row + i;
            kernels().token_logprobs_add_f32(logits + i * n, n, column_of(tokens_[row], first, n), temperature_,
                                             with_entropy_, &sums_[row]);
        }
    });
}

void TokenLogprobs::end(float* logprobs, float* lse, float* entropy) const {
    for (size_t row = 0; row < sums_.size(); ++row) {
        kernels().token_logprobs_end(sums_[row], temperature_, logprobs + row, lse + row,
                                     with_entropy_ ? entropy + row : nullptr);
    }
}

template <class T>
void token_logprobs_backward(const TokenLogprobsTile& t, T* out) {
    const auto kernel = kernel_of<T>(kernels().token_logprobs_backward_f32, kernels().token_logprobs_backward_bf16);
    parallel_split(t.rows, rows_per_task(t.n), work_of(t.rows * t.n), [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) {
            kernel(t.logits + i * t.n, t.n, column_of(t.tokens[i], t.first, t.n), t.temperature, t.lse[i],
                   t.logprobs[i], t.grads[i], out + i * t.n);
        }
    });
}
template void token_logprobs_backward(const TokenLogprobsTile&, float*);
template void token_logprobs_backward(const TokenLogprobsTile&, uint16_t*);

namespace {

AdamWStep step_of(const AdamW& settings) {
    const auto& [lr, beta1, beta2, eps, weight_decay, t, grad_scale] = settings;
    return {.keep = static_cast<float>(1.0 - lr * weight_decay),
            .beta2 = static_cast<float>(beta2),
            .toward = static_cast<float>(1.0 - beta1),
            .square = static_cast<float>(1.0 - beta2),
            .root = static_cast<float>(std::sqrt(1.0 - std::pow(beta2, t))),
            .eps = static_cast<float>(eps),
            .step = static_cast<float>(lr / (1.0 - std::pow(beta1, t))),
            .grad_scale = static_cast<float>(grad_scale)};
}

}  // namespace

void adamw(const AdamW& settings, size_t n, float* p, const float* grad, float* m, float* v) {
    const AdamWStep step = step_of(settings);
    parallel_split(n, 65536, work_of(n), [&](size_t begin, size_t end) {
        kernels().adamw_f32(step, end - begin, p + begin, grad + begin, m + begin, v + begin);
    });
}

void adamw_8bit(const AdamW& settings, size_t n, float* p, const float* grad, const Moments8& moments, uint64_t seed) {
    const AdamWStep step = step_of(settings);
    const auto& [m, v, m_scales, v_scales] = moments;
    parallel_split(n, 65536, 2.0 * work_of(n), [&](size_t begin, size_t end) {
        for (size_t at = begin; at < end; at += kMomentBlock) {
            const size_t block = at / kMomentBlock;
            kernels().adamw_8bit(step, seed, at, std::min(kMomentBlock, end - at), p + at, grad + at, m + at, v + at,
                                 m_scales + block, v_scales + block);
        }
    });
}

}  // namespace whet
