// The weights of a transformer, by slot: "embedding", "layers.3.qkv", "layers.3.qkv.bias".
//
// Shared by engines and trainers. Methods are thread-safe: many readers or one packer. Hold reading() to read members
// directly.
#pragma once
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/config.h"
#include "engine/deferred_rows.h"
#include "engine/linear.h"
#include "engine/packing_loss.h"
#include "engine/stored_rows.h"
#include "engine/stored_table.h"
#include "runtime/read_write_lock.h"

namespace whet {

struct Matrix {
    std::vector<PackedWeight> parts;  // consecutive rows in one format each; empty: no weight
    std::vector<float> bias;          // empty: none

    size_t n() const;
    size_t k() const { return parts.empty() ? 0 : parts.front().k(); }
    // Dequantises rows [first, first + count); see PackedWeight::rows. Throws std::out_of_range.
    void rows(size_t first, size_t count, void* out, bool bf16) const;
    const float* bias_or_null() const { return bias.empty() ? nullptr : bias.data(); }
};

struct NormWeight {
    std::vector<float> weight, bias;
    const float* bias_or_null() const { return bias.empty() ? nullptr : bias.data(); }
    size_t size_bytes() const { return (weight.size() + bias.size()) * sizeof(float); }
};

struct LayerNorms {
    NormWeight norm1, norm2, post_norm1, post_norm2, q_norm, k_norm, delta_norm, input_norm;
};

struct Norms {
    std::vector<LayerNorms> layers;
    NormWeight final_norm, layer_inputs_norm;

    explicit Norms(size_t n_layers) : layers(n_layers) {}

    // Returns a norm by its name, "layers.3.norm1" or "final_norm"; null: there is none.
    const NormWeight* find(const std::string& name) const;
    NormWeight* find(const std::string& name) { return const_cast<NormWeight*>(std::as_const(*this).find(name)); }
    size_t size_bytes() const;
};

struct LayerWeights {
    Matrix qkv, o, up, down;  // up: gate rows, if gated, then up rows
    // (taps, channels) float32, the oldest first. In a short convolution qkv is B, C and x, and o the output; in the
    // gated delta rule qkv is q, k, v (the channels), z, b and a, and in Mamba-2 z, v, k, q (the channels) and a.
    Matrix conv;
    std::vector<float> sinks;  // of the query heads; empty: none
    // Mixture of experts: up and down are the shared expert's. The matrices of the experts have the rows of one expert
    // after the other, each expert in separate parts, as many for each.
    Matrix router, experts_up, experts_down, shared_router;
    std::vector<float> router_bias, router_correction;  // of the experts; empty: none
    Matrix input_gate, input_out;                       // of the layer's input: (layer_input_dim, hidden_dim) and back
    std::vector<float> scale;                           // of the layer's output; empty: 1
    std::vector<float> decay, dt_bias;   // of the value heads: log decay = decay softplus(a + dt_bias), decay < 0
    std::vector<float> conv_bias, skip;  // of the channels, and of the value heads; empty: none
};

// Splits "layers.12.norm1.bias" into "layers.12.norm1" and "bias".
std::pair<std::string, std::string> split_part(const std::string& slot);

// Throws std::invalid_argument for inconsistent sizes.
void check(const ModelConfig& config);

class Weights {
public:
    explicit Weights(ModelConfig config)
        : norms(config.n_layers), layers(config.n_layers), config_(std::move(config)) {}

    const ModelConfig& config() const { return config_; }

    Matrix embedding, head;  // head without parts: tied to the embedding
    Matrix positions;        // float32
    Matrix layer_inputs;     // (n_layers layer_input_dim, hidden_dim)
    StoredTable layer_embedding;
    Norms norms;
    std::vector<LayerWeights> layers;

    const Matrix& output() const { return head.parts.empty() ? embedding : head; }

    // Adds a slot; repeated calls for a matrix append parts of n rows. Throws std::invalid_argument for an unknown
    // name.
    void add_matrix(const std::string& slot, WeightFormat format, size_t n, size_t k);
    void add_vector(const std::string& slot, size_t n);
    // Allocates the matrices, once: one zeroed block, so that small matrices share huge pages, which are fast to
    // commit.
    void allocate();
    // Allocates one matrix, zeroed, in memory of the caller, who calls free() before it ends: to pack what is then
    // copied to a device.
    std::vector<uint8_t> allocate(const std::string& slot);
    void free(const std::string& slot);

    // Packs rows [first, first + rows.n) of a matrix, or writes one row to elements [first, first + rows.k) of a
    // vector. Throws std::invalid_argument for an unknown slot or a wrong shape.
    void pack(const std::string& slot, size_t first, const StoredRows& rows);
    // Packs these rows of a matrix when they are first used: see DeferredRows. Rows of layer_embedding are not packed.
    void defer(const std::string& slot, size_t first, const StoredRows& rows, const std::shared_ptr<void>& owner);
    size_t deferred_bytes() const;  // of deferred rows that are packed
    // Drops deferred rows, the least recently used first, until at most `limit` bytes of them are packed.
    void drop_deferred(size_t limit);
    // Measures the loss of pack() with the same arguments. For rows of several parts: the sum, and the first format
    // whose limit they exceed.
    PackingLoss measure_loss(const std::string& slot, size_t first, const StoredRows& rows) const;

    const Matrix& matrix(const std::string& slot) const { return matrix_at(slot); }
    // Numbers per row; 1 for a vector. This and the following throw std::invalid_argument for an unknown slot.
    size_t k(const std::string& slot) const;
    // Dequantises rows [first, first + count) to (count, k) float32, or bfloat16 rounded to nearest even. Throws
    // std::out_of_range.
    void rows(const std::string& slot, size_t first, size_t count, void* out, bool bf16) const;
    // Dequantises the rows of a matrix with these indices.
    void gather(const std::string& slot, const int64_t* rows, size_t count, void* out, bool bf16) const;
    // Checksum of the packed bytes, or of a table's checked rows.
    uint64_t checksum(const std::string& slot) const;
    size_t size_bytes() const;
    // Releases the memory of the matrices to the system: they are zeros until packed again.
    size_t release();

    auto reading() const { return lock_.reading(); }

private:
    const ModelConfig config_;
    mutable ReadWriteLock lock_;
    Zeroed memory_;  // all matrices
    size_t memory_bytes_ = 0;
    std::deque<DeferredRows> deferred_;
    std::map<std::string, Matrix*> matrices_;
    std::map<std::string, std::vector<float>*> vectors_;

    // Places the parts of a matrix in memory; returns its end.
    static uint8_t* place(Matrix& matrix, uint8_t* memory);
    size_t rows_to_boundary(const std::string& slot, size_t first) const;
    // The added vector of this name, or null.
    const std::vector<float>* vector_at(const std::string& slot) const;
    // Throws std::invalid_argument for an unknown slot.
    Matrix& matrix_at(const std::string& slot) const;
    // Throws std::invalid_argument also if the rows do not fit from row `first` on.
    Matrix& matrix_for(const std::string& slot, size_t first, const StoredRows& rows) const;
    void table_rows(size_t first, size_t count, void* out, bool bf16) const;
    Matrix* matrix_named(const std::string& slot);
    std::vector<float>* vector_named(const std::string& slot);
    void pack_vector(const std::string& slot, size_t first, const StoredRows& row);
};

}  // namespace whet
