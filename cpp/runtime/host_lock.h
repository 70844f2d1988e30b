// The lock of the language that calls the core (Python's GIL): released while work that is worth threads runs.
//
// A binding sets host_lock once, at initialisation; hosts without such a lock leave it null.
#pragma once

namespace whet {

struct HostLock {
    void* (*release)() = nullptr;  // returns the argument of acquire(), or null if the thread does not own the lock
    void (*acquire)(void* state) = nullptr;
};
inline HostLock host_lock;

// Releases the lock for the lifetime of this object, if `wanted`.
class ReleasedHostLock {
public:
    explicit ReleasedHostLock(bool wanted)
        : state_(wanted && host_lock.release != nullptr ? host_lock.release() : nullptr) {}
    ReleasedHostLock(const ReleasedHostLock&) = delete;
    ~ReleasedHostLock() {
        if (state_ != nullptr) host_lock.acquire(state_);
    }

private:
    void* state_;
};

}  // namespace whet
