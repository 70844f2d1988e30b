// Learner exports for JavaScript: one learner of the instance's model, in the build that learns.
//
// Factors, and their gradients, are one array: A (rank, k) and B (rank, n) of each adapter, in the order in which the
// adapters were added. web/src validates arguments with explanatory errors; the checks here are for memory safety.
#include "learner/learner.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "bindings/wasm/exports.h"
#include "bindings/wasm/model.h"
#include "bindings/wasm/result.h"
#include "bindings/wasm/settings.h"
#include "learner/token_logprobs_head.h"

namespace whet {
namespace {

struct Batch : TrainingBatch {
    std::vector<int64_t> targets;
    double temperature;
    bool with_adapters, keep;
    size_t activation_bytes;
};

// A learner, and a head that reads its hidden states.
struct LearnerAndHead {
    std::shared_ptr<const Weights> weights = loaded_weights();
    Learner learner{weights, ProductType::kFloat32};
    TokenLogprobsHead head{*weights, ProductType::kFloat32};
    const float* hidden = nullptr;
    size_t rows = 0;
};
std::unique_ptr<LearnerAndHead> state;

LearnerAndHead& running() {
    if (state == nullptr) throw std::logic_error("there is no learner");
    return *state;
}

}  // namespace

WHET_EXPORT(begin_learner) void begin_learner() { state = std::make_unique<LearnerAndHead>(); }
WHET_EXPORT(end_learner) void end_learner() { state.reset(); }

WHET_EXPORT(add_learner_adapter)
void add_learner_adapter(size_t layer, int target, size_t first_row, size_t n, size_t rank) {
    running().learner.add_adapter(layer, static_cast<Target>(target), first_row, n, rank);
}

// Packs the factors of all adapters for the next forward pass.
WHET_EXPORT(set_factors) void set_factors(const float* factors, float scale) {
    Learner& learner = running().learner;
    for (size_t i = 0; i < learner.n_adapters(); ++i) {
        const size_t* shape = learner.shape(i);
        const float* b = factors + shape[0] * shape[1];
        learner.set_factors(i, factors, b, scale);
        factors = b + shape[0] * shape[2];
    }
}

// Writes the log-probs of the targets.
WHET_EXPORT(learner_forward) void learner_forward(const double* numbers, size_t n, float* logprobs) {
    LearnerAndHead& s = running();
    Settings from(numbers, n);
    Batch batch;
#define BATCH(field) from.read(batch.field);
#include "bindings/fields.def"
    from.finish();
    const size_t rows = batch.targets.size(), vocabulary = s.learner.vocab_size();
    if (batch.predictors.size() != rows) throw std::invalid_argument("expected a predictor for each target");
    for (const int64_t target : batch.targets) {
        if (target < 0 || static_cast<size_t>(target) >= vocabulary) {
            throw std::invalid_argument("a target is not in the vocabulary");
        }
    }
    s.rows = 0;
    s.hidden = s.learner.forward(batch, batch.with_adapters, batch.keep, batch.activation_bytes);
    s.head.forward(s.hidden, batch.targets.data(), rows, 1, {}, batch.temperature, {logprobs});
    s.rows = rows;
}

// Adds to the gradients of all factors, from the gradients of the last log-probs.
WHET_EXPORT(learner_backward) void learner_backward(const float* grad_logprobs, size_t rows, float* gradients) {
    LearnerAndHead& s = running();
    s.learner.check_kept();
    if (rows != s.rows) throw std::invalid_argument("expected a gradient for each log-prob");
    std::vector<FactorGradients> factors;
    for (size_t i = 0; i < s.learner.n_adapters(); ++i) {
        const size_t* shape = s.learner.shape(i);
        float* b = gradients + shape[0] * shape[1];
        factors.push_back({gradients, b});
        gradients = b + shape[0] * shape[2];
    }
    const auto grad_hidden = std::make_unique_for_overwrite<float[]>(rows * s.learner.hidden_dim());
    s.head.backward(s.hidden, {grad_logprobs}, grad_hidden.get());
    s.learner.backward(grad_hidden.get(), factors, {});
}

// The number of the second embedding's rows that its checksum reads, and their tokens.
WHET_EXPORT(checked_rows) const int32_t* checked_rows() {
    static std::vector<int32_t> numbers;
    const auto rows = loaded_weights()->layer_embedding.checked_rows();
    numbers = {static_cast<int32_t>(rows.size())};
    numbers.insert(numbers.end(), rows.begin(), rows.end());
    return numbers.data();
}
// The 64-bit checksum of a slot's packed weights, in hexadecimal.
WHET_EXPORT(slot_checksum) void slot_checksum(const char* slot, size_t size) {
    result.clear();
    for (uint64_t sum = loaded_weights()->checksum({slot, size}); sum != 0 || result.empty(); sum >>= 4) {
        result.insert(result.begin(), "0123456789abcdef"[sum % 16]);
    }
}

}  // namespace whet
