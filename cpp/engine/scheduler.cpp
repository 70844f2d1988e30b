#include "engine/scheduler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "kernels/dispatch.h"
#include "runtime/ceil_div.h"
#include "runtime/pages.h"
#include "runtime/philox.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

constexpr size_t kHeadTile = 64;  // rows of logits per tile

}  // namespace

Scheduler::Scheduler(Transformer& transformer, const Limits& limits)
    : transformer_(transformer),
      cache_(transformer.config(), transformer.bf16_cache(), limits.kv_bytes),
      limits_(limits),
      head_tile_(std::min(kHeadTile, std::max(limits.max_batch, size_t{16}))) {
    const ModelConfig& config = transformer.config();
    rows_.reserve(transformer.max_rows());
    running_.reserve(limits.max_batch);
    prefilling_.reserve(limits.max_batch);
    pending_.reserve(limits.max_batch);
    head_rows_.reserve(transformer.max_rows() + limits.max_batch);
    counts_.reserve(limits.max_batch);
    failed_.reserve(limits.max_batch);
    drawn_.resize(limits.max_batch);
    head_in_.resize(head_tile_ * config.hidden_dim);
    logits_.resize(head_tile_ * config.vocab_size);
}

bool Scheduler::step() {
    start_samples();
    admit_waiting();
    rows_.clear();
    head_rows_.clear();
    add_decode_rows();
    add_prompt_rows();
    if (rows_.empty() && running_.empty()) return false;
    has_workspace_ = true;
    const float* hidden = rows_.empty() ? nullptr : transformer_.forward(rows_.data(), rows_.size(), cache_);
    collect_heads(hidden);
    run_heads();
    // State changes only after the last allocation, so that a step that threw is repeated.
    advance_prompts(hidden);
    append_drawn();
    return true;
}

// Adds the last token of every sample that has one, and allocates the page for its keys and values.
void Scheduler::add_decode_rows() {
    for (Running& running : running_) {
        if (running.fresh) continue;
        const Job& job = *running.job;
        const Sample& sample = job.samples[running.sample];
        const size_t position = job.request.tokens.size() + sample.tokens.size() - 1;
        if (position / kPage == running.pages.size()) {
            // Copy on write of the prompt's last page if it is not full.
            const bool extends_prompt = position == job.request.tokens.size() && position % kPage != 0;
            running.pages.push_back(extends_prompt ? cache_.copy(job.pages.back()) : cache_.allocate());
            --running.reserved, --reserved_;
        }
        rows_.push_back(
            {sample.tokens.back(), static_cast<int32_t>(position), running.pages.data(), job.adapter.get()});
    }
}

// Chunked prefill: adds the next tokens of the prompts, in order.
void Scheduler::add_prompt_rows() {
    counts_.clear();
    size_t room = std::min(limits_.chunk, transformer_.max_rows() - rows_.size());
    for (Job* job : prefilling_) {
        const size_t count = std::min(room, job->request.tokens.size() - job->computed);
        for (size_t i = 0; i < count; ++i) {
            const size_t at = job->computed + i;
            rows_.push_back({job->request.tokens[at], static_cast<int32_t>(at), job->pages.data(), job->adapter.get()});
        }
        counts_.push_back(count);
        room -= count;
        if (room == 0) break;
    }
}

// Selects the hidden states for the head: those that a token is drawn from, and those that precede a scored token.
void Scheduler::collect_heads(const float* hidden) {
    const size_t d = transformer_.config().hidden_dim;
    for (size_t i = 0; i < running_.size(); ++i) {
        const float* from = running_[i].job->hidden.data();
        if (!running_[i].fresh) from = hidden, hidden += d;
        head_rows_.push_back({Kind::kDraw, from, i, nullptr});
    }
    for (size_t j = 0; j < counts_.size(); ++j) {
        Job& job = *prefilling_[j];
        for (size_t i = 0; i < counts_[j]; ++i, hidden += d) {
            const size_t next = job.computed + i + 1;
            const bool has_result = next < job.request.tokens.size() || job.request.logits;
            if (job.request.n == 0 && next >= job.request.score_from && has_result) {
                head_rows_.push_back({Kind::kScore, hidden, next, &job});
            }
        }
    }
}

