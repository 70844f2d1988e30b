// Continuous batching of prompts and samples over one paged KV cache: plans each step and completes it with the drawn
// tokens. Does not compute (model_runner.h).
//
// A step computes one token of every running sample, with the tokens that are expected to follow it (speculation.h),
// and a chunk of the admitted prompts, then draws. A prompt is
// computed once for all its samples, and full pages of a common prefix once for all prompts. Admission reserves the
// pages of a sample's worst case, so there is no preemption; samples of admitted prompts start before new prompts. A
// request may retain its sequence in the cache for requests with the same prefix, such as the next turn of a
// conversation, until the memory is needed. Tokens are drawn with uniforms of (seed, prompt, sample, position): a
// sample does not depend on other requests or their order.
#pragma once
#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/page_index.h"
#include "engine/speculation.h"
#include "engine/step_plan.h"
#include "engine/stop_strings.h"

namespace whet {

class DraftModel;
class SampleDrafts;

enum class Finish : uint8_t { kRunning, kStop, kLength, kCancelled };

struct Sample {
    std::vector<int32_t> tokens;
    std::vector<float> logprobs;
    std::vector<Drawn> alternatives;    // top_logprobs per token, and perhaps of tokens not in `tokens`
    std::vector<int32_t> n_withheld;    // with stop strings, per token: StopStrings::Match::n_withheld
    std::vector<uint32_t> allowed;      // of a constrained request: bitmap of the next token; empty: not known yet
    std::vector<int64_t> kept_offsets;  // of a request that keeps sets: TokenSets of the tokens
    std::vector<int32_t> kept_words;
    std::vector<uint16_t> experts;  // of a request that reports them: KvMemory::experts of each computed token
    Finish finish = Finish::kRunning;
};

struct Request {
    std::vector<int32_t> tokens;   // the prompt, or a sequence to score
    uint64_t adapter = 0;          // 0: none
    bool keep = false;             // retain prompt and sampled tokens, or scored tokens and scores, in the cache
    bool constrained = false;      // a token is drawn only after allow()
    bool records_kept = false;     // record the tokens that each token was drawn from
    bool records_experts = false;  // report the experts of the prompt's and of the sampled tokens
    // Sampling:
    size_t n = 0, min_new_tokens = 0, max_new_tokens = 0;
    Sampling sampling;
    std::vector<int32_t> stop_tokens;                       // like stop strings, not before min_new_tokens tokens
    std::shared_ptr<const StopStrings> stop_strings;        // null: none
    uint64_t seed = 0, prompt_index = 0, first_sample = 0;  // samples [first_sample, first_sample + n)
    // Scoring: log-probs (and entropies, and alternatives) of tokens [score_from, tokens.size()). 0: none, if n > 0.
    size_t score_from = 0;
    Sampling scoring;  // temperature and number of alternatives
    bool entropy = false;
    bool logits = false;  // also return the logits of tokens [score_from - 1, tokens.size())
    bool hidden = false;  // return only the final hidden states of tokens [score_from - 1, tokens.size())

    // Whether it scores tokens under the model's distribution, as PageScores do.
    bool scores_model() const { return score_from > 0 && !hidden && scoring.temperature == 1.0; }
    // Tokens at the beginning that are another request's too, at most `most`.
    size_t common_tokens(const Request& other, size_t most) const {
        const auto n = static_cast<ptrdiff_t>(std::min(most, other.tokens.size()));
        const auto end = std::mismatch(tokens.begin(), tokens.begin() + n, other.tokens.begin()).first;
        return static_cast<size_t>(end - tokens.begin());
    }
    // Whether its results are in PageScores, except the best token.
    bool can_use_scores() const {
        return kIsComplete && scores_model() && !entropy && !logits && scoring.top_logprobs <= 1;
    }
};

// A request, its state and its results. Belongs to a session: a call, which ends all of its jobs at once.
struct Job {
    Request request;
    uint64_t session = 0;
    std::vector<Sample> samples;
    std::vector<float> logprobs, entropies, logits, hiddens;
    std::vector<Drawn> alternatives;  // top_logprobs per scored token
    bool done = false;
    std::string error;  // set if the request ended because of NaN or infinite logits

