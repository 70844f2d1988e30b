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

double sum_of(const float* z, size_t n) {
    double sum = 0.0;
    for (size_t i = 0; i < n; ++i) sum += z[i];
    return sum;
}

}  // namespace

void TokenLogprobsHead::forward(const float* hidden, const int64_t* tokens, size_t rows, size_t k,
                                const TokenSets& kept, double temperature, const TokenValues& values) {
    tokens_.assign(tokens, tokens + rows * k);
    kept_offsets_.assign(kept.offsets.begin(), kept.offsets.end());
    kept_words_.assign(kept.words.begin(), kept.words.end());
    temperature_ = temperature, k_ = k, has_mean_ = values.mean != nullptr;
    std::vector<TokenSums> sums(rows);
    std::vector<float> others(rows * k);  // logits of the k tokens
    std::vector<double> totals(has_mean_ ? rows : 0);
    const auto logits = head_.allocate(rows);
    const ProductRows x = head_.convert(hidden, rows);
    for (const OutputRange& range : head_.ranges()) {
        compute_logits(range, x, rows, logits.get());
        for_rows(rows, 4 * range.n, [&](size_t i) {
            const float* z = logits.get() + i * range.n;
            kernels().token_logprobs_add_f32(z, range.n, column_of(tokens_[i * k], range), temperature,
                                             values.entropy != nullptr, &sums[i]);
            for (size_t j = 1; j < k; ++j) {
                const size_t column = column_of(tokens_[i * k + j], range);
                if (column < range.n) others[i * k + j] = z[column];
            }
            if (has_mean_) totals[i] += sum_of(z, range.n);
        });
    }
    logprobs_.resize(rows), lse_.resize(rows), entropy_.resize(values.entropy == nullptr ? 0 : rows);
    for (size_t i = 0; i < rows; ++i) {
        float entropy = 0.0f;
        kernels().token_logprobs_end(sums[i], temperature, &logprobs_[i], &lse_[i],
                                     values.entropy == nullptr ? nullptr : &entropy);
        if (values.entropy != nullptr) entropy_[i] = values.entropy[i] = entropy;
        const auto logprob = [&](double z) { return static_cast<float>(z / temperature - double{lse_[i]}); };
        values.logprobs[i * k] = logprobs_[i];
        for (size_t j = 1; j < k; ++j) values.logprobs[i * k + j] = logprob(others[i * k + j]);
        if (has_mean_) values.mean[i] = logprob(totals[i] / static_cast<double>(head_.vocab_size()));
    }
}

void TokenLogprobsHead::backward(const float* hidden, const TokenGradients& grads, float* grad_hidden) {
    const size_t rows = lse_.size(), k = k_;
    const auto logits = head_.allocate(rows), grad_logits = head_.allocate(rows);
    const ProductRows x = head_.convert(hidden, rows);
    const auto per_temperature = static_cast<float>(1.0 / temperature_);
    bool add = false;
    for (const OutputRange& range : head_.ranges()) {
        compute_logits(range, x, rows, logits.get());
        for_rows(rows, 4 * range.n, [&](size_t i) {
            const float* z = logits.get() + i * range.n;
            float* grad = grad_logits.get() + i * range.n;
            const float* g = grads.logprobs + i * k;
            const float mean = grads.mean == nullptr ? 0.0f : grads.mean[i];
            if (k == 1 && mean == 0.0f) {
                kernels().token_logprobs_backward_f32(z, range.n, column_of(tokens_[i], range), temperature_, lse_[i],
                                                      logprobs_[i], g[0], grad);
            } else {
                float total = mean;
                for (size_t j = 0; j < k; ++j) total += g[j];
                kernels().token_logprobs_backward_f32(z, range.n, range.n, temperature_, lse_[i], 0.0f, total, grad);
                for (size_t j = 0; j < k; ++j) {
                    const size_t column = column_of(tokens_[i * k + j], range);
                    if (column < range.n) grad[column] += g[j] * per_temperature;
                }
                const float each = mean * per_temperature / static_cast<float>(head_.vocab_size());
                for (size_t v = 0; mean != 0.0f && v < range.n; ++v) grad[v] += each;
            }
            if (grads.entropy != nullptr) {
                kernels().token_entropy_backward_f32(z, range.n, temperature_, lse_[i], entropy_[i], grads.entropy[i],
                                                     grad);
            }
        });
        head_.backward(range, logits.get(), grad_logits.get(), rows, grad_hidden, add);
        add = true;
    }
}

// logits (rows, range.n).
void TokenLogprobsHead::compute_logits(const OutputRange& range, ProductRows hidden, size_t rows, float* logits) const {
    head_.compute(range, hidden, rows, logits);
    const TokenSets kept{kept_offsets_, kept_words_};
    if (kept.is_empty()) return;
    for_rows(rows, range.n,
             [&](size_t i) { drop_logits(kept[i], head_.vocab_size(), range.first, range.n, logits + i * range.n); });
}

}  // namespace whet
