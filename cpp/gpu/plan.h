// The forward pass of a transformer for a GPU, as data: buffers, pipelines and dispatches, for any host of WebGPU.
//
// The kernels are WGSL (src/whet/gpu/kernels). The source of a pipeline is its constants, then its files; they read
// weights in the panels of the CPU's kernels (kernels/panel_layout.h). The dispatches follow Transformer::forward()
// line by line, in float32; keys and values are in the format of the cache.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "engine/config.h"
#include "engine/lora.h"
#include "engine/weights.h"

namespace whet::gpu {

constexpr size_t kLookahead = 8;  // steps of a submission, at most

struct Buffer {
    std::string name;
    size_t bytes;  // zeros before uploads
    size_t rows = 1;
};

// Contents of a part of a buffer: memory of the weights.
struct Upload {
    uint32_t buffer;
    size_t offset, bytes;
    const PackedWeight* weight;  // null: a vector
    size_t first_panel;
    const void* vector;

    // A matrix may be without memory until it is packed.
    const void* data() const { return weight != nullptr ? weight->panel(first_panel) : vector; }
};

struct Pipeline {
    std::string constants;
    std::vector<std::string> files;
};

// Rows of a dispatch: of the step's tokens, of their chosen experts, of the logits, or one.
enum class Count { kTokens, kExperts, kHeads, kOne };

// A kernel for a grid of (groups, rows of the step / rows) workgroups.
struct Variant {
    static constexpr uint32_t kSkip = UINT32_MAX;  // in place of the pipeline: there is nothing to do

    uint32_t rows, groups, pipeline;
    std::vector<uint32_t> buffers;  // in the order of their bindings
};

struct Dispatch {
    std::vector<Variant> variants;  // ascending: a step uses the first that has all of its rows, or the last
    Count count;
};

// Rows of inputs of a product. A single row may be normed or activated by the product as it reads it: the dispatches
// that do so are skipped.
struct Operand {
    uint32_t buffer;
    size_t stride;
    bool is_activated = false;   // rows are gate and up projections
    uint32_t raw = 0, norm = 0;  // of a normed row: the buffers of its elements and of the weights
    bool is_normed = false;
};

// A product of the forward pass to which adapters add: y += scale B (A x).
struct AdapterPoint {
    size_t layer;
    Target target;
    size_t after;  // dispatches of the forward pass before it
    Operand x;
    uint32_t y;  // buffer
    size_t y_stride;
    double scale;
};

struct Plan {
    std::vector<Buffer> buffers;  // named ones are the inputs and results: see make_plan()
    std::vector<Upload> uploads;
    std::vector<Pipeline> pipelines;
    std::vector<Dispatch> write_pages, forward, head, draw, next_tokens;
    std::vector<AdapterPoint> adapter_points;
    uint32_t params, tokens, none;  // buffers
    double norm_eps;
    bool is_gated;
    Activation activation;
    size_t max_rows;
};

// The dispatches of one adapter, by point of the plan, for the tokens of its number.
struct AdapterPlan {
    std::vector<Buffer> buffers;  // numbered after the plan's buffers; the first is its number
    std::vector<Upload> uploads;
    std::vector<Pipeline> pipelines;
    std::vector<std::vector<Dispatch>> dispatches;  // of every point: two, or none
};

struct Limits {
    size_t max_rows, n_pages, n_states;
    size_t binding_bytes;  // largest buffer that a kernel can bind
};

// Inputs of a step, which the host writes:
//
//  - params: number of tokens, of logits, of page writes
//  - tokens: id, position, offset of the sequence's pages in page_table, number of the adapter (0: none)
//  - page_table: pages of the sequences
//  - runs: per token, its Run (runs.wgsl)
//  - writes: PageWrites, at most as many as it has rows
//  - rotation, local_rotation: of each token cosines, sines, and the factor of its queries
//  - draws: per row of logits that is drawn from, 1 / temperature (0: greedy), the uniform number, and 1 / temperature
//    of the reported log-prob
//  - next_NAME: the same of tokens, rotation, local_rotation and draws for all steps of a submission
//  - head_rows: per row of logits, the token with the hidden state, or -1: the host writes it to head_in
//
// Results, in rows: drawn (kHeadTile, 2), the token and the bits of its log-prob, and all_drawn (max_rows, 2) of all
// steps of a submission, in each of which next_tokens copies the last drawn tokens to tokens; hidden (max_rows,
// hidden_dim), head_in (kHeadTile, hidden_dim), logits (kHeadTile, vocab_size), and the recorded experts (max_rows,
// mixture layers x n_used_experts).
//
// Throws std::invalid_argument for what has no kernel, named.
Plan make_plan(const Weights& weights, KvType kv_type, const Limits& limits);
// Throws std::invalid_argument for what has no kernel, named.
AdapterPlan make_adapter_plan(const Plan& plan, Adapter& adapter);

// Pages and states of a cache, and the size that the CPU's cache has with as many.
struct CacheSize {
    size_t n_pages, n_states, kv_bytes;
};
// The largest cache within a budget and the size of a buffer.
CacheSize fit_cache(const ModelConfig& config, KvType kv_type, size_t kv_bytes, size_t binding_bytes);

}  // namespace whet::gpu
