// The number formats of attention: the operations that differ between float32 and bfloat16.
//
// A word is the 32 bits of one lane: a float32, or a pair of bfloat16 numbers.
#pragma once
#include "simd/dot.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {
namespace attention {

// Loads 16 words, zeros after the first n; the bits are unchanged by the float type.
WHET_INLINE f32x16 load_words(const void* x, int n) {
    if (n >= 16) return load(static_cast<const float*>(x));
    float words[16] = {};
    __builtin_memcpy(words, x, static_cast<size_t>(n) * sizeof(float));
    return load(words);
}

struct Float32 {
    using Element = float;
    using Vector = f32x16;  // of elements
    static constexpr int kPerWord = 1, kLanes = 16;

    static WHET_INLINE Vector load_vector(const float* x) { return load(x); }
    // sum + a b of two vectors, or of the word at `a` broadcast and b.
    static WHET_INLINE f32x16 multiply_add(Vector a, Vector b, f32x16 sum) { return fma(a, b, sum); }
    static WHET_INLINE f32x16 multiply_add(const float* a, f32x16 b, f32x16 sum) { return fma(f32x16(*a), b, sum); }
    static WHET_INLINE f32x16 value_words(const float* first, const float*, int n) { return load_words(first, n); }
    // NaN in lanes with a non-finite number, else 0.
    static WHET_INLINE f32x16 infinities(f32x16 words) { return words - words; }
    static WHET_INLINE f32x16 keep(f32x16 words, bool, bool) { return words; }
    static WHET_INLINE void store_weights(float* out, int i, f32x16 weights) { store(out + 16 * i, weights); }
    static WHET_INLINE void store_out(float* out, f32x16 v, int n) { n < 16 ? store_first(out, v, n) : store(out, v); }
    // One vector of columns, widened to float32, and back.
    static WHET_INLINE void load_columns(const float* x, f32x16 (&v)[1]) { v[0] = load(x); }
    static WHET_INLINE void store_columns(float* out, const f32x16 (&v)[1], int n) { store_out(out, v[0], n); }
};

struct BFloat16 {
    using Element = uint16_t;
    using Vector = u16x32;
    static constexpr int kPerWord = 2, kLanes = 32;

    static WHET_INLINE Vector load_vector(const uint16_t* x) { return load(x); }
    static WHET_INLINE f32x16 multiply_add(Vector a, Vector b, f32x16 sum) { return dot_bf16(sum, a, b); }
    static WHET_INLINE f32x16 multiply_add(const float* a, f32x16 b, f32x16 sum) {
        int32_t word;
        __builtin_memcpy(&word, a, sizeof word);
        return dot_bf16(sum, bit_cast<u16x32>(i32x16(word)), bit_cast<u16x32>(b));
    }
    // Interleaves one column of two values: each word is a pair.
    static WHET_INLINE f32x16 value_words(const uint16_t* first, const uint16_t* second, int n) {
        uint16_t copies[2][16] = {};
        if (n < 16) {
            __builtin_memcpy(copies[0], first, static_cast<size_t>(n) * sizeof *first);
            __builtin_memcpy(copies[1], second, static_cast<size_t>(n) * sizeof *second);
            first = copies[0], second = copies[1];
        }
        f32x16 words;
        const f32x16 low = load_bf16(first), high = load_bf16(second);
        WHET_EACH_PART(p) words.part[p] = (f32x16::Native)((NativeU32)low.part[p] >> 16 | (NativeU32)high.part[p]);
        return words;
    }
    static WHET_INLINE f32x16 infinities(f32x16 words) {
        const f32x16 even = even_bf16(bit_cast<u16x32>(words)), odd = odd_bf16(bit_cast<u16x32>(words));
        return (even - even) + (odd - odd);
    }
    // Words with their first or second number cleared unless kept.
    static WHET_INLINE f32x16 keep(f32x16 words, bool first, bool second) {
        const uint32_t mask = (first ? 0xffffu : 0) | (second ? 0xffff0000u : 0);
        WHET_EACH_PART(p) words.part[p] = (f32x16::Native)((NativeU32)words.part[p] & mask);
        return words;
    }
    static WHET_INLINE void store_weights(float* out, int i, f32x16 weights) {
        store_bf16(reinterpret_cast<uint16_t*>(out) + 16 * i, weights);
    }
    static WHET_INLINE void store_out(uint16_t* out, f32x16 v, int n) {
        uint16_t rounded[16];
        store_bf16(rounded, v);
        __builtin_memcpy(out, rounded, static_cast<size_t>(n) * sizeof *out);
    }
    // Even columns, then odd columns: one operation each.
    static WHET_INLINE void load_columns(const uint16_t* x, f32x16 (&v)[2]) {
        const u16x32 pairs = load(x);
        v[0] = even_bf16(pairs), v[1] = odd_bf16(pairs);
    }
    static WHET_INLINE void store_columns(uint16_t* out, const f32x16 (&v)[2], int n) {
        uint16_t rounded[32];
        store(rounded, zip_bf16(v[0], v[1]));
        __builtin_memcpy(out, rounded, static_cast<size_t>(n) * sizeof *out);
    }
};

// Sums of a tile that are computed at once: they fit in 32 registers of 16 bytes, or in 16 of 32 bytes. On AVX2, pairs
// of bfloat16 are unpacked, which costs more than to keep half of the sums in memory: twice as many rows share it.
#if defined(__aarch64__)
template <class Format>
constexpr int kSumsAtOnce = 4;
#elif defined(WHET_AVX2)
template <class Format>
constexpr int kSumsAtOnce = 4 * Format::kPerWord;
#else
template <class Format>
constexpr int kSumsAtOnce = 16;
#endif

}  // namespace attention
}  // namespace
}  // namespace whet::WHET_ISA
