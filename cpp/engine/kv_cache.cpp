#include "engine/kv_cache.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace whet {
namespace {

// Keys and values of one KV head in a page, in the layout of kernels/cached_attention.h.
size_t head_bytes(const ModelConfig& config, bool bf16) {
    const size_t words = bf16 ? (config.head_dim + 1) / 2 : config.head_dim;
    const size_t columns = (config.head_dim + 15) / 16 * 16;
    return kPageTokens * (words * 4 + columns * (bf16 ? 2 : 4));
}

uint64_t hash_of(uint64_t before, uint64_t key, const int32_t* tokens) {
    uint64_t hash = before * 0x9e3779b97f4a7c15u ^ key;
    for (int i = 0; i < kPageTokens; ++i) {
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
    const int32_t page = free_.back();
    free_.pop_back();
    // Masked keys get weight 0, but 0 * inf and 0 * NaN are NaN.
    std::memset(memory_.data() + static_cast<size_t>(page) * page_bytes_, 0, page_bytes_);
    pages_[static_cast<size_t>(page)] = {.ref_count = 1, .serial = ++serial_};
    return page;
}

void KvCache::unref(int32_t page) {
    Page& p = pages_[static_cast<size_t>(page)];
    if (--p.ref_count > 0) return;
    if (p.indexed) {
        const auto [begin, end] = entries_.equal_range(p.hash);
        const auto at = std::find_if(begin, end, [&](const auto& entry) { return entry.second.page == page; });
        if (at != end) entries_.erase(at);
    }
    free_.push_back(page);
}

int32_t KvCache::copy(int32_t page) {
    const int32_t own = free_.back();
    free_.pop_back();
    std::memcpy(memory_.data() + static_cast<size_t>(own) * page_bytes_,
                memory_.data() + static_cast<size_t>(page) * page_bytes_, page_bytes_);
    pages_[static_cast<size_t>(own)] = {.ref_count = 1, .serial = ++serial_};
    return own;
}

int32_t KvCache::find_prefix(int32_t before, uint64_t key, const int32_t* tokens) const {
    const uint64_t serial = serial_of(before);
    const auto [begin, end] = entries_.equal_range(hash_of(serial, key, tokens));
    for (auto at = begin; at != end; ++at) {
        const Entry& entry = at->second;
        if (entry.before == serial && entry.key == key && std::equal(tokens, tokens + kPageTokens, entry.tokens.data()))
            return entry.page;
    }
    return kNone;
}

void KvCache::insert_prefix(int32_t page, int32_t before, uint64_t key, const int32_t* tokens) {
    Page& p = pages_[static_cast<size_t>(page)];
    const uint64_t serial = serial_of(before);
    p.hash = hash_of(serial, key, tokens);
    try {
        entries_.emplace(p.hash, Entry{page, serial, key, std::vector<int32_t>(tokens, tokens + kPageTokens)});
        p.indexed = true;
    } catch (const std::bad_alloc&) {  // a page that is not indexed is only not shared
    }
}

}  // namespace whet
