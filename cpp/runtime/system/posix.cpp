// Code that Linux and macOS share.
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "runtime/system.h"

namespace whet {
namespace {

constexpr size_t kMapped = size_t{2} << 20;  // zeroed memory from this size on is mapped

size_t whole_pages(size_t bytes) { return (bytes + page_bytes() - 1) / page_bytes() * page_bytes(); }

}  // namespace

size_t page_bytes() {
    static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

// macOS 10.13 does not have aligned_alloc.
void* allocate_aligned(size_t alignment, size_t bytes) {
    void* memory = nullptr;
    return posix_memalign(&memory, alignment, bytes) == 0 ? memory : nullptr;
}

void free_aligned(void* memory) { std::free(memory); }

void* allocate_zeroed(size_t bytes) {
    if (bytes < kMapped) {
        void* const memory = allocate_aligned(64, bytes);
        return memory == nullptr ? nullptr : std::memset(memory, 0, bytes);
    }
    if (bytes > SIZE_MAX / 2) return nullptr;
    const size_t whole = whole_pages(bytes);
    void* const mapped =
        mmap(nullptr, whole + page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    // Separates it from the next mapping: Linux merges neighbours, and cannot fork a process with a mapping larger than
    // the machine's memory, even if few of its pages are used.
    mprotect(static_cast<uint8_t*>(mapped) + whole, page_bytes(), PROT_NONE);
    prefer_huge_pages(mapped, bytes);
    return mapped;
}

void free_zeroed(void* memory, size_t bytes) {
    if (bytes < kMapped) return free_aligned(memory);
    munmap(memory, whole_pages(bytes) + page_bytes());
}

double thread_time_s() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

void at_fork(void (*prepare)(), void (*end_in_parent)(), void (*end_in_child)()) {
    pthread_atfork(prepare, end_in_parent, end_in_child);
}

}  // namespace whet
