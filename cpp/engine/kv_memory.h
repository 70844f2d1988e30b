// The memory of a paged KV cache: keys and values of all layers, in pages of 64 tokens, lazily committed. Which pages
// are in use is in page_index.h.
//
// A page of a model with short convolutions also has two states: for each of these layers the inputs of the last
// conv_length - 1 tokens up to some token of the page. Two, because a step reads one and writes the other: it can be
// repeated. So a sequence has a state at the end of each of its pages and after its last token, and the state is
// shared, copied, retained and evicted with the page.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/config.h"
#include "engine/page_index.h"
#include "kernels/attention_task.h"
#include "runtime/zeroed.h"

namespace whet {

// Initialises a newly allocated page: copies page `from`, or clears the page if `from` is PageIndex::kNone.
struct PageWrite {
    int32_t page, from;
};

class KvMemory {
public:
    KvMemory(const ModelConfig& config, KvType type, size_t budget_bytes);

    static size_t page_bytes(const ModelConfig& config, KvType type);
    size_t n_pages() const { return is_committed_.size(); }
    size_t page_bytes() const { return page_bytes_; }
    uint8_t* data() const { return memory_.data(); }
    uint8_t* page(int32_t i) const { return memory_.data() + static_cast<size_t>(i) * page_bytes_; }
    // Offset of the keys of a layer's KV head in a page.
    size_t offset(size_t layer, size_t head) const { return offsets_[layer] + head * head_bytes_; }
    // For each of a page's two states, the number of tokens of the sequence that it follows; 0: none.
    int32_t* state_lengths(int32_t i) const { return reinterpret_cast<int32_t*>(page(i) + states_); }
    // A layer's part of a state: (conv_length - 1, hidden_dim) inputs, the oldest first.
    float* state(int32_t i, size_t layer, size_t which) const {
        return reinterpret_cast<float*>(page(i) + offsets_[layer] + which * state_bytes_);
    }

    void apply(std::span<const PageWrite> writes);  // in order
    size_t n_committed() const;
    // Releases the memory of unused pages to the system, runs of adjacent pages at once, so that whole huge pages are
    // freed; returns the number of pages.
    size_t release(const PageIndex& index);

private:
    std::vector<size_t> offsets_;  // of the layers in a page, of the lengths of its states, and of its end
    size_t head_bytes_, state_bytes_, states_, page_bytes_;
    Zeroed memory_;
    std::vector<bool> is_committed_;
};

}  // namespace whet
