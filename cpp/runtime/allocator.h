// Settings of the C library's allocator for training.
#pragma once
#include <cstddef>

namespace whet {

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

}  // namespace whet
