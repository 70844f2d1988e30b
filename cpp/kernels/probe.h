// Hardware ceilings: the bandwidth of caches and memory, and multiply-adds in registers.
//
// These kernels compute nothing useful; their rates are the ceilings that other kernels are compared with. The caller
// splits memory over threads and measures time.
#pragma once
#include "kernels/dispatch.h"
#include "simd/dot.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

namespace probe {

// Makes the compiler assume that `x` changes, so that nothing that depends on it is hoisted out of a loop.
template <class T>
WHET_INLINE void touch(Vec<T>& x) {
#if defined(__x86_64__)
    WHET_EACH_PART(p) __asm__ volatile("" : "+x"(x.part[p]));
#elif defined(__aarch64__)
    WHET_EACH_PART(p) __asm__ volatile("" : "+w"(x.part[p]));
#else
    WHET_EACH_PART(p) __asm__ volatile("" : "+r"(x.part[p]));
#endif
}
WHET_INLINE void touch_memory() { __asm__ volatile("" ::: "memory"); }

// Calls body(offset, i) for all vectors in [0, n_bytes), a multiple of kProbeStep; i is the vector modulo kStreams.
constexpr int kStreams = kProbeStep / kVecBytes;
template <class Body>
WHET_INLINE void each_vector(size_t n_bytes, Body body) {
    for (size_t at = 0; at < n_bytes; at += kProbeStep) {
#pragma GCC unroll 8
        for (int i = 0; i < kStreams; ++i) body(at + static_cast<size_t>(i) * kVecBytes, i);
    }
}

}  // namespace probe

// Returns the bitwise or of all 8-byte words, which loads every vector, `repeats` times.
uint64_t probe_read(const void* x, size_t n_bytes, size_t repeats) {
    i64x8 even(0), odd(0);  // more accumulators, two streams or prefetching are not faster
    for (size_t r = 0; r < repeats; ++r) {
        probe::each_vector(n_bytes, [&](size_t at, int i) WHET_INLINE_LAMBDA {
            i64x8& seen = i % 2 == 0 ? even : odd;
            seen = seen | load(reinterpret_cast<const int64_t*>(static_cast<const char*>(x) + at));
        });
        probe::touch_memory();
    }
    int64_t word = 0;
    for (int lane = 0; lane < i64x8::kLanes; ++lane) word |= even[lane] | odd[lane];
    return static_cast<uint64_t>(word);
}

// Copies x to out, `repeats` times; `streaming` stores bypass the caches. Both are aligned to 64 bytes.
void probe_copy(float* out, const float* x, size_t n, bool streaming, size_t repeats) {
    const auto pass = [&](auto put) WHET_INLINE_LAMBDA {
        for (size_t r = 0; r < repeats; ++r) {
            probe::each_vector(n * sizeof(float), [&](size_t at, int) WHET_INLINE_LAMBDA {
                put(out + at / sizeof(float), load(x + at / sizeof(float)));
            });
            probe::touch_memory();
        }
    };
    if (streaming) {
        pass([](float* to, f32x16 v) WHET_INLINE_LAMBDA { store_streaming(to, v); });
        finish_streaming();
    } else {
        pass([](float* to, f32x16 v) WHET_INLINE_LAMBDA { store(to, v); });
    }
}

// x *= factor, `repeats` times.
void probe_scale(float* x, size_t n, float factor, size_t repeats) {
    const f32x16 f(factor);
    for (size_t r = 0; r < repeats; ++r) {
        probe::each_vector(n * sizeof(float), [&](size_t at, int) WHET_INLINE_LAMBDA {
            float* v = x + at / sizeof(float);
            store(v, load(v) * f);
        });
        probe::touch_memory();
    }
}

namespace probe {

// Independent sums: enough to fill the pipelines (4 to 6 cycles deep, 1 or 2 a cycle), few enough to fit in registers
// with the operands.
constexpr int kChains = kParts == 1 ? kProbeChains : 4;

// Computes sums[c] = step(sums[c], a, b), `iterations` times for each of kChains vectors; returns the number of steps.
// Each step reads a and b again.
template <class Sum, class A, class B, class Step>
WHET_INLINE size_t run_chains(const A* a, const B* b, Sum* sums, size_t iterations, Step step) {
    Vec<A> x = load(a);
    const Vec<B> y = load(b);
    Vec<Sum> chain[kChains];
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) chain[c] = load(sums + c * Vec<Sum>::kLanes);
    for (size_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 16
        for (int c = 0; c < kChains; ++c) {
            chain[c] = step(chain[c], x, y);
            touch(x);
        }
    }
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) store(sums + c * Vec<Sum>::kLanes, chain[c]);
    return iterations * kChains;
}

}  // namespace probe

// 16 multiply-adds per step.
size_t probe_fma_f32(const float a[16], const float b[16], float* sums, size_t iterations) {
    return probe::run_chains(a, b, sums, iterations,
                             [](f32x16 sum, f32x16 x, f32x16 y) WHET_INLINE_LAMBDA { return fma(x, y, sum); });
}

// 8 multiply-adds per step.
size_t probe_fma_f64(const double a[8], const double b[8], double* sums, size_t iterations) {
    return probe::run_chains(a, b, sums, iterations,
                             [](f64x8 sum, f64x8 x, f64x8 y) WHET_INLINE_LAMBDA { return fma(x, y, sum); });
}

// 32 multiply-adds per step.
size_t probe_fma_bf16(const uint16_t a[32], const uint16_t b[32], float* sums, size_t iterations) {
    return probe::run_chains(a, b, sums, iterations,
                             [](f32x16 sum, u16x32 x, u16x32 y) WHET_INLINE_LAMBDA { return dot_bf16(sum, x, y); });
}

// 64 multiply-adds per step: of 7 bits to sums of 16 bits, where products of 8 bits take more instructions.
size_t probe_fma_int8(const uint8_t a[64], const int8_t b[64], int32_t* sums, size_t iterations) {
    if constexpr (kOnlyDotInt7) {
        int16_t pairs[probe::kChains * 32] = {};
        const size_t steps =
            probe::run_chains(a, b, pairs, iterations,
                              [](i16x32 sum, u8x64 x, i8x64 y) WHET_INLINE_LAMBDA { return dot_pairs(sum, x, y); });
        for (int c = 0; c < probe::kChains; ++c) {
            store(sums + 16 * c, add_pairs(load(sums + 16 * c), load(pairs + 32 * c)));
        }
        return steps;
    }
    return probe::run_chains(a, b, sums, iterations,
                             [](i32x16 sum, u8x64 x, i8x64 y) WHET_INLINE_LAMBDA { return dot_int8(sum, x, y); });
}

}  // namespace
}  // namespace whet::WHET_ISA
