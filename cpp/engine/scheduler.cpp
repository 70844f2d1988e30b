#include "engine/scheduler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "kernels/dispatch.h"
#include "runtime/ceil_div.h"
#include "runtime/philox.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

constexpr size_t kPage = kPageTokens;
constexpr size_t kHeadTile = 64;  // rows of logits at a time

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
    bad_.reserve(limits.max_batch);
    drawn_.resize(limits.max_batch);
    head_in_.resize(head_tile_ * config.hidden_dim);
    logits_.resize(head_tile_ * config.vocab_size);
}

size_t Scheduler::workspace_bytes() const {
    return transformer_.workspace_bytes() + (head_in_.size() + logits_.size()) * sizeof(float) + scratch_.size();
}

const Adapter* Scheduler::adapter_of(const Job& job) const {
    return job.request.adapter == 0 ? nullptr : adapters_.at(job.request.adapter).get();
}

// Pages that one sample may need beyond the full ones of its prompt. Its last token is not put into the cache.
size_t Scheduler::tail_pages(const Request& request) const {
    if (request.n == 0) return 0;
    return ceil_div(request.tokens.size() + request.max_new_tokens - 1, kPage) - request.tokens.size() / kPage;
}

uint64_t Scheduler::add(Request request, uint64_t session) {
    const size_t needed = ceil_div(request.tokens.size(), kPage) + tail_pages(request);
    if (needed > cache_.n_pages()) {
        throw std::invalid_argument(std::to_string(request.tokens.size()) + " + " +
                                    std::to_string(request.max_new_tokens) + " tokens need " +
                                    std::to_string(needed * cache_.page_bytes()) +
                                    " bytes of KV cache, and kv_bytes is " + std::to_string(limits_.kv_bytes));
    }
    auto job = std::make_unique<Job>();
    job->request = std::move(request);
    job->session = session;
    job->samples.resize(job->request.n);
    const size_t n_tokens = job->request.tokens.size();
    if (job->request.n == 0) {
        const size_t scored = n_tokens - std::min(n_tokens, job->request.score_from);
        job->logprobs.resize(scored);
        if (job->request.entropy) job->entropies.resize(scored);
        if (job->request.logits) job->logits.resize((scored + 1) * transformer_.config().vocab_size);
        job->done = scored == 0 && !job->request.logits;
    }
    // What a step would ask for is asked for here.
    job->pages.reserve(ceil_div(n_tokens, kPage));
    if (job->request.n > 0) job->hidden.reserve(transformer_.config().hidden_dim);
    const uint64_t id = next_id_++;
    const auto at = jobs_.emplace(id, std::move(job)).first;
    try {
        if (!at->second->done) waiting_.push_back(at->second.get());
    } catch (...) {
        jobs_.erase(at);
        throw;
    }
    return id;
}

// Takes the pages of a prompt, those that are in the cache already from there. False: there is no room yet.
bool Scheduler::admit(Job& job) {
    const Request& request = job.request;
    const size_t n_tokens = request.tokens.size(), n_pages = ceil_div(n_tokens, kPage);
    // The last token before the first one that is asked for has to be computed, for its hidden state.
    const size_t known = request.n > 0 ? n_tokens - 1 : request.score_from - 1;
    size_t shared = 0;
    int32_t before = KvCache::kNone;
    std::vector<int32_t>& pages = job.pages;
    pages.clear();
    while (shared < known / kPage) {
        before = cache_.find_prefix(before, request.adapter, request.tokens.data() + shared * kPage);
        if (before == KvCache::kNone) break;
        pages.push_back(before);
        ++shared;
    }
    const size_t tail = tail_pages(request);
    if (cache_.n_free() < reserved_ + n_pages - shared + tail) {
        pages.clear();  // none of them is held
        return false;
    }
    for (int32_t page : pages) cache_.ref(page);
    while (pages.size() < n_pages) {
        const size_t at = pages.size();
        pages.push_back(cache_.allocate());
        if ((at + 1) * kPage <= n_tokens) {
            cache_.insert_prefix(pages[at], at == 0 ? KvCache::kNone : pages[at - 1], request.adapter,
                                 request.tokens.data() + at * kPage);
        }
    }
    job.computed = shared * kPage;
    reserved_ += tail;
    job.first_reserved = true;
    return true;
}

