// Large zeroed memory, lazily committed, in huge pages if available: random reads, as in a cache of many
// sequences, otherwise spend more time on TLB misses than on data. A separate mapping, so that freeing it returns the
// memory to the system at once; the allocator would cache blocks of this size.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace whet {

class Zeroed {
public:
    Zeroed() = default;
    // Throws std::bad_alloc.
    explicit Zeroed(size_t bytes) {
#if defined(__linux__)
        constexpr size_t huge = size_t{2} << 20;
        if (bytes >= huge) {
            void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (mapped == MAP_FAILED) throw std::bad_alloc();
            static_cast<void>(madvise(mapped, bytes, MADV_HUGEPAGE));  // on failure pages are small
            memory_ = Memory(mapped, Free{bytes});
            return;
        }
#elif defined(__wasm__)
        // The C library's allocator cannot allocate 2 GiB at once. Memory added to the module is zeroed, and is never
        // returned.
        constexpr size_t large = size_t{1} << 30, page = 65536;
        if (bytes >= large) {
            const size_t before = __builtin_wasm_memory_grow(0, bytes / page + 1);
            if (before == SIZE_MAX) throw std::bad_alloc();
            memory_ = Memory(reinterpret_cast<void*>(before * page), Free{bytes});
            return;
        }
#endif
        memory_ = Memory(allocate_zeroed(bytes + 64), Free{0});
        if (!memory_) throw std::bad_alloc();
    }
    // Aligned to 64 bytes.
    uint8_t* data() const {
        return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory_.get()) + 63) / 64 * 64);
    }

private:
    struct Free {
        size_t mapped;  // bytes; 0: allocated with malloc
        void operator()(void* p) const {
#if defined(__linux__)
            if (mapped != 0) {
                munmap(p, mapped);
                return;
            }
#elif defined(__wasm__)
            if (mapped != 0) return;
#endif
            std::free(p);
        }
    };
    using Memory = std::unique_ptr<void, Free>;
    Memory memory_;

    static void* allocate_zeroed(size_t bytes) {
#if defined(__wasm__)
        // Memory added to the module is zeroed already: clearing it, as calloc does, would commit all of it. Only one
        // thread may allocate here, while a model is loaded: memory beyond the old end that another thread has used
        // and freed would be mistaken for new memory.
        const uintptr_t end = __builtin_wasm_memory_size(0) * 65536;
        void* const p = std::malloc(bytes);
        const uintptr_t begin = reinterpret_cast<uintptr_t>(p);
        if (begin != 0 && begin < end) std::memset(p, 0, std::min<size_t>(bytes, end - begin));
        return p;
#else
        return std::calloc(bytes, 1);
#endif
    }
};

}  // namespace whet
