#include "engine/page_index.h"

#include <algorithm>

#include "engine/config.h"
#include "runtime/try_allocating.h"

namespace whet {
namespace {

uint64_t hash_of(uint64_t before, uint64_t key, const int32_t* tokens, size_t n) {
    uint64_t hash = before * 0x9e3779b97f4a7c15u ^ key;
    for (size_t i = 0; i < n; ++i) {
        hash = (hash ^ static_cast<uint32_t>(tokens[i])) * 0xff51afd7ed558ccdu;
        hash ^= hash >> 32;
    }
    return hash;
}

}  // namespace

PageIndex::PageIndex(size_t n_pages) : pages_(n_pages) {
    free_.reserve(n_pages);
    for (size_t i = n_pages; i > 0; --i) free_.push_back(static_cast<int32_t>(i - 1));
}

int32_t PageIndex::allocate() {
    if (free_.empty()) {
        const auto key = [](const Page& p) { return p.is_evictable() ? p.released : UINT64_MAX; };
        const auto oldest = std::min_element(pages_.begin(), pages_.end(),
                                             [&](const Page& a, const Page& b) { return key(a) < key(b); });
        evict(static_cast<int32_t>(oldest - pages_.begin()));
    }
    const int32_t page = free_.back();
    free_.pop_back();
    at(page) = {.ref_count = 1, .serial = ++serial_};
    return page;
}

void PageIndex::ref(int32_t page) {
    Page& p = at(page);
    if (p.is_evictable()) --n_evictable_;
    ++p.ref_count;
}

void PageIndex::unref(int32_t page) {
    Page& p = at(page);
    if (--p.ref_count > 0) return;
    if (p.retained) {
        p.released = ++releases_;
        ++n_evictable_;
        return;
    }
    if (p.indexed) erase_entry(p, page);
    p.scores = nullptr;
    free_.push_back(page);
}

void PageIndex::evict(int32_t page) {
    Page& p = at(page);
    erase_entry(p, page);
    p.retained = false;
    p.scores = nullptr;
    --n_evictable_;
    free_.push_back(page);
}

void PageIndex::evict_retained() {
    for (size_t i = 0; i < n_pages(); ++i) {
        if (pages_[i].is_evictable()) evict(static_cast<int32_t>(i));
    }
}

int32_t PageIndex::find(int32_t before, uint64_t key, const int32_t* tokens, size_t n) const {
    const uint64_t serial = serial_of(before);
    const auto [begin, end] = entries_.equal_range(hash_of(serial, key, tokens, n));
    for (auto found = begin; found != end; ++found) {
        const Entry& entry = found->second;
        if (entry.before == serial && entry.key == key &&
            std::equal(tokens, tokens + n, entry.tokens.begin(), entry.tokens.end()))
            return entry.page;
    }
    return kNone;
}

int32_t PageIndex::retain(int32_t page, int32_t before, uint64_t key, const int32_t* tokens, size_t n) {
    Page& p = at(page);
    if (!p.indexed) {
        const int32_t other = find(before, key, tokens, n);
        if (other != kNone) return other;
        insert(page, before, key, tokens, n);
    }
    p.retained = p.indexed;
    return page;
}

std::pair<int32_t, size_t> PageIndex::find_retained(int32_t before, uint64_t key, const int32_t* tokens, size_t n,
                                                    Scores scores, bool whole) const {
    std::pair<int32_t, size_t> best{kNone, 0};
    for (const auto& [hash, entry] : entries_) {
        if (entry.before != serial_of(before) || entry.key != key) continue;
        if (!at(entry.page).retained || (kIsComplete && !at(entry.page).has(scores))) continue;
        const auto end = std::mismatch(tokens, tokens + n, entry.tokens.begin(), entry.tokens.end()).first;
        const auto common = static_cast<size_t>(end - tokens);
        if (common > best.second && (!whole || common == entry.tokens.size())) best = {entry.page, common};
    }
    return best;
}

void PageIndex::insert(int32_t page, int32_t before, uint64_t key, const int32_t* tokens, size_t n) {
    Page& p = at(page);
    const uint64_t serial = serial_of(before);
    p.hash = hash_of(serial, key, tokens, n);
    // Without memory for the entry the page is not shared.
    p.indexed = try_allocating(
        [&] { entries_.emplace(p.hash, Entry{page, serial, key, std::vector<int32_t>(tokens, tokens + n)}); });
}

void PageIndex::erase_entry(const Page& p, int32_t page) {
    const auto [begin, end] = entries_.equal_range(p.hash);
    const auto found = std::find_if(begin, end, [&](const auto& entry) { return entry.second.page == page; });
    if (found != end) entries_.erase(found);
}

}  // namespace whet
