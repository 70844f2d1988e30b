// Bindings of the learner of adapters. whet.training checks arguments and explains errors; the checks here ensure
// memory safety. One call at a time: further threads wait.
#include "learner/learner.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "gil.h"
#include "learner/divergence_head.h"
#include "learner/token_logprobs_head.h"

namespace nb = nanobind;

namespace whet {
namespace {

template <class T, size_t axes>
using Contiguous = nb::ndarray<T, nb::device::cpu, nb::c_contig, nb::ndim<axes>>;
using Indices = Contiguous<const int64_t, 1>;

void require(bool fits, const char* error) {
    if (!fits) throw std::invalid_argument(error);
}

std::vector<int64_t> copy(const Indices& x) { return {x.data(), x.data() + x.shape(0)}; }

template <class T>
std::span<T> span_of(const Contiguous<T, 1>& x) {
    return {x.data(), x.shape(0)};
}

// A learner, and a head that reads its hidden states.
class LearnerObject {
public:
    LearnerObject(const Shared<Weights>& weights, bool bf16, bool is_merged)
        : weights_(weights.value),
          learner_(weights.value, bf16 ? ProductType::kBFloat16 : ProductType::kFloat32, is_merged),
          head_(*weights.value, learner_.type()) {}

    size_t add_adapter(size_t layer, Target target, size_t first_row, size_t n, size_t rank) {
        const std::lock_guard guard(mutex_);
        return learner_.add_adapter(layer, target, first_row, n, rank);
    }

    void set_factors(size_t adapter, const Contiguous<const float, 2>& a, const Contiguous<const float, 2>& b,
                     float scale) {
        const ReleasedGil released;
        const std::lock_guard guard(mutex_);
        check_shapes(adapter, a, b);
        learner_.set_factors(adapter, a.data(), b.data(), scale);
    }

    void row_lengths(size_t adapter, const Contiguous<const float, 2>& a, const Contiguous<const float, 2>& b,
                     float scale, const Contiguous<double, 1>& out) {
        const ReleasedGil released;
        const std::lock_guard guard(mutex_);
        check_shapes(adapter, a, b);
        require(out.shape(0) == b.shape(1), "Learner.row_lengths: expected a number for each row");
        std::ranges::copy(learner_.row_lengths(adapter, a.data(), b.data(), scale), out.data());
    }

    void set_magnitude(size_t adapter, const Contiguous<const float, 1>& magnitude,
                       const Contiguous<const double, 1>& lengths) {
        const std::lock_guard guard(mutex_);
        const size_t n = learner_.shape(adapter)[2];
        require(magnitude.shape(0) == n && lengths.shape(0) == n,
                "Learner.set_magnitude: expected a magnitude and a length of each row");
        learner_.set_magnitude(adapter, magnitude.data(), {lengths.data(), lengths.data() + n});
    }

    size_t add_norm(const std::string& slot, const Contiguous<const float, 1>& values) {
        const std::lock_guard guard(mutex_);
        return learner_.add_norm(slot, {values.data(), values.shape(0)});
    }

    void set_norm(size_t norm, const Contiguous<const float, 1>& values) {
        const std::lock_guard guard(mutex_);
        require(values.shape(0) == learner_.norm_size(norm), "Learner.set_norm: expected the size of the norm");
        learner_.set_norm(norm, values.data());
    }

