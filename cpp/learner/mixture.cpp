// The experts of a mixture, in both directions, in tiles of rows and expert by expert.
//
// With the probabilities p of the experts, the experts K of a token, S = sum over K of p + router_eps if normalised,
// else 1, and the gradient dy of the result:
//
//   y = sum over K of w_j f_j(x),   w_j = scale p_j / S,   dw_j = f_j(x) . dy
//   dp_j = scale / S (dw_j - sum over i in K of dw_i p_i / S), or scale dw_j; 0 for the other experts
//   dz_e = p_e (dp_e - sum over K of p_j dp_j) of softmax;   dz_e = p_e (1 - p_e) dp_e of sigmoid
//
// The choice of K has no gradient, and the router and the matrices of the experts are frozen. Experts may have
// adapters, which get no gradient if the expert has no rows.
#include <algorithm>

#include "engine/activation.h"
#include "engine/scratch.h"
#include "kernels/dispatch.h"
#include "learner/learner.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

double dot(const float* x, const float* y, size_t n) {
    double sum = 0.0;
    for (size_t i = 0; i < n; ++i) sum += double{x[i]} * double{y[i]};
    return sum;
}

}  // namespace

// The experts of h_.
void Learner::choose_experts(size_t layer, const RowTile& tile) {
    const size_t ld = config_.n_token_experts();
    const uint16_t* given = nullptr;
    if (!batch_.experts.empty()) {
        given = batch_.experts.data() + tile.begin * ld + config_.n_moe_layers(layer) * config_.n_used_experts;
    }
    choice_.choose(weights_->layers[layer], h_.get(), tile.n(), given, ld);
}

// Copies the rows of x of the tokens of an expert.
void Learner::gather_expert_rows(const Choice::Group& group, const float* x, float* rows) const {
    const size_t d = config_.hidden_dim;
    for_rows(group.rows, d, [&](size_t i) {
        std::copy_n(x + static_cast<size_t>(choice_.tokens[group.first + i]) * d, d, rows + i * d);
    });
}

// The rows of an expert as a tile, in which the rows of each group of tokens follow each other.
Learner::RowTile Learner::tile_of(const Choice::Group& group, const RowTile& tile) const {
    RowTile rows{0, group.rows, {}};
    size_t first = 0, end = 0;
    for (const auto& of_tokens : tile.groups) {
        while (end < group.rows && static_cast<size_t>(choice_.tokens[group.first + end]) < of_tokens.second) ++end;
        if (end > first) rows.groups.emplace_back(first, end);
        first = end;
    }
    return rows;
}

// Adds expert_rows_, times the experts' weights if `weighted`, to the rows of y of the tokens of an expert.
void Learner::add_expert_rows(const Choice::Group& group, bool weighted, float* y) {
    const size_t d = config_.hidden_dim;
    for_rows(group.rows, d, [&](size_t i) {
        const size_t row = group.first + i;
        const float weight = weighted ? choice_.weights[choice_.pairs[row]] : 1.0f;
        kernels().blend_f32(expert_rows_.get() + i * d, d, weight, 1.0f,
                            y + static_cast<size_t>(choice_.tokens[row]) * d);
    });
}

// expert_up_ = W_up h of the tokens of an expert.
void Learner::expert_up(size_t layer, const Choice::Group& group, const RowTile& rows) {
    const size_t d = config_.hidden_dim, width = config_.expert_up_dim();
    const Matrix& w = weights_->layers[layer].experts_up;
    gather_expert_rows(group, h_.get(), expert_rows_.get());
    const ProductRows x = convert(expert_rows_.get(), d, group.rows, d);
    multiply(type_, parts_of(w, group.expert, config_.n_experts), x, group.rows,
             bias_of(w, group.expert, config_.n_experts), expert_up_.get(), width);
    add_adapters(adapters_at(layer, Target::kExpertsUp, group.expert), x, rows, expert_up_.get(), width);
}

// Adds the results of the experts of h_ to y.
void Learner::add_experts(size_t layer, const RowTile& tile, float* y) {
    const size_t d = config_.hidden_dim, f = config_.expert_dim, width = config_.expert_up_dim();
    choose_experts(layer, tile);
    for (const Choice::Group& group : choice_.groups) {
        const RowTile rows = tile_of(group, tile);
        expert_up(layer, group, rows);
        for_rows(group.rows, 4 * width, [&](size_t i) {
            float* row = expert_up_.get() + i * width;
            activate(config_, row, row + f, f, row);
        });
        const Matrix& w = weights_->layers[layer].experts_down;
        const ProductRows x = convert(expert_up_.get(), width, group.rows, f);
        multiply(type_, parts_of(w, group.expert, config_.n_experts), x, group.rows,
                 bias_of(w, group.expert, config_.n_experts), expert_rows_.get(), d);
        add_adapters(adapters_at(layer, Target::kExpertsDown, group.expert), x, rows, expert_rows_.get(), d);
        add_expert_rows(group, true, y);
    }
}

