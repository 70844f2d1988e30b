// The head of a learner that returns the divergence of its distributions from a teacher's, and its gradient with
// respect to the learner's final hidden states; kernels/divergence.h has the formulas. Logits of both models exist for
// some outputs of the vocabulary at a time, and are computed twice in the forward pass: the divergence needs the
// normalisers.
#pragma once
#include <cstddef>
#include <vector>

#include "kernels/divergence_row.h"
#include "learner/head_logits.h"

namespace whet {

class DivergenceHead {
public:
    // Throws std::invalid_argument unless both heads have the same vocabulary, each in one part.
    DivergenceHead(const Weights& student, const Weights& teacher, ProductType type);

    // out (rows,), given the hidden states (rows, hidden_dim) of student and teacher, each with its own hidden_dim.
    void forward(const float* student, const float* teacher, size_t rows, double temperature, float beta, float* out);
    // Gradient of the student's hidden states of the last forward(); both must be unchanged.
    void backward(const float* student, const float* teacher, const float* grads, float* grad_student);

    size_t rows() const { return rows_.size(); }

private:
    HeadLogits student_, teacher_;
    std::vector<DivergenceRow> rows_;
    std::vector<DivergenceSums> sums_;

    template <class F>
    void each_range(const float* student, const float* teacher, size_t rows, F&& f) const;
};

}  // namespace whet
