// Zeroed memory with an owner. Large blocks, such as a KV cache, are separate mappings on huge pages: random reads
// would otherwise spend more time on TLB misses than on data.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "runtime/system.h"

namespace whet {

class Zeroed {
public:
    Zeroed() = default;
    // Throws std::bad_alloc.
    explicit Zeroed(size_t bytes) : memory_(static_cast<uint8_t*>(allocate_zeroed(bytes)), Free{bytes}) {
        if (!memory_) throw std::bad_alloc();
    }
    // Aligned to 64 bytes.
    uint8_t* data() const { return memory_.get(); }

private:
    struct Free {
        size_t bytes;
        void operator()(uint8_t* memory) const { free_zeroed(memory, bytes); }
    };
    std::unique_ptr<uint8_t, Free> memory_;
};

}  // namespace whet
