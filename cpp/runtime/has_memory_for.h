// Work that may fail for lack of memory, and then is only left out.
#pragma once
#include <new>
#include <utility>

namespace whet {

// Whether `work`, which changes nothing where it throws std::bad_alloc, was done. A WebAssembly build catches nothing:
// there the exception ends the caller's call.
template <class Work>
bool has_memory_for(Work&& work) {
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