void Scheduler::run_heads() {
    const ModelConfig& config = transformer_.config();
    const auto threads = static_cast<size_t>(num_threads());
    const size_t scratch = ceil_div(sampler_scratch_bytes(config.vocab_size), 64) * 64;
    if (scratch_.size() < threads * scratch + 64) scratch_.resize(threads * scratch + 64);
    auto* aligned = scratch_.data() + (64 - reinterpret_cast<uintptr_t>(scratch_.data()) % 64) % 64;
    for (size_t begin = 0; begin < head_rows_.size(); begin += head_tile_) {
        const size_t n = std::min(head_tile_, head_rows_.size() - begin);
        for (size_t i = 0; i < n; ++i) {
            std::memcpy(head_in_.data() + i * config.hidden_dim, head_rows_[begin + i].hidden,
                        config.hidden_dim * sizeof(float));
        }
        transformer_.logits(head_in_.data(), n, logits_.data());
        auto task = [&](size_t t) {
            for (size_t i = t; i < n; i += threads) {
                const HeadRow& row = head_rows_[begin + i];
                float* logits = logits_.data() + i * config.vocab_size;
                row.kind == Kind::kScore ? score(row, logits) : draw(row, logits, aligned + t * scratch);
            }
        };
        parallel_for(std::min(threads, n), task);
    }
}

void Scheduler::score(const HeadRow& row, const float* logits) {
    const size_t vocab = transformer_.config().vocab_size;
    const Request& request = row.job->request;
    const size_t at = row.index - request.score_from;
    if (request.logits) std::copy(logits, logits + vocab, row.job->logits.data() + at * vocab);
    if (row.index == request.tokens.size()) return;
    float* entropy = request.entropy ? &row.job->entropies[at] : nullptr;
    kernels().token_logprobs_f32(logits, vocab, static_cast<size_t>(request.tokens[row.index]),
                                 request.sampling.temperature, &row.job->logprobs[at], entropy);
}

void Scheduler::draw(const HeadRow& row, float* logits, void* scratch) {
    const Running& running = running_[row.index];
    const Request& request = running.job->request;
    Sample& sample = running.job->samples[running.sample];
    const size_t position = sample.tokens.size();
    const double uniform =
        token_uniform(request.seed, request.prompt_index, request.first_sample + running.sample, position);
    History history{running.seen.empty() ? nullptr : running.seen.data(), running.counts, {}};
    if (position < request.min_new_tokens) history.banned = request.stop_tokens;
    const size_t n_top = request.sampling.top_logprobs;
    sample.alternatives.resize((position + 1) * n_top);  // reserved by start_sample()
    drawn_[row.index] = draw_token(logits, transformer_.config().vocab_size, request.sampling, history, uniform,
                                   scratch, sample.alternatives.data() + position * n_top);
}

// Advances prompts by their tokens in this step. A computed prompt is done (scoring), or its samples may start.
void Scheduler::advance_prompts(const float* hidden) {
    const size_t d = transformer_.config().hidden_dim;
    for (const Running& running : running_) hidden += running.fresh ? 0 : d;
    for (size_t j = 0; j < counts_.size(); ++j) {
        Job& job = *prefilling_[j];
        job.computed += counts_[j];
        hidden += counts_[j] * d;
        if (job.is_computed() && job.request.n > 0) job.hidden.assign(hidden - d, hidden);
    }
    for (Job* job : prefilling_) {
        if (job->is_computed()) job->request.n == 0 ? release_prompt(*job) : pending_.push_back(job);
    }
    std::erase_if(prefilling_, [](const Job* job) { return job->is_computed(); });
}

// Appends the drawn tokens to their samples, and ends samples.
void Scheduler::append_drawn() {
    for (size_t i = 0; i < running_.size(); ++i) append(running_[i], drawn_[i]);
    erase_ended();
    for (Job* job : failed_) cancel(*job);
    failed_.clear();
}