    // Computes the hidden states of `predictors`, and the log-probs (rows, k) of targets (rows, k) unless k is 0, and
    // entropies and mean log-probs unless null.
    void forward(const Indices& tokens, const Indices& positions, const Indices& group_offsets,
                 const Indices& q_offsets, const Indices& k_offsets, const Indices& key_rows,
                 const Indices& reader_offsets, const Indices& readers, const Indices& predictors,
                 const Contiguous<const int64_t, 2>& targets, const std::optional<Indices>& kept_offsets,
                 const std::optional<Contiguous<const int32_t, 1>>& kept_words, double temperature, bool with_adapters,
                 bool keep, size_t activation_bytes, double dropout, uint64_t seed,
                 const std::optional<Contiguous<const uint16_t, 3>>& experts,
                 const std::optional<Contiguous<const float, 2>>& noise, const Contiguous<float, 2>& logprobs,
                 const std::optional<Contiguous<float, 1>>& entropy, const std::optional<Contiguous<float, 1>>& mean) {
        const ReleasedGil released;
        const std::lock_guard guard(mutex_);
        const size_t rows = targets.shape(0), k = targets.shape(1);
        require(predictors.shape(0) == rows && logprobs.shape(0) == rows && logprobs.shape(1) == k &&
                    (!entropy || entropy->shape(0) == rows) && (!mean || mean->shape(0) == rows),
                "Learner.forward: expected targets, log-probs, an entropy and a mean for each predictor");
        for (size_t i = 0; i < rows * k; ++i) {
            require(targets.data()[i] >= 0 && static_cast<size_t>(targets.data()[i]) < learner_.vocab_size(),
                    "Learner.forward: a target is not in the vocabulary");
        }
        TokenSets kept;
        if (kept_offsets && kept_words) {
            require(k == 1, "Learner.forward: kept tokens need one target for each predictor");
            kept = {span_of(*kept_offsets), span_of(*kept_words)};
            check_token_sets(kept, {targets.data(), rows}, learner_.vocab_size());
        }
        TrainingBatch batch{copy(tokens),   copy(positions),      copy(group_offsets), copy(q_offsets), copy(k_offsets),
                            copy(key_rows), copy(reader_offsets), copy(readers),       copy(predictors)};
        if (experts) batch.experts.assign(experts->data(), experts->data() + experts->size());
        if (noise) batch.noise.assign(noise->data(), noise->data() + noise->size());
        hidden_ = learner_.forward(std::move(batch), with_adapters, keep, activation_bytes, {dropout, seed});
        rows_ = rows;
        divergence_.reset();
        if (k == 0) return;
        head_.forward(hidden_, targets.data(), rows, k, kept, temperature,
                      {logprobs.data(), entropy ? entropy->data() : nullptr, mean ? mean->data() : nullptr});
    }

    // Copies the hidden states (rows, hidden_dim) of the last forward().
    void hidden(const Contiguous<float, 2>& out) {
        const ReleasedGil released;
        const std::lock_guard guard(mutex_);
        require(out.shape(0) == rows_ && out.shape(1) == learner_.hidden_dim(),
                "Learner.hidden: expected (rows, hidden_dim)");
        std::copy_n(hidden_, rows_ * learner_.hidden_dim(), out.data());
    }

    // Divergences (rows,) of the last forward() from a teacher, given its hidden states of the same rows.
    void divergence(const Shared<Weights>& teacher, const Contiguous<const float, 2>& teacher_hidden,
                    double temperature, float beta, const Contiguous<float, 1>& out) {
        const ReleasedGil released;
        const std::lock_guard guard(mutex_);
        require(out.shape(0) == rows_ && teacher_hidden.shape(0) == rows_ &&
                    teacher_hidden.shape(1) == teacher.value->config().hidden_dim,
                "Learner.divergence: expected a divergence and a hidden state of the teacher for each row");
        teacher_ = teacher.value;
        teacher_hidden_.assign(teacher_hidden.data(), teacher_hidden.data() + teacher_hidden.size());
        divergence_.emplace(*weights_, *teacher_, learner_.type());
        divergence_->forward(hidden_, teacher_hidden_.data(), rows_, temperature, beta, out.data());
    }

