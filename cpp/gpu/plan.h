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

struct Buffer {
    std::string name;
    size_t bytes;
    const void* data = nullptr;  // initial contents, memory of the weights; null: zeros
};

struct Pipeline {
    std::string constants;
    std::vector<std::string> files;
};

enum class Count { kTokens, kHeads, kOne };  // rows of a dispatch: of the step's tokens, of its logits, or one

// A grid of (groups, rows / rows of a workgroup) workgroups.
struct Dispatch {
    // (rows of a workgroup, pipeline), ascending: a step uses the first that has all of its rows, or the last.
    std::vector<std::pair<uint32_t, uint32_t>> pipelines;
    std::vector<uint32_t> buffers;  // in the order of their bindings
    uint32_t groups;
    Count count;
};

// A product of the forward pass to which adapters add: y += B (A x).
struct AdapterPoint {
    size_t layer;
    Target target;
    size_t after;   // dispatches of the forward pass before it
    uint32_t x, y;  // buffers
    size_t x_stride, y_stride;
};

struct Plan {
    std::vector<Buffer> buffers;  // named ones are the inputs and results: see make_plan()
    std::vector<Pipeline> pipelines;
    std::vector<Dispatch> write_pages, forward, head;
    std::vector<AdapterPoint> adapter_points;
    uint32_t params, tokens, none;  // buffers
    size_t max_rows;
};

// The dispatches of one adapter, by point of the plan, for the tokens of its number.
struct AdapterPlan {
    std::vector<Buffer> buffers;  // numbered after the plan's buffers; the first is its number
    std::vector<Pipeline> pipelines;
    std::vector<std::vector<Dispatch>> dispatches;  // of every point; empty: none
};

struct Limits {
    size_t max_rows, max_heads, n_pages, max_writes;
    size_t binding_bytes;  // largest buffer that a kernel can bind
};

// Inputs of a step, which the host writes:
//   params        number of tokens, of logits, of page writes
//   tokens        per token: id, position, offset of its sequence's pages in page_table, number of its adapter (0:
//   none) page_table    pages of the sequences writes        PageWrites rotation, local_rotation   cosines, then sines,
//   per token query_scales  per token head_rows     per row of logits: the token with the hidden state, or -1: the host
//   writes it to `head_in`
// Results: hidden (max_rows, hidden_dim), head_in (max_heads, hidden_dim), logits (max_heads, vocab_size).
//
// Throws std::invalid_argument for what has no kernel, named.
Plan make_plan(const Weights& weights, KvType kv_type, const Limits& limits);
// Throws std::invalid_argument for what has no kernel, named.
AdapterPlan make_adapter_plan(const Plan& plan, const Adapter& adapter);

// Bytes of a page in the buffers of all layers.
size_t page_bytes(const ModelConfig& config, KvType kv_type);
// Bytes of a page in the buffer of the layer with the largest pages.
size_t largest_page_bytes(const ModelConfig& config, KvType kv_type);

}  // namespace whet::gpu
