// Cancellation of a request, or of all requests of a session.
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

// Prompts with a common prefix share its pages from admission, computed or not, and only the first of them in
// prefilling_ computes the shared tokens. When that job is cancelled, the next prompt with a shared page computes the
// rest of that page.
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
