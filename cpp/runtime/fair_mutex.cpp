#include "runtime/fair_mutex.h"

#include <algorithm>
#include <new>
#include <vector>

#include "runtime/system.h"

namespace whet {
namespace {

// Never destroyed: a daemon thread of the host program may still use a mutex at exit.
auto& all_mutex = *new std::mutex;
auto& all = *new std::vector<FairMutex*>;
uint64_t forks = 0;

}  // namespace

uint64_t FairMutex::n_forks() { return forks; }

FairMutex::FairMutex() {
    static std::once_flag once;
    std::call_once(once, at_fork, &FairMutex::prepare_fork, &FairMutex::end_fork_in_parent,
                   &FairMutex::end_fork_in_child);
    const std::lock_guard guard(all_mutex);
    all.push_back(this);
}

FairMutex::~FairMutex() {
    const std::lock_guard guard(all_mutex);
    std::erase(all, this);
}

bool FairMutex::lock() {
    std::unique_lock guard(mutex_);
    if (is_lost_) return false;
    const uint64_t mine = next_++;
    unlocked_.wait(guard, [&] { return serving_ == mine; });
    return is_locked_ = true;
}

void FairMutex::prepare_fork() {
    all_mutex.lock();
    for (FairMutex* lock : all) lock->mutex_.lock();
}

void FairMutex::end_fork_in_parent() {
    for (FairMutex* lock : all) lock->mutex_.unlock();
    all_mutex.unlock();
}

void FairMutex::end_fork_in_child() {
    ++forks;
    for (FairMutex* lock : all) {
        lock->is_lost_ |= lock->is_locked_;
        lock->serving_ = lock->next_;
        ::new (&lock->unlocked_) std::condition_variable;  // the old one counts waiting threads of the parent
        lock->mutex_.unlock();
    }
    all_mutex.unlock();
}

}  // namespace whet
