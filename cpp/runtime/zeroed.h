// Large zeroed memory, committed page by page as it is touched, in huge pages where the system has them: random reads,
// as of a cache of many sequences, otherwise spend more time on TLB misses than on data. It is a mapping of its own, so
// that freeing it returns it to the system at once: the allocator would keep blocks of this size.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
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
#endif
        memory_ = Memory(std::calloc(bytes + 64, 1), Free{0});
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
#endif
            std::free(p);
        }
    };
    using Memory = std::unique_ptr<void, Free>;
    Memory memory_;
};

}  // namespace whet
