// The operating system: memory, processors and forks. runtime/system/ has one implementation per system, chosen by the
// build; nothing else in the core depends on the system.
#pragma once
#include <cstddef>

namespace whet {

// ---------------------------------------------------------------- memory

size_t page_bytes();

// Returns null without memory. `alignment` is a power of two of at least 16.
void* allocate_aligned(size_t alignment, size_t bytes);
void free_aligned(void* memory);
struct FreeAligned {
    void operator()(void* memory) const { free_aligned(memory); }
};

// Zeroed memory, aligned to 64 bytes; null without memory. Large memory is a separate mapping, which is committed when
// it is written, on huge pages if available, and returned to the system when it is freed.
void* allocate_zeroed(size_t bytes);
void free_zeroed(void* memory, size_t bytes);

// Releases the whole pages in this range to the system. Their addresses stay valid, their contents are undefined.
void release_pages(void* memory, size_t bytes);

// Releases the whole pages of a mapped file in this range, which are read again on access.
void release_file_pages(const void* memory, size_t bytes);

// Puts the whole pages in this range on huge pages if the system has them.
void prefer_huge_pages(void* memory, size_t bytes);

// Retains freed memory in the process and puts the heap on huge pages; once per process, glibc only.
//
// A training step frees a gigabyte of activations and allocates it again. By default the allocator returns such memory
// to the system, and the page faults that zero and map it again take a tenth of the step; huge pages save TLB misses in
// matrix products, another tenth. Half of the machine's memory is reserved as address space, which is committed lazily;
// if the address space is limited (RLIMIT_AS), none is reserved.
void keep_freed_memory();

// Returns up to this many bytes of retained memory to the system, so that other allocations do not add to the peak. The
// next step takes page faults for these bytes only.
void release_freed_memory(size_t bytes);

// Physical memory, in bytes; 0 if the system does not report it.
struct ProcessMemory {
    size_t resident = 0, peak = 0;
};
struct MachineMemory {
    size_t total = 0, available = 0;
};
ProcessMemory read_process_memory();
MachineMemory read_machine_memory();

// ---------------------------------------------------------------- processors, time and forks

// Processors on which the system schedules this process; of two kinds of processors only the fast ones.
int n_schedulable_processors();

// Processor time of the calling thread, in seconds; on Windows, which counts it in steps of 16 ms, elapsed time.
double thread_time_s();

// Calls these functions around each fork of the process; a no-op on systems without forks.
void at_fork(void (*prepare)(), void (*end_in_parent)(), void (*end_in_child)());

}  // namespace whet
