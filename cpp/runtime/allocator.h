// The C library's allocator, as a training step wants it.
#pragma once
#include <cstddef>

namespace whet {

// Keep freed memory in the process, and let the heap grow into huge pages; once per process, and with glibc only.
//
// A training step frees a gigabyte of activations and allocates it again. By default the allocator returns such memory
// to the system, and the page faults that bring it back, cleared, are a tenth of the step; huge pages save TLB misses
// in the products, another tenth. Half of the machine's memory is reserved as addresses, which costs nothing until it
// is touched; where the address space is limited (RLIMIT_AS), none is.
void keep_freed_memory();

// Give so many bytes of the memory that is kept so back to the system, or all of it where it is less. What else is to
// be allocated then adds nothing to the peak; the page faults come back with the next step, for these bytes alone.
void release_freed_memory(size_t bytes);

}  // namespace whet
