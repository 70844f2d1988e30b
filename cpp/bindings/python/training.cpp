// Bindings of the functions of a training step, for src/whet/nn: detached CPU tensors (tensors that require grad work
// too, but torch exports them more slowly).
//
// nanobind checks dtype, contiguity and number of axes; the functions here check sizes. Arrays are not converted, since
// results would be written to the copy.
#include "engine/training.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <type_traits>

#include "bindings.h"
#include "gil.h"
#include "engine/attention.h"
#include "engine/kept_tokens.h"
#include "engine/training_attention.h"
#include "engine/training_delta.h"
#include "runtime/system.h"
#include "runtime/thread_pool.h"

namespace nb = nanobind;

namespace whet {
namespace {

enum class BFloat16 : uint16_t {};  // raw bits

}  // namespace
}  // namespace whet

template <>
struct nanobind::detail::dtype_traits<whet::BFloat16> {
    static constexpr dlpack::dtype value{static_cast<uint8_t>(dlpack::dtype_code::Bfloat), 16, 1};
    static constexpr auto name = const_name("bfloat16");
};

namespace whet {
namespace {

template <class T, class... Shape>
using Contiguous = nb::ndarray<T, nb::device::cpu, nb::c_contig, Shape...>;
template <class T>
using Vector = Contiguous<T, nb::ndim<1>>;
template <class T>
using Matrix = Contiguous<T, nb::ndim<2>>;

// The core's type of an element: float, or uint16_t for bfloat16.
template <class Array>
auto* data(const Array& x) {
    using T = typename Array::Scalar;
    using Stored = std::conditional_t<std::is_same_v<std::remove_const_t<T>, BFloat16>, uint16_t, float>;
    return reinterpret_cast<std::conditional_t<std::is_const_v<T>, const Stored, Stored>*>(x.data());
}

void require(bool fits, const char* error) {
    if (!fits) throw std::invalid_argument(error);
}

template <class A, class B>
bool same_shape(const A& a, const B& b) {
    bool same = a.ndim() == b.ndim();
    for (size_t i = 0; same && i < a.ndim(); ++i) same = a.shape(i) == b.shape(i);
    return same;
}

// ---------------------------------------------------------------- weights, rows

void bf16_from_f32_call(const Contiguous<const float>& x, const Contiguous<BFloat16>& out) {
    require(same_shape(x, out), "bf16_from_f32: x and out have different shapes");
    bf16_from_f32(data(x), x.size(), data(out));
}

void rounded_linear_call(const Matrix<const BFloat16>& x, const Matrix<const float>& weight, bool by_columns,
                         const std::optional<Vector<const float>>& bias, const Matrix<BFloat16>& out) {
    const size_t k = weight.shape(by_columns ? 0 : 1), n = weight.shape(by_columns ? 1 : 0);
    require(x.shape(1) == k && out.shape(0) == x.shape(0) && out.shape(1) == n && (!bias || bias->shape(0) == n),
            "rounded_linear: expected x (m, k), bias (n,) and out (m, n) for the weight's (n, k)");
    rounded_linear(by_columns, data(weight), n, k, data(x), x.shape(0), bias ? data(*bias) : nullptr, data(out));
}

void rms_norm_to_bf16_call(const Contiguous<const float>& x, const Vector<const float>& weight, double eps,
                           const Contiguous<BFloat16>& out) {
    const size_t n = weight.shape(0);
    require(x.ndim() > 0 && x.shape(x.ndim() - 1) == n && same_shape(x, out),
            "rms_norm_to_bf16: expected x and out (..., n) for a weight (n,)");
    if (n > 0) rms_norm_to_bf16(data(x), data(weight), x.size() / n, n, eps, data(out));
}

template <class T, class Grad>
void rms_norm_backward_call(const Contiguous<const T>& x, const Vector<const float>& weight,
                            const Contiguous<const Grad>& grad, double eps, const Contiguous<T>& grad_x,
                            const Vector<float>& grad_weight) {
    const size_t n = weight.shape(0);
    require(x.ndim() > 0 && x.shape(x.ndim() - 1) == n && same_shape(x, grad) && same_shape(x, grad_x) &&
                grad_weight.shape(0) == n,
            "rms_norm_backward: expected x and its gradients (..., n) for a weight (n,)");
    if (n > 0) {
        rms_norm_backward(data(x), data(weight), data(grad), x.size() / n, n, eps, data(grad_x), data(grad_weight));
    }
}

template <class T>
void swiglu_backward_call(const Contiguous<const T>& gate, const Contiguous<const T>& up,
                          const Contiguous<const T>& grad, const Contiguous<T>& grad_gate,
                          const Contiguous<T>& grad_up) {
    require(same_shape(gate, up) && same_shape(gate, grad) && same_shape(gate, grad_gate) && same_shape(gate, grad_up),
            "swiglu_backward: the arrays have different shapes");
    swiglu_backward(data(gate), data(up), data(grad), gate.size(), data(grad_gate), data(grad_up));
}

template <class T>
void softcap_backward_call(const Contiguous<const float>& y, double cap, const Contiguous<T>& grad) {
    require(same_shape(y, grad), "softcap_backward: y and grad have different shapes");
    softcap_backward(data(y), y.size(), static_cast<float>(cap), data(grad));
}

// ---------------------------------------------------------------- log-probs

void add_logits(TokenLogprobs& self, const Matrix<const float>& logits, size_t first_row, size_t first_token) {
    require(first_row + logits.shape(0) <= self.rows(), "TokenLogprobs.add: more rows than tokens");
    self.add(data(logits), first_row, logits.shape(0), first_token, logits.shape(1));
}

void end_logprobs(const TokenLogprobs& self, const Vector<float>& logprobs, const Vector<float>& lse,
                  const Vector<float>& entropy) {
    require(logprobs.shape(0) == self.rows() && lse.shape(0) == self.rows() && entropy.shape(0) == self.rows(),
            "TokenLogprobs.end: logprobs, lse and entropy must have one number per token");
    self.end(data(logprobs), data(lse), data(entropy));
}

template <class T>
void token_logprobs_backward_call(const Matrix<const float>& logits, const Vector<const int64_t>& tokens,
                                  size_t first_token, double temperature, const Vector<const float>& lse,
                                  const Vector<const float>& logprobs, const Vector<const float>& grads,
                                  const Matrix<T>& out) {
    const size_t rows = logits.shape(0);
    require(tokens.shape(0) == rows && lse.shape(0) == rows && logprobs.shape(0) == rows && grads.shape(0) == rows &&
                same_shape(logits, out),
            "token_logprobs_backward: expected a token, lse, logprob and gradient for each row of logits");
    const TokenLogprobsTile tile{.logits = data(logits),
                                 .rows = rows,
                                 .n = logits.shape(1),
                                 .tokens = tokens.data(),
                                 .first = first_token,
                                 .temperature = temperature,
                                 .lse = data(lse),
                                 .logprobs = data(logprobs),
                                 .grads = data(grads)};
    token_logprobs_backward(tile, data(out));
}

void check_kept_tokens(const Vector<const int64_t>& offsets, const Vector<const int32_t>& words,
                       const Vector<const int64_t>& tokens, size_t vocab_size) {
    check_token_sets({{offsets.data(), offsets.shape(0)}, {words.data(), words.shape(0)}},
                     {tokens.data(), tokens.shape(0)}, vocab_size);
}

// logits (rows, n) of the tokens from first_token on, under the sets from first_row on, which are checked.
void drop_logits_call(const Matrix<float>& logits, const Vector<const int64_t>& offsets,
                      const Vector<const int32_t>& words, size_t first_row, size_t first_token, size_t vocab_size) {
    const TokenSets sets{{offsets.data(), offsets.shape(0)}, {words.data(), words.shape(0)}};
    const size_t rows = logits.shape(0), n = logits.shape(1);
    require(first_row + rows < offsets.shape(0) && first_token + n <= vocab_size,
            "drop_logits: more rows than sets, or columns than tokens");
    float* z = data(logits);
    for_rows(rows, n, [&](size_t i) { drop_logits(sets[first_row + i], vocab_size, first_token, n, z + i * n); });
}

// ---------------------------------------------------------------- AdamW

void adamw_call(const Contiguous<float>& p, const Contiguous<const float>& grad, const Contiguous<float>& m,
                const Contiguous<float>& v, double lr, double beta1, double beta2, double eps, double weight_decay,
                double t, double grad_scale) {
    require(same_shape(p, grad) && same_shape(p, m) && same_shape(p, v), "adamw: the arrays have different shapes");
    adamw({lr, beta1, beta2, eps, weight_decay, t, grad_scale}, p.size(), data(p), data(grad), data(m), data(v));
}

void adamw_8bit_call(const Contiguous<float>& p, const Contiguous<const float>& grad, const Contiguous<uint8_t>& m,
                     const Contiguous<uint8_t>& v, const Vector<float>& m_scales, const Vector<float>& v_scales,
                     double lr, double beta1, double beta2, double eps, double weight_decay, double t,
                     double grad_scale, uint64_t seed) {
    const size_t blocks = (p.size() + kMomentBlock - 1) / kMomentBlock;
    require(same_shape(p, grad) && same_shape(p, m) && same_shape(p, v) && m_scales.shape(0) >= blocks &&
                v_scales.shape(0) >= blocks,
            "adamw_8bit: the arrays have different shapes, or there are fewer scales than blocks");
    adamw_8bit({lr, beta1, beta2, eps, weight_decay, t, grad_scale}, p.size(), data(p), data(grad),
               {m.data(), v.data(), m_scales.data(), v_scales.data()}, seed);
}

// ---------------------------------------------------------------- attention

template <class... Args>
using TokenArray = nb::ndarray<nb::device::cpu, nb::ndim<3>, Args...>;  // (tokens, heads, head_dim)
using HeadsIn = TokenArray<nb::ro>;
using ContiguousIn = TokenArray<nb::ro, nb::c_contig>;
using ContiguousOut = TokenArray<nb::c_contig>;

// Attention of a training step, with references to the tensors that its gradient needs.
class AttentionObject {
public:
    AttentionObject(HeadsIn q, HeadsIn k, HeadsIn v, ContiguousOut out, Matrix<float> lse,
                    Vector<const int64_t> q_offsets, Vector<const int64_t> k_offsets, Vector<const int64_t> key_rows,
                    std::optional<int64_t> window, double scale, double softcap,
                    std::optional<Vector<const float>> sinks)
        : q_(q),
          k_(k),
          v_(v),
          out_(out),
          lse_(lse),
          q_offsets_(q_offsets),
          k_offsets_(k_offsets),
          key_rows_(key_rows),
          sinks_(std::move(sinks)) {
        const size_t n_tokens = q.shape(0), n_offsets = q_offsets.shape(0);
        require(q.dtype() == nb::dtype<float>() || q.dtype() == nb::dtype<BFloat16>(),
                "TrainingAttention: q is neither float32 nor bfloat16");
        require(k.dtype() == q.dtype() && v.dtype() == q.dtype() && out.dtype() == q.dtype(),
                "TrainingAttention: q, k, v and out have different dtypes");
        require(same_shape(q, out) && same_shape(k, v) && k.shape(0) == n_tokens && k.shape(2) == q.shape(2) &&
                    k.shape(1) > 0 && q.shape(1) % k.shape(1) == 0 && q.shape(2) <= kAttentionMaxHeadDim &&
                    lse.shape(0) == n_tokens && lse.shape(1) == q.shape(1),
                "TrainingAttention: shapes of q, k, v, out and lse disagree");
        require(q.stride(2) == 1 && k.stride(2) == 1 && v.stride(2) == 1,
                "TrainingAttention: the last axis is not contiguous");
        require(!sinks_ || sinks_->shape(0) == q.shape(1), "TrainingAttention: expected a sink for each head");
        require(n_offsets > 0 && k_offsets.shape(0) == n_offsets &&
                    q_offsets.data()[n_offsets - 1] <= static_cast<int64_t>(n_tokens) &&
                    k_offsets.data()[n_offsets - 1] == static_cast<int64_t>(key_rows.shape(0)),
                "TrainingAttention: the offsets do not fit the tokens");
        a_.bf16 = q.dtype() == nb::dtype<BFloat16>();
        a_.n_tokens = static_cast<int64_t>(n_tokens), a_.n_heads = static_cast<int64_t>(q.shape(1));
        a_.n_kv_heads = static_cast<int64_t>(k.shape(1)), a_.head_dim = static_cast<int64_t>(q.shape(2));
        a_.n_sequences = static_cast<int64_t>(n_offsets) - 1;
        a_.q_offsets = q_offsets.data(), a_.k_offsets = k_offsets.data(), a_.key_rows = key_rows.data();
        a_.window = window.value_or(kNoWindow), a_.scale = scale, a_.softcap = softcap;
        a_.sinks = sinks_ ? sinks_->data() : nullptr;
        a_.q = {q.data(), q.stride(0), q.stride(1)};
        a_.k = {k.data(), k.stride(0), k.stride(1)};
        a_.v = {v.data(), v.stride(0), v.stride(1)};
        a_.out = out.data(), a_.lse = lse.data();
    }

