// WebAssembly: memory that only grows, one processor per worker of the host.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "runtime/system.h"

namespace whet {
namespace {

// The C library's allocator cannot allocate 2 GiB at once.
constexpr size_t kMapped = size_t{1} << 30, kPage = 65536;

}  // namespace

size_t page_bytes() { return kPage; }

void* allocate_aligned(size_t alignment, size_t bytes) {
    return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}
void free_aligned(void* memory) { std::free(memory); }

// Memory added to the module is zeroed already: clearing it would commit all of it. Only one thread may allocate here,
// while a model is loaded: memory beyond the old end that another thread has used and freed would be mistaken for new
// memory.
void* allocate_zeroed(size_t bytes) {
    if (bytes >= kMapped) {
        const size_t before = __builtin_wasm_memory_grow(0, bytes / kPage + 1);
        return before == SIZE_MAX ? nullptr : reinterpret_cast<void*>(before * kPage);
    }
    const uintptr_t end = __builtin_wasm_memory_size(0) * kPage;
    void* const memory = allocate_aligned(64, bytes);
    const auto begin = reinterpret_cast<uintptr_t>(memory);
    if (begin != 0 && begin < end) std::memset(memory, 0, std::min<size_t>(bytes, end - begin));
    return memory;
}

void free_zeroed(void* memory, size_t bytes) {
    if (bytes < kMapped) free_aligned(memory);  // memory of the module is never returned
}

void release_pages(void*, size_t) {}

}  // namespace whet