// Adds to `grad`, the gradient of h_, what comes through the experts and the router, from the gradient of y; adds to
// the gradients of the experts' adapters.
void Learner::experts_backward(size_t layer, const RowTile& tile, const float* grad_y, float* grad,
                               std::span<const FactorGradients> grads) {
    const size_t d = config_.hidden_dim, f = config_.expert_dim, width = config_.expert_up_dim();
    const LayerWeights& w = weights_->layers[layer];
    choose_experts(layer, tile);
    const auto grad_weights = std::make_unique_for_overwrite<double[]>(tile.n() * config_.n_used_experts);
    const auto weights = std::make_unique_for_overwrite<float[]>(tile.n());  // of the rows of an expert
    for (const Choice::Group& group : choice_.groups) {
        const RowTile rows = tile_of(group, tile);
        const LowRank* const low_up = adapters_at(layer, Target::kExpertsUp, group.expert);
        const LowRank* const low_down = adapters_at(layer, Target::kExpertsDown, group.expert);
        const float* bias = bias_of(w.experts_down, group.expert, config_.n_experts);
        expert_up(layer, group, rows);
        gather_expert_rows(group, grad_y, expert_rows_.get());
        ProductRows activated{};
        if (low_down != nullptr) {
            for_rows(group.rows, 4 * width, [&](size_t i) {
                const float* row = expert_up_.get() + i * width;
                activate(config_, row, row + f, f, activated_.get() + i * f);
                weights[i] = choice_.weights[choice_.pairs[group.first + i]];
            });
            activated = convert(activated_.get(), f, group.rows, f);
        }
        multiply_transposed(type_, parts_of(w.experts_down, group.expert, config_.n_experts), expert_rows_.get(), d,
                            group.rows, grad_activated(), f, false);
        adapters_backward(low_down, activated, rows, expert_rows_.get(), d, grad_activated(), f, grads, weights.get());
        for_rows(group.rows, 6 * width, [&](size_t i) {
            const int32_t pair = choice_.pairs[group.first + i];
            float *row = expert_up_.get() + i * width, *grad_row = grad_activated() + i * f;
            float* activated_row = scratch<float>(f, Scratch::kSums);
            activate(config_, row, row + f, f, activated_row);
            double& grad_weight = grad_weights[static_cast<size_t>(pair)];
            grad_weight = dot(activated_row, grad_row, f);  // f_j(x) . dy, by W_down^T dy
            if (bias != nullptr) grad_weight += dot(bias, expert_rows_.get() + i * d, d);
            kernels().blend_f32(grad_row, f, choice_.weights[pair], 0.0f, grad_row);
            activation_backward(row, grad_row, f);
        });
        multiply_transposed(type_, parts_of(w.experts_up, group.expert, config_.n_experts), expert_up_.get(), width,
                            group.rows, expert_rows_.get(), d, false);
        if (low_up != nullptr) {
            gather_expert_rows(group, h_.get(), expert_inputs_.get());
            const ProductRows x = convert(expert_inputs_.get(), d, group.rows, d);
            adapters_backward(low_up, x, rows, expert_up_.get(), width, expert_rows_.get(), d, grads);
        }
        add_expert_rows(group, false, grad);
    }
    for_rows(tile.n(), 8 * config_.n_experts, [&](size_t i) { router_backward(i, grad_weights.get()); });
    multiply_transposed(ProductType::kFloat32, w.router.parts, choice_.probabilities, config_.n_experts, tile.n(), grad,
                        d, true);
}

// Replaces a token's probabilities by the gradients of the router's logits, from the gradients of the weights.
void Learner::router_backward(size_t token, const double* grad_weights) {
    const size_t k = config_.n_used_experts;
    float* p = choice_.probabilities + token * config_.n_experts;
    const int32_t* chosen = choice_.chosen + token * k;
    const double* dw = grad_weights + token * k;
    double sum = config_.router_normalised ? config_.router_eps : 1.0, mean = 0.0, all = 0.0;
    for (size_t j = 0; config_.router_normalised && j < k; ++j) sum += double{p[chosen[j]]};
    for (size_t j = 0; config_.router_normalised && j < k; ++j) mean += dw[j] * double{p[chosen[j]]} / sum;
    const auto grad = [&](size_t j) { return config_.router_scale / sum * (dw[j] - mean); };
    for (size_t j = 0; j < k; ++j) all += double{p[chosen[j]]} * grad(j);
    const bool is_softmax = config_.router == Router::kSoftmax;
    float* of_chosen = scratch<float>(k, Scratch::kSums);
    for (size_t j = 0; j < k; ++j) {
        const double each = double{p[chosen[j]]};
        of_chosen[j] = static_cast<float>(each * (is_softmax ? grad(j) - all : grad(j) * (1.0 - each)));
    }
    for (size_t e = 0; e < config_.n_experts; ++e) p[e] = static_cast<float>(is_softmax ? -double{p[e]} * all : 0.0);
    for (size_t j = 0; j < k; ++j) p[chosen[j]] = of_chosen[j];
}

// gates (rows,) = sigmoid(w . h_) of the shared expert.
void Learner::shared_gates(size_t layer, size_t rows, float* gates) const {
    const size_t d = config_.hidden_dim;
    linear(weights_->layers[layer].shared_router.parts, h_.get(), false, d, rows, nullptr, gates, 1);
    for (size_t i = 0; i < rows; ++i) gates[i] = static_cast<float>(sigmoid(gates[i]));
}

// Multiplies the gradient of the shared expert by its gate, and adds to `grad`, the gradient of h_, what comes through
// the gate, given the result of the expert.
void Learner::shared_gate_backward(size_t layer, size_t rows, const float* result, float* grad_result, float* grad) {
    const size_t d = config_.hidden_dim;
    shared_gates(layer, rows, gates_.get());
    for_rows(rows, 2 * d, [&](size_t i) {
        const double gate = gates_[i];
        float* row = grad_result + i * d;
        gates_[i] = static_cast<float>(dot(result + i * d, row, d) * gate * (1.0 - gate));
        kernels().blend_f32(row, d, static_cast<float>(gate), 0.0f, row);
    });
    multiply_transposed(ProductType::kFloat32, weights_->layers[layer].shared_router.parts, gates_.get(), 1, rows, grad,
                        d, true);
}

}  // namespace whet
