// Large zeroed memory, committed page by page as it is touched, in huge pages where the system has them: random reads,
// as of a cache of many sequences, otherwise spend more time on TLB misses than on data. It is a mapping of its own, so
// that freeing it returns it to the system at once: the allocator would keep blocks of this size.
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
            static_cast<void>(madvise(mapped, bytes, MADV_HUGEPAGE));  // on failure pages stay small
            memory_ = Memory(mapped, Free{bytes});
            return;
        }
#elif defined(__wasm__)
        // The C library's allocator cannot give 2 GiB at once. Memory that the module grows by is zeros, and stays its
        // own.
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
    // At a multiple of 64 bytes.
    uint8_t* data() const {
        return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory_.get()) + 63) / 64 * 64);
    }

private:
    struct Free {
        size_t mapped;  // bytes; 0: of the allocator
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
        // Memory that the module grows by is zeros: to clear it, as its calloc does, would commit all of it. One thread
        // allocates here, as a model is loaded: what another had used and freed behind the old end would be taken for
        // it.
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
