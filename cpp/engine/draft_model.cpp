#include "engine/draft_model.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "engine/scheduler.h"
#include "runtime/ceil_div.h"
#include "runtime/clock.h"
#include "runtime/philox.h"

namespace whet {

DraftSequence::DraftSequence(DraftModel& model, const Request& request, size_t sample)
    : model_(model),
      n_prompt_(request.tokens.size()),
      sampling_(request.sampling),
      min_new_tokens_(request.min_new_tokens),
      seed_(request.seed),
      prompt_index_(request.prompt_index),
      sample_(request.first_sample + sample) {
    const size_t capacity = n_prompt_ + request.max_new_tokens;
    tokens_.reserve(capacity);
    tokens_.assign(request.tokens.begin(), request.tokens.end());
    expected_.reserve(kMaxDraft);
    pages_.reserve(ceil_div(capacity, DraftModel::kPage));
    const auto is_known_token = [this](int32_t token) { return is_known(token); };
    is_known_ = std::all_of(tokens_.begin(), tokens_.end(), is_known_token);
    std::copy_if(request.stop_tokens.begin(), request.stop_tokens.end(), std::back_inserter(banned_), is_known_token);
    std::erase_if(sampling_.logit_bias, [this](const TokenBias& bias) { return !is_known(bias.token); });
    sampling_.top_logprobs = 0;
    int32_t page = PageIndex::kNone;
    while (computed_ + DraftModel::kPage < n_prompt_) {
        page = model.pages_.find(page, 0, tokens_.data() + computed_);
        if (page == PageIndex::kNone) break;
        model.pages_.ref(page);
        pages_.push_back(page);
        computed_ += DraftModel::kPage;
    }
}

DraftSequence::~DraftSequence() {
    PageIndex& pages = model_.pages_;
    const size_t n = std::min(computed_, tokens_.size()) / DraftModel::kPage;
    int32_t before = PageIndex::kNone;
    for (size_t i = 0; i < n; ++i) {
        before = pages.retain(pages_[i], before, 0, tokens_.data() + i * DraftModel::kPage, DraftModel::kPage);
    }
    for (auto page = pages_.rbegin(); page != pages_.rend(); ++page) pages.unref(*page);
}

bool DraftSequence::is_known(int32_t token) const {
    return static_cast<size_t>(token) < model_.transformer_.config().vocab_size;
}

void DraftSequence::append(int32_t token) {
    constexpr double kRate = 1.0 / 16, kReturn = 1.0 / 500;
    if (expected_.empty()) {
        // Without drafts the share returns to its first value, so that they are tried again.
        right_ += kReturn * std::max(0.0, kFirstRight - right_);
    } else if (const bool is_right = expected_.front() == token; is_right) {
        right_ += kRate * (1.0 - right_);
        expected_.erase(expected_.begin());
    } else {
        right_ -= kRate * right_;
        expected_.clear();
        computed_ = std::min(computed_, tokens_.size());
    }
    tokens_.push_back(token);
    is_known_ = is_known_ && is_known(token);
}

DraftModel::DraftModel(Transformer& transformer, size_t n_pages, size_t max_batch, size_t vocab_size)
    : transformer_(transformer),
      memory_(transformer.config(), transformer.kv_type(),
              n_pages * KvMemory::page_bytes(transformer.config(), transformer.kv_type())),
      pages_(n_pages),
      runner_(transformer, max_batch),
      vocab_size_(vocab_size) {
    plan_.tokens.reserve(transformer.max_rows());
    plan_.draws.reserve(max_batch);
}

void DraftModel::draft() {
    for (bool is_first = true;; is_first = false) {
        plan_step(is_first);
        if (plan_.is_empty()) {
            is_warm_ = is_warm_ || !is_first;
            return;
        }
        const double start_s = now_s();
        const std::span<const Drawn> drawn = runner_.run(plan_, memory_);
        const size_t n = drawn.size();
        if (is_warm_ && plan_.tokens.size() <= 2 * n) times_.add(n, now_s() - start_s);
        for (const Task& advance : advances_) advance.sequence->computed_ += advance.n;
        for (size_t i = 0; i < n; ++i) {
            DraftSequence& sequence = *advances_[plan_.draws[i].sample].sequence;
            const bool is_known = static_cast<size_t>(drawn[i].token) < vocab_size_;
            if (is_known && !std::isnan(drawn[i].logprob)) sequence.expected_.push_back(drawn[i].token);
        }
    }
}

// Adds the tokens that are not computed yet, and a draw after each sequence of which all are; in the first step of a
// call also chunks of longer texts. A sequence that drew nothing in the last step has no token left.
void DraftModel::plan_step(bool is_first) {
    plan_.tokens.clear();
    plan_.draws.clear();
    advances_.clear();
    for (const auto& [sequence, n_drafted] : tasks_) {
        DraftSequence& s = *sequence;
        const size_t n_left = s.n_tokens() - s.computed_, room = transformer_.max_rows() - plan_.tokens.size();
        const size_t n = std::min(n_left, room);
        if (s.expected_.size() == n_drafted || n == 0 || (n_left > 1 && !is_first)) continue;
        if (s.n_tokens() > transformer_.config().max_position || !allocate_pages(s, s.computed_ + n)) continue;
        for (size_t i = s.computed_; i < s.computed_ + n; ++i) {
            plan_.tokens.push_back({s.token(i), static_cast<int32_t>(i), s.pages_.data(), nullptr});
        }
        if (n == n_left) {
            const size_t position = s.n_tokens() - s.n_prompt_;
            DrawTask& task = plan_.draws.emplace_back();
            task.sample = advances_.size();
            task.token = plan_.tokens.size() - 1;
            task.sampling = &s.sampling_;
            if (position < s.min_new_tokens_) task.history.banned = s.banned_;
            task.uniform = token_uniform(s.seed_, s.prompt_index_, s.sample_, position);
        }
        advances_.push_back({sequence, n});
    }
}

// Returns false if too few pages are free.
bool DraftModel::allocate_pages(DraftSequence& sequence, size_t n_tokens) {
    while (sequence.pages_.size() * kPage < n_tokens) {
        if (pages_.n_free() == 0) return false;
        plan_.page_writes.reserve(plan_.page_writes.size() + 1);
        const int32_t page = pages_.allocate();
        sequence.pages_.push_back(page);
        plan_.page_writes.push_back({page, PageIndex::kNone});
    }
    return true;
}

size_t DraftModel::committed_bytes() const {
    return transformer_.weights().size_bytes() + memory_.n_committed() * memory_.page_bytes() +
           runner_.committed_workspace_bytes();
}

size_t DraftModel::release_memory() {
    const size_t workspace = runner_.committed_workspace_bytes();
    runner_.write_pages(plan_.page_writes, memory_);  // of a step that threw: they may read free pages
    runner_.release_workspace();
    is_warm_ = false;
    return workspace + memory_.release(pages_) * memory_.page_bytes();
}

SampleDrafts::SampleDrafts(const Request& request, size_t sample, DraftModel* model)
    : lookup_(request.tokens, request.tokens.size() + request.max_new_tokens) {
    if (model != nullptr) sequence_.emplace(*model, request, sample);
}

void SampleDrafts::append(int32_t token) {
    lookup_.append(token);
    if (sequence_) sequence_->append(token);
}

std::span<const int32_t> SampleDrafts::draft(double least, size_t most) const {
    const std::span<const int32_t> found = lookup_.draft(least, most);
    if (!found.empty() || !sequence_) return found;
    return sequence_->expected().first(std::min(most, sequence_->expected().size()));
}

}  // namespace whet
