// Optional work that is skipped if memory cannot be allocated.
#pragma once
#include <new>
#include <utility>

namespace whet {

// Runs `work`, which must change nothing if it throws std::bad_alloc, and returns whether it succeeded. A WebAssembly
// build catches no exceptions: the exception ends the host's call.
template <class Work>
bool try_allocating(Work&& work) {
#if defined(__wasm__)
    work();
#else
    try {
        std::forward<Work>(work)();
    } catch (const std::bad_alloc&) {
        return false;
    }
#endif
    return true;
}

}  // namespace whet
