// Paged KV cache: pages of 64 tokens over all layers, reference-counted, with a prefix cache.
//
// A full page of a prompt is indexed by its tokens and the page before it, so that sequences with the same prefix share
// it. A retained page stays in the index without references until its memory is needed, and is evicted in the order of
// last release. Pages have one size, so memory does not fragment; it is committed lazily, until release_free().
#pragma once
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/config.h"
#include "kernels/attention_task.h"
#include "runtime/zeroed.h"

namespace whet {

class KvCache {
public:
    static constexpr int32_t kNone = -1;

    KvCache(const ModelConfig& config, bool bf16, size_t budget_bytes);

    static size_t page_bytes(const ModelConfig& config, bool bf16);
    size_t n_pages() const { return pages_.size(); }
    size_t n_free() const { return free_.size() + n_evictable_; }  // includes retained pages without a reference
    size_t n_evictable() const { return n_evictable_; }
    size_t n_committed() const;
    size_t page_bytes() const { return page_bytes_; }
    bool bf16() const { return bf16_; }
    uint8_t* data() const { return memory_.data(); }
    // Offset of the keys of a layer's KV head in a page.
    size_t offset(size_t layer, size_t head) const { return (layer * n_kv_heads_ + head) * head_bytes_; }

    int32_t allocate();  // zeroed, with one reference; requires n_free() > 0
    void ref(int32_t page);
    void unref(int32_t page);
    int32_t copy(int32_t page);  // a new page with the same contents; `page` itself if that is evicted for it
    int32_t ref_count(int32_t page) const { return pages_[static_cast<size_t>(page)].ref_count; }

    // Finds the page with these 64 tokens after page `before` (kNone: at the start) under `key` (the adapter's id), or
    // returns kNone.
    int32_t find_prefix(int32_t before, uint64_t key, const int32_t* tokens) const;
    void insert_prefix(int32_t page, int32_t before, uint64_t key, const int32_t* tokens);

    // Retains a page with the computed keys and values of n <= 64 tokens. Returns the indexed page with these tokens:
    // this page, or an earlier one.
    int32_t retain(int32_t page, int32_t before, uint64_t key, const int32_t* tokens, size_t n);
    // Finds the retained page after `before` with the longest common prefix with these n tokens, and its length, or
    // returns {kNone, 0}.
    std::pair<int32_t, size_t> find_retained(int32_t before, uint64_t key, const int32_t* tokens, size_t n) const;
    void evict_retained();  // frees all retained pages without a reference

    // Releases the memory of free pages, excluding retained pages, to the system; returns the number of pages.
    size_t release_free();

private:
    struct Page {
        int32_t ref_count = 0;
        uint64_t serial = 0;  // unique per allocation: following pages are indexed by it
        uint64_t hash = 0;
        uint64_t released = 0;  // time of the last unref, in releases
        bool indexed = false, retained = false, committed = false;

        bool is_evictable() const { return retained && ref_count == 0; }
        bool is_releasable() const { return committed && !retained && ref_count == 0; }
    };
    struct Entry {
        int32_t page;
        uint64_t before, key;
        std::vector<int32_t> tokens;  // 64, or fewer of a retained page that is not full
    };
    bool bf16_;
    size_t n_kv_heads_, head_bytes_, page_bytes_;
    Zeroed memory_;
    std::vector<Page> pages_;
    std::vector<int32_t> free_;
    uint64_t serial_ = 0, releases_ = 0;
    size_t n_evictable_ = 0;
    std::unordered_multimap<uint64_t, Entry> entries_;

    int32_t allocate_uncleared();
    void evict(int32_t page);
    int32_t find(int32_t before, uint64_t key, const int32_t* tokens, size_t n) const;
    void insert(int32_t page, int32_t before, uint64_t key, const int32_t* tokens, size_t n);
    void erase_entry(const Page& p, int32_t page);
    uint64_t serial_of(int32_t page) const { return page == kNone ? 0 : pages_[static_cast<size_t>(page)].serial; }
};

}  // namespace whet
