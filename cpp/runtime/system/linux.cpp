#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>  // defines __GLIBC__
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "runtime/system.h"
#include "runtime/system/page_range.h"

namespace whet {
namespace {

void advise(void* memory, size_t bytes, int advice) {
    const PageRange pages(memory, bytes);
    if (pages.bytes > 0) static_cast<void>(madvise(pages.begin, pages.bytes, advice));  // on failure nothing changes
}

// The value of a line "Name:  12 kB" of a file in /proc, in bytes.
size_t read_kilobytes(const char* path, const std::string& name) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        if (line.starts_with(name + ":")) return 1024 * std::strtoull(line.c_str() + name.size() + 1, nullptr, 10);
    }
    return 0;
}

size_t physical_bytes() { return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page_bytes(); }

}  // namespace

void release_pages(void* memory, size_t bytes) { advise(memory, bytes, MADV_DONTNEED); }
void release_file_pages(const void* memory, size_t bytes) { advise(const_cast<void*>(memory), bytes, MADV_DONTNEED); }
void prefer_huge_pages(void* memory, size_t bytes) { advise(memory, bytes, MADV_HUGEPAGE); }

#if defined(__GLIBC__)
namespace {

constexpr size_t kMmapThreshold = size_t{32} << 20;

void grow_heap_into_huge_pages() {
    rlimit addresses{};
    if (getrlimit(RLIMIT_AS, &addresses) != 0 || addresses.rlim_cur != RLIM_INFINITY) return;
    const size_t bytes = physical_bytes() / 2;
    mallopt(M_MMAP_MAX, 0);  // the reservation must be part of the heap
    if (void* reserved = std::malloc(bytes)) {
        prefer_huge_pages(reserved, bytes);
        std::free(reserved);
    }
    mallopt(M_MMAP_MAX, 1 << 16);  // glibc's default
}

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

ProcessMemory read_process_memory() {
    constexpr const char* status = "/proc/self/status";
    return {read_kilobytes(status, "VmRSS"), read_kilobytes(status, "VmHWM")};
}

MachineMemory read_machine_memory() { return {physical_bytes(), read_kilobytes("/proc/meminfo", "MemAvailable")}; }

int n_schedulable_processors() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    return static_cast<int>(std::thread::hardware_concurrency());  // more than 1024
}

}  // namespace whet
