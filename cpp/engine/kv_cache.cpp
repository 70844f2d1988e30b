#include "engine/kv_cache.h"

#include <algorithm>
#include <cstring>

#include "runtime/try_allocating.h"
#include "runtime/pages.h"

namespace whet {
namespace {

// Keys and values of one KV head in a page, in the layout of kernels/cached_attention.h.
size_t head_bytes(const ModelConfig& config, bool bf16) {
    const size_t words = bf16 ? (config.head_dim + 1) / 2 : config.head_dim;
    const size_t columns = (config.head_dim + 15) / 16 * 16;
    return kPageTokens * (words * 4 + columns * (bf16 ? 2 : 4));
}

uint64_t hash_of(uint64_t before, uint64_t key, const int32_t* tokens, size_t n) {
    uint64_t hash = before * 0x9e3779b97f4a7c15u ^ key;
    for (size_t i = 0; i < n; ++i) {
        hash = (hash ^ static_cast<uint32_t>(tokens[i])) * 0xff51afd7ed558ccdu;
        hash ^= hash >> 32;
    }
    return hash;
}

}  // namespace

size_t KvCache::page_bytes(const ModelConfig& config, bool bf16) {
    return config.n_layers * config.n_kv_heads * head_bytes(config, bf16);
}

KvCache::KvCache(const ModelConfig& config, bool bf16, size_t budget_bytes)
    : bf16_(bf16),
      n_kv_heads_(config.n_kv_heads),
      head_bytes_(head_bytes(config, bf16)),
      page_bytes_(page_bytes(config, bf16)),
      memory_(budget_bytes / page_bytes_ * page_bytes_),
      pages_(budget_bytes / page_bytes_) {
    free_.reserve(n_pages());
    for (size_t i = n_pages(); i > 0; --i) free_.push_back(static_cast<int32_t>(i - 1));
}

int32_t KvCache::allocate() {
    const int32_t page = allocate_uncleared();
    // Masked keys have weight 0, but 0 * inf and 0 * NaN are NaN.
    std::memset(memory_.data() + static_cast<size_t>(page) * page_bytes_, 0, page_bytes_);
    return page;
}

int32_t KvCache::copy(int32_t page) {
    const int32_t own = allocate_uncleared();
    if (own != page) {
        std::memcpy(memory_.data() + static_cast<size_t>(own) * page_bytes_,
                    memory_.data() + static_cast<size_t>(page) * page_bytes_, page_bytes_);
    }
    return own;
}

int32_t KvCache::allocate_uncleared() {
    if (free_.empty()) {
        const auto key = [](const Page& p) { return p.is_evictable() ? p.released : UINT64_MAX; };
        const auto oldest = std::min_element(pages_.begin(), pages_.end(),
                                             [&](const Page& a, const Page& b) { return key(a) < key(b); });
        evict(static_cast<int32_t>(oldest - pages_.begin()));
    }
    const int32_t page = free_.back();
    free_.pop_back();
    pages_[static_cast<size_t>(page)] = {.ref_count = 1, .serial = ++serial_, .committed = true};
    return page;
}

void KvCache::ref(int32_t page) {
    Page& p = pages_[static_cast<size_t>(page)];
    if (p.is_evictable()) --n_evictable_;
    ++p.ref_count;
}

void KvCache::unref(int32_t page) {
    Page& p = pages_[static_cast<size_t>(page)];
    if (--p.ref_count > 0) return;
    if (p.retained) {
        p.released = ++releases_;
        ++n_evictable_;
        return;
    }
    if (p.indexed) erase_entry(p, page);
    free_.push_back(page);
}

void KvCache::evict(int32_t page) {
    Page& p = pages_[static_cast<size_t>(page)];
    erase_entry(p, page);
    p.retained = false;
    --n_evictable_;
    free_.push_back(page);
}

void KvCache::evict_retained() {
    for (size_t i = 0; i < n_pages(); ++i) {
        if (pages_[i].is_evictable()) evict(static_cast<int32_t>(i));
    }
}

size_t KvCache::n_committed() const {
    return static_cast<size_t>(std::count_if(pages_.begin(), pages_.end(), [](const Page& p) { return p.committed; }));
}

// Releases runs of adjacent pages at once, so that whole huge pages are freed.
size_t KvCache::release_free() {
    const auto is_releasable = [](const Page& p) { return p.is_releasable(); };
    size_t n = 0;
    for (auto end = pages_.begin(); end != pages_.end();) {
        const auto begin = std::find_if(end, pages_.end(), is_releasable);
        end = std::find_if_not(begin, pages_.end(), is_releasable);
        const auto first = static_cast<size_t>(begin - pages_.begin()), count = static_cast<size_t>(end - begin);
        release_pages(memory_.data() + first * page_bytes_, count * page_bytes_);
        std::for_each(begin, end, [](Page& p) { p.committed = false; });
        n += count;
    }
    return n;
}

int32_t KvCache::find_prefix(int32_t before, uint64_t key, const int32_t* tokens) const {
    return find(before, key, tokens, kPageTokens);
}

int32_t KvCache::find(int32_t before, uint64_t key, const int32_t* tokens, size_t n) const {
    const uint64_t serial = serial_of(before);
    const auto [begin, end] = entries_.equal_range(hash_of(serial, key, tokens, n));
    for (auto at = begin; at != end; ++at) {
        const Entry& entry = at->second;
        if (entry.before == serial && entry.key == key &&
            std::equal(tokens, tokens + n, entry.tokens.begin(), entry.tokens.end()))
            return entry.page;
    }
    return kNone;
}

void KvCache::insert_prefix(int32_t page, int32_t before, uint64_t key, const int32_t* tokens) {
    insert(page, before, key, tokens, kPageTokens);
}

int32_t KvCache::retain(int32_t page, int32_t before, uint64_t key, const int32_t* tokens, size_t n) {
    Page& p = pages_[static_cast<size_t>(page)];
    if (!p.indexed) {
        const int32_t other = find(before, key, tokens, n);
        if (other != kNone) return other;
        insert(page, before, key, tokens, n);
    }
    p.retained = p.indexed;
    return page;
}

std::pair<int32_t, size_t> KvCache::find_retained(int32_t before, uint64_t key, const int32_t* tokens, size_t n) const {
    std::pair<int32_t, size_t> best{kNone, 0};
    for (const auto& [hash, entry] : entries_) {
        if (entry.before != serial_of(before) || entry.key != key) continue;
        if (!pages_[static_cast<size_t>(entry.page)].retained) continue;
        const auto end = std::mismatch(tokens, tokens + n, entry.tokens.begin(), entry.tokens.end()).first;
        const auto common = static_cast<size_t>(end - tokens);
        if (common > best.second) best = {entry.page, common};
    }
    return best;
}

void KvCache::insert(int32_t page, int32_t before, uint64_t key, const int32_t* tokens, size_t n) {
    Page& p = pages_[static_cast<size_t>(page)];
    const uint64_t serial = serial_of(before);
    p.hash = hash_of(serial, key, tokens, n);
    // Without memory for the entry the page is not shared.
    p.indexed = try_allocating(
        [&] { entries_.emplace(p.hash, Entry{page, serial, key, std::vector<int32_t>(tokens, tokens + n)}); });
}

void KvCache::erase_entry(const Page& p, int32_t page) {
    const auto [begin, end] = entries_.equal_range(p.hash);
    const auto at = std::find_if(begin, end, [&](const auto& entry) { return entry.second.page == page; });
    if (at != end) entries_.erase(at);
}

}  // namespace whet