void Scheduler::start_samples() {
    for (size_t i = 0; i < pending_.size();) {
        Job& job = *pending_[i];
        const Request& request = job.request;
        const size_t tail = tail_pages(request);
        while (job.started < request.n && running_.size() < limits_.max_batch) {
            if (!job.first_reserved && cache_.n_free() < reserved_ + tail) break;
            // All its memory first, then what changes: a step that is refused some has changed nothing.
            Running one{&job, job.started, {}, {}, tail, true};
            one.pages.reserve(ceil_div(request.tokens.size() + request.max_new_tokens, kPage));
            if (request.sampling.repetition_penalty != 1.0f) {
                one.seen.assign(ceil_div(transformer_.config().vocab_size, 64), 0);
                for (int32_t token : request.tokens) one.seen[static_cast<size_t>(token) / 64] |= 1ull << token % 64;
            }
            Sample& sample = job.samples[one.sample];
            sample.tokens.reserve(request.max_new_tokens);
            sample.logprobs.reserve(request.max_new_tokens);
            const size_t full = request.tokens.size() / kPage;
            for (size_t p = 0; p < full; ++p) one.pages.push_back(job.pages[p]), cache_.ref(job.pages[p]);
            if (!job.first_reserved) reserved_ += tail;
            job.first_reserved = false;
            ++job.started;
            running_.push_back(std::move(one));
        }
        if (job.started < request.n) return;  // those before it first
        pending_.erase(pending_.begin() + static_cast<ptrdiff_t>(i));
    }
}

void Scheduler::admit_waiting() {
    while (!waiting_.empty() && prefilling_.size() + pending_.size() < limits_.max_batch) {
        if (!admit(*waiting_.front())) return;
        prefilling_.push_back(waiting_.front());
        waiting_.pop_front();
    }
}

// The last token of every sample that has one, into the page that it may have to take first.
void Scheduler::add_decode_rows() {
    for (Running& one : running_) {
        if (one.fresh) continue;
        const Job& job = *one.job;
        const Sample& sample = job.samples[one.sample];
        const size_t position = job.request.tokens.size() + sample.tokens.size() - 1;
        if (position / kPage == one.pages.size()) {
            // The prompt's last page, where it is not full, is the sample's own from here on.
            const bool prompts = position == job.request.tokens.size() && position % kPage != 0;
            one.pages.push_back(prompts ? cache_.copy(job.pages.back()) : cache_.allocate());
            --one.reserved, --reserved_;
        }
        rows_.push_back({sample.tokens.back(), static_cast<int32_t>(position), one.pages.data(), adapter_of(job)});
    }
}

void Scheduler::add_prompt_rows() {
    counts_.clear();
    size_t room = std::min(limits_.chunk, transformer_.max_rows() - rows_.size());
    for (Job* job : prefilling_) {
        const size_t count = std::min(room, job->request.tokens.size() - job->computed);
        for (size_t i = 0; i < count; ++i) {
            const size_t at = job->computed + i;
            rows_.push_back({job->request.tokens[at], static_cast<int32_t>(at), job->pages.data(), adapter_of(*job)});
        }
        counts_.push_back(count);
        room -= count;
        if (room == 0) break;
    }
}

// Which hidden states go to the head: those that a token is drawn after, and those before a token to be scored.
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
            const bool asked = next < job.request.tokens.size() || job.request.logits;
            if (job.request.n == 0 && next >= job.request.score_from && asked) {
                head_rows_.push_back({Kind::kScore, hidden, next, &job});
            }
        }
    }
}

// The rows of prompts are in the cache. Not before the heads are through: a step that ends in an exception is taken
// again.
void Scheduler::take_prompts(const float* hidden) {
    const size_t d = transformer_.config().hidden_dim;
    for (const Running& one : running_) hidden += one.fresh ? 0 : d;
    for (size_t j = 0; j < counts_.size(); ++j) {
        Job& job = *prefilling_[j];
        job.computed += counts_[j];
        hidden += counts_[j] * d;
        if (job.computed == job.request.tokens.size() && job.request.n > 0) job.hidden.assign(hidden - d, hidden);
    }
    for (size_t i = 0; i < prefilling_.size();) {
        Job* job = prefilling_[i];
        if (job->computed < job->request.tokens.size()) {
            ++i;
            continue;
        }
        prefilling_.erase(prefilling_.begin() + static_cast<ptrdiff_t>(i));
        if (job->request.n == 0) {
            leave_prompt(*job);
        } else {
            pending_.push_back(job);
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
                run_head(head_rows_[begin + i], logits_.data() + i * config.vocab_size, aligned + t * scratch);
            }
        };
        parallel_for(std::min(threads, n), task);
    }
}

void Scheduler::run_head(const HeadRow& row, float* logits, void* scratch) {
    const size_t vocab = transformer_.config().vocab_size;
    if (row.kind == Kind::kScore) {
        const Request& request = row.job->request;
        const size_t at = row.index - request.score_from;
        if (request.logits) std::copy(logits, logits + vocab, row.job->logits.data() + at * vocab);
        if (row.index == request.tokens.size()) return;
        float* entropy = request.entropy ? &row.job->entropies[at] : nullptr;
        kernels().token_logprobs_f32(logits, vocab, static_cast<size_t>(request.tokens[row.index]),
                                     request.sampling.temperature, &row.job->logprobs[at], entropy);
        return;
    }
    const Running& one = running_[row.index];
    const Request& request = one.job->request;
    const double uniform =
        token_uniform(request.seed, request.prompt_index, one.sample, one.job->samples[one.sample].tokens.size());
    drawn_[row.index] =
        draw_token(logits, vocab, request.sampling, one.seen.empty() ? nullptr : one.seen.data(), uniform, scratch);
}