    // State of the scheduler.
    std::shared_ptr<const Adapter> adapter;  // null: none
    std::vector<int32_t> pages;
    std::vector<float> hidden;         // after the last token of the prompt
    std::vector<float> cached_hidden;  // after the last token of a page with scores in the cache
    std::vector<float> page_hiddens;   // after the last token of each full page, to retain its scores
    size_t n_cached_scores = 0;        // tokens of whole pages whose scores were found in the cache
    size_t computed = 0;               // prompt tokens in the cache
    size_t reused = 0;                 // prompt tokens found in the cache on admission
    size_t started = 0, ended = 0;
    bool first_reserved = false;  // reserved_ includes the tail pages of its first sample
    // With recurrent mixers: the state after the computed tokens (kNone: none), and after the step's.
    int32_t state = PageIndex::kNone, next_state = PageIndex::kNone;
    size_t n_state_readers = 0;        // samples that still start from the prompt's state
    size_t state_rights = 0;           // its part of Scheduler::state_rights_
    std::vector<size_t> state_points;  // numbers of tokens after which its state stays in the cache

    bool is_computed() const { return computed == request.tokens.size(); }
};

struct Limits {
    size_t kv_bytes, max_batch, chunk;  // max_batch: running samples; chunk: prompt tokens per step
    bool speculation = false;
    size_t lookahead = 1;  // steps that a device may compute at once
};

class Scheduler {
public:
    // `draft`: drafts what prompt lookup does not; null: none.
    Scheduler(const ModelConfig& config, size_t max_tokens, const KvMemory& memory, const Limits& limits,
              DraftModel* draft = nullptr);

    // Queues a request, with at most as many new tokens as the model has positions for. Throws std::invalid_argument
    // for an invalid request, and if it needs more pages than there are.
    uint64_t add(Request request, uint64_t session = 0);
    // Throws std::out_of_range for an unknown id.
    const Job& job(uint64_t id) const { return *jobs_.at(id); }
    // Sets the tokens that the next token of a sample of a constrained request may be: a bitmap of the vocabulary.
    // Throws std::out_of_range for an unknown id or sample.
    void allow(uint64_t id, size_t sample, std::vector<uint32_t> tokens);
    // Cancels and erases a request, or all requests of a session: frees their jobs, pages and index entries, except
    // retained pages. Prompts that wait for shared pages compute them. Does not throw.
    void remove(uint64_t id);
    void end_session(uint64_t session);

    // Sets the draft model's tasks, the drafts that pay in the next step: of samples without one from prompt lookup.
    void plan_drafts();
    // Starts samples, admits prompts and plans the next step: empty if there is nothing to do. complete() takes the
    // tokens drawn for the plan, and its time; no other call may come between. Without complete(), plan() plans the
    // same step again: a step that threw is repeated.
    StepPlan& plan();
    void complete(std::span<const Drawn> drawn, double seconds);
    bool is_step_open() const { return is_step_open_; }  // planned and not completed
    std::vector<PageWrite>& page_writes() { return plan_.page_writes; }

    void add_adapter(uint64_t id, std::unique_ptr<Adapter> adapter) { adapters_.emplace(id, std::move(adapter)); }
    void remove_adapter(uint64_t id) { adapters_.erase(id); }  // its requests share ownership until they end
    bool has_adapter(uint64_t id) const { return adapters_.count(id) != 0; }
    size_t adapters_bytes() const;

    // Frees all retained pages. No request may be active.
    void evict_retained() { pages_.evict_retained(); }
    const PageIndex& pages() const { return pages_; }
    // Tokens of drafts that were computed, and how many of them were drawn.
    size_t n_drafted() const { return n_drafted_; }
    size_t n_accepted() const { return n_accepted_; }

private:
    static constexpr size_t kPage = kPageTokens;
    // States of a prompt: before and after a step; then its own and the first sample's.
    static constexpr size_t kStates = 2;

    struct Running {
        Job* job;
        size_t sample;
        std::vector<int32_t> pages;
        std::vector<uint64_t> seen;        // bitmap of the sequence's tokens; empty without a repetition penalty
        size_t reserved;                   // pages that it may still allocate
        bool fresh;                        // its first token is drawn from the prompt's last hidden state
        int32_t state = PageIndex::kNone;  // with recurrent mixers
        bool has_state = false;            // `state` is computed; else it starts from the prompt's
        std::vector<TokenCount> counts{};  // by token id; empty without presence and frequency penalties
        StopStrings::State stop_state{};
        TokenSetBuffer kept{};                   // of the step; empty unless recorded
        std::shared_ptr<SampleDrafts> drafts{};  // null: no speculation

