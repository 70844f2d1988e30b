// A shared mutex: any number of readers, or one writer. A no-op in WebAssembly, where a single thread calls the core.
#pragma once
#if !defined(__wasm__)
#include <mutex>
#include <shared_mutex>
#endif

namespace whet {

class ReadWriteLock {
public:
#if defined(__wasm__)
    struct Guard {
        Guard() {}
        ~Guard() {}  // prevents warnings of unused variables
    };
    Guard reading() { return {}; }
    Guard writing() { return {}; }
#else
    std::shared_lock<std::shared_mutex> reading() { return std::shared_lock(mutex_); }
    std::unique_lock<std::shared_mutex> writing() { return std::unique_lock(mutex_); }

private:
    std::shared_mutex mutex_;
#endif
};

}  // namespace whet
