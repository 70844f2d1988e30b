#include "learner/head_logits.h"

#include <algorithm>

#include "kernels/dispatch.h"
#include "runtime/thread_pool.h"

namespace whet {

HeadLogits::HeadLogits(const Weights& weights, ProductType type, size_t most_outputs)
    : weights_(weights), type_(type), ranges_(split_outputs(weights.output().parts, most_outputs)) {}

std::unique_ptr<float[]> HeadLogits::allocate(size_t rows) const {
    size_t most = 0;
    for (const OutputRange& range : ranges_) most = std::max(most, range.n);
    return std::make_unique_for_overwrite<float[]>(rows * most);
}

ProductRows HeadLogits::convert(const float* hidden, size_t rows, Scratch use) const {
    return convert_rows(type_, hidden, hidden_dim(), rows, hidden_dim(), use);
}

void HeadLogits::compute(const OutputRange& range, ProductRows hidden, size_t rows, float* logits) const {
    const float* bias = weights_.head.bias_or_null();
    multiply(type_, range, hidden, rows, bias == nullptr ? nullptr : bias + range.first, logits, range.n);
    const float cap = weights_.config().logits_softcap;
    if (cap <= 0.0f) return;
    for_rows(rows, range.n,
             [&](size_t i) { kernels().softcap_f32(logits + i * range.n, range.n, cap, false, logits + i * range.n); });
}

void HeadLogits::backward(const OutputRange& range, const float* logits, float* grads, size_t rows, float* grad_hidden,
                          bool add) const {
    const float cap = weights_.config().logits_softcap;
    if (cap > 0.0f) {
        for_rows(rows, range.n, [&](size_t i) {
            kernels().softcap_backward_f32(logits + i * range.n, range.n, cap, grads + i * range.n);
        });
    }
    multiply_transposed(type_, range, grads, range.n, rows, grad_hidden, hidden_dim(), add);
}

}  // namespace whet
