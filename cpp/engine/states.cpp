// States of recurrent mixers.
//
// A prompt and a sample each hold the state after their computed tokens. A step of a prompt writes another state; a
// sample starts from the prompt's and then replaces its own. Where a later request may continue, the state stays in the
// cache, attached to the page before that place: every kStateTokens tokens of a kept prompt and at its last whole page,
// at the end of a kept sequence, and where a waiting prompt parts from the one being computed.
#include <algorithm>

#include "engine/scheduler.h"

namespace whet {
namespace {

constexpr size_t kStateTokens = 512;

}  // namespace

// The states of a prompt that is admitted: it may hold kStates, and starts from its last page's.
void Scheduler::start_states(Job& job) {
    const Request& request = job.request;
    job.state_rights = kStates;
    state_rights_ += kStates;
    job.n_state_readers = request.n;
    if (job.pages.empty()) return;
    job.state = pages_.state_of(job.pages.back());
    if (job.state != PageIndex::kNone) pages_.ref_state(job.state);
}

// Adds the run of the last n planned tokens, from a state to another, which is allocated if it is kNone.
void Scheduler::plan_run(size_t n, int32_t from, int32_t& to) {
    if (to == PageIndex::kNone) {
        reserve_page_writes(pages_.n_state_pages());
        const int32_t state = pages_.allocate_state();
        for (size_t i = 0; i < pages_.n_state_pages(); ++i) {
            const int32_t page = pages_.pages_of_state(state)[i];
            plan_.page_writes.push_back({page, page});
        }
        to = state;
    }
    const int32_t* const before = from == PageIndex::kNone ? nullptr : pages_.pages_of_state(from);
    plan_.runs.push_back({plan_.tokens.size() - n, n, before, pages_.pages_of_state(to), from, to});
}

// The end of a prompt's next steps: they stop where its state has to be kept.
size_t Scheduler::next_state_point(const Job& job) const {
    size_t next = job.request.tokens.size();
    if (!is_recurrent()) return next;
    if (job.request.keep) next = std::min(next, (job.computed / kStateTokens + 1) * kStateTokens);
    for (const size_t point : job.state_points) {
        if (point > job.computed) next = std::min(next, point);
    }
    return next;
}

// The step has computed n tokens of a prompt: replaces its state by the state after them.
void Scheduler::advance_state(Job& job, size_t n) {
    release_state(job.state);
    std::swap(job.state, job.next_state);
    for (size_t i = (job.computed - n) / kPage; i < job.computed / kPage; ++i) pages_.set_computed(job.pages[i]);
    const auto is_point = [&](size_t point) { return point == job.computed; };
    if ((job.request.keep && job.computed % kStateTokens == 0) ||
        std::any_of(job.state_points.begin(), job.state_points.end(), is_point)) {
        attach_state(job);
    }
}

// Keeps the state after the first n_tokens of a prompt, a number of whole pages, unless they are behind it.
void Scheduler::keep_state_at(Job& job, size_t n_tokens) {
    if (job.computed == n_tokens) return attach_state(job);
    const auto end = job.state_points.end();
    if (std::find(job.state_points.begin(), end, n_tokens) == end) job.state_points.push_back(n_tokens);
}

// Attaches the state of a prompt after whole pages to the last of them, or to an indexed page with the same tokens, if
// all indexed pages up to it are computed.
void Scheduler::attach_state(const Job& job) {
    int32_t page = PageIndex::kNone;
    for (size_t i = 0; i < job.computed / kPage; ++i) {
        page = pages_.find(page, job.request.adapter, job.request.tokens.data() + i * kPage);
        if (page == PageIndex::kNone || !pages_.is_computed(page)) return;
    }
    pages_.attach_state(job.state, page);
}

void Scheduler::release_state(int32_t& state) {
    if (state != PageIndex::kNone) pages_.unref_state(state);
    state = PageIndex::kNone;
}

void Scheduler::release_states(Job& job) {
    release_state(job.state);
    release_state(job.next_state);
    state_rights_ -= job.state_rights;
    job.state_rights = 0;
}

// The state that the step has computed for a sample is its own.
void Scheduler::take_state(Running& running) {
    if (running.has_state) return;
    running.has_state = true;
    if (--running.job->n_state_readers == 0) release_states(*running.job);
}

void Scheduler::end_state(Running& running) {
    take_state(running);
    release_state(running.state);
    --state_rights_;
}

// A prompt can only continue where there is a state: after a page, or after a retained page that is not full.
void Scheduler::drop_pages_without_state(Job& job) const {
    while (!job.pages.empty() && pages_.state_of(job.pages.back()) == PageIndex::kNone &&
           find_retained(job).second == 0) {
        job.pages.pop_back();
    }
}

// Whether a prompt that is being computed has more pages in common with the job than the job would find in the cache,
// and will leave a state behind them: it is asked to.
bool Scheduler::waits_for_state(const Job& job) {
    if (!is_recurrent() || prefilling_.empty()) return false;
    const Request& request = job.request;
    const size_t most = ((request.score_from > 0 ? request.score_from : request.tokens.size()) - 1) / kPage * kPage;
    size_t common = 0;
    Job* nearest = nullptr;
    for (Job* other : prefilling_) {
        const Request& first = other->request;
        if (first.adapter != request.adapter) continue;
        const size_t found = request.common_tokens(first, most) / kPage * kPage;
        if (found > common && found >= other->computed) common = found, nearest = other;
    }
    if (nearest == nullptr) return false;
    int32_t page = PageIndex::kNone;
    size_t with_state = 0;
    for (size_t i = 0; i < common / kPage; ++i) {
        page = pages_.find(page, request.adapter, request.tokens.data() + i * kPage);
        if (page == PageIndex::kNone) break;
        if (pages_.state_of(page) != PageIndex::kNone) with_state = (i + 1) * kPage;
    }
    if (with_state == common) return false;
    keep_state_at(*nearest, common);
    return nearest->computed < common;
}

}  // namespace whet
