#include "learner/token_logprobs_head.h"

#include <algorithm>
#include <memory>

#include "kernels/dispatch.h"
#include "kernels/token_sums.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

// Column of a token in a range; range.n or more if the token is not in it.
size_t column_of(int64_t token, const OutputRange& range) {
    const auto id = static_cast<size_t>(token);
    return id < range.first ? range.n : id - range.first;
}

std::unique_ptr<float[]> new_logits(const std::vector<OutputRange>& ranges, size_t rows) {
    size_t most = 0;
    for (const OutputRange& range : ranges) most = std::max(most, range.n);
    return std::make_unique_for_overwrite<float[]>(rows * most);
}

}  // namespace

TokenLogprobsHead::TokenLogprobsHead(const Weights& weights, ProductType type)
    : weights_(weights), type_(type), ranges_(split_outputs(weights.output().parts)) {}

void TokenLogprobsHead::forward(const float* hidden, const int64_t* tokens, size_t rows, const TokenSets& kept,
                                double temperature, float* logprobs, float* entropy) {
    const size_t k = weights_.config().hidden_dim;
    tokens_.assign(tokens, tokens + rows);
    kept_offsets_.assign(kept.offsets.begin(), kept.offsets.end());
    kept_words_.assign(kept.words.begin(), kept.words.end());
    temperature_ = temperature;
    std::vector<TokenSums> sums(rows);
    const auto logits = new_logits(ranges_, rows);
    const ProductRows x = convert_rows(type_, hidden, k, rows, k, Scratch::kInputs);
    for (const OutputRange& range : ranges_) {
        compute_logits(range, x, rows, logits.get());
        for_rows(rows, 4 * range.n, [&](size_t i) {
            kernels().token_logprobs_add_f32(logits.get() + i * range.n, range.n, column_of(tokens_[i], range),
                                             temperature, entropy != nullptr, &sums[i]);
        });
    }
    logprobs_.resize(rows), lse_.resize(rows), entropy_.resize(entropy == nullptr ? 0 : rows);
    for (size_t i = 0; i < rows; ++i) {
        kernels().token_logprobs_end(sums[i], temperature, &logprobs_[i], &lse_[i],
                                     entropy == nullptr ? nullptr : &entropy_[i]);
    }
    std::copy(logprobs_.begin(), logprobs_.end(), logprobs);
    std::copy(entropy_.begin(), entropy_.end(), entropy);
}

void TokenLogprobsHead::backward(const float* hidden, const float* grad_logprobs, const float* grad_entropy,
                                 float* grad_hidden) {
    const size_t k = weights_.config().hidden_dim, rows = tokens_.size();
    const float cap = weights_.config().logits_softcap;
    const auto logits = new_logits(ranges_, rows), grads = new_logits(ranges_, rows);
    const ProductRows x = convert_rows(type_, hidden, k, rows, k, Scratch::kInputs);
    bool add = false;
    for (const OutputRange& range : ranges_) {
        compute_logits(range, x, rows, logits.get());
        for_rows(rows, 4 * range.n, [&](size_t i) {
            const float* z = logits.get() + i * range.n;
            float* grad = grads.get() + i * range.n;
            kernels().token_logprobs_backward_f32(z, range.n, column_of(tokens_[i], range), temperature_, lse_[i],
                                                  logprobs_[i], grad_logprobs[i], grad);
            if (grad_entropy != nullptr) {
                kernels().token_entropy_backward_f32(z, range.n, temperature_, lse_[i], entropy_[i], grad_entropy[i],
                                                     grad);
            }
            if (cap > 0.0f) kernels().softcap_backward_f32(z, range.n, cap, grad);
        });
        multiply_transposed(type_, range, grads.get(), range.n, rows, grad_hidden, k, add);
        add = true;
    }
}

// logits (rows, range.n).
void TokenLogprobsHead::compute_logits(const OutputRange& range, ProductRows hidden, size_t rows, float* logits) const {
    const float* bias = weights_.head.bias_or_null();
    multiply(type_, range, hidden, rows, bias == nullptr ? nullptr : bias + range.first, logits, range.n);
    const float cap = weights_.config().logits_softcap;
    const TokenSets kept{kept_offsets_, kept_words_};
    if (cap <= 0.0f && kept.is_empty()) return;
    for_rows(rows, range.n, [&](size_t i) {
        float* z = logits + i * range.n;
        if (cap > 0.0f) kernels().softcap_f32(z, range.n, cap, false, z);
        if (!kept.is_empty()) drop_logits(kept[i], weights_.config().vocab_size, range.first, range.n, z);
    });
}

}  // namespace whet