    // grads: (grad_a, grad_b), and the gradients of magnitudes if there are any, of each adapter, and norm_grads: of
    // each vector of norms, to which the gradients are added.
    void backward(const Contiguous<const float, 2>& grad_logprobs,
                  const std::optional<Contiguous<const float, 1>>& grad_entropy,
                  const std::optional<Contiguous<const float, 1>>& grad_mean, const nb::sequence& grads,
                  const nb::sequence& norm_grads) {
        run_backward(grads, norm_grads, [&](float* grad_hidden) {
            require(grad_logprobs.shape(0) == head_.rows() && head_.rows() == rows_ &&
                        grad_logprobs.shape(1) == head_.k() && (!grad_entropy || grad_entropy->shape(0) == rows_) &&
                        (!grad_mean || grad_mean->shape(0) == rows_),
                    "Learner.backward: expected a gradient for each log-prob, entropy and mean");
            require(!grad_entropy || head_.has_entropy(), "Learner.backward: the forward pass computed no entropies");
            require(!grad_mean || head_.has_mean(), "Learner.backward: the forward pass computed no mean log-probs");
            head_.backward(hidden_,
                           {grad_logprobs.data(), grad_entropy ? grad_entropy->data() : nullptr,
                            grad_mean ? grad_mean->data() : nullptr},
                           grad_hidden);
        });
    }

    void backward_divergence(const Contiguous<const float, 1>& grad, const nb::sequence& grads,
                             const nb::sequence& norm_grads) {
        run_backward(grads, norm_grads, [&](float* grad_hidden) {
            require(divergence_.has_value() && grad.shape(0) == rows_,
                    "Learner.backward_divergence: expected a gradient for each divergence");
            divergence_->backward(hidden_, teacher_hidden_.data(), grad.data(), grad_hidden);
        });
    }

    void backward_hidden(const Contiguous<const float, 2>& grad, const nb::sequence& grads,
                         const nb::sequence& norm_grads) {
        run_backward(grads, norm_grads, [&](float* grad_hidden) {
            require(grad.shape(0) == rows_ && grad.shape(1) == learner_.hidden_dim(),
                    "Learner.backward_hidden: expected a gradient for each hidden state");
            std::copy_n(grad.data(), grad.size(), grad_hidden);
        });
    }

    size_t n_replaced() {
        const std::lock_guard guard(mutex_);
        return learner_.n_replaced();
    }

    size_t n_kept_layers() {
        const std::lock_guard guard(mutex_);
        return learner_.n_kept_layers();
    }

    size_t layer_bytes(size_t layer, size_t n, bool keeps) {
        const std::lock_guard guard(mutex_);
        require(layer < weights_->config().n_layers, "Learner.layer_bytes: the model has no such layer");
        return learner_.layer_bytes(layer, n, keeps);
    }

    size_t kept_bytes() {
        const std::lock_guard guard(mutex_);
        return learner_.kept_bytes();
    }

private:
    std::shared_ptr<const Weights> weights_, teacher_;
    Learner learner_;
    TokenLogprobsHead head_;
    std::optional<DivergenceHead> divergence_;
    std::vector<float> teacher_hidden_;
    const float* hidden_ = nullptr;
    size_t rows_ = 0;
    std::mutex mutex_;

    // Adds to the gradients of adapters and norms, given the gradient of the hidden states, which `head` computes.
    template <class F>
    void run_backward(const nb::sequence& grads, const nb::sequence& norm_grads, F&& head) {
        // A caster to std::vector would terminate the process where memory is refused.
        std::vector<std::pair<Contiguous<float, 2>, Contiguous<float, 2>>> pairs;
        std::vector<std::optional<Contiguous<float, 1>>> magnitudes;
        for (nb::handle each : grads) {
            pairs.emplace_back(nb::cast<Contiguous<float, 2>>(each[0]), nb::cast<Contiguous<float, 2>>(each[1]));
            auto& magnitude = magnitudes.emplace_back();
            if (nb::len(each) > 2) magnitude = nb::cast<Contiguous<float, 1>>(each[2]);
        }
        std::vector<Contiguous<float, 1>> vectors;
        for (nb::handle vector : norm_grads) vectors.push_back(nb::cast<Contiguous<float, 1>>(vector));
        std::vector<FactorGradients> factors;
        std::vector<float*> norms;
        const ReleasedGil released;
        const std::lock_guard guard(mutex_);
        require(pairs.size() == learner_.n_adapters(), "Learner.backward: expected gradients of every adapter");
        for (const auto& [a, b] : pairs) {
            const size_t adapter = factors.size();
            const auto& magnitude = magnitudes[adapter];
            check_shapes(adapter, a, b);
            require(learner_.has_magnitude(adapter) == magnitude.has_value() &&
                        (!magnitude || magnitude->shape(0) == learner_.shape(adapter)[2]),
                    "Learner.backward: expected gradients of magnitudes for adapters that have them");
            factors.push_back({a.data(), b.data(), magnitude ? magnitude->data() : nullptr});
        }
        require(vectors.size() == learner_.n_norms(), "Learner.backward: expected gradients of every norm");
        for (const auto& vector : vectors) {
            require(vector.shape(0) == learner_.norm_size(norms.size()),
                    "Learner.backward: expected the size of a norm");
            norms.push_back(vector.data());
        }
        const auto grad_hidden = std::make_unique_for_overwrite<float[]>(rows_ * learner_.hidden_dim());
        learner_.check_kept();
        head(grad_hidden.get());
        learner_.backward(grad_hidden.get(), factors, norms);
    }

