// A clock for measuring durations.
#pragma once
#include <chrono>

namespace whet {

// Seconds since an arbitrary time. 0 in WebAssembly, which has no clock without a function of the page.
inline double now_s() {
#if defined(__wasm__)
    return 0;
#else
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
#endif
}

}  // namespace whet
