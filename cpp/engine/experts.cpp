#include "engine/experts.h"

#include <algorithm>
#include <cmath>

#include "engine/activation.h"
#include "kernels/dispatch.h"
#include "runtime/ceil_div.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

size_t up_to_block(size_t rows) { return ceil_div(rows, kRowBlock) * kRowBlock; }

// The parts of an expert.
std::span<const PackedWeight> parts_of(const Matrix& w, size_t expert, size_t n_experts) {
    const size_t n = w.parts.size() / n_experts;
    return {w.parts.data() + expert * n, n};
}

}  // namespace

Experts::Experts(const ModelConfig& config, size_t max_rows) : config_(config) {
    if (config.n_experts == 0) return;
    const size_t chosen = max_rows * config.n_used_experts, rows = most_rows(max_rows);
    const auto parts = [&] {
        logits_ = arena_.take<float>(max_rows * config.n_experts);
        weights_ = arena_.take<float>(chosen);
        up_ = arena_.take<float>(rows * config.expert_up_dim());
        down_ = arena_.take<float>(rows * config.hidden_dim);
        chosen_ = arena_.take<int32_t>(chosen), rows_ = arena_.take<int32_t>(chosen);
        x_rows_ = arena_.take<int32_t>(rows), own_rows_ = arena_.take<int32_t>(rows);
        counts_ = arena_.take<int32_t>(config.n_experts);
    };
    parts();
    arena_.allocate();
    parts();
    groups_.reserve(config.n_experts);
}

// Rows of n tokens' experts, each expert from the start of a block on.
size_t Experts::most_rows(size_t n) const {
    const size_t rows = n * config_.n_used_experts;
    return up_to_block(rows + std::min(rows, config_.n_experts) * (kRowBlock - 1));
}

// The experts of a token, the most probable first, and their weights. Replaces the logits by probabilities.
void Experts::choose(const LayerWeights& w, float* logits, int32_t* chosen, float* weights) const {
    const size_t n = config_.n_experts, k = config_.n_used_experts;
    if (config_.router == Router::kSoftmax) {
        kernels().softmax_f32(logits, n, 1.0f, logits);
    } else {
        for (size_t e = 0; e < n; ++e) {
            logits[e] = static_cast<float>(1 / (1 + std::exp(-static_cast<double>(logits[e]))));
        }
    }
    const auto key = [&](size_t e) {
        return w.router_correction.empty() ? logits[e] : logits[e] + w.router_correction[e];
    };
    size_t found = 0;
    for (size_t e = 0; e < n; ++e) {  // insertion into the k best: of equal experts, the first
        if (found == k && !(key(e) > key(static_cast<size_t>(chosen[k - 1])))) continue;
        size_t at = found < k ? found++ : k - 1;
        for (; at > 0 && key(e) > key(static_cast<size_t>(chosen[at - 1])); --at) chosen[at] = chosen[at - 1];
        chosen[at] = static_cast<int32_t>(e);
    }
    double sum = config_.router_eps;
    for (size_t j = 0; j < k; ++j) sum += logits[chosen[j]];
    const double factor = config_.router_scale / (config_.router_normalised ? sum : 1.0);
    for (size_t j = 0; j < k; ++j) weights[j] = static_cast<float>(logits[chosen[j]] * factor);
}

// Gives each token's experts rows, by expert and then by token.
void Experts::group(const LayerWeights& w, size_t n) {
    const size_t n_chosen = n * config_.n_used_experts;
    std::fill_n(counts_, config_.n_experts, 0);
    for (size_t i = 0; i < n_chosen; ++i) ++counts_[chosen_[i]];
    groups_.clear();
    size_t first = 0;
    for (size_t e = 0; e < config_.n_experts; ++e) {
        const auto rows = static_cast<size_t>(counts_[e]);
        if (rows > 0) groups_.push_back({parts_of(w.experts_up, e, config_.n_experts), first, rows});
        counts_[e] = static_cast<int32_t>(first);  // the next row of the expert
        const size_t end = first + rows;
        first = up_to_block(end);
        std::fill(x_rows_ + end, x_rows_ + first, -1);
        std::fill(own_rows_ + end, own_rows_ + first, -1);
    }
    for (size_t i = 0; i < n_chosen; ++i) {
        const int32_t row = rows_[i] = counts_[chosen_[i]]++;
        x_rows_[row] = static_cast<int32_t>(i / config_.n_used_experts);
        own_rows_[row] = row;
    }
}

void Experts::add(const LayerWeights& w, const float* x, size_t n, float* out) {
    const size_t d = config_.hidden_dim, f = config_.expert_dim, width = config_.expert_up_dim(),
                 n_experts = config_.n_experts, k = config_.n_used_experts;
    linear(w.router.parts, x, false, d, n, w.router_bias.empty() ? nullptr : w.router_bias.data(), logits_, n_experts);
    for_rows(n, 16 * n_experts,
             [&](size_t i) { choose(w, logits_ + i * n_experts, chosen_ + i * k, weights_ + i * k); });
    group(w, n);
    linear_groups(groups_, x_rows_, x, d, up_, width);
    const size_t rows = groups_.back().first + groups_.back().rows;
    for_rows(rows, 2 * width, [&](size_t r) {
        if (x_rows_[r] < 0) return;
        float *gate = up_ + r * width, *up = gate + f;
        if (config_.gated && config_.activation == Activation::kSilu) {
            return kernels().swiglu_f32(gate, up, f, false, gate);
        }
        activation_kernel(config_.activation)(gate, f, false, gate);
        for (size_t j = 0; config_.gated && j < f; ++j) gate[j] *= up[j];
    });
    for (RowGroup& group : groups_) {
        const auto expert = static_cast<size_t>(group.w.data() - w.experts_up.parts.data()) / group.w.size();
        group.w = parts_of(w.experts_down, expert, n_experts);
    }
    linear_groups(groups_, own_rows_, up_, width, down_, d);
    for_rows(n, k * d, [&](size_t i) {
        for (size_t j = 0; j < k; ++j) {
            kernels().blend_f32(down_ + static_cast<size_t>(rows_[i * k + j]) * d, d, weights_[i * k + j], 1.0f,
                                out + i * d);
        }
    });
}

}  // namespace whet
