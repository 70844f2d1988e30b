#include "engine/scheduler.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "engine/draft_model.h"
#include "runtime/ceil_div.h"
#include "runtime/philox.h"
#include "runtime/try_allocating.h"

namespace whet {

Scheduler::Scheduler(const ModelConfig& config, size_t max_tokens, const KvMemory& memory, const Limits& limits,
                     DraftModel* draft)
    : config_(config),
      memory_(memory),
      draft_model_(draft),
      max_tokens_(max_tokens),
      limits_(limits),
      pages_(memory.n_pages(), memory.n_state_pages()) {
    running_.reserve(limits.max_batch);
    prefilling_.reserve(limits.max_batch);
    pending_.reserve(limits.max_batch);
    counts_.reserve(limits.max_batch);
    failed_.reserve(limits.max_batch);
    plan_.page_writes.reserve(memory.n_pages());
    plan_.tokens.reserve(max_tokens);
    if (is_recurrent()) plan_.runs.reserve(max_tokens);
    plan_.hiddens.reserve(max_tokens);
    plan_.draws.reserve(limits.max_batch + kMaxStepDrafts);
    plan_.scores.reserve(max_tokens + limits.max_batch);
}

StepPlan& Scheduler::plan() {
    start_samples();
    admit_waiting();
    plan_.tokens.clear();
    plan_.runs.clear();
    plan_.hiddens.clear();
    plan_.draws.clear();
    plan_.scores.clear();
    plan_samples();
    plan_prompts();
    is_step_open_ = !plan_.is_empty();
    return plan_;
}

void Scheduler::complete(std::span<const Drawn> drawn, double seconds) {
    if constexpr (kIsComplete) {
        reserve_kept();
        if (limits_.speculation && counts_.empty() && plan_.n_steps == 1) step_times_.add(plan_.draws.size(), seconds);
    }
    if (kHasDevices && counts_.empty()) step_s_ = seconds / static_cast<double>(plan_.n_steps);
    is_step_open_ = false;
    advance_prompts();
    for (size_t i = 0; i < plan_.draws.size(); ++i) append(plan_.draws[i], drawn[i]);
    erase_ended();
    for (Job* job : failed_) cancel(*job);
    failed_.clear();
}

void Scheduler::allow(uint64_t id, size_t sample, std::vector<uint32_t> tokens) {
    jobs_.at(id)->samples.at(sample).allowed = std::move(tokens);
}

// Adds a draw for every running sample that may draw, and the last token of those that have one, with a page for its
// keys and values; then the same for each token of its draft.
void Scheduler::plan_samples() {
    const auto may_draw = [](const Running& running) {
        return !running.job->request.constrained || !running.job->samples[running.sample].allowed.empty();
    };
    const auto n_draws = static_cast<size_t>(std::count_if(running_.begin(), running_.end(), may_draw));
    size_t n_drafts = 0;
    for (size_t i = 0; i < running_.size(); ++i) {
        Running& running = running_[i];
        if (!may_draw(running)) continue;
        const Job& job = *running.job;
        const Sample& sample = job.samples[running.sample];
        const size_t n_prompt = job.request.tokens.size(), n_drawn = sample.tokens.size();
        plan_draw(i, n_drawn, DrawTask::kNone, plan_.tokens.size());
        if (running.fresh) continue;
        plan_token(running, sample.tokens.back(), n_prompt + n_drawn - 1);
        if (is_recurrent()) plan_run(1, running.has_state ? running.state : job.state, running.state);
        if (!kIsComplete || running.drafts == nullptr) continue;
        size_t position = n_drawn;
        for (const int32_t token : draft(running, n_draws, n_drafts)) {
            plan_draw(i, ++position, token, plan_.tokens.size());
            plan_token(running, token, n_prompt + position - 1);
            ++n_drafts;
        }
    }
    if constexpr (kHasDevices) {
        plan_.n_steps = n_drafts == 0 ? n_steps_ahead() : 1;
        plan_ahead();
    }
}

// Adds a token of a sample, with a page for its keys and values.
void Scheduler::plan_token(Running& running, int32_t token, size_t position) {
    const Job& job = *running.job;
    if (position / kPage == running.pages.size()) {
        // Copy on write of the prompt's last page if it is not full.
        const bool extends_prompt = position == job.request.tokens.size() && position % kPage != 0;
        reserve_page_writes(1);
        running.pages.push_back(allocate_page(extends_prompt ? job.pages.back() : PageIndex::kNone));
        --running.reserved, --reserved_;
    }
    plan_.tokens.push_back({token, static_cast<int32_t>(position), running.pages.data(), job.adapter.get()});
}

// The number of steps that a device can compute before their tokens are known here: while only samples run, whose draws
// are plain, and as many as nobody waits long for, or two.
size_t Scheduler::n_steps_ahead() const {
    constexpr double kLongest_s = 0.05;
    const size_t n = running_.size();
    const bool has_room = n > 0 && n <= kMaxStepDrafts && n == plan_.draws.size() && n == plan_.tokens.size();
    if (limits_.lookahead == 1 || !has_room || !prefilling_.empty() || is_recurrent() || step_s_ == 0) return 1;
    if (memory_.token_experts() > 0 || config_.has_layer_inputs()) return 1;  // are read and computed between steps
    size_t most = std::min({limits_.lookahead, 1 + kMaxStepDrafts / n, max_tokens_ / n});
    for (const DrawTask& draw : plan_.draws) {
        if (!is_plain(draw, config_.vocab_size)) return 1;
        most = std::min(most, running_[draw.sample].job->request.max_new_tokens - draw.position);
    }
    return std::min(most, std::max(size_t{2}, static_cast<size_t>(kLongest_s / step_s_)));
}

// Adds the following steps, whose tokens are drawn by the steps before.
void Scheduler::plan_ahead() {
    for (size_t step = 1; step < plan_.n_steps; ++step) {
        for (size_t i = 0; i < running_.size(); ++i) {
            const Request& request = running_[i].job->request;
            const size_t position = running_[i].job->samples[running_[i].sample].tokens.size() + step;
            plan_draw(i, position, DrawTask::kDrawn, plan_.tokens.size());
            plan_token(running_[i], DrawTask::kDrawn, request.tokens.size() + position - 1);
        }
    }
}

void Scheduler::plan_drafts() {
    plan_.tokens.clear();
    size_t n = 0, n_tasks = running_.size();
    do {
        n = n_tasks;
        n_tasks = plan_drafts_of(n);
    } while (0 < n_tasks && n_tasks < n);  // a token takes more time in steps of fewer sequences
}

// Sets the tasks that pay if steps of the draft model have n sequences; returns their number.
size_t Scheduler::plan_drafts_of(size_t n) {
    const size_t n_draws = running_.size();
    const double draft_s = n == 0 ? 0 : draft_model_->token_s(n);
    size_t n_drafts = 0, n_tasks = 0;
    draft_model_->clear();
    for (const Running& running : running_) {
        if (running.fresh || running.drafts == nullptr) continue;
        const size_t most = most_drafts(running, n_draws, n_drafts);
        size_t length = running.drafts->draft(least_right(n_draws, n_drafts), most).size();
        if (length == 0) {
            DraftSequence& sequence = *running.drafts->sequence();
            length = sequence.n_worth_drafting(least_right(n_draws, n_drafts, draft_s), most);
            if (length > 0) draft_model_->add(sequence, length), ++n_tasks;
        }
        n_drafts += length;
    }
    return n_tasks;
}

// The draft of a sample in a step of n_draws samples, which has n_drafts tokens of other drafts.
std::span<const int32_t> Scheduler::draft(const Running& running, size_t n_draws, size_t n_drafts) const {
    return running.drafts->draft(least_right(n_draws, n_drafts), most_drafts(running, n_draws, n_drafts));
}

// n_draws counts the samples before this one too.
size_t Scheduler::most_drafts(const Running& running, size_t n_draws, size_t n_drafts) const {
    const size_t n_left = running.job->request.max_new_tokens - running.job->samples[running.sample].tokens.size();
    const size_t n_rows = plan_.tokens.size() + n_draws + (prefilling_.empty() ? 0 : limits_.chunk);
    return n_rows >= max_tokens_ ? 0 : std::min({n_left - 1, kMaxStepDrafts - n_drafts, max_tokens_ - n_rows});
}

// A further token of a draft shortens the mean time per token if it is right with a higher probability than its share
// of the time times n_draws. `draft_s`: time that drafting it takes. The margin covers products in tiles, of which the
// first rows take more time.
double Scheduler::least_right(size_t n_draws, size_t n_drafts, double draft_s) const {
    constexpr double kMargin = 1.3;
    const double step_s = step_times_.seconds(n_draws + n_drafts);
    if (step_s == 0) return 1;
    return kMargin * (step_times_.row_s() + draft_s) / step_s * static_cast<double>(n_draws);
}

void Scheduler::plan_draw(size_t index, size_t position, int32_t before, size_t token) {
    Running& running = running_[index];
    const Request& request = running.job->request;
    Sample& sample = running.job->samples[running.sample];
    const size_t n_top = request.sampling.top_logprobs;
    sample.alternatives.resize((position + 1) * n_top);  // reserved by start_sample()
    DrawTask& task = plan_.draws.emplace_back();
    task.sample = index;
    task.position = position;
    task.before = before;
    task.token = token;
    task.hidden = running.fresh ? running.job->hidden.data() : nullptr;
    task.sampling = &request.sampling;
    task.history = {running.seen.empty() ? nullptr : running.seen.data(), running.counts, {}};
    if (position < request.min_new_tokens) task.history.banned = request.stop_tokens;
    if (request.constrained) task.history.allowed = sample.allowed.data();
    task.uniform = token_uniform(request.seed, request.prompt_index, request.first_sample + running.sample, position);
    task.alternatives = sample.alternatives.data() + position * n_top;
    task.kept = kIsComplete && request.records_kept ? &running.kept : nullptr;
}

// Chunked prefill: adds the next tokens of the prompts, in order, and the scores of tokens that follow them, or their
// hidden states.
void Scheduler::plan_prompts() {
    counts_.clear();
    size_t room = std::min(limits_.chunk, max_tokens_ - plan_.tokens.size());
    for (Job* job : prefilling_) {
        const Request& request = job->request;
        const size_t n_tokens = request.tokens.size(), count = std::min(room, next_state_point(*job) - job->computed);
        // The first token without a cached score follows the stored hidden state.
        if (kIsComplete && job->n_cached_scores > 0 && job->computed == job->n_cached_scores) {
            plan_score(*job, job->computed, 0, job->cached_hidden.data());
        }
        for (size_t i = job->computed; i < job->computed + count; ++i) {
            const size_t next = i + 1, at = next - request.score_from;
            if (kIsComplete && request.hidden && next >= request.score_from) {
                plan_.hiddens.push_back({plan_.tokens.size(), job->hiddens.data() + at * config_.hidden_dim});
            } else if (request.score_from > 0 && next >= request.score_from && (next < n_tokens || request.logits)) {
                plan_score(*job, next, plan_.tokens.size(), nullptr);
            }
            if (kIsComplete && !job->page_hiddens.empty() && next % kPage == 0) {
                plan_.hiddens.push_back(
                    {plan_.tokens.size(), job->page_hiddens.data() + (next / kPage - 1) * config_.hidden_dim});
            }
            plan_.tokens.push_back({request.tokens[i], static_cast<int32_t>(i), job->pages.data(), job->adapter.get()});
        }
        if (is_recurrent() && count > 0) plan_run(count, job->state, job->next_state);
        if (request.n > 0 && job->computed + count == n_tokens) {
            plan_.hiddens.push_back({plan_.tokens.size() - 1, job->hidden.data()});
        }
        counts_.push_back(count);
        room -= count;
        if (room == 0) break;
    }
}

// Adds the score of a token of a job, from the hidden state of planned token `before` or a stored one.
void Scheduler::plan_score(Job& job, size_t token, size_t before, const float* hidden) {
    const Request& request = job.request;
    const size_t at = token - request.score_from;
    ScoreTask task{before, hidden, 0, &request.scoring, nullptr, nullptr, nullptr, nullptr};
    if (request.logits) task.logits = job.logits.data() + at * config_.vocab_size;
    if (token < request.tokens.size()) {
        task.target = request.tokens[token], task.logprob = &job.logprobs[at];
        if (request.entropy) task.entropy = &job.entropies[at];
        task.alternatives = job.alternatives.data() + at * request.scoring.top_logprobs;
    }
    plan_.scores.push_back(task);
}

// Allocates a page and plans its initialisation: a copy of page `from`, or zeros for kNone.
int32_t Scheduler::allocate_page(int32_t from) {
    const int32_t page = pages_.allocate();
    plan_.page_writes.push_back({page, from});
    return page;
}

// Advances prompts by their tokens in the step. A computed prompt is done (scoring), or its samples may start.
void Scheduler::advance_prompts() {
    for (size_t j = 0; j < counts_.size(); ++j) {
        prefilling_[j]->computed += counts_[j];
        if (is_recurrent() && counts_[j] > 0) advance_state(*prefilling_[j], counts_[j]);
    }
    for (Job* job : prefilling_) {
        if (!job->is_computed()) continue;
        if (kIsComplete && job->request.keep && job->request.scores_model()) retain_scores(*job);
        if (job->request.n > 0) {
            pending_.push_back(job);
        } else {
            release_prompt(*job);
        }
    }
    std::erase_if(prefilling_, [](const Job* job) { return job->is_computed(); });
}

// Makes room for the sets of the step, so that only this can run out of memory, before anything has changed.
void Scheduler::reserve_kept() {
    for (const DrawTask& task : plan_.draws) {
        const Running& running = running_[task.sample];
        std::vector<int32_t>& words = running.job->samples[running.sample].kept_words;
        const size_t n = words.size() + running.kept.set().size();
        if (n > words.capacity()) words.reserve(std::max(n, 2 * words.capacity()));
    }
}

// Appends a drawn token to its sample, unless it follows a draft that the sample has not continued.
void Scheduler::append(const DrawTask& task, const Drawn& drawn) {
    const bool is_draft = kIsComplete && task.before >= 0;
    Running& running = running_[task.sample];
    if (is_draft) ++n_drafted_;
    if (kHasDevices && running.job == nullptr) return;  // ended by a token of this step
    Job& job = *running.job;
    Sample& sample = job.samples[running.sample];
    if (kHasDevices && sample.tokens.size() != task.position) return;
    if (is_draft) {
        if (sample.tokens.back() != task.before) return;
        ++n_accepted_;
    }
    if (is_recurrent() && !running.fresh) take_state(running);
    running.fresh = false;
    if (std::isnan(drawn.logprob)) {
        job.error = "the model's logits for prompt " + std::to_string(job.request.prompt_index) + ", sample " +
                    std::to_string(job.request.first_sample + running.sample) + ", token " +
                    std::to_string(sample.tokens.size()) + " contain NaN or +inf, or are all -inf";
        failed_.push_back(&job);
        return;
    }
    sample.tokens.push_back(drawn.token);
    sample.allowed.clear();
    sample.logprobs.push_back(drawn.logprob);
    if (kIsComplete && job.request.records_kept) {
        const TokenSet kept = running.kept.set();
        sample.kept_words.insert(sample.kept_words.end(), kept.begin(), kept.end());
        sample.kept_offsets.push_back(static_cast<int64_t>(sample.kept_words.size()));
    }
    if (!running.seen.empty()) running.mark_seen(drawn.token);
    if (job.request.sampling.counts_tokens()) running.count(drawn.token);
    if constexpr (kIsComplete) {
        if (running.drafts != nullptr) running.drafts->append(drawn.token);
    }
    const Finish finish = finish_after(running);
    if (finish != Finish::kRunning) end(running, finish);
}

void Scheduler::Running::count(int32_t token) {
    const auto is_before = [](const TokenCount& entry, int32_t other) { return entry.token < other; };
    const auto at = std::lower_bound(counts.begin(), counts.end(), token, is_before);
    if (at != counts.end() && at->token == token) {
        ++at->count;
    } else {
        counts.insert(at, {token, 1});
    }
}

// Returns whether and why the last token ends its sample. Advances the search for stop strings.
Finish Scheduler::finish_after(Running& running) const {
    const Request& request = running.job->request;
    Sample& sample = running.job->samples[running.sample];
    const size_t n = sample.tokens.size();
    if (request.stop_strings != nullptr) {
        const bool may_end = n > request.min_new_tokens;
        const auto match = request.stop_strings->read(running.stop_state, sample.tokens.back(), may_end);
        sample.n_withheld.push_back(match.n_withheld);
        if (match.is_complete) return Finish::kStop;
    }
    const auto& stops = request.stop_tokens;
    const bool is_stop = std::find(stops.begin(), stops.end(), sample.tokens.back()) != stops.end();
    if (!is_stop && n < request.max_new_tokens) return Finish::kRunning;
    if (request.stop_strings != nullptr) sample.n_withheld.back() = 0;  // the text has ended without a stop string
    return is_stop ? Finish::kStop : Finish::kLength;
}

// Frees the pages of a sample; erase_ended() then removes it from running_.
void Scheduler::end(Running& running, Finish finish) {
    Job& job = *running.job;
    job.samples[running.sample].finish = finish;
    if (kIsComplete && job.request.records_experts) read_experts(running);
    if (job.request.keep && job.error.empty()) retain(running);
    if (is_recurrent()) end_state(running);
    unref_all(running.pages);
    reserved_ -= running.reserved;
    running.job = nullptr;
    if (++job.ended == job.request.n) release_prompt(job);
}

// Tokens of a sequence with keys and values: all except the last sampled one.
size_t Scheduler::n_computed(const Running& running) {
    const size_t n_drawn = running.job->samples[running.sample].tokens.size();
    return running.job->request.tokens.size() + std::max<size_t>(n_drawn, 1) - 1;
}

int32_t Scheduler::page_of(const Running& running, size_t i) {
    return i < running.pages.size() ? running.pages[i] : running.job->pages[i];
}

void Scheduler::read_experts(const Running& running) {
    const size_t n = n_computed(running), n_numbers = memory_.token_experts();
    std::vector<uint16_t>& experts = running.job->samples[running.sample].experts;
    experts.resize(n * n_numbers);  // reserved by start_sample()
    for (size_t i = 0; i < n; ++i) {
        const uint16_t* const of_token = memory_.experts(page_of(running, i / kPage), i % kPage);
        std::copy_n(of_token, n_numbers, experts.data() + i * n_numbers);
    }
}

// Retains the pages of a sequence, except its last token.
void Scheduler::retain(const Running& running) {
    const Job& job = *running.job;
    const std::vector<int32_t>&prompt = job.request.tokens, &drawn = job.samples[running.sample].tokens;
    const size_t n = n_computed(running);
    int32_t before = PageIndex::kNone;
    bool are_computed = true;
    for (size_t begin = 0; begin < n; begin += kPage) {
        const size_t count = std::min(kPage, n - begin), i = begin / kPage;
        std::array<int32_t, kPage> tokens{};
        for (size_t t = 0; t < count; ++t) {
            const size_t at = begin + t;
            tokens[t] = at < prompt.size() ? prompt[at] : drawn[at - prompt.size()];
        }
        before = pages_.retain(page_of(running, i), before, job.request.adapter, tokens.data(), count);
        are_computed = are_computed && pages_.is_computed(before);
    }
    if (!is_recurrent() || !are_computed || (running.has_state && is_step_open_)) return;
    pages_.attach_state(running.has_state ? running.state : job.state, before);
}

// Last page first: retained pages are evicted in this order, and a page can only be found through its predecessors.
void Scheduler::unref_all(const std::vector<int32_t>& pages) {
    for (auto page = pages.rbegin(); page != pages.rend(); ++page) pages_.unref(*page);
}

void Scheduler::erase_ended() {
    std::erase_if(running_, [](const Running& running) { return running.job == nullptr; });
}

// Retains the pages of a scored sequence, with the scores of those that are scored whole.
void Scheduler::retain_scores(const Job& job) {
    const Request& request = job.request;
    const size_t n_top = request.scoring.top_logprobs, d = config_.hidden_dim, n = request.tokens.size();
    int32_t before = PageIndex::kNone;
    for (size_t begin = 0; begin < n; begin += kPage) {
        const size_t first = std::max<size_t>(1, begin), end = std::min(begin + kPage, n), i = begin / kPage;
        const int32_t page =
            pages_.retain(job.pages[i], before, request.adapter, request.tokens.data() + begin, end - begin);
        before = page;
        if (!pages_.is_retained(page) || first < request.score_from) continue;
        if (const PageScores* known = pages_.scores(page); known != nullptr && (known->has_best || n_top == 0))
            continue;
        // Without memory for the scores, they are computed again.
        try_allocating([&] {
            auto scores = std::make_unique<PageScores>();
            if (end == begin + kPage) {
                const float* hidden = job.page_hiddens.data() + i * d;
                scores->hidden.assign(hidden, hidden + d);
            }
            scores->has_best = n_top > 0;
            for (size_t t = first; t < end; ++t) {
                const size_t at = t - request.score_from;
                scores->logprobs[t % kPage] = job.logprobs[at];
                if (n_top > 0) scores->best[t % kPage] = job.alternatives[at * n_top];
            }
            pages_.set_scores(page, std::move(scores));
        });
    }
}

// Frees the pages of a prompt and marks the job as done.
void Scheduler::release_prompt(Job& job) {
    release_states(job);
    unref_all(job.pages);
    job.pages.clear();
    if (job.first_reserved) reserved_ -= tail_pages(job.request);
    job.first_reserved = false;
    job.adapter = nullptr;
    job.done = true;
}

size_t Scheduler::adapters_bytes() const {
    size_t bytes = 0;
    for (const auto& [id, adapter] : adapters_) {
        if (kIsComplete && adapter->norms) bytes += adapter->norms->size_bytes();
        for (const auto& layer : adapter->layers) {
            for (const std::vector<LowRank>& matrices : layer) {
                for (const LowRank& low : matrices) {
                    for (const PackedWeight& a : low.a) bytes += a.size_bytes();
                    for (const PackedWeight& b : low.b) bytes += b.size_bytes();
                    for (const RowScale& scale : low.scales) bytes += scale.size_bytes();
                }
            }
        }
    }
    return bytes;
}

}  // namespace whet
