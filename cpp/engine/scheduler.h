// Continuous batching: prompts and their samples over one transformer and one cache, a step at a time.
//
// A step computes one token of every running sample and the next tokens of the admitted prompts, then draws. A prompt
// is computed once for all its samples, and whole pages of 64 tokens that prompts have in common, once for all of them.
// Ended samples are replaced by others: admission reserves the pages of a sample's worst case, so there is no
// preemption; samples of admitted prompts go before new prompts. A request may keep its sequence in the cache for those
// that begin like it, such as the next turn of a conversation, until the memory is needed. Tokens are drawn from
// uniforms of (seed, prompt, sample, position): a sample depends neither on other requests nor on their order.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/kv_cache.h"
#include "engine/sampler.h"
#include "engine/stop_strings.h"
#include "engine/transformer.h"

namespace whet {

enum class Finish : uint8_t { kRunning, kStop, kLength, kCancelled };

struct Sample {
    std::vector<int32_t> tokens;
    std::vector<float> logprobs;
    std::vector<Drawn> alternatives;  // top_logprobs for each token, perhaps also for one that is not among them yet
    std::vector<int32_t> held;        // with stop strings, per token: bytes at the end of its text that are not shown
    Finish finish = Finish::kRunning;
};

struct Request {
    std::vector<int32_t> tokens;  // the prompt, or a sequence to score
    uint64_t adapter = 0;         // 0: none
    bool keep = false;            // prompt and sampled tokens in the cache, for later requests
    // To sample:
    size_t n = 0, min_new_tokens = 0, max_new_tokens = 0;
    Sampling sampling;
    std::vector<int32_t> stop_tokens;                 // these and the stop strings come after min_new_tokens tokens
    std::shared_ptr<const StopStrings> stop_strings;  // null: none
    uint64_t seed = 0, prompt_index = 0, first_sample = 0;  // its samples are first_sample ... first_sample + n - 1
    // To score, where n is 0: log-probs (and entropies) of the tokens from `score_from` on, which is 1 at least.
    size_t score_from = 1;
    bool entropy = false;
    bool logits = false;  // keep them: of every token from score_from - 1 on
};

// A request, its state and its results. It belongs to a session: a caller's call, which ends all of its jobs at once.
struct Job {
    Request request;
    uint64_t session = 0;
    std::vector<Sample> samples;
    std::vector<float> logprobs, entropies, logits;
    bool done = false;
    std::string error;  // which logits hold NaN or infinity: the request ended there

    // The scheduler's own.
    std::shared_ptr<const Adapter> adapter;  // null: none
    std::vector<int32_t> pages;
    std::vector<float> hidden;  // after the last token of the prompt
    size_t computed = 0;        // tokens of the prompt that are in the cache
    size_t reused = 0;          // of these, those that others had computed when it was admitted
    size_t started = 0, ended = 0;
    bool first_reserved = false;  // the pages of its first sample

    bool is_computed() const { return computed == request.tokens.size(); }
};

struct Limits {
    size_t kv_bytes, max_batch, chunk;  // samples at a time; tokens of prompts in a step
};

class Scheduler {
public:
    Scheduler(Transformer& transformer, const Limits& limits);

    // Queues a request. Throws std::invalid_argument if it could never run, for lack of pages.
    uint64_t add(Request request, uint64_t session = 0);
    // Throws std::out_of_range if there is no such request.
    const Job& job(uint64_t id) const { return *jobs_.at(id); }
    // Erases a request, or all of a session, which are cancelled if they still run: no job, page or index entry of
    // theirs is left, but for pages that they keep, and other prompts compute the shared pages that they awaited. Does
    // not throw.
    void remove(uint64_t id);
    void end_session(uint64_t session);

    // False when there was nothing to do. After std::bad_alloc the next step continues.
    bool step();

    void add_adapter(uint64_t id, std::unique_ptr<Adapter> adapter);  // id: not 0, and new
    void remove_adapter(uint64_t id) { adapters_.erase(id); }         // requests that have it keep it until they end
    bool has_adapter(uint64_t id) const { return adapters_.count(id) != 0; }

    // Frees what requests have kept; there are none.
    void forget_kept() { cache_.forget_kept(); }

    // Gives the memory of free pages and of the workspace back to the system, until the next step. Kept pages stay.
    // How many bytes it was, at most.
    size_t release_memory();

    const KvCache& cache() const { return cache_; }
    size_t workspace_bytes() const;
    size_t committed_workspace_bytes() const { return has_workspace_ ? workspace_bytes() : 0; }
    size_t adapters_bytes() const;

private:
    static constexpr size_t kPage = kPageTokens;

    struct Running {
        Job* job;
        size_t sample;
        std::vector<int32_t> pages;
        std::vector<uint64_t> seen;        // tokens of the sequence, a bit each; empty without a repetition penalty
        size_t reserved;                   // pages that it may still allocate
        bool fresh;                        // its first token comes from the prompt's last hidden state
        std::vector<TokenCount> counts{};  // of its tokens, in order of id; empty without penalties on them
        StopStrings::State stop_state{};

        void mark_seen(int32_t token) { seen[static_cast<size_t>(token) / 64] |= uint64_t{1} << token % 64; }
        void count(int32_t token);
    };
    enum class Kind : uint8_t { kDraw, kScore };
    struct HeadRow {
        Kind kind;
        const float* hidden;
        size_t index;  // of running_, or of the token of `job`
        Job* job;
    };

    Transformer& transformer_;
    KvCache cache_;
    Limits limits_;
    std::map<uint64_t, std::unique_ptr<Job>> jobs_;
    std::map<uint64_t, std::shared_ptr<const Adapter>> adapters_;
    uint64_t next_id_ = 1;
    std::deque<Job*> waiting_;
    std::vector<Job*> prefilling_, pending_;  // pending_: prompts in the cache with samples still to start
    std::vector<Running> running_;
    size_t reserved_ = 0;
    std::vector<Row> rows_;
    std::vector<size_t> counts_;  // rows that each prompt of prefilling_ has got
    std::vector<HeadRow> head_rows_;
    std::vector<Drawn> drawn_;
    std::vector<Job*> failed_;  // whose logits are not numbers
    std::vector<float> head_in_, logits_;
    std::vector<uint8_t> scratch_;
    size_t head_tile_;
    bool has_workspace_ = false;  // whether a step has used it since it was made or released

    // admission.cpp
    size_t tail_pages(const Request& request) const;
    std::unique_ptr<Job> make_job(Request request, uint64_t session) const;
    void admit_waiting();
    bool admit(Job& job);
    void find_prefix(Job& job) const;
    void copy_kept(Job& job);
    void start_samples();
    bool start_sample(Job& job);

    // scheduler.cpp: a step
    void add_decode_rows();
    void add_prompt_rows();
    void collect_heads(const float* hidden);
    void run_heads();
    void score(const HeadRow& row, const float* logits);
    void draw(const HeadRow& row, float* logits, void* scratch);
    void advance_prompts(const float* hidden);
    void append_drawn();
    void append(Running& running, const Drawn& drawn);
    Finish finish_after(Running& running) const;
    void end(Running& running, Finish finish);
    void keep(const Running& running);
    void unref_all(const std::vector<int32_t>& pages);
    void erase_ended();
    void release_prompt(Job& job);

    // cancellation.cpp
    void cancel(Job& job);
    void reassign_shared_pages(const Job& job);
};

}  // namespace whet
