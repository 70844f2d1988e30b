// Memory that a thread keeps for its next call: nothing is asked of the system once it has seen the largest size.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace whet {

// n elements in one of the thread's four slots, on a page boundary; what was there is lost if it has to grow.
template <class T>
T* scratch(size_t n, int slot) {
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    struct Block {
        std::unique_ptr<void, Free> memory;
        size_t bytes = 0;
    };
    thread_local Block blocks[4];
    Block& block = blocks[slot];
    if (block.bytes < n * sizeof(T)) {
        block.bytes = (n * sizeof(T) + 4095) / 4096 * 4096;
        block.memory.reset(std::aligned_alloc(4096, block.bytes));
        if (block.memory == nullptr) block.bytes = 0, throw std::bad_alloc();
    }
    return static_cast<T*>(block.memory.get());
}

}  // namespace whet