void Scheduler::take_drawn() {
    for (size_t i = 0; i < running_.size(); ++i) {
        Running& one = running_[i];
        const Request& request = one.job->request;
        Sample& sample = one.job->samples[one.sample];
        const Drawn drawn = drawn_[i];
        if (std::isnan(drawn.logprob)) {
            one.job->error = "the model's logits for prompt " + std::to_string(request.prompt_index) + ", sample " +
                             std::to_string(one.sample) + ", token " + std::to_string(sample.tokens.size()) +
                             " hold NaN or +inf, or nothing but -inf";
            bad_.push_back(one.job);
            one.fresh = false;
            continue;
        }
        sample.tokens.push_back(drawn.token);
        sample.logprobs.push_back(drawn.logprob);
        if (!one.seen.empty()) one.seen[static_cast<size_t>(drawn.token) / 64] |= 1ull << drawn.token % 64;
        one.fresh = false;
        const auto& stops = request.stop_tokens;
        if (std::find(stops.begin(), stops.end(), drawn.token) != stops.end()) {
            end(one, Finish::kStop);
        } else if (sample.tokens.size() == request.max_new_tokens) {
            end(one, Finish::kLength);
        }
    }
    std::erase_if(running_, [](const Running& one) { return one.job == nullptr; });
    for (Job* job : bad_) cancel(*job);
    bad_.clear();
}

// The sample's pages are free; take_drawn() and cancel() remove it from running_.
void Scheduler::end(Running& one, Finish finish) {
    Job& job = *one.job;
    job.samples[one.sample].finish = finish;
    for (int32_t page : one.pages) cache_.unref(page);
    reserved_ -= one.reserved;
    one.job = nullptr;
    if (++job.ended == job.request.n) leave_prompt(job);
}

void Scheduler::leave_prompt(Job& job) {
    for (int32_t page : job.pages) cache_.unref(page);
    job.pages.clear();
    if (job.first_reserved) reserved_ -= tail_pages(job.request);
    job.first_reserved = false;
    job.done = true;
}

bool Scheduler::step() {
    start_samples();
    admit_waiting();
    rows_.clear();
    head_rows_.clear();
    add_decode_rows();
    add_prompt_rows();
    if (rows_.empty() && running_.empty()) return false;
    const float* hidden = rows_.empty() ? nullptr : transformer_.forward(rows_.data(), rows_.size(), cache_);
    collect_heads(hidden);
    run_heads();
    take_prompts(hidden);
    take_drawn();
    return true;
}

void Scheduler::cancel(Job& job) {
    if (job.done) return;
    for (Running& one : running_) {
        if (one.job == &job) end(one, Finish::kCancelled);
    }
    std::erase_if(running_, [](const Running& one) { return one.job == nullptr; });
    for (size_t i = job.started; i < job.samples.size(); ++i) job.samples[i].finish = Finish::kCancelled;
    if (job.done) return;
    hand_over(job);
    std::erase(waiting_, &job);
    std::erase(prefilling_, &job);
    std::erase(pending_, &job);
    leave_prompt(job);
}

// Prompts that begin like this one share its pages, computed or not, and stand behind it. What is still to be computed
// of a shared page, the first of them that needs it computes in its place.
void Scheduler::hand_over(const Job& job) {
    auto at = std::find(prefilling_.begin(), prefilling_.end(), &job);
    size_t computed = job.computed;
    for (; at != prefilling_.end(); ++at) {
        Job& next = **at;
        if (&next == &job) continue;
        const auto [own, others] =
            std::mismatch(job.pages.begin(), job.pages.end(), next.pages.begin(), next.pages.end());
        const size_t shared = static_cast<size_t>(own - job.pages.begin()) * kPage;
        if (shared <= computed) continue;
        next.computed = computed;
        computed = shared;
    }
}

void Scheduler::remove(uint64_t id) {
    cancel(*jobs_.at(id));
    jobs_.erase(id);
}

void Scheduler::end_session(uint64_t session) {
    for (auto at = jobs_.begin(); at != jobs_.end();) {
        if (at->second->session == session) {
            cancel(*at->second);
            at = jobs_.erase(at);
        } else {
            ++at;
        }
    }
}

void Scheduler::add_adapter(uint64_t id, std::unique_ptr<Adapter> adapter) {
    transformer_.reserve_adapters(adapter->max_rank);
    adapters_.emplace(id, std::move(adapter));
}

}  // namespace whet
