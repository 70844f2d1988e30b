// Preloaded (LD_PRELOAD): refuses memory to Whet's extension module, and to nobody else. What is refused is the n-th
// operator new, calloc, aligned_alloc or mmap that its code calls after arm(n, ...), or the n-th and all after it.
#include <errno.h>
#include <link.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <new>

namespace {

std::atomic<uintptr_t> first{0}, last{0};  // addresses of the module's code
std::atomic<long> seen{0}, fails_at{0}, refused{0};
std::atomic<bool> lasting{false};

bool refuse(void* caller) {
    const auto at = reinterpret_cast<uintptr_t>(caller);
    if (fails_at == 0 || at < first || at >= last) return false;
    const long n = ++seen;
    const bool fails = lasting ? n >= fails_at : n == fails_at;
    refused += fails;
    return fails;
}

int find(dl_phdr_info* info, size_t, void*) {
    if (strstr(info->dlpi_name, "/whet/_core.") == nullptr) return 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& part = info->dlpi_phdr[i];
        if (part.p_type != PT_LOAD || (part.p_flags & PF_X) == 0) continue;
        first = info->dlpi_addr + part.p_vaddr;
        last = first + part.p_memsz;
    }
    return 1;
}

}  // namespace

extern "C" {
void* __libc_calloc(size_t, size_t);
void* __libc_memalign(size_t, size_t);

// n from 1; 0 refuses nothing.
void arm(long n, bool from_then) {
    if (first == 0) dl_iterate_phdr(find, nullptr);
    seen = 0, refused = 0, lasting = from_then, fails_at = n;
}

// How many were refused; -1: the module is not here.
long disarm() {
    fails_at = 0;
    return first == 0 ? -1 : refused.load();
}

void* calloc(size_t n, size_t size) {
    if (!refuse(__builtin_return_address(0))) return __libc_calloc(n, size);
    errno = ENOMEM;
    return nullptr;
}

void* aligned_alloc(size_t alignment, size_t n) {
    if (!refuse(__builtin_return_address(0))) return __libc_memalign(alignment, n);
    errno = ENOMEM;
    return nullptr;
}

void* mmap(void* at, size_t n, int protection, int flags, int file, off_t offset) {
    if (!refuse(__builtin_return_address(0))) {
        return reinterpret_cast<void*>(syscall(SYS_mmap, at, n, protection, flags, file, offset));
    }
    errno = ENOMEM;
    return MAP_FAILED;
}
}

void* operator new(size_t n) {
    void* p = refuse(__builtin_return_address(0)) ? nullptr : malloc(n == 0 ? 1 : n);
    if (p == nullptr) throw std::bad_alloc();
    return p;
}

void* operator new(size_t n, std::align_val_t alignment) {
    const bool refused_here = refuse(__builtin_return_address(0));
    void* p = refused_here ? nullptr : __libc_memalign(static_cast<size_t>(alignment), n);
    if (p == nullptr) throw std::bad_alloc();
    return p;
}

void operator delete(void* p) noexcept { free(p); }
void operator delete(void* p, size_t) noexcept { free(p); }
void operator delete(void* p, std::align_val_t) noexcept { free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { free(p); }
