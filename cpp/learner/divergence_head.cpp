#include "learner/divergence_head.h"

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "kernels/dispatch.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

size_t common_outputs(const Weights& a, const Weights& b) {
    return std::min(outputs_in_caches(a.config().hidden_dim), outputs_in_caches(b.config().hidden_dim));
}

}  // namespace

DivergenceHead::DivergenceHead(const Weights& student, const Weights& teacher, ProductType type)
    : student_(student, type, common_outputs(student, teacher)),
      teacher_(teacher, type, common_outputs(student, teacher)) {
    if (student_.vocab_size() != teacher_.vocab_size()) {
        throw std::invalid_argument("the vocabularies have " + std::to_string(student_.vocab_size()) + " and " +
                                    std::to_string(teacher_.vocab_size()) + " tokens");
    }
    if (student.output().parts.size() != 1 || teacher.output().parts.size() != 1) {
        throw std::invalid_argument("a head has several parts");
    }
}

// Calls f(range, logits of the student, logits of the teacher) for all ranges of outputs.
template <class F>
void DivergenceHead::each_range(const float* student, const float* teacher, size_t rows, F&& f) const {
    const auto zp = student_.allocate(rows), zq = teacher_.allocate(rows);
    const ProductRows p = student_.convert(student, rows), q = teacher_.convert(teacher, rows, Scratch::kTeacher);
    for (size_t i = 0; i < student_.ranges().size(); ++i) {
        student_.compute(student_.ranges()[i], p, rows, zp.get());
        teacher_.compute(teacher_.ranges()[i], q, rows, zq.get());
        f(student_.ranges()[i], zp.get(), zq.get());
    }
}

void DivergenceHead::forward(const float* student, const float* teacher, size_t rows, double temperature, float beta,
                             float* out) {
    std::vector<TokenSums> p(rows), q(rows);
    each_range(student, teacher, rows, [&](const OutputRange& range, const float* zp, const float* zq) {
        const size_t n = range.n;
        for_rows(rows, 8 * n, [&](size_t i) {
            kernels().token_logprobs_add_f32(zp + i * n, n, n, temperature, false, &p[i]);
            kernels().token_logprobs_add_f32(zq + i * n, n, n, temperature, false, &q[i]);
        });
    });
    rows_.resize(rows);
    sums_.assign(rows, {});
    for (size_t i = 0; i < rows; ++i) {
        float logprob;
        rows_[i] = {temperature, beta, 0.0f, 0.0f};
        for (TokenSums* sums : {&p[i], &q[i]}) sums->token_logit = -0x1.fffffep+127f;  // excludes no token
        kernels().token_logprobs_end(p[i], temperature, &logprob, &rows_[i].lse_p, nullptr);
        kernels().token_logprobs_end(q[i], temperature, &logprob, &rows_[i].lse_q, nullptr);
    }
    each_range(student, teacher, rows, [&](const OutputRange& range, const float* zp, const float* zq) {
        const size_t n = range.n;
        for_rows(rows, 16 * n,
                 [&](size_t i) { kernels().divergence_add_f32(zp + i * n, zq + i * n, n, rows_[i], &sums_[i]); });
    });
    for (size_t i = 0; i < rows; ++i) out[i] = static_cast<float>(sums_[i].divergence);
}

void DivergenceHead::backward(const float* student, const float* teacher, const float* grads, float* grad_student) {
    const size_t rows = rows_.size();
    const auto grad_logits = student_.allocate(rows);
    bool add = false;
    each_range(student, teacher, rows, [&](const OutputRange& range, const float* zp, const float* zq) {
        const size_t n = range.n;
        for_rows(rows, 16 * n, [&](size_t i) {
            kernels().divergence_backward_f32(zp + i * n, zq + i * n, n, rows_[i], sums_[i], grads[i],
                                              grad_logits.get() + i * n);
        });
        student_.backward(range, zp, grad_logits.get(), rows, grad_student, add);
        add = true;
    });
}

}  // namespace whet
