// A fair lock: threads acquire it in the order of their requests (FIFO), so that a loop that locks again at once does
// not starve those that wait.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace whet {

class TurnLock {
public:
    void lock() {
        std::unique_lock guard(mutex_);
        const uint64_t mine = next_++;
        turned_.wait(guard, [&] { return serving_ == mine; });
    }

    void unlock() {
        {
            const std::lock_guard guard(mutex_);
            ++serving_;
        }
        turned_.notify_all();
    }

private:
    std::mutex mutex_;
    std::condition_variable turned_;
    uint64_t next_ = 0, serving_ = 0;
};

}  // namespace whet
