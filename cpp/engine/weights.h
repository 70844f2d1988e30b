// The weights of a transformer, each found by the name of its slot: "embedding", "layers.3.qkv", "layers.3.qkv.bias".
//
// Engines and trainers may share one. Any number of threads read it, or one packs: who reads more than a call of this
// class does holds reading() meanwhile.
#pragma once
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "engine/config.h"
#include "engine/linear.h"
#include "engine/packing_loss.h"
#include "engine/stored_rows.h"
#include "runtime/read_write_lock.h"

namespace whet {

struct Matrix {
    std::vector<PackedWeight> parts;  // of its rows, from the first on, each in a format of its own; none: no weight
    std::vector<float> bias;          // empty: none

    size_t n() const;
    size_t k() const { return parts.front().k(); }
    // Rows [first, first + count) as numbers; see PackedWeight. Throws std::out_of_range if there are not so many.
    void rows(size_t first, size_t count, void* out, bool bf16) const;
    const float* bias_or_null() const { return bias.empty() ? nullptr : bias.data(); }
};

struct NormWeight {
    std::vector<float> weight, bias;
    const float* bias_or_null() const { return bias.empty() ? nullptr : bias.data(); }
};

struct LayerWeights {
    NormWeight norm1, norm2, post_norm1, post_norm2, q_norm, k_norm;
    Matrix qkv, o, up, down;  // up: the gate's rows before its own, where there is a gate
};

// Throws std::invalid_argument for sizes that the engine would go wrong with.
void check(const ModelConfig& config);

class Weights {
public:
    explicit Weights(ModelConfig config) : layers(config.n_layers), config_(std::move(config)) {}

    const ModelConfig& config() const { return config_; }

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
    // The loss of pack() with the same arguments; of rows in several formats, the first format that they exceed.
    PackingLoss measure_loss(const std::string& slot, size_t first, const StoredRows& rows) const;

    // The numbers of a row; a vector's rows are of one. Throws std::invalid_argument if there is no slot of this name,
    // as all of these do.
    size_t k(const std::string& slot) const;
    // Rows [first, first + count) as numbers, (count, k): float32, or bfloat16, rounded to nearest even. Throws
    // std::out_of_range if there are not so many.
    void rows(const std::string& slot, size_t first, size_t count, void* out, bool bf16) const;
    // The same of a matrix's rows with these numbers.
    void gather(const std::string& slot, const int64_t* rows, size_t count, void* out, bool bf16) const;
    // Of all bytes, in the formats that they are packed in.
    uint64_t checksum(const std::string& slot) const;
    size_t size_bytes() const;
    // Gives the memory of the matrices back to the system: zeros, until they are packed again.
    size_t release();

    auto reading() const { return lock_.reading(); }

private:
    const ModelConfig config_;
    mutable ReadWriteLock lock_;
    Zeroed memory_;  // of the matrices
    size_t memory_bytes_ = 0;
    std::map<std::string, Matrix*> matrices_;
    std::map<std::string, std::vector<float>*> vectors_;

    // Of what was added; null if nothing was.
    const std::vector<float>* vector_at(const std::string& slot) const;
    const Matrix& matrix_at(const std::string& slot) const;
    Matrix* matrix_named(const std::string& slot);
    std::vector<float>* vector_named(const std::string& slot);
    void pack_vector(const std::string& slot, size_t first, const StoredRows& row);
};

}  // namespace whet
