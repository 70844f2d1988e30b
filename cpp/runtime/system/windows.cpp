#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>
//
#include <psapi.h>

#include <bit>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <malloc.h>
#include <thread>

#include "runtime/system.h"
#include "runtime/system/page_range.h"

namespace whet {
namespace {

constexpr size_t kMapped = size_t{2} << 20;  // zeroed memory from this size on is mapped

}  // namespace

size_t page_bytes() {
    static const size_t bytes = [] {
        SYSTEM_INFO info;
        GetSystemInfo(&info);
        return size_t{info.dwPageSize};
    }();
    return bytes;
}

void* allocate_aligned(size_t alignment, size_t bytes) {
    return _aligned_malloc(bytes == 0 ? 1 : bytes, alignment);  // 0 is an error
}
void free_aligned(void* memory) { _aligned_free(memory); }

// Without large pages: they need a privilege that users do not have by default.
void* allocate_zeroed(size_t bytes) {
    if (bytes >= kMapped) return VirtualAlloc(nullptr, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
    void* const memory = allocate_aligned(64, bytes);
    return memory == nullptr ? nullptr : std::memset(memory, 0, bytes);
}

void free_zeroed(void* memory, size_t bytes) {
    if (bytes < kMapped) return free_aligned(memory);
    VirtualFree(memory, 0, MEM_RELEASE);
}

void release_file_pages(const void* memory, size_t bytes) {
    const PageRange pages(const_cast<void*>(memory), bytes);
    if (pages.bytes > 0) VirtualUnlock(pages.begin, pages.bytes);  // removes unlocked pages from the working set
}

void release_pages(void* memory, size_t bytes) {
    const PageRange pages(memory, bytes);
    if (pages.bytes == 0) return;
    VirtualAlloc(pages.begin, pages.bytes, MEM_RESET, PAGE_READWRITE);  // the contents need not be written to disk
    VirtualUnlock(pages.begin, pages.bytes);                            // removes unlocked pages from the working set
}

void prefer_huge_pages(void*, size_t) {}
void keep_freed_memory() {}
void release_freed_memory(size_t) {}

ProcessMemory read_process_memory() {
    PROCESS_MEMORY_COUNTERS counters{};
    if (!K32GetProcessMemoryInfo(GetCurrentProcess(), &counters, sizeof counters)) return {};
    return {counters.WorkingSetSize, counters.PeakWorkingSetSize};
}

MachineMemory read_machine_memory() {
    MEMORYSTATUSEX status{};
    status.dwLength = sizeof status;
    if (!GlobalMemoryStatusEx(&status)) return {};
    return {static_cast<size_t>(status.ullTotalPhys), static_cast<size_t>(status.ullAvailPhys)};
}

// The masks are of one group of at most 64 processors, and 0 if the process has threads in several groups.
int n_schedulable_processors() {
    DWORD_PTR of_process = 0, of_system = 0;
    if (GetProcessAffinityMask(GetCurrentProcess(), &of_process, &of_system) && of_process != 0) {
        return std::popcount(uint64_t{of_process});
    }
    return static_cast<int>(std::thread::hardware_concurrency());
}

double thread_time_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void at_fork(void (*)(), void (*)(), void (*)()) {}

}  // namespace whet
