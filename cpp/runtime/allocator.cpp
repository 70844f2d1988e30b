#include "runtime/allocator.h"

#include <cstdlib>  // defines __GLIBC__
#if defined(__GLIBC__)
#include <malloc.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <vector>

#include "runtime/pages.h"
#endif

namespace whet {

#if defined(__GLIBC__)
namespace {

void grow_heap_into_huge_pages() {
    rlimit addresses{};
    if (getrlimit(RLIMIT_AS, &addresses) != 0 || addresses.rlim_cur != RLIM_INFINITY) return;
    const size_t page = size_t{2} << 20;
    const size_t bytes = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE)) / 2;
    mallopt(M_MMAP_MAX, 0);  // the reservation must be part of the heap
    if (void* reserved = std::malloc(bytes)) {
        const uintptr_t begin = (reinterpret_cast<uintptr_t>(reserved) + page - 1) / page * page;
        const uintptr_t end = (reinterpret_cast<uintptr_t>(reserved) + bytes) / page * page;
        if (begin < end) static_cast<void>(madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE));
        std::free(reserved);
    }
    mallopt(M_MMAP_MAX, 1 << 16);  // glibc's default
}

constexpr size_t kMmapThreshold = size_t{32} << 20;

}  // namespace

void keep_freed_memory() {
    static std::once_flag once;
    std::call_once(once, [] {
        mallopt(M_MMAP_THRESHOLD, kMmapThreshold);
        mallopt(M_TRIM_THRESHOLD, -1);
        grow_heap_into_huge_pages();
    });
}

// Allocates blocks of retained memory, releases their pages and frees them: malloc_trim would release all of it.
void release_freed_memory(size_t bytes) {
    constexpr size_t kBlock = kMmapThreshold / 2;
    std::vector<void*> blocks;
    while (bytes > 0) {
        const size_t size = std::min(bytes, kBlock);
        blocks.push_back(std::malloc(size));
        if (blocks.back() != nullptr) release_pages(blocks.back(), size);
        bytes -= size;
    }
    for (void* block : blocks) std::free(block);
}
#else
void keep_freed_memory() {}
void release_freed_memory(size_t) {}
#endif

}  // namespace whet
