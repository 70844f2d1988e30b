// Large memory: zeros that cost nothing until they are touched, in huge pages where the system has them. What is read
// here and there, as a cache of many sequences, waits for addresses longer than for data otherwise.
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
    explicit Zeroed(size_t bytes) : memory_(std::calloc(bytes + 64, 1)) {
        if (memory_ == nullptr) throw std::bad_alloc();
#if defined(__linux__)
        constexpr uintptr_t small = 4096, huge = size_t{2} << 20;
        const auto begin = (reinterpret_cast<uintptr_t>(memory_.get()) + small - 1) / small * small;
        const auto end = (reinterpret_cast<uintptr_t>(memory_.get()) + bytes + 64) / small * small;
        // A refusal leaves small pages.
        if (bytes >= huge) static_cast<void>(madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE));
#endif
    }
    // At a multiple of 64 bytes.
    uint8_t* data() const {
        return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory_.get()) + 63) / 64 * 64);
    }

private:
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    std::unique_ptr<void, Free> memory_;
};

}  // namespace whet
