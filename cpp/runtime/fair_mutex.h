// A fair (FIFO) mutex: a thread that relocks in a loop does not starve the threads that wait.
//
// A forked child has only the thread that forked. If another thread owned the mutex, nothing releases it and the state
// it guards may be half changed: the mutex is lost. Waiting threads are dropped.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace whet {

class FairMutex {
public:
    FairMutex();
    FairMutex(const FairMutex&) = delete;
    ~FairMutex();

    // Returns false if the mutex is lost.
    [[nodiscard]] bool lock();

    void unlock() {
        {
            const std::lock_guard guard(mutex_);
            is_locked_ = false;
            ++serving_;
        }
        unlocked_.notify_all();
    }

    // Number of forks between the first process with a FairMutex and this process.
    static uint64_t n_forks();

private:
    // Keep all threads out of lock() and unlock() during a fork.
    static void prepare_fork();
    static void end_fork_in_parent();
    static void end_fork_in_child();

    std::mutex mutex_;
    std::condition_variable unlocked_;
    uint64_t next_ = 0, serving_ = 0;
    bool is_locked_ = false, is_lost_ = false;
};

}  // namespace whet
