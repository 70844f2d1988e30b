#include "engine/experts.h"

#include <algorithm>
#include <cmath>

#include "engine/activation.h"
#include "engine/scratch.h"
#include "engine/transformer.h"
#include "kernels/dispatch.h"
#include "runtime/ceil_div.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

size_t up_to_block(size_t rows) { return ceil_div(rows, kRowBlock) * kRowBlock; }

}  // namespace

size_t Choice::most_rows(const ModelConfig& config, size_t n_tokens) {
    const size_t rows = n_tokens * config.n_used_experts;
    return up_to_block(rows + std::min(rows, config.n_experts) * (kRowBlock - 1));
}

void Choice::take(Arena& arena, size_t max_tokens) {
    const size_t n = max_tokens * config_.n_used_experts, n_rows = most_rows(config_, max_tokens);
    probabilities = arena.take<float>(max_tokens * config_.n_experts);
    weights = arena.take<float>(n);
    chosen = arena.take<int32_t>(n), rows = arena.take<int32_t>(n);
    pairs = arena.take<int32_t>(n_rows), tokens = arena.take<int32_t>(n_rows);
    next_ = arena.take<int32_t>(config_.n_experts);
    groups.reserve(config_.n_experts);
}

void Choice::choose(const LayerWeights& w, const float* x, size_t n, const uint16_t* given, size_t ld) {
    const size_t n_experts = config_.n_experts;
    linear(w.router.parts, x, false, config_.hidden_dim, n, w.router_bias.empty() ? nullptr : w.router_bias.data(),
           probabilities, n_experts);
    for_rows(n, 16 * n_experts, [&](size_t i) {
        choose_of_token(w, i, given == nullptr || given[i * ld] == kOwnChoice ? nullptr : given + i * ld);
    });
    group(n);
}

// The experts of a token, and their weights. Replaces the logits by probabilities.
void Choice::choose_of_token(const LayerWeights& w, size_t token, const uint16_t* given) {
    const size_t n = config_.n_experts, k = config_.n_used_experts;
    float* p = probabilities + token * n;
    int32_t* own = chosen + token * k;
    if (config_.router == Router::kSoftmax) {
        kernels().softmax_f32(p, n, 1.0f, p);
    } else {
        for (size_t e = 0; e < n; ++e) p[e] = static_cast<float>(sigmoid(p[e]));
    }
    const auto key = [&](size_t e) { return w.router_correction.empty() ? p[e] : p[e] + w.router_correction[e]; };
    size_t found = 0;
    for (size_t e = 0; e < n; ++e) {  // insertion into the k best: of equal experts, the first
        if (found == k && !(key(e) > key(static_cast<size_t>(own[k - 1])))) continue;
        size_t at = found < k ? found++ : k - 1;
        for (; at > 0 && key(e) > key(static_cast<size_t>(own[at - 1])); --at) own[at] = own[at - 1];
        own[at] = static_cast<int32_t>(e);
    }
    if (given != nullptr) {
        const auto is_given = [&](int32_t e) { return std::find(given, given + k, e) != given + k; };
        if (!std::all_of(own, own + k, is_given)) n_replaced.fetch_add(1, std::memory_order_relaxed);
        std::copy_n(given, k, own);
    }
    double sum = config_.router_eps;
    for (size_t j = 0; j < k; ++j) sum += p[own[j]];
    const double factor = config_.router_scale / (config_.router_normalised ? sum : 1.0);
    for (size_t j = 0; j < k; ++j) weights[token * k + j] = static_cast<float>(p[own[j]] * factor);
}

void Choice::group(size_t n) {
    const size_t n_chosen = n * config_.n_used_experts;
    std::fill_n(next_, config_.n_experts, 0);
    for (size_t i = 0; i < n_chosen; ++i) ++next_[chosen[i]];
    groups.clear();
    size_t first = 0;
    for (size_t e = 0; e < config_.n_experts; ++e) {
        const auto count = static_cast<size_t>(next_[e]);
        if (count > 0) groups.push_back({e, first, count});
        next_[e] = static_cast<int32_t>(first);
        const size_t end = first + count;
        first = up_to_block(end);
        std::fill(pairs + end, pairs + first, -1);
        std::fill(tokens + end, tokens + first, -1);
    }
    for (size_t i = 0; i < n_chosen; ++i) {
        const int32_t row = rows[i] = next_[chosen[i]]++;
        pairs[row] = static_cast<int32_t>(i);
        tokens[row] = static_cast<int32_t>(i / config_.n_used_experts);
    }
}

