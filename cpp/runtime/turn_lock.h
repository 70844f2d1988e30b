// A fair lock: threads acquire it in the order of their requests (FIFO), so that a loop that locks again at once does
// not starve those that wait.
//
// A forked child has the one thread that forked. Where another one held the lock then, it never releases it, and what
// it was changing stays as it is: the lock is lost. Those that only waited are forgotten.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace whet {

class TurnLock {
public:
    TurnLock();
    TurnLock(const TurnLock&) = delete;
    ~TurnLock();

    // False if it is lost.
    [[nodiscard]] bool lock();

    void unlock() {
        {
            const std::lock_guard guard(mutex_);
            is_held_ = false;
            ++serving_;
        }
        turned_.notify_all();
    }

    // How many forks lie between the first process that had a lock and this one.
    static uint64_t n_forks();

private:
    // No thread is in the middle of lock() or unlock() during a fork.
    static void prepare_fork();
    static void end_fork_in_parent();
    static void end_fork_in_child();

    std::mutex mutex_;
    std::condition_variable turned_;
    uint64_t next_ = 0, serving_ = 0;
    bool is_held_ = false, is_lost_ = false;
};

}  // namespace whet
