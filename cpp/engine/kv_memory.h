// The memory of a paged KV cache: keys and values of all layers, and a mixture's choices of experts, in pages of 64
// tokens, lazily committed. Which pages are in use is in page_index.h.
//
// The state of recurrent mixers after some token of a sequence is in pages too. Its parts, the inputs of a layer's
// short convolution and the matrix of a value head, are each within one page.
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

using StateLength = int32_t;  // tokens of a sequence up to its state

class KvMemory {
public:
    // `holds_keys`: whether keys and values are here; else pages have memory only for the experts of a mixture.
    KvMemory(const ModelConfig& config, KvType type, size_t budget_bytes, bool holds_keys = true);

    static size_t page_bytes(const ModelConfig& config, KvType type);
    size_t n_pages() const { return is_committed_.size(); }
    size_t page_bytes() const { return page_bytes_; }
    uint8_t* data() const { return memory_.data(); }
    uint8_t* page(int32_t i) const { return memory_.data() + static_cast<size_t>(i) * page_bytes_; }
    // Offset of the keys of a KV head that a layer reads in a page.
    size_t offset(size_t layer, size_t head) const { return offsets_[layer] + head * head_bytes_[layer]; }
    // The experts of a token of a page, (mixture layers, n_used_experts).
    uint16_t* experts(int32_t page_number, size_t token) const {
        return reinterpret_cast<uint16_t*>(page(page_number) + experts_offset_) + token * token_experts_;
    }
    size_t token_experts() const { return token_experts_; }  // numbers; 0: no mixture
    size_t n_state_pages() const { return n_state_pages_; }  // 0: no mixer is recurrent
    // Part of the state in these pages: 0, the inputs of a layer's convolution, (conv_length, channels), with the
    // input at position p in row p % conv_length; 1 + h, the matrix of value head h, followed by a StateLength.
    float* state(const int32_t* pages, size_t layer, size_t part) const {
        const StatePart& at = state_parts_[first_parts_[layer] + part];
        return reinterpret_cast<float*>(page(pages[at.page]) + at.offset);
    }

    void apply(std::span<const PageWrite> writes);  // in order
    // Applies them to the experts of the pages, where keys and values are on a device.
    void copy_experts(std::span<const PageWrite> writes);
    size_t n_committed() const;
    // Releases the memory of unused pages to the system, runs of adjacent pages at once, so that whole huge pages are
    // freed; returns the number of pages.
    size_t release(const PageIndex& index);

private:
    struct StatePart {
        uint32_t page, offset;  // the page's index in the state
    };
    std::vector<size_t> offsets_, head_bytes_;  // of the layers in a page
    size_t token_experts_, experts_offset_ = 0, page_bytes_;
    std::vector<StatePart> state_parts_;
    std::vector<size_t> first_parts_;  // of the layers
    size_t n_state_pages_ = 0;
    Zeroed memory_;
    std::vector<bool> is_committed_;
};

}  // namespace whet
