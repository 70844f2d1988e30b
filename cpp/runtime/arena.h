// One block of memory, divided once into arrays of fixed size and freed as a whole.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "runtime/system.h"

namespace whet {

class Arena {
public:
    // Called twice for every array: first to count the bytes, then, after allocate(), for its address.
    template <class T>
    T* take(size_t n) {
        const size_t at = used_;
        used_ += (n * sizeof(T) + 63) / 64 * 64;
        return memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_.get() + at);
    }
    void allocate() {
        memory_.reset(static_cast<uint8_t*>(allocate_aligned(64, used_)));
        if (memory_ == nullptr) throw std::bad_alloc();
        used_ = 0;
    }
    size_t size_bytes() const { return used_; }
    void release() { release_pages(memory_.get(), used_); }  // addresses stay valid

private:
    std::unique_ptr<uint8_t[], FreeAligned> memory_;
    size_t used_ = 0;
};

}  // namespace whet
