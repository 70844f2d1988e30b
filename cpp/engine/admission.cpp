// Admission: creates jobs from requests, allocates the pages of prompts, starts samples.
//
// A prompt is admitted, and a sample started, only if the pages of its worst case are free or reserved: reserved_
// counts the pages that admitted samples may still allocate, so allocations never fail and nothing is preempted.
#include "engine/scheduler.h"

#include <algorithm>
#include <stdexcept>

#include "engine/draft_model.h"
#include "runtime/ceil_div.h"

namespace whet {
namespace {

// The scores that a page must have to answer a request.
PageIndex::Scores scores_of(const Request& request) {
    return request.scoring.top_logprobs > 0 ? PageIndex::Scores::kBest : PageIndex::Scores::kLogprobs;
}

}  // namespace

void Scheduler::check(const Request& request) const {
    const auto require = [](bool fits, const char* error) {
        if (!fits) throw std::invalid_argument(error);
    };
    const size_t n_tokens = request.tokens.size(), score_from = request.score_from;
    require(n_tokens > 0, "no tokens");
    require(n_tokens <= config_.max_position, "too many tokens");
    for (const int32_t token : request.tokens) check_token(token, config_.vocab_size);
    for (const int32_t token : request.stop_tokens) check_token(token, config_.vocab_size);
    for (const TokenBias& bias : request.sampling.logit_bias) check_token(bias.token, config_.vocab_size);
    require(request.adapter == 0 || has_adapter(request.adapter), "no such adapter");
    require(request.n == 0 || !request.hidden, "samples and hidden states");
    if (request.n > 0) {
        require(request.max_new_tokens > 0 && n_tokens < config_.max_position, "no token to sample");
        require(!request.logits, "samples and logits");
        require(!request.records_experts || config_.n_experts > 0, "no experts to record");
    }
    if ((request.n == 0 && score_from == 0) || score_from > n_tokens) {
        throw std::invalid_argument("score_from is " + std::to_string(score_from) + ", expected 1 to " +
                                    std::to_string(n_tokens));
    }
}

// Pages that a sample may need in addition to the full pages of its prompt. Its last token is not written to the cache.
size_t Scheduler::tail_pages(const Request& request) const {
    if (request.n == 0) return 0;
    return ceil_div(request.tokens.size() + request.max_new_tokens - 1, kPage) - request.tokens.size() / kPage;
}

// Creates a job with all the memory that steps need for it.
std::unique_ptr<Job> Scheduler::make_job(Request request, uint64_t session) const {
    auto job = std::make_unique<Job>();
    const size_t n_tokens = request.tokens.size(),
                 n_scored = request.score_from == 0 ? 0 : n_tokens - request.score_from;
    job->session = session;
    if (request.adapter != 0) job->adapter = adapters_.at(request.adapter);
    job->pages.reserve(ceil_div(n_tokens, kPage));
    if (is_recurrent() && request.keep) job->state_points.push_back(n_tokens / kPage * kPage);
    if (request.n > 0) {
        job->samples.resize(request.n);
        job->hidden.resize(config_.hidden_dim);
    }
    if (kIsComplete && request.hidden) {
        job->hiddens.resize((n_scored + 1) * config_.hidden_dim);
    } else if (request.score_from > 0) {
        job->logprobs.resize(n_scored);
        job->alternatives.resize(n_scored * request.scoring.top_logprobs);
        if (request.entropy) job->entropies.resize(n_scored);
        if (request.logits) job->logits.resize((n_scored + 1) * config_.vocab_size);
        if (request.can_use_scores()) job->cached_hidden.resize(config_.hidden_dim);
        if (kIsComplete && request.keep && request.scores_model())
            job->page_hiddens.resize(n_tokens / kPage * config_.hidden_dim);
        job->done = request.n == 0 && n_scored == 0 && !request.logits;
    }
    job->request = std::move(request);
    return job;
}

uint64_t Scheduler::add(Request request, uint64_t session) {
    check(request);
    request.max_new_tokens = std::min(request.max_new_tokens, config_.max_position - request.tokens.size());
    const size_t needed =
        ceil_div(request.tokens.size(), kPage) + tail_pages(request) + kStates * pages_.n_state_pages();
    if (needed > pages_.n_pages()) {
        throw std::invalid_argument(std::to_string(request.tokens.size()) + " + " +
                                    std::to_string(request.max_new_tokens) + " tokens need " +
                                    std::to_string(uint64_t{needed} * memory_.page_bytes()) +
                                    " bytes of KV cache, and kv_bytes is " + std::to_string(limits_.kv_bytes));
    }
    const uint64_t id = next_id_++;
    std::map<uint64_t, std::unique_ptr<Job>> added;
    Job* const job = added.emplace(id, make_job(std::move(request), session)).first->second.get();
    if (!job->done) waiting_.push_back(job);
    jobs_.merge(added);  // does not allocate: a waiting job is always in jobs_
    return id;
}

void Scheduler::admit_waiting() {
    for (auto next = waiting_.begin();
         next != waiting_.end() && prefilling_.size() + pending_.size() < limits_.max_batch;) {
        Job* const job = *next;
        if (waits_for_scores(*job) || waits_for_state(*job)) {
            ++next;
            continue;
        }
        if (!admit(*job)) return;
        prefilling_.push_back(job);
        next = waiting_.erase(next);
    }
}

// Whether a sequence being computed will leave scores of at least kWorthWaiting more of the job's tokens in the cache
// than there are. It is complete in a few steps.
bool Scheduler::waits_for_scores(const Job& job) {
    constexpr size_t kWorthWaiting = 16;
    const Request& request = job.request;
    if (!request.keep || !request.can_use_scores()) return false;
    size_t common = 0;
    Job* nearest = nullptr;
    for (Job* other : prefilling_) {
        const Request& first = other->request;
        if (!first.keep || !first.scores_model() || first.adapter != request.adapter || first.score_from > 1) continue;
        if (first.scoring.top_logprobs < request.scoring.top_logprobs) continue;
        const size_t found = request.common_tokens(first, request.tokens.size() - 1);
        if (found > common) common = found, nearest = other;
    }
    if (is_recurrent()) common = common / kPage * kPage;  // where that sequence can leave a state
    size_t available = 0;
    int32_t page = PageIndex::kNone;
    for (; available + kWorthWaiting <= common; available += kPage) {
        const bool may_be_whole = available + kPage < request.tokens.size();
        const int32_t next = may_be_whole ? find_scored_page(request, page, available / kPage) : PageIndex::kNone;
        if (next == PageIndex::kNone) {
            const size_t n = is_recurrent() ? 0 : find_scored_part(request, page, available).second;
            if (available + n + kWorthWaiting > common) return false;
            if (is_recurrent()) keep_state_at(*nearest, common);
            return true;
        }
        page = next;
    }
    return false;
}

// Allocates the pages of a prompt that are not in the prefix cache. Returns false if too few pages are free.
bool Scheduler::admit(Job& job) {
    const Request& request = job.request;
    const size_t n_tokens = request.tokens.size(), n_pages = ceil_div(n_tokens, kPage), tail = tail_pages(request);
    find_prefix(job);
    const size_t shared = job.pages.size(),
                 needed = reserved_pages() + n_pages - shared + tail + kStates * pages_.n_state_pages();
    const auto is_free = [&](int32_t page) { return pages_.ref_count(page) == 0; };  // retained, not yet referenced
    const auto retained = std::count_if(job.pages.begin(), job.pages.end(), is_free);
    if (pages_.n_free() < needed + static_cast<size_t>(retained)) {
        job.pages.clear();  // not referenced yet
        return false;
    }
    reserve_page_writes(n_pages - shared);
    for (int32_t page : job.pages) pages_.ref(page);
    job.computed = shared * kPage;
    if (is_recurrent()) start_states(job);
    copy_scores(job);
    if (request.keep && request.can_use_scores()) {
        copy_retained_scores(job);
    } else {
        copy_retained(job);
    }
    job.reused = job.computed;
    while (job.pages.size() < n_pages) job.pages.push_back(allocate_page(PageIndex::kNone));
    // From the first page on of which another is indexed, the job's pages are not: prompts that share pages share all
    // pages before them, on which reassign_shared_pages() relies. With recurrent mixers they share computed pages only.
    int32_t before = shared == 0 ? PageIndex::kNone : job.pages[shared - 1];
    for (size_t i = shared; (i + 1) * kPage <= n_tokens; ++i) {
        const int32_t* tokens = request.tokens.data() + i * kPage;
        const int32_t other = pages_.find(before, request.adapter, tokens);
        if (other != PageIndex::kNone && !is_recurrent()) break;
        if (other == PageIndex::kNone) pages_.insert(job.pages[i], before, request.adapter, tokens);
        before = other == PageIndex::kNone ? job.pages[i] : other;
    }
    reserved_ += tail;
    job.first_reserved = true;
    return true;
}

// Pages that admitted prompts and samples may still allocate.
size_t Scheduler::reserved_pages() const {
    return reserved_ + (state_rights_ - pages_.n_referenced_states()) * pages_.n_state_pages();
}

// Makes room for n page writes, so that allocate_page() does not throw.
void Scheduler::reserve_page_writes(size_t n) {
    std::vector<PageWrite>& writes = plan_.page_writes;
    if (writes.capacity() - writes.size() < n) writes.reserve(2 * writes.size() + n);
}

// Sets job.pages to the cached pages of the longest prefix of its prompt, excluding the last token before the first
// result, whose hidden state has to be computed.
void Scheduler::find_prefix(Job& job) const {
    const Request& request = job.request;
    const size_t n_reusable = ((request.score_from > 0 ? request.score_from : request.tokens.size()) - 1) / kPage;
    int32_t page = PageIndex::kNone;
    job.pages.clear();
    job.n_cached_scores = 0;
    while (job.pages.size() < n_reusable) {
        page = pages_.find(page, request.adapter, request.tokens.data() + job.pages.size() * kPage);
        if (page == PageIndex::kNone) break;
        job.pages.push_back(page);
    }
    if (job.pages.size() == n_reusable) find_scores(job);
    if (!is_recurrent()) return;
    drop_pages_without_state(job);
    if (job.n_cached_scores > 0) job.n_cached_scores = job.pages.size() > n_reusable ? job.pages.size() * kPage : 0;
}

// Finds page i of a request, after page `before`, if its scores are cached, or returns kNone.
int32_t Scheduler::find_scored_page(const Request& request, int32_t before, size_t i) const {
    const int32_t page = pages_.find(before, request.adapter, request.tokens.data() + i * kPage);
    return page != PageIndex::kNone && pages_.has_scores(page, scores_of(request)) ? page : PageIndex::kNone;
}

// Finds the retained page with scores, after page `before`, that has the longest common prefix with the tokens of a
// request from `begin` on, and its length, or returns {kNone, 0}. Excludes the last token.
std::pair<int32_t, size_t> Scheduler::find_scored_part(const Request& request, int32_t before, size_t begin) const {
    const size_t left = std::min(request.tokens.size() - 1 - begin, kPage);
    return pages_.find_retained(before, request.adapter, request.tokens.data() + begin, left, scores_of(request));
}

// Adds to job.pages the following pages whose scores are cached, excluding the last token.
void Scheduler::find_scores(Job& job) const {
    const Request& request = job.request;
    if (!request.can_use_scores()) return;
    const size_t first = job.pages.size(), most = (request.tokens.size() - 1) / kPage;
    int32_t page = first == 0 ? PageIndex::kNone : job.pages.back();
    while (job.pages.size() < most) {
        page = find_scored_page(request, page, job.pages.size());
        if (page == PageIndex::kNone) break;
        job.pages.push_back(page);
    }
    if (job.pages.size() > first) job.n_cached_scores = job.pages.size() * kPage;
}

// Copies the cached scores of a job that is admitted, and the hidden state that scores the next token.
void Scheduler::copy_scores(Job& job) const {
    if (!kIsComplete || job.n_cached_scores == 0) return;
    for (size_t i = 0; i < job.n_cached_scores; i += kPage) copy_scores_of(job.pages[i / kPage], i, kPage, job);
    const std::vector<float>& hidden = pages_.scores(job.pages[job.n_cached_scores / kPage - 1])->hidden;
    std::copy(hidden.begin(), hidden.end(), job.cached_hidden.begin());
}

// Copies the scores of the first n tokens of a page, which are the tokens of the job from `begin` on.
void Scheduler::copy_scores_of(int32_t page, size_t begin, size_t n, Job& job) const {
    const PageScores& scores = *pages_.scores(page);
    const size_t from = job.request.score_from;
    for (size_t i = std::max(begin, from); i < begin + n; ++i) {
        job.logprobs[i - from] = scores.logprobs[i - begin];
        if (!job.alternatives.empty()) job.alternatives[i - from] = scores.best[i - begin];
    }
}

// Finds the retained page after job.pages with the longest common prefix with the prompt, and its length, or returns
// {kNone, 0}; with states, which a page has after its last token, a page that the prompt continues.
std::pair<int32_t, size_t> Scheduler::find_retained(const Job& job) const {
    const Request& request = job.request;
    const int32_t before = job.pages.empty() ? PageIndex::kNone : job.pages.back();
    const size_t begin = job.pages.size() * kPage, left = std::min(request.tokens.size() - 1 - begin, kPage);
    if (!request.keep || request.n == 0 || request.score_from > 0) return {PageIndex::kNone, 0};
    return pages_.find_retained(before, request.adapter, request.tokens.data() + begin, left, PageIndex::Scores::kAny,
                                is_recurrent());
}

// If a prompt diverges from a retained sequence within a page, copies that page for the prompt.
void Scheduler::copy_retained(Job& job) {
    const auto [page, n] = find_retained(job);
    if (n == 0) return;
    if (is_recurrent()) {
        release_state(job.state);
        job.state = pages_.state_of(page);
        pages_.ref_state(job.state);
    }
    job.pages.push_back(allocate_page(page));
    job.computed += n;
}

// The same for a prompt that is scored: copies the scores too. The last common token is computed again, since its
// hidden state scores the next one; the page has no state before that token.
void Scheduler::copy_retained_scores(Job& job) {
    if (is_recurrent()) return;
    const int32_t before = job.pages.empty() ? PageIndex::kNone : job.pages.back();
    const size_t begin = job.computed;
    const auto [page, n] = find_scored_part(job.request, before, begin);
    if (n < 2) return;
    copy_scores_of(page, begin, n, job);
    job.pages.push_back(allocate_page(page));
    job.computed += n - 1;
}

// Whether the draws of a request depend on the sequence only through the logits. A state cannot return to the one
// before a rejected token.
bool Scheduler::may_speculate(const Request& request) const {
    return limits_.speculation && !is_recurrent() && !request.constrained && !request.records_kept &&
           request.sampling.repetition_penalty == 1.0f && !request.sampling.counts_tokens();
}

// Starts samples of computed prompts, in the order of the prompts.
void Scheduler::start_samples() {
    while (!pending_.empty()) {
        Job& job = *pending_.front();
        while (job.started < job.request.n) {
            if (running_.size() == limits_.max_batch || !start_sample(job)) return;
        }
        pending_.erase(pending_.begin());
    }
}

// Returns false if too few pages are free. Allocates memory before it changes any state, so an exception changes
// nothing.
bool Scheduler::start_sample(Job& job) {
    const Request& request = job.request;
    const size_t tail = tail_pages(request), n_full = request.tokens.size() / kPage;
    if (!job.first_reserved && pages_.n_free() < reserved_pages() + tail + pages_.n_state_pages()) return false;
    Running running{&job, job.started, {}, {}, tail, true};
    running.pages.reserve(ceil_div(request.tokens.size() + request.max_new_tokens, kPage));
    if (request.sampling.repetition_penalty != 1.0f) {
        running.seen.assign(ceil_div(config_.vocab_size, 64), 0);
        for (int32_t token : request.tokens) running.mark_seen(token);
    }
    Sample& sample = job.samples[job.started];
    sample.tokens.reserve(request.max_new_tokens);
    sample.logprobs.reserve(request.max_new_tokens);
    if (kIsComplete && request.records_experts) {
        sample.experts.reserve((request.tokens.size() + request.max_new_tokens) * memory_.token_experts());
    }
    sample.alternatives.reserve(request.max_new_tokens * request.sampling.top_logprobs);
    if (request.stop_strings != nullptr) sample.n_withheld.reserve(request.max_new_tokens);
    if (request.sampling.counts_tokens()) running.counts.reserve(request.max_new_tokens);
    if (kIsComplete && request.records_kept) {
        running.kept.reserve(config_.vocab_size);
        sample.kept_offsets.reserve(request.max_new_tokens + 1);
        sample.kept_offsets.assign(1, 0);
    }
    if constexpr (kIsComplete) {
        if (may_speculate(request)) running.drafts = std::make_shared<SampleDrafts>(request, job.started, draft_model_);
    }
    running.pages.assign(job.pages.begin(), job.pages.begin() + static_cast<ptrdiff_t>(n_full));
    for (int32_t page : running.pages) pages_.ref(page);
    if (is_recurrent()) job.first_reserved ? --job.state_rights : ++state_rights_;
    if (!job.first_reserved) reserved_ += tail;
    job.first_reserved = false;
    ++job.started;
    running_.push_back(std::move(running));
    return true;
}

}  // namespace whet
