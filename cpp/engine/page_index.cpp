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

PageIndex::PageIndex(size_t n_pages, size_t n_state_pages) : pages_(n_pages), n_state_pages_(n_state_pages) {
    free_.reserve(n_pages);
    for (size_t i = n_pages; i > 0; --i) free_.push_back(static_cast<int32_t>(i - 1));
    if (n_state_pages == 0) return;
    states_.resize(n_pages / n_state_pages);
    for (State& state : states_) state.pages.reserve(n_state_pages);
    for (size_t i = states_.size(); i > 0; --i) free_states_.push_back(static_cast<int32_t>(i - 1));
}

int32_t PageIndex::allocate() {
    if (free_.empty()) evict_oldest();
    const int32_t page = free_.back();
    free_.pop_back();
    at(page) = {.ref_count = 1, .serial = ++serial_};
    return page;
}

void PageIndex::evict_oldest() {
    const auto oldest_of = [](const auto& entries) {
        const auto key = [](const auto& entry) { return entry.is_evictable() ? entry.released : UINT64_MAX; };
        const auto found = std::min_element(entries.begin(), entries.end(),
                                            [&](const auto& a, const auto& b) { return key(a) < key(b); });
        return std::pair(found == entries.end() ? UINT64_MAX : key(*found),
                         static_cast<int32_t>(found - entries.begin()));
    };
    const auto page = oldest_of(pages_), state = oldest_of(states_);
    page.first <= state.first ? evict(page.second) : free_state(state.second);
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
    free_page(page);
}

void PageIndex::evict(int32_t page) {
    --n_evictable_;
    free_page(page);
}

void PageIndex::free_page(int32_t page) {
    Page& p = at(page);
    if (p.indexed) erase_entry(p, page);
    p.indexed = p.retained = false;
    p.scores = nullptr;
    if (p.state != kNone) detach_state(p);
    free_.push_back(page);
}

void PageIndex::evict_retained() {
    for (size_t i = 0; i < n_pages(); ++i) {
        if (pages_[i].is_evictable()) evict(static_cast<int32_t>(i));
    }
}

int32_t PageIndex::allocate_state() {
    while (free_.size() < n_state_pages_) evict_oldest();
    const int32_t state = free_states_.back();
    free_states_.pop_back();
    State& s = state_at(state);
    s.ref_count = 1;
    ++n_referenced_states_;
    for (size_t i = 0; i < n_state_pages_; ++i) s.pages.push_back(allocate());
    return state;
}

void PageIndex::ref_state(int32_t state) {
    State& s = state_at(state);
    if (s.is_evictable()) n_evictable_ -= n_state_pages_;
    if (s.ref_count++ == 0) ++n_referenced_states_;
}

void PageIndex::unref_state(int32_t state) {
    State& s = state_at(state);
    if (--s.ref_count > 0) return;
    --n_referenced_states_;
    n_evictable_ += n_state_pages_;
    s.released = ++releases_;
    if (s.page == kNone) free_state(state);
}

// Frees the pages of a state without a reference.
void PageIndex::free_state(int32_t state) {
    State& s = state_at(state);
    if (s.page != kNone) at(s.page).state = kNone;
    s.page = kNone;
    n_evictable_ -= n_state_pages_;
    for (const int32_t page : s.pages) unref(page);
    s.pages.clear();
    free_states_.push_back(state);
}

void PageIndex::attach_state(int32_t state, int32_t page) {
    State& s = state_at(state);
    if (s.page != kNone || at(page).state != kNone) return;
    s.page = page;
    at(page).state = state;
}

// The page is freed.
void PageIndex::detach_state(Page& p) {
    State& s = state_at(p.state);
    if (s.ref_count == 0) return free_state(p.state);
    s.page = p.state = kNone;
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
    p.computed = true;
    return page;
}

std::pair<int32_t, size_t> PageIndex::find_retained(int32_t before, uint64_t key, const int32_t* tokens, size_t n,
                                                    Scores scores, bool with_state) const {
    std::pair<int32_t, size_t> best{kNone, 0};
    for (const auto& [hash, entry] : entries_) {
        if (entry.before != serial_of(before) || entry.key != key) continue;
        if (!at(entry.page).retained || (kIsComplete && !at(entry.page).has(scores))) continue;
        const auto end = std::mismatch(tokens, tokens + n, entry.tokens.begin(), entry.tokens.end()).first;
        const auto common = static_cast<size_t>(end - tokens);
        if (with_state && (common < entry.tokens.size() || state_of(entry.page) == kNone)) continue;
        if (common > best.second) best = {entry.page, common};
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
