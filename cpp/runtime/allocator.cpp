#include "runtime/allocator.h"

#include <cstdlib>  // defines __GLIBC__
#if defined(__GLIBC__)
#include <malloc.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#endif

namespace whet {

#if defined(__GLIBC__)
namespace {

void grow_heap_into_huge_pages() {
    rlimit addresses{};
    if (getrlimit(RLIMIT_AS, &addresses) != 0 || addresses.rlim_cur != RLIM_INFINITY) return;
    const size_t page = size_t{2} << 20;
    const size_t bytes = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE)) / 2;
    mallopt(M_MMAP_MAX, 0);  // the reservation has to come from the heap
    if (void* reserved = std::malloc(bytes)) {
        const uintptr_t begin = (reinterpret_cast<uintptr_t>(reserved) + page - 1) / page * page;
        const uintptr_t end = (reinterpret_cast<uintptr_t>(reserved) + bytes) / page * page;
        if (begin < end) static_cast<void>(madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE));
        std::free(reserved);
    }
    mallopt(M_MMAP_MAX, 1 << 16);  // glibc's default
}

}  // namespace

void keep_freed_memory() {
    static std::once_flag once;
    std::call_once(once, [] {
        mallopt(M_MMAP_THRESHOLD, 32 << 20);
        mallopt(M_TRIM_THRESHOLD, -1);
        grow_heap_into_huge_pages();
    });
}
#else
void keep_freed_memory() {}
#endif

}  // namespace whet
