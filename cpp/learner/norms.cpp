// Norms of the learner in both directions, and the gradients of their weights and biases:
//
//   y = w n(x) + b,   dw += dy n(x),   db += dy
#include <algorithm>
#include <cstring>

#include "engine/scratch.h"
#include "kernels/dispatch.h"
#include "learner/learner.h"
#include "learner/sums.h"
#include "runtime/thread_pool.h"

namespace whet {

// The gradient of a vector of the current norms; null: it is not trained.
float* Learner::gradient_of(const std::vector<float>& vector) const {
    const auto is_own = [&](const TrainedVector& trained) { return trained.vector == &vector; };
    const auto found = std::find_if(norms_.begin(), norms_.end(), is_own);
    return found == norms_.end() ? nullptr : found->grad;
}

// Consecutive predictors of one group.
Learner::Groups Learner::predictor_groups() const {
    Groups groups;
    int64_t end = -1;  // of the group's tokens
    for (size_t i = 0; i < batch_.predictors.size(); ++i) {
        const int64_t token = batch_.predictors[i];
        const auto& offsets = batch_.group_offsets;
        const int64_t own_end = *std::upper_bound(offsets.begin(), offsets.end(), token);
        if (own_end != end) groups.emplace_back(i, i), end = own_end;
        groups.back().second = i + 1;
    }
    return groups;
}

void Learner::norm(const NormWeight& w, const float* x, size_t rows, float* out) const {
    const size_t d = config_.hidden_dim;
    for_rows(rows, d, [&](size_t i) {
        const float* row = x + i * d;
        if (w.weight.empty()) {
            std::memcpy(out + i * d, row, d * sizeof(float));
        } else if (config_.norm == Norm::kRms) {
            kernels().rms_norm_f32(row, nullptr, w.weight.data(), d, config_.norm_eps, false, out + i * d);
        } else {
            kernels().layer_norm_f32(row, nullptr, w.weight.data(), w.bias_or_null(), d, config_.norm_eps, false,
                                     out + i * d);
        }
    });
}

// Converts grad in place from the gradient of norm(x) to the gradient of x, for rows in groups. Adds to the gradients
// of the norm if it is trained: with `sums`, the terms of all calls, once, if this is the last of them.
void Learner::norm_backward(const NormWeight& w, const float* x, float* grad, const Groups& groups,
                            std::vector<float>* sums, bool is_last) const {
    if (w.weight.empty() || groups.empty()) return;
    const size_t d = config_.hidden_dim, width = w.bias.empty() ? d : 2 * d;
    float *grad_weight = gradient_of(w.weight), *grad_bias = gradient_of(w.bias);
    if (grad_weight != nullptr || grad_bias != nullptr) {
        std::vector<float> own;
        if (sums == nullptr) sums = &own;
        sum_blocks(groups, width, *sums, [&](size_t i, float* to) {
            add_norm_terms(config_.norm, x + i * d, grad + i * d, d, !w.bias.empty(), to);
        });
        if (is_last) add_sums(*sums, width, 0, d, grad_weight), add_sums(*sums, width, d, d, grad_bias);
    }
    for_rows(groups.back().second, d, [&](size_t i) {
        const float* row = x + i * d;
        float* g = grad + i * d;
        if (config_.norm == Norm::kRms) {
            kernels().rms_norm_backward_f32(row, w.weight.data(), g, d, config_.norm_eps, g, nullptr);
        } else {
            kernels().layer_norm_backward_f32(row, w.weight.data(), g, d, config_.norm_eps, g);
        }
    });
}

// Adds to `sums` the terms of a row of `width` numbers: of the gradient of the weight, then of the bias if there is
// one.
void Learner::add_norm_terms(Norm kind, const float* x, const float* grad, size_t width, bool has_bias,
                             float* sums) const {
    float* normed = scratch<float>(width, Scratch::kSums);
    if (kind == Norm::kRms) {
        kernels().rms_norm_f32(x, nullptr, nullptr, width, config_.norm_eps, false, normed);
    } else {
        kernels().layer_norm_f32(x, nullptr, nullptr, nullptr, width, config_.norm_eps, false, normed);
    }
    for (size_t i = 0; i < width; ++i) sums[i] += grad[i] * normed[i];
    for (size_t i = 0; has_bias && i < width; ++i) sums[width + i] += grad[i];
}

}  // namespace whet