    template <class Factor>
    void check_shapes(size_t adapter, const Factor& a, const Factor& b) const {
        const size_t* shape = learner_.shape(adapter);
        require(a.shape(0) == shape[0] && a.shape(1) == shape[1] && b.shape(0) == shape[0] && b.shape(1) == shape[2],
                "Learner: expected factors (rank, k) and (rank, n)");
    }
};

auto array(const char* name) { return nb::arg(name).noconvert(); }

}  // namespace

void bind_learner(nb::module_& m) {
    using nb::arg;
    nb::class_<LearnerObject>(m, "Learner")
        .def(nb::init<const Shared<Weights>&, bool, bool>(), arg("weights"), arg("bf16"), arg("is_merged") = false)
        .def_prop_ro("n_replaced", &LearnerObject::n_replaced)
        .def_prop_ro("n_kept_layers", &LearnerObject::n_kept_layers)
        .def_prop_ro("kept_bytes", &LearnerObject::kept_bytes)
        .def("layer_bytes", &LearnerObject::layer_bytes, arg("layer"), arg("n"), arg("keeps"))
        .def("add_adapter", &LearnerObject::add_adapter, nb::kw_only(), arg("layer"), arg("target"), arg("first_row"),
             arg("n"), arg("rank"))
        .def("set_factors", &LearnerObject::set_factors, arg("adapter"), array("a"), array("b"), arg("scale"))
        .def("row_lengths", &LearnerObject::row_lengths, arg("adapter"), array("a"), array("b"), arg("scale"),
             array("out"))
        .def("set_magnitude", &LearnerObject::set_magnitude, arg("adapter"), array("magnitude"), array("lengths"))
        .def("add_norm", &LearnerObject::add_norm, arg("slot"), array("values"))
        .def("set_norm", &LearnerObject::set_norm, arg("norm"), array("values"))
        .def("forward", &LearnerObject::forward, nb::kw_only(), array("tokens"), array("positions"),
             array("group_offsets"), array("q_offsets"), array("k_offsets"), array("key_rows"), array("reader_offsets"),
             array("readers"), array("predictors"), array("targets"), array("kept_offsets").none(),
             array("kept_words").none(), arg("temperature"), arg("with_adapters"), arg("keep"), arg("activation_bytes"),
             arg("dropout"), arg("seed"), array("experts").none(), array("noise").none(), array("logprobs"),
             array("entropy").none(), array("mean").none())
        .def("hidden", &LearnerObject::hidden, array("out"))
        .def("divergence", &LearnerObject::divergence, nb::kw_only(), arg("teacher"), array("teacher_hidden"),
             arg("temperature"), arg("beta"), array("out"))
        .def("backward", &LearnerObject::backward, nb::kw_only(), array("grad_logprobs"), array("grad_entropy").none(),
             array("grad_mean").none(), arg("grads"), arg("norm_grads"))
        .def("backward_divergence", &LearnerObject::backward_divergence, nb::kw_only(), array("grad"), arg("grads"),
             arg("norm_grads"))
        .def("backward_hidden", &LearnerObject::backward_hidden, nb::kw_only(), array("grad"), arg("grads"),
             arg("norm_grads"));
}

}  // namespace whet