    void forward() const { attention_forward(a_); }

    void backward(const ContiguousIn& grad_out, const ContiguousOut& grad_q, const ContiguousOut& grad_k,
                  const ContiguousOut& grad_v, const Vector<const int64_t>& reader_offsets,
                  const Vector<const int64_t>& readers) const {
        require(grad_out.dtype() == q_.dtype() && grad_q.dtype() == q_.dtype() && grad_k.dtype() == q_.dtype() &&
                    grad_v.dtype() == q_.dtype() && same_shape(grad_out, q_) && same_shape(grad_q, q_) &&
                    same_shape(grad_k, k_) && same_shape(grad_v, v_),
                "TrainingAttention.backward: a gradient does not match the shape or dtype of its tensor");
        require(reader_offsets.shape(0) == q_.shape(0) + 1 && readers.shape(0) == key_rows_.shape(0),
                "TrainingAttention.backward: the readers do not fit the tokens");
        attention_backward(a_, {.out = grad_out.data(),
                                .q = grad_q.data(),
                                .k = grad_k.data(),
                                .v = grad_v.data(),
                                .reader_offsets = reader_offsets.data(),
                                .readers = readers.data()});
    }

private:
    HeadsIn q_, k_, v_;  // these own the memory that a_ points to
    ContiguousOut out_;
    Matrix<float> lse_;
    Vector<const int64_t> q_offsets_, k_offsets_, key_rows_;
    std::optional<Vector<const float>> sinks_;
    TrainingAttention a_;
};

// ---------------------------------------------------------------- gated delta rule

// The rule of a training step, with references to the tensors that its gradient needs.
class DeltaObject {
public:
    DeltaObject(Matrix<const float> qkv, Matrix<const float> decay, Matrix<const float> beta, size_t n_key_heads,
                size_t key_dim, bool corrects, Vector<const int64_t> q_offsets, Vector<const int64_t> k_offsets,
                Vector<const int64_t> key_rows)
        : qkv_(qkv), decay_(decay), beta_(beta), q_offsets_(q_offsets), k_offsets_(k_offsets), key_rows_(key_rows) {
        const size_t n_tokens = qkv.shape(0), heads = decay.shape(1), keys = 2 * n_key_heads * key_dim;
        const size_t n_offsets = q_offsets.shape(0);
        require(same_shape(decay, beta) && decay.shape(0) == n_tokens && n_key_heads > 0 && heads > 0 &&
                    heads % n_key_heads == 0 && qkv.shape(1) > keys && (qkv.shape(1) - keys) % heads == 0,
                "TrainingDelta: shapes of qkv, decay and beta disagree");
        require(n_offsets > 0 && k_offsets.shape(0) == n_offsets &&
                    q_offsets.data()[n_offsets - 1] == static_cast<int64_t>(n_tokens) &&
                    k_offsets.data()[n_offsets - 1] == static_cast<int64_t>(key_rows.shape(0)),
                "TrainingDelta: the offsets do not fit the tokens");
        d_ = {.n_heads = heads,
              .n_key_heads = n_key_heads,
              .dim = (qkv.shape(1) - keys) / heads,
              .key_dim = key_dim,
              .is_tiled = false,
              .n_sequences = n_offsets - 1,
              .q_offsets = q_offsets.data(),
              .k_offsets = k_offsets.data(),
              .key_rows = key_rows.data(),
              .qkv = data(qkv),
              .decay = data(decay),
              .beta = data(beta),
              .corrects = corrects};
    }

