// The whole pages in a range of memory.
#pragma once
#include <cstddef>
#include <cstdint>

#include "runtime/system.h"

namespace whet {

struct PageRange {
    void* begin;
    size_t bytes;

    PageRange(void* memory, size_t n) {
        const size_t page = page_bytes();
        const auto address = reinterpret_cast<uintptr_t>(memory);
        const uintptr_t first = (address + page - 1) / page * page, end = (address + n) / page * page;
        begin = reinterpret_cast<void*>(first);
        bytes = first < end ? end - first : 0;
    }
};

}  // namespace whet
