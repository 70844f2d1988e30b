// Cancellation: a request, or all of a session, ends before its time and leaves nothing behind.
#include <algorithm>

#include "engine/scheduler.h"

namespace whet {

void Scheduler::cancel(Job& job) {
    if (job.done) return;
    for (Running& running : running_) {
        if (running.job == &job) end(running, Finish::kCancelled);
    }
    erase_ended();
    for (size_t i = job.started; i < job.samples.size(); ++i) job.samples[i].finish = Finish::kCancelled;
    if (job.done) return;
    reassign_shared_pages(job);
    std::erase(waiting_, &job);
    std::erase(prefilling_, &job);
    std::erase(pending_, &job);
    release_prompt(job);
}

// Prompts with the same first tokens share their pages from admission on, computed or not, and only the first of them
// in prefilling_ computes the shared tokens. When that job is cancelled, what is still to be computed of a shared page
// is computed by the next prompt that has it.
void Scheduler::reassign_shared_pages(const Job& job) {
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
    std::erase_if(jobs_, [&](const auto& entry) {
        Job& job = *entry.second;
        if (job.session == session) cancel(job);
        return job.session == session;
    });
}

}  // namespace whet
