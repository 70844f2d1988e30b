// Logits of the head of a packed model, some outputs of the vocabulary at a time, and the way back to hidden states.
//
//   z = softcap(hidden W^T + bias)
#pragma once
#include <cstddef>
#include <memory>
#include <vector>

#include "engine/weights.h"
#include "learner/products.h"

namespace whet {

class HeadLogits {
public:
    // `most_outputs` of a range; 0: as many as fit in the caches.
    HeadLogits(const Weights& weights, ProductType type, size_t most_outputs = 0);

    const std::vector<OutputRange>& ranges() const { return ranges_; }
    size_t vocab_size() const { return weights_.config().vocab_size; }
    size_t hidden_dim() const { return weights_.config().hidden_dim; }
    std::unique_ptr<float[]> allocate(size_t rows) const;  // for the logits of the largest range

    // The hidden states (rows, hidden_dim) for compute(), in scratch memory of the calling thread.
    ProductRows convert(const float* hidden, size_t rows, Scratch use = Scratch::kInputs) const;
    // logits (rows, range.n).
    void compute(const OutputRange& range, ProductRows hidden, size_t rows, float* logits) const;
    // Sets, or adds to, the gradient of the hidden states from the gradient of a range's logits, which is overwritten.
    void backward(const OutputRange& range, const float* logits, float* grads, size_t rows, float* grad_hidden,
                  bool add) const;

private:
    const Weights& weights_;
    const ProductType type_;
    std::vector<OutputRange> ranges_;
};

}  // namespace whet
