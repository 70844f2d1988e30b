// Runtime support for a WebAssembly module without an operating system: kernel table, thread-safe allocation and
// exceptions.
//
// JavaScript throws exceptions: its Error carries the C++ exception's type and text through the module's frames, whose
// destructors run, to the caller in JavaScript. Nothing in the core catches.
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <typeinfo>

#include "bindings/wasm/exports.h"
#include "kernels/dispatch.h"

namespace whet {

namespace wasm {
extern const Kernels table;
}
const Kernels& kernels() { return wasm::table; }

WHET_EXPORT(allocate) void* allocate(size_t bytes) { return ::operator new(bytes); }
WHET_EXPORT(release) void release(void* memory) { std::free(memory); }

// Whether the relaxed madd rounds once, which each runtime fixes. (Volatile prevents constant folding.)
WHET_EXPORT(is_fused) bool is_fused() {
#if defined(__wasm_relaxed_simd__)
    typedef float Four __attribute__((vector_size(16)));
    volatile float factor = 1 + 0x1p-12f, addend = -(1 + 0x1p-11f);
    const float a = factor, c = addend;
    const Four x = {a, a, a, a}, y = {c, c, c, c};
    return __builtin_wasm_relaxed_madd_f32x4(x, x, y)[0] == 0x1p-24f;
#else
    return false;
#endif
}

}  // namespace whet

// ---------------------------------------------------------------- memory

#if defined(__wasm_atomics__)
// The C library's allocator is not thread-safe. The linker redirects its callers here (--wrap).
namespace {
bool is_allocating = false;
struct AllocatorLock {
    AllocatorLock() {
        while (__atomic_test_and_set(&is_allocating, __ATOMIC_ACQUIRE)) {
        }
    }
    ~AllocatorLock() { __atomic_clear(&is_allocating, __ATOMIC_RELEASE); }
};
}  // namespace

extern "C" {
void* __real_malloc(size_t);
void* __real_calloc(size_t, size_t);
void* __real_aligned_alloc(size_t, size_t);
void __real_free(void*);
void* __wrap_malloc(size_t n) {
    const AllocatorLock lock;
    return __real_malloc(n);
}
void* __wrap_calloc(size_t n, size_t size) {
    const AllocatorLock lock;
    return __real_calloc(n, size);
}
void* __wrap_aligned_alloc(size_t alignment, size_t n) {
    const AllocatorLock lock;
    return __real_aligned_alloc(alignment, n);
}
void __wrap_free(void* memory) {
    const AllocatorLock lock;
    __real_free(memory);
}
}
#endif

void* operator new(size_t n) {
    void* const memory = std::malloc(n == 0 ? 1 : n);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}
void* operator new[](size_t n) { return ::operator new(n); }
void* operator new(size_t n, const std::nothrow_t&) noexcept { return std::malloc(n == 0 ? 1 : n); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

// ---------------------------------------------------------------- exceptions

extern "C" {
// Throws an Error with this type and text.
__attribute__((import_module("host"), import_name("raise"), noreturn)) void host_raise(const char* type,
                                                                                       size_t type_size,
                                                                                       const char* text,
                                                                                       size_t text_size);

void* __cxa_allocate_exception(size_t size) noexcept {
    void* const memory = std::malloc(size);
    if (memory == nullptr) __builtin_trap();
    return memory;
}
void __cxa_free_exception(void* exception) noexcept { std::free(exception); }
// Leaks the object, 16 bytes and its text, after JavaScript has copied the text. All exceptions of the core derive from
// std::exception as their first base.
[[noreturn]] void __cxa_throw(void* exception, std::type_info* type, void* (*)(void*)) {
    const char* const text = static_cast<std::exception*>(exception)->what();
    host_raise(type->name(), std::strlen(type->name()), text, std::strlen(text));
}
// Called before std::terminate in noexcept functions.
void* __cxa_begin_catch(void* exception) noexcept { return exception; }
int __cxa_thread_atexit(void (*)(void*), void*, void*) noexcept { return 0; }  // threads live as long as their memory
[[noreturn]] void __cxa_pure_virtual() { __builtin_trap(); }
void abort() { __builtin_trap(); }
[[noreturn]] void abort_message(const char*, ...) { __builtin_trap(); }  // the library's version links printf
}

namespace std {
[[noreturn]] void terminate() noexcept { __builtin_trap(); }
}  // namespace std

// As above. Some versions do not declare it noexcept.
#ifndef _LIBCPP_VERBOSE_ABORT_NOEXCEPT
#define _LIBCPP_VERBOSE_ABORT_NOEXCEPT
#endif
_LIBCPP_BEGIN_NAMESPACE_STD
[[noreturn]] void __libcpp_verbose_abort(const char*, ...) _LIBCPP_VERBOSE_ABORT_NOEXCEPT { __builtin_trap(); }
_LIBCPP_END_NAMESPACE_STD
