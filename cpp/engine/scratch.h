// Memory that a thread keeps for its next call: nothing is asked of the system once it has seen the largest size.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace whet {

// What a thread's memory is used for. Each use has its own: kRow serves within one call while the others are in use.
enum class Scratch {
    kInputs,  // a layer's inputs in the form that its kernel takes
    kRow,     // one row on its way from one format to another
    kPanels,  // gemm's b
    kCopy,    // gemm's a, where it cannot be used as it lies
    kSums,    // of gemm and gemv, before they are blended with c
    kTask,    // one task of attention
    kRuns,    // the partial results of decode attention, of the calling thread
    kCount
};

// Bytes for this use, on a page boundary; what was there is lost if it has to grow.
inline void* scratch_bytes(size_t bytes, Scratch use) {
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    struct Block {
        std::unique_ptr<void, Free> memory;
        size_t bytes = 0;
    };
    thread_local Block blocks[static_cast<size_t>(Scratch::kCount)];
    Block& block = blocks[static_cast<size_t>(use)];
    if (block.bytes < bytes) {
        block.bytes = (bytes + 4095) / 4096 * 4096;
        block.memory.reset(std::aligned_alloc(4096, block.bytes));
        if (block.memory == nullptr) block.bytes = 0, throw std::bad_alloc();
    }
    return block.memory.get();
}

// n elements.
template <class T>
T* scratch(size_t n, Scratch use) {
    return static_cast<T*>(scratch_bytes(n * sizeof(T), use));
}

}  // namespace whet
