// The short convolution of a layer, in both directions: out = C y, y_t = sum over j of w_j (B x)_(t - taps + 1 + j).
//
// The tokens before a completion's first ones are its prompt's last ones, which are computed once. Their gradients are
// sums over all tokens that read them, in the order of these.
#include <cstring>

#include "engine/scratch.h"
#include "kernels/dispatch.h"
#include "learner/learner.h"
#include "runtime/thread_pool.h"

namespace whet {

// Finds the tokens before each token in its sequence, and the tokens that read it.
void Learner::find_neighbours() {
    const size_t length = config_.conv_length;
    before_.assign(n() * length, -1);
    std::vector<size_t> counts(n() + 1, 0);
    for (size_t s = 0; s + 1 < batch_.q_offsets.size(); ++s) {
        const int64_t n_keys = batch_.k_offsets[s + 1] - batch_.k_offsets[s];
        const int64_t n_queries = batch_.q_offsets[s + 1] - batch_.q_offsets[s];
        for (int64_t i = 0; i < n_queries; ++i) {
            const auto token = static_cast<size_t>(batch_.q_offsets[s] + i);
            const int64_t at = n_keys - n_queries + i;
            for (size_t places = 0; places < length && static_cast<int64_t>(places) <= at; ++places) {
                const int64_t other = batch_.key_rows[static_cast<size_t>(batch_.k_offsets[s] + at) - places];
                before_[token * length + places] = other;
                ++counts[static_cast<size_t>(other) + 1];
            }
        }
    }
    for (size_t i = 0; i < n(); ++i) counts[i + 1] += counts[i];
    next_offsets_ = counts;
    next_.resize(counts.back());
    for (size_t token = 0; token < n(); ++token) {
        for (size_t places = 0; places < length; ++places) {
            const int64_t other = before_[token * length + places];
            if (other >= 0) next_[counts[static_cast<size_t>(other)]++] = {token, places};
        }
    }
}

// B x of all tokens.
std::unique_ptr<float[]> Learner::conv_inputs() const {
    const size_t d = config_.hidden_dim;
    auto inputs = std::make_unique_for_overwrite<float[]>(n() * d);
    for_rows(n(), d, [&](size_t i) {
        const float *b = now_.raw + i * 3 * d, *x = b + 2 * d;
        for (size_t j = 0; j < d; ++j) inputs[i * d + j] = b[j] * x[j];
    });
    return inputs;
}

// The inputs that each tap reads for a token, the oldest first; tokens are `stride` numbers apart.
void Learner::find_rows(const float* inputs, size_t stride, size_t token, const float** rows) const {
    const size_t length = config_.conv_length;
    for (size_t j = 0; j < length; ++j) {
        const int64_t other = before_[token * length + length - 1 - j];
        rows[j] = other < 0 ? nullptr : inputs + static_cast<size_t>(other) * stride;
    }
}

// Computes the gradient of the inputs of a token, from the gradients of all results.
void Learner::add_readers(const float* grad, const std::vector<float>& taps, size_t token, float* sum) const {
    const size_t length = config_.conv_length, width = taps.size() / length;
    std::memset(sum, 0, width * sizeof(float));
    for (size_t at = next_offsets_[token]; at < next_offsets_[token + 1]; ++at) {
        const auto [reader, places] = next_[at];
        kernels().multiply_add_f32(taps.data() + (length - 1 - places) * width, grad + reader * width, width, sum);
    }
}

std::vector<float> Learner::taps_of(size_t layer) const {
    std::vector<float> taps(config_.conv_length * config_.conv_dim(layer));
    weights_->layers[layer].conv.rows(0, config_.conv_length, taps.data(), false);
    return taps;
}

void Learner::convolve(size_t layer) {
    const size_t d = config_.hidden_dim, length = config_.conv_length;
    const std::vector<float> taps = taps_of(layer);
    const auto inputs = conv_inputs();
    for_rows(n(), length * d, [&](size_t i) {
        const float* rows[kMaxConvLength];
        find_rows(inputs.get(), d, i, rows);
        float* row = scratch<float>(d, Scratch::kRow);
        kernels().short_conv_f32(rows, length, taps.data(), d, now_.raw + i * 3 * d + d, d, row);
        store(row, 1, d, now_.attended + i * d * head_bytes_);
    });
}

// Replaces B, C and x of all tokens by their gradients, from the gradient of the result.
void Learner::convolve_backward(size_t layer, const float* grad) {
    const size_t d = config_.hidden_dim, length = config_.conv_length;
    const std::vector<float> taps = taps_of(layer);
    const auto inputs = conv_inputs();
    const auto grad_y = std::make_unique_for_overwrite<float[]>(n() * d);
    for_rows(n(), length * d, [&](size_t i) {
        const float* rows[kMaxConvLength];
        find_rows(inputs.get(), d, i, rows);
        float *c = now_.raw + i * 3 * d + d, *y = scratch<float>(d, Scratch::kRow);
        kernels().short_conv_f32(rows, length, taps.data(), d, nullptr, d, y);
        for (size_t j = 0; j < d; ++j) {
            grad_y[i * d + j] = grad[i * d + j] * c[j];
            c[j] = grad[i * d + j] * y[j];
        }
    });
    for_rows(n(), length * d, [&](size_t i) {
        float *b = now_.raw + i * 3 * d, *x = b + 2 * d, *sum = scratch<float>(d, Scratch::kRow);
        add_readers(grad_y.get(), taps, i, sum);
        for (size_t j = 0; j < d; ++j) {
            const float grad_b = sum[j] * x[j];
            x[j] = sum[j] * b[j];
            b[j] = grad_b;
        }
    });
}

}  // namespace whet
