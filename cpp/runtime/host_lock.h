// The lock of the language that calls the core (Python's GIL): released while work that is worth threads runs.
//
// A binding sets host_lock once, at its start; a host without such a lock leaves it as it is.
#pragma once

namespace whet {

struct HostLock {
    void* (*release)() = nullptr;  // what acquire() needs, or null where the calling thread does not hold the lock
    void (*acquire)(void* state) = nullptr;
};
inline HostLock host_lock;

// Releases it for the lifetime of this object, if `wanted`.
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