    void forward(const Matrix<float>& out) const {
        check(out, "TrainingDelta.forward: expected out (tokens, n_heads dim)");
        delta_forward(d_, data(out), out.shape(1));
    }

    void backward(const Matrix<const float>& grad_out, const Matrix<float>& grad_qkv, const Matrix<float>& grad_decay,
                  const Matrix<float>& grad_beta) const {
        check(grad_out, "TrainingDelta.backward: expected grad_out (tokens, n_heads dim)");
        require(same_shape(grad_qkv, qkv_) && same_shape(grad_decay, decay_) && same_shape(grad_beta, beta_),
                "TrainingDelta.backward: a gradient does not match the shape of its tensor");
        delta_backward(d_, {data(grad_out), data(grad_qkv), data(grad_decay), data(grad_beta)});
    }

private:
    template <class T>
    void check(const Matrix<T>& out, const char* error) const {
        require(out.shape(0) == qkv_.shape(0) && out.shape(1) == d_.n_heads * d_.dim, error);
    }

    Matrix<const float> qkv_, decay_, beta_;  // these own the memory that d_ points to
    Vector<const int64_t> q_offsets_, k_offsets_, key_rows_;
    TrainingDelta d_;
};

auto array(const char* name) { return nb::arg(name).noconvert(); }

}  // namespace

void bind_training(nb::module_& m) {
    using Release = nb::call_guard<ReleasedGil>;
    using nb::arg;
    m.def("keep_freed_memory", &keep_freed_memory);
    m.def("release_freed_memory", &release_freed_memory, arg("bytes"), Release());
    m.def("bf16_from_f32", &bf16_from_f32_call, array("x"), array("out"), Release());
    m.def("rounded_linear", &rounded_linear_call, array("x"), array("weight"), nb::kw_only(), arg("by_columns"),
          array("bias").none(), array("out"), Release());
    m.def("rms_norm_to_bf16", &rms_norm_to_bf16_call, array("x"), array("weight"), arg("eps"), array("out"), Release());
    const auto def_rms_norm_backward = [&](auto function) {
        m.def("rms_norm_backward", function, nb::kw_only(), array("x"), array("weight"), array("grad"), arg("eps"),
              array("grad_x"), array("grad_weight"), Release());
    };
    def_rms_norm_backward(&rms_norm_backward_call<float, float>);
    def_rms_norm_backward(&rms_norm_backward_call<float, BFloat16>);
    def_rms_norm_backward(&rms_norm_backward_call<BFloat16, BFloat16>);
    const auto def_swiglu_backward = [&](auto function) {
        m.def("swiglu_backward", function, nb::kw_only(), array("gate"), array("up"), array("grad"), array("grad_gate"),
              array("grad_up"), Release());
    };
    def_swiglu_backward(&swiglu_backward_call<float>);
    def_swiglu_backward(&swiglu_backward_call<BFloat16>);
    const auto def_softcap_backward = [&](auto function) {
        m.def("softcap_backward", function, nb::kw_only(), array("y"), arg("cap"), array("grad"), Release());
    };
    def_softcap_backward(&softcap_backward_call<float>);
    def_softcap_backward(&softcap_backward_call<BFloat16>);
    m.def("check_kept_tokens", &check_kept_tokens, nb::kw_only(), array("offsets"), array("words"), array("tokens"),
          arg("vocab_size"));
    m.def("drop_logits", &drop_logits_call, array("logits"), nb::kw_only(), array("offsets"), array("words"),
          arg("first_row"), arg("first_token"), arg("vocab_size"));
    nb::class_<TokenLogprobs>(m, "TokenLogprobs")
        .def(
            "__init__",
            [](TokenLogprobs* self, const Vector<const int64_t>& tokens, double temperature, bool with_entropy) {
                new (self) TokenLogprobs(tokens.data(), tokens.shape(0), temperature, with_entropy);
            },
            array("tokens"), arg("temperature"), arg("with_entropy"))
        .def("add", &add_logits, array("logits"), arg("first_row"), arg("first_token"), Release())
        .def("end", &end_logprobs, array("logprobs"), array("lse"), array("entropy"), Release());
    const auto def_token_logprobs_backward = [&](auto function) {
        m.def("token_logprobs_backward", function, nb::kw_only(), array("logits"), array("tokens"), arg("first_token"),
              arg("temperature"), array("lse"), array("logprobs"), array("grads"), array("out"), Release());
    };
    def_token_logprobs_backward(&token_logprobs_backward_call<float>);
    def_token_logprobs_backward(&token_logprobs_backward_call<BFloat16>);
    m.def("adamw", &adamw_call, nb::kw_only(), array("p"), array("grad"), array("m"), array("v"), arg("lr"),
          arg("beta1"), arg("beta2"), arg("eps"), arg("weight_decay"), arg("t"), arg("grad_scale"), Release());
    m.def("adamw_8bit", &adamw_8bit_call, nb::kw_only(), array("p"), array("grad"), array("m"), array("v"),
          array("m_scales"), array("v_scales"), arg("lr"), arg("beta1"), arg("beta2"), arg("eps"), arg("weight_decay"),
          arg("t"), arg("grad_scale"), arg("seed"), Release());
    nb::class_<AttentionObject>(m, "TrainingAttention")
        .def(nb::init<HeadsIn, HeadsIn, HeadsIn, ContiguousOut, Matrix<float>, Vector<const int64_t>,
                      Vector<const int64_t>, Vector<const int64_t>, std::optional<int64_t>, double, double,
                      std::optional<Vector<const float>>>(),
             nb::kw_only(), array("q"), array("k"), array("v"), array("out"), array("lse"), array("q_offsets"),
             array("k_offsets"), array("key_rows"), arg("window").none(), arg("scale"), arg("softcap"),
             array("sinks").none())
        .def("forward", &AttentionObject::forward, Release())
        .def("backward", &AttentionObject::backward, nb::kw_only(), array("grad_out"), array("grad_q"), array("grad_k"),
             array("grad_v"), array("reader_offsets"), array("readers"), Release());
    nb::class_<DeltaObject>(m, "TrainingDelta")
        .def(nb::init<Matrix<const float>, Matrix<const float>, Matrix<const float>, size_t, size_t, bool,
                      Vector<const int64_t>, Vector<const int64_t>, Vector<const int64_t>>(),
             nb::kw_only(), array("qkv"), array("decay"), array("beta"), arg("n_key_heads"), arg("key_dim"),
             arg("corrects"), array("q_offsets"), array("k_offsets"), array("key_rows"))
        .def("forward", &DeltaObject::forward, array("out"), Release())
        .def("backward", &DeltaObject::backward, nb::kw_only(), array("grad_out"), array("grad_qkv"),
             array("grad_decay"), array("grad_beta"), Release());
}

}  // namespace whet
