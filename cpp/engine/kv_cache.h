// Keys and values of sequences in pages of 64 tokens, over all layers: reference-counted, shared, and indexed by their
// tokens.
//
// A page counts the sequences that reference it and is freed with the last reference. A full page of a prompt is
// indexed by its tokens and the page before it, so that a sequence that begins with the same tokens finds it (prefix
// caching). A page that is kept stays in the index without a reference, until its memory is needed: the one that was
// released first is evicted first. Pages have one size, so memory does not fragment; it is committed when a page is
// first used, and stays so until release_free().
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
    size_t n_free() const { return free_.size() + n_evictable_; }  // kept pages without a reference among them
    size_t n_evictable() const { return n_evictable_; }
    size_t n_committed() const;
    size_t page_bytes() const { return page_bytes_; }
    bool bf16() const { return bf16_; }
    uint8_t* data() const { return memory_.data(); }
    // Offset in a page of the keys of a KV head of a layer.
    size_t offset(size_t layer, size_t head) const { return (layer * n_kv_heads_ + head) * head_bytes_; }

    int32_t allocate();  // a page of zeros with one reference; there must be a free one
    void ref(int32_t page);
    void unref(int32_t page);
    int32_t copy(int32_t page);  // a page of its own with the same contents: the same one, where it is evicted for it
    int32_t ref_count(int32_t page) const { return pages_[static_cast<size_t>(page)].ref_count; }

    // The page that holds these 64 tokens after page `before` (kNone: from the start) under `key` (an adapter's
    // number), or kNone.
    int32_t find_prefix(int32_t before, uint64_t key, const int32_t* tokens) const;
    void insert_prefix(int32_t page, int32_t before, uint64_t key, const int32_t* tokens);

    // Keeps a page whose keys and values of n <= 64 tokens are computed. The page that stands for them in the index:
    // this one, or one that was there before.
    int32_t keep(int32_t page, int32_t before, uint64_t key, const int32_t* tokens, size_t n);
    // The kept page after `before` that has the most of these n first tokens, and how many; {kNone, 0}: there is none.
    std::pair<int32_t, size_t> find_kept(int32_t before, uint64_t key, const int32_t* tokens, size_t n) const;
    void forget_kept();  // frees the kept pages that are not referenced

    // Gives the memory of free pages, kept ones not among them, back to the system; how many pages it was.
    size_t release_free();

private:
    struct Page {
        int32_t ref_count = 0;
        uint64_t serial = 0;  // of its present allocation: pages that follow it are indexed by this number
        uint64_t hash = 0;
        uint64_t released = 0;  // when its last reference went, in releases
        bool indexed = false, kept = false, committed = false;

        bool is_evictable() const { return kept && ref_count == 0; }
        bool is_releasable() const { return committed && !kept && ref_count == 0; }
    };
    struct Entry {
        int32_t page;
        uint64_t before, key;
        std::vector<int32_t> tokens;  // 64, and fewer of a kept page that is not full
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
