// The weights of a transformer, each found by the name of its slot: "embedding", "layers.3.qkv", "layers.3.qkv.bias".
#pragma once
#include <map>
#include <string>
#include <vector>

#include "engine/linear.h"
#include "engine/stored_rows.h"

namespace whet {

struct Matrix {
    std::vector<PackedWeight> parts;  // of its rows, from the first on, each in a format of its own; none: no weight
    std::vector<float> bias;          // empty: none

    size_t n() const;
    size_t k() const { return parts.front().k(); }
    // The part with row i, which becomes the row's number there. Throws std::out_of_range if there is none.
    const PackedWeight& part_of(size_t& i) const;
    const float* bias_or_null() const { return bias.empty() ? nullptr : bias.data(); }
};

struct NormWeight {
    std::vector<float> weight, bias;
    const float* bias_or_null() const { return bias.empty() ? nullptr : bias.data(); }
};

struct LayerWeights {
    NormWeight norm1, norm2, q_norm, k_norm;
    Matrix qkv, o, up, down;  // up: the gate's rows before its own, where there is a gate
};

class Weights {
public:
    explicit Weights(size_t n_layers) : layers(n_layers) {}

    Matrix embedding, head;  // the head is the embedding where it has no weight of its own
    Matrix positions;        // float32
    NormWeight final_norm;
    std::vector<LayerWeights> layers;

    const Matrix& output() const { return head.parts.empty() ? embedding : head; }

    // A slot, of a matrix its next n rows. Throws std::invalid_argument if there is no slot of this name.
    void add_matrix(const std::string& slot, WeightFormat format, size_t n, size_t k);
    void add_vector(const std::string& slot, size_t n);
    // Memory for the matrices that were added, once: zeros in one block, so that small ones share huge pages, which are
    // quick to get.
    void allocate();

    // Into rows [first, first + rows.n) of the matrix that was added under a name; one row into the numbers from
    // `first` on of a vector. Throws std::invalid_argument if nothing was, or of another shape.
    void pack(const std::string& slot, size_t first, const StoredRows& rows);

    size_t size_bytes() const;

private:
    Zeroed memory_;  // of the matrices
    std::map<std::string, Matrix*> matrices_;
    std::map<std::string, std::vector<float>*> vectors_;

    Matrix* matrix_named(const std::string& slot);
    std::vector<float>* vector_named(const std::string& slot);
    void pack_vector(const std::string& slot, size_t first, const StoredRows& row);
};

}  // namespace whet
