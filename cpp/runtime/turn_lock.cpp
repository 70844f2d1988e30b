#include "runtime/turn_lock.h"

#include <pthread.h>

#include <algorithm>
#include <new>
#include <vector>

namespace whet {
namespace {

// Never destroyed: a daemon thread of the host program may still use a lock at exit.
auto& all_mutex = *new std::mutex;
auto& all = *new std::vector<TurnLock*>;
uint64_t forks = 0;

}  // namespace

uint64_t TurnLock::n_forks() { return forks; }

TurnLock::TurnLock() {
    static const int registered =
        pthread_atfork(&TurnLock::prepare_fork, &TurnLock::end_fork_in_parent, &TurnLock::end_fork_in_child);
    static_cast<void>(registered);
    const std::lock_guard guard(all_mutex);
    all.push_back(this);
}

TurnLock::~TurnLock() {
    const std::lock_guard guard(all_mutex);
    std::erase(all, this);
}

bool TurnLock::lock() {
    std::unique_lock guard(mutex_);
    if (is_lost_) return false;
    const uint64_t mine = next_++;
    turned_.wait(guard, [&] { return serving_ == mine; });
    return is_held_ = true;
}

void TurnLock::prepare_fork() {
    all_mutex.lock();
    for (TurnLock* lock : all) lock->mutex_.lock();
}

void TurnLock::end_fork_in_parent() {
    for (TurnLock* lock : all) lock->mutex_.unlock();
    all_mutex.unlock();
}

void TurnLock::end_fork_in_child() {
    ++forks;
    for (TurnLock* lock : all) {
        lock->is_lost_ |= lock->is_held_;
        lock->serving_ = lock->next_;
        ::new (&lock->turned_) std::condition_variable;  // the old one counts threads that are not here
        lock->mutex_.unlock();
    }
    all_mutex.unlock();
}

}  // namespace whet