Experts::Experts(const ModelConfig& config, size_t max_rows) : config_(config), choice_(config) {
    if (config.n_experts == 0) return;
    const size_t rows = Choice::most_rows(config, max_rows);
    const auto parts = [&] {
        choice_.take(arena_, max_rows);
        up_ = arena_.take<float>(rows * config.expert_up_dim());
        down_ = arena_.take<float>(rows * config.hidden_dim);
        own_rows_ = arena_.take<int32_t>(rows);
    };
    parts();
    arena_.allocate();
    parts();
    groups_.reserve(config.n_experts);
}

void Experts::group(const Matrix& w) {
    groups_.clear();
    for (const auto& [expert, first, rows] : choice_.groups) {
        groups_.push_back({parts_of(w, expert, config_.n_experts), first, rows});
    }
}

// y[r] += B (A x[x_rows[r]]) for the rows r of experts with adapters. A thread computes all rows of an expert: the
// products are small.
void Experts::adapt(const InputToken* tokens, size_t layer, Target target, const int32_t* x_rows, const float* x,
                    size_t ldx, float* y, size_t ldy) const {
    auto task = [&](size_t i) {
        const auto& [expert, first, rows] = choice_.groups[i];
        const auto adapter_of = [&](size_t row) { return tokens[choice_.tokens[row]].adapter; };
        for (size_t begin = first, end; begin < first + rows; begin = end) {
            const Adapter* adapter = adapter_of(begin);
            const size_t most = std::min(first + rows, begin + kAdapterRows);
            for (end = begin + 1; end < most && adapter_of(end) == adapter; ++end) {
            }
            const LowRank* low = adapter == nullptr ? nullptr : adapter->find(layer, target, expert);
            if (low == nullptr) continue;
            const size_t k = low->a.front().k();
            float* gathered = scratch<float>(kAdapterRows * (k + low->ranks()), Scratch::kRuns);
            for (size_t row = begin; row < end; ++row) {
                std::copy_n(x + static_cast<size_t>(x_rows[row]) * ldx, k, gathered + (row - begin) * k);
            }
            low->add(gathered, k, end - begin, gathered + kAdapterRows * k, y + begin * ldy, ldy);
        }
    };
    parallel_for(choice_.groups.size(), task);
}

void Experts::add(const LayerWeights& w, const InputToken* tokens, size_t layer, const float* x, size_t n, float* out) {
    const size_t d = config_.hidden_dim, width = config_.expert_up_dim(), k = config_.n_used_experts;
    const bool has_adapters =
        kIsComplete && std::any_of(tokens, tokens + n, [](const InputToken& each) { return each.adapter != nullptr; });
    choice_.choose(w, x, n);
    const auto add_bias = [&](const Matrix& matrix, size_t expert, float factor, float* y) {
        const float* bias = bias_of(matrix, expert, config_.n_experts);
        if (bias != nullptr) kernels().blend_f32(bias, matrix.bias.size() / config_.n_experts, factor, 1.0f, y);
    };
    group(w.experts_up);
    linear_groups(groups_, choice_.tokens, x, d, up_, width);
    if (has_adapters) adapt(tokens, layer, Target::kExpertsUp, choice_.tokens, x, d, up_, width);
    const size_t rows = groups_.back().first + groups_.back().rows;
    for_rows(rows, 2 * width, [&](size_t r) {
        own_rows_[r] = choice_.tokens[r] < 0 ? -1 : static_cast<int32_t>(r);
        if (choice_.tokens[r] < 0) return;
        float* const gate = up_ + r * width;
        add_bias(w.experts_up, choice_.expert_of(r), 1.0f, gate);
        activate(config_, gate, gate + config_.expert_dim, config_.expert_dim, gate);
    });
    group(w.experts_down);
    linear_groups(groups_, own_rows_, up_, width, down_, d);
    if (has_adapters) adapt(tokens, layer, Target::kExpertsDown, own_rows_, up_, width, down_, d);
    for_rows(n, k * d, [&](size_t i) {
        for (size_t j = i * k; j < (i + 1) * k; ++j) {
            kernels().blend_f32(down_ + static_cast<size_t>(choice_.rows[j]) * d, d, choice_.weights[j], 1.0f,
                                out + i * d);
            add_bias(w.experts_down, static_cast<size_t>(choice_.chosen[j]), choice_.weights[j], out + i * d);
        }
    });
}

}  // namespace whet
