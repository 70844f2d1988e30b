// Thread-local scratch memory, reused across calls: no allocation after warm-up.
#pragma once
#include <cstddef>
#include <memory>
#include <new>

#include "runtime/ceil_div.h"
#include "runtime/system.h"

namespace whet {

// Uses of scratch memory, each with a separate buffer per thread: kRow is used while others are in use.
enum class Scratch {
    kInputs,   // inputs of a layer, converted for its kernel
    kRow,      // one row during a conversion between formats
    kPanels,   // packed b of gemm
    kCopy,     // copy of gemm's a, if its layout is not supported
    kSums,     // accumulators of gemm and gemv, before they are blended with c
    kTask,     // one task of attention
    kRuns,     // partial results of decode attention
    kTeacher,  // hidden states of a teacher, converted for its head
    kCount
};

// Returns at least this many bytes, page-aligned. Contents are lost if the buffer has to grow.
inline void* scratch_bytes(size_t bytes, Scratch use) {
    struct Block {
        std::unique_ptr<void, FreeAligned> memory;
        size_t bytes = 0;
    };
    thread_local Block blocks[static_cast<size_t>(Scratch::kCount)];
    Block& block = blocks[static_cast<size_t>(use)];
    if (block.bytes < bytes) {
        block.bytes = ceil_div(bytes, page_bytes()) * page_bytes();
        block.memory.reset(allocate_aligned(page_bytes(), block.bytes));
        if (block.memory == nullptr) block.bytes = 0, throw std::bad_alloc();
    }
    return block.memory.get();
}

// Scratch memory for n elements.
template <class T>
T* scratch(size_t n, Scratch use) {
    return static_cast<T*>(scratch_bytes(n * sizeof(T), use));
}

}  // namespace whet