        void mark_seen(int32_t token) { seen[static_cast<size_t>(token) / 64] |= uint64_t{1} << token % 64; }
        void count(int32_t token);
    };

    const ModelConfig& config_;
    const KvMemory& memory_;
    DraftModel* const draft_model_;  // null: none
    const size_t max_tokens_;
    const Limits limits_;
    PageIndex pages_;
    std::map<uint64_t, std::unique_ptr<Job>> jobs_;
    std::map<uint64_t, std::shared_ptr<const Adapter>> adapters_;
    uint64_t next_id_ = 1;
    std::deque<Job*> waiting_;
    std::vector<Job*> prefilling_, pending_;  // pending_: prompts in the cache with samples still to start
    std::vector<Running> running_;
    size_t reserved_ = 0;
    size_t state_rights_ = 0;    // states that admitted prompts and samples may hold, counted once per holder
    bool is_step_open_ = false;  // a step is planned and not completed: states that it replaces are undefined
    StepPlan plan_;
    StepTimes step_times_;
    double step_s_ = 0;  // time of the last step; 0: not measured yet
    size_t n_drafted_ = 0, n_accepted_ = 0;
    std::vector<size_t> counts_;  // tokens of each prompt of prefilling_ in this step
    std::vector<Job*> failed_;    // jobs with invalid logits

    // admission.cpp
    void check(const Request& request) const;
    size_t tail_pages(const Request& request) const;
    std::unique_ptr<Job> make_job(Request request, uint64_t session) const;
    void admit_waiting();
    bool admit(Job& job);
    void reserve_page_writes(size_t n);
    void find_prefix(Job& job) const;
    size_t reserved_pages() const;
    std::pair<int32_t, size_t> find_retained(const Job& job) const;
    void copy_retained(Job& job);
    void copy_retained_scores(Job& job);
    int32_t find_scored_page(const Request& request, int32_t before, size_t i) const;
    std::pair<int32_t, size_t> find_scored_part(const Request& request, int32_t before, size_t begin) const;
    void find_scores(Job& job) const;
    void copy_scores(Job& job) const;
    void copy_scores_of(int32_t page, size_t begin, size_t n, Job& job) const;
    bool waits_for_scores(const Job& job);
    bool may_speculate(const Request& request) const;
    void start_samples();
    bool start_sample(Job& job);

    // scheduler.cpp: a step
    void plan_samples();
    void plan_token(Running& running, int32_t token, size_t position);
    size_t n_steps_ahead() const;
    void plan_ahead();
    void plan_prompts();
    size_t plan_drafts_of(size_t n);
    std::span<const int32_t> draft(const Running& running, size_t n_draws, size_t n_drafts) const;
    size_t most_drafts(const Running& running, size_t n_draws, size_t n_drafts) const;
    double least_right(size_t n_draws, size_t n_drafts, double draft_s = 0) const;
    void plan_draw(size_t running, size_t position, int32_t before, size_t token);
    void plan_score(Job& job, size_t token, size_t before, const float* hidden);
    int32_t allocate_page(int32_t from);
    void advance_prompts();
    void reserve_kept();
    void append(const DrawTask& task, const Drawn& drawn);
    Finish finish_after(Running& running) const;
    void end(Running& running, Finish finish);
    static size_t n_computed(const Running& running);
    static int32_t page_of(const Running& running, size_t i);
    void read_experts(const Running& running);
    void retain(const Running& running);
    void retain_scores(const Job& job);
    void unref_all(const std::vector<int32_t>& pages);
    void erase_ended();
    void release_prompt(Job& job);

    // states.cpp: of recurrent mixers
    bool is_recurrent() const { return pages_.n_state_pages() > 0; }
    void start_states(Job& job);
    void plan_run(size_t n, int32_t from, int32_t& to);
    size_t next_state_point(const Job& job) const;
    void advance_state(Job& job, size_t n);
    void keep_state_at(Job& job, size_t n_tokens);
    void attach_state(const Job& job);
    void release_state(int32_t& state);
    void release_states(Job& job);
    void take_state(Running& running);
    void end_state(Running& running);
    void drop_pages_without_state(Job& job) const;
    bool waits_for_state(const Job& job);

    // cancellation.cpp
    void cancel(Job& job);
    void reassign_shared_pages(const Job& job);
};

}  // namespace whet
