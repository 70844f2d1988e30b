// Releases memory to the system while its addresses stay valid.
#pragma once
#include <cstddef>
#include <cstdint>
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace whet {

// Releases the whole pages in this range (MADV_DONTNEED). They read as zeros and are committed again when written. A
// no-op on systems without such a call.
inline void release_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), address = reinterpret_cast<uintptr_t>(data);
    const uintptr_t begin = (address + page - 1) / page * page, end = (address + bytes) / page * page;
    if (begin < end) static_cast<void>(madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED));
#endif
}

}  // namespace whet