void Scheduler::append(Running& running, const Drawn& drawn) {
    Job& job = *running.job;
    Sample& sample = job.samples[running.sample];
    running.fresh = false;
    if (std::isnan(drawn.logprob)) {
        job.error = "the model's logits for prompt " + std::to_string(job.request.prompt_index) + ", sample " +
                    std::to_string(job.request.first_sample + running.sample) + ", token " +
                    std::to_string(sample.tokens.size()) + " contain NaN or +inf, or are all -inf";
        failed_.push_back(&job);
        return;
    }
    sample.tokens.push_back(drawn.token);
    sample.logprobs.push_back(drawn.logprob);
    if (!running.seen.empty()) running.mark_seen(drawn.token);
    if (job.request.sampling.counts_tokens()) running.count(drawn.token);
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
    if (job.request.keep && job.error.empty()) retain(running);
    unref_all(running.pages);
    reserved_ -= running.reserved;
    running.job = nullptr;
    if (++job.ended == job.request.n) release_prompt(job);
}

// Retains the pages of a sequence, excluding its last token, whose keys and values have not been computed.
void Scheduler::retain(const Running& running) {
    const Job& job = *running.job;
    const std::vector<int32_t>&prompt = job.request.tokens, &drawn = job.samples[running.sample].tokens;
    const size_t n = prompt.size() + std::max<size_t>(drawn.size(), 1) - 1;
    int32_t before = KvCache::kNone;
    for (size_t begin = 0; begin < n; begin += kPage) {
        const size_t count = std::min(kPage, n - begin), i = begin / kPage;
        std::array<int32_t, kPage> tokens{};
        for (size_t t = 0; t < count; ++t) {
            const size_t at = begin + t;
            tokens[t] = at < prompt.size() ? prompt[at] : drawn[at - prompt.size()];
        }
        const int32_t page = i < running.pages.size() ? running.pages[i] : job.pages[i];
        before = cache_.retain(page, before, job.request.adapter, tokens.data(), count);
    }
}

// Last page first: retained pages are evicted in this order, and a page can only be found through its predecessors.
void Scheduler::unref_all(const std::vector<int32_t>& pages) {
    for (auto page = pages.rbegin(); page != pages.rend(); ++page) cache_.unref(*page);
}

void Scheduler::erase_ended() {
    std::erase_if(running_, [](const Running& running) { return running.job == nullptr; });
}

// Frees the pages of a prompt and marks the job as done.
void Scheduler::release_prompt(Job& job) {
    unref_all(job.pages);
    job.pages.clear();
    if (job.first_reserved) reserved_ -= tail_pages(job.request);
    job.first_reserved = false;
    job.adapter = nullptr;
    job.done = true;
}

size_t Scheduler::workspace_bytes() const {
    return transformer_.workspace_bytes() + (head_in_.size() + logits_.size()) * sizeof(float) + scratch_.size();
}

size_t Scheduler::release_memory() {
    const size_t workspace = committed_workspace_bytes();
    transformer_.release_workspace();
    release_pages(logits_.data(), logits_.size() * sizeof(float));
    release_pages(scratch_.data(), scratch_.size());
    has_workspace_ = false;
    return workspace + cache_.release_free() * cache_.page_bytes();
}

size_t Scheduler::adapters_bytes() const {
    size_t bytes = 0;
    for (const auto& [id, adapter] : adapters_) {
        for (const auto& layer : adapter->layers) {
            for (const LowRank& low : layer) {
                for (const PackedWeight& a : low.a) bytes += a.size_bytes();
                for (const PackedWeight& b : low.b) bytes += b.size_bytes();
            }
        }
    }
    return bytes;
}

void Scheduler::add_adapter(uint64_t id, std::unique_ptr<Adapter> adapter) {
    transformer_.reserve_adapters(adapter->max_rank);
    adapters_.emplace(id, std::move(adapter));
}

}  // namespace whet
