// Allocation, sharing and prefix cache of the pages of a KV cache. Knows page numbers and tokens, not memory
// (kv_memory.h).
//
// Pages of 64 tokens are reference-counted. A full page of a prompt is indexed by its tokens and the page before it, so
// that sequences with the same prefix share it. A retained page stays in the index without references until its memory
// is needed, and is evicted in the order of last release. Pages have one size, so memory does not fragment.
//
// Recurrent mixers have a state per sequence, held in some pages too. A state that is attached to an indexed page is
// the state after the last token of that page, for sequences that continue it; it stays until its memory is needed,
// also while the page is in use, and ends with the page.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/sampler.h"
#include "kernels/attention_task.h"

namespace whet {

// Scores of the tokens of a page (of the first page, except its first token) under the model's distribution, and, if
// the page is full, the hidden state after the last of them, which scores any token that follows.
struct PageScores {
    std::array<float, kPageTokens> logprobs;
    std::array<Drawn, kPageTokens> best;  // most probable token at each place; valid if has_best
    bool has_best = false;
    std::vector<float> hidden;
};

class PageIndex {
public:
    static constexpr int32_t kNone = -1;
    enum class Scores : uint8_t { kAny, kLogprobs, kBest };  // scores that a page must have

    // n_state_pages: pages of a state; 0: there are none.
    explicit PageIndex(size_t n_pages, size_t n_state_pages = 0);

    size_t n_pages() const { return pages_.size(); }
    // Includes retained pages without a reference, and the pages of such states.
    size_t n_free() const { return free_.size() + n_evictable_; }
    size_t n_evictable() const { return n_evictable_; }

    int32_t allocate();  // with one reference; requires n_free() > 0. May evict the retained page released first
    void ref(int32_t page);
    void unref(int32_t page);
    int32_t ref_count(int32_t page) const { return at(page).ref_count; }
    // Whether the contents of a page are not needed.
    bool is_unused(int32_t page) const { return at(page).ref_count == 0 && !at(page).retained; }

    int32_t allocate_state();  // with one reference; requires n_free() >= n_state_pages()
    void ref_state(int32_t state);
    void unref_state(int32_t state);
    size_t n_state_pages() const { return n_state_pages_; }
    size_t n_referenced_states() const { return n_referenced_states_; }
    const int32_t* pages_of_state(int32_t state) const { return states_[static_cast<size_t>(state)].pages.data(); }
    // Attaches a state with a reference to an indexed page, unless either has one already.
    void attach_state(int32_t state, int32_t page);
    int32_t state_of(int32_t page) const { return at(page).state; }  // kNone: it has none

    // Finds the page with these n <= 64 tokens after page `before` (kNone: at the start) under `key` (the adapter's
    // id), or returns kNone.
    int32_t find(int32_t before, uint64_t key, const int32_t* tokens, size_t n = kPageTokens) const;
    void insert(int32_t page, int32_t before, uint64_t key, const int32_t* tokens, size_t n = kPageTokens);

    // Retains a page with the computed keys and values of n <= 64 tokens. Returns the indexed page with these tokens:
    // this page, or an earlier one.
    int32_t retain(int32_t page, int32_t before, uint64_t key, const int32_t* tokens, size_t n);
    // Finds the retained page after `before` with the longest common prefix with these n tokens, and its length, or
    // returns {kNone, 0}; only among pages with `scores`. `with_state`: among pages with a state, all of whose tokens
    // are common.
    std::pair<int32_t, size_t> find_retained(int32_t before, uint64_t key, const int32_t* tokens, size_t n,
                                             Scores scores = Scores::kAny, bool with_state = false) const;
    bool is_retained(int32_t page) const { return at(page).retained; }
    void set_computed(int32_t page) { at(page).computed = true; }
    bool is_computed(int32_t page) const { return at(page).computed; }
    // Scores of a page, until its memory is needed; null: none.
    const PageScores* scores(int32_t page) const { return at(page).scores.get(); }
    bool has_scores(int32_t page, Scores scores) const { return at(page).has(scores); }
    void set_scores(int32_t page, std::unique_ptr<PageScores> scores) { at(page).scores = std::move(scores); }
    void evict_retained();  // frees all retained pages and states without a reference

private:
    struct Page {
        int32_t ref_count = 0;
        uint64_t serial = 0;  // unique per allocation: following pages are indexed by it
        uint64_t hash = 0;
        uint64_t released = 0;  // time of the last unref, in releases
        int32_t state = kNone;  // attached
        bool indexed = false, retained = false, computed = false;
        std::unique_ptr<PageScores> scores{};

        bool is_evictable() const { return retained && ref_count == 0; }
        bool has(Scores wanted) const {
            return wanted == Scores::kAny || (scores != nullptr && (scores->has_best || wanted == Scores::kLogprobs));
        }
    };
    struct State {
        std::vector<int32_t> pages;
        int32_t ref_count = 0;
        int32_t page = kNone;  // that it is attached to
        uint64_t released = 0;

        bool is_evictable() const { return page != kNone && ref_count == 0; }
    };
    struct Entry {
        int32_t page;
        uint64_t before, key;
        std::vector<int32_t> tokens;  // 64, or fewer of a retained page that is not full
    };
    std::vector<Page> pages_;
    std::vector<int32_t> free_;
    std::vector<State> states_;
    std::vector<int32_t> free_states_;
    uint64_t serial_ = 0, releases_ = 0;
    size_t n_evictable_ = 0;  // pages, and pages of states
    size_t n_state_pages_, n_referenced_states_ = 0;
    std::unordered_multimap<uint64_t, Entry> entries_;

    Page& at(int32_t page) { return pages_[static_cast<size_t>(page)]; }
    const Page& at(int32_t page) const { return pages_[static_cast<size_t>(page)]; }
    State& state_at(int32_t state) { return states_[static_cast<size_t>(state)]; }
    void evict_oldest();
    void evict(int32_t page);
    void free_page(int32_t page);
    void free_state(int32_t state);
    void detach_state(Page& p);
    void erase_entry(const Page& p, int32_t page);
    uint64_t serial_of(int32_t page) const { return page == kNone ? 0 : at(page).serial; }
};

}  // namespace whet
