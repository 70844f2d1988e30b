// Vectors of a fixed logical width: 16 floats or 8 doubles (64 bytes) on every instruction set.
//
// A Vec is one zmm, two ymm or four 16-byte registers. Arithmetic uses the compiler's vector extensions, so that
// kernels read like formulas; the few operations without an operator (fma, sqrt, min, max, scaling by a power of two,
// masked loads) are intrinsics, only in this directory. Every operation is correctly rounded or exact, and lanes
// combine in an order that does not depend on the register width: all instruction sets give the same bits.
#pragma once
#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef WHET_ISA  // in an editor
#define WHET_ISA scalar
#endif

namespace whet::WHET_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kNativeBytes = 64;
#elif defined(__AVX2__)
#define WHET_AVX2  // and no more
constexpr int kNativeBytes = 32;
#else
constexpr int kNativeBytes = 16;
#endif
constexpr int kVecBytes = 64;
constexpr int kParts = kVecBytes / kNativeBytes;

#define WHET_INLINE inline __attribute__((always_inline))
#define WHET_INLINE_LAMBDA __attribute__((always_inline))
// WHET_SHARED: inlined into kernels, except in WebAssembly builds and in the unit for processors without AVX2, where
// one copy keeps the download small. WHET_UNROLL: unrolled, with the same exceptions, for loops that are as fast
// rolled.
#define WHET_PRAGMA(x) _Pragma(#x)
#if defined(__wasm__) || (defined(__x86_64__) && !defined(__AVX2__))
#define WHET_SHARED inline __attribute__((noinline))
#define WHET_UNROLL(n) WHET_PRAGMA(GCC unroll 1)
#else
#define WHET_SHARED WHET_INLINE
#define WHET_UNROLL(n) WHET_PRAGMA(GCC unroll n)
#endif
#define WHET_EACH_PART(p) _Pragma("GCC unroll 4") for (int p = 0; p < kParts; ++p)

// The integer type with as many bits as T: the result of comparisons of T, per lane (0 or -1).
template <class T>
struct BitsOf {
    using Type = T;
};
template <>
struct BitsOf<float> {
    using Type = int32_t;
};
template <>
struct BitsOf<double> {
    using Type = int64_t;
};
template <>
struct BitsOf<uint16_t> {
    using Type = int16_t;
};
template <>
struct BitsOf<uint8_t> {
    using Type = int8_t;
};

template <class T>
struct Vec {
    typedef T Native __attribute__((vector_size(kNativeBytes)));
    using Mask = Vec<typename BitsOf<T>::Type>;
    static constexpr int kLanes = kVecBytes / sizeof(T);
    static constexpr int kPartLanes = kNativeBytes / sizeof(T);

    Native part[kParts];

    Vec() = default;
    WHET_INLINE Vec(T x) { WHET_EACH_PART(p) part[p] = x - Native{}; }

#define WHET_BINARY(op)                                       \
    friend WHET_INLINE Vec operator op(Vec a, Vec b) {        \
        WHET_EACH_PART(p) a.part[p] = a.part[p] op b.part[p]; \
        return a;                                             \
    }
    WHET_BINARY(+)
    WHET_BINARY(-)
    WHET_BINARY(*)
    WHET_BINARY(/)
    WHET_BINARY(&)
    WHET_BINARY(|)
    WHET_BINARY(^)
#undef WHET_BINARY

#define WHET_COMPARE(op)                                      \
    friend WHET_INLINE Mask operator op(Vec a, Vec b) {       \
        Mask m;                                               \
        WHET_EACH_PART(p) m.part[p] = a.part[p] op b.part[p]; \
        return m;                                             \
    }
    WHET_COMPARE(<)
    WHET_COMPARE(>)
    WHET_COMPARE(==)
    WHET_COMPARE(!=)
#undef WHET_COMPARE

    friend WHET_INLINE Vec operator-(Vec a) {
        WHET_EACH_PART(p) a.part[p] = -a.part[p];
        return a;
    }
    WHET_INLINE Vec& operator+=(Vec b) { return *this = *this + b; }
    WHET_INLINE T operator[](int lane) const { return part[lane / kPartLanes][lane % kPartLanes]; }
};

using f32x16 = Vec<float>;
using f64x8 = Vec<double>;
using i32x16 = Vec<int32_t>;
using i64x8 = Vec<int64_t>;

// Orders the products of a row of a tile before the loads of the next row. Clang would load the inputs of all rows
// first, which leaves too few registers for the tile's sums.
template <int n>
WHET_INLINE void end_row([[maybe_unused]] f32x16 (&sums)[n]) {
#if defined(__clang__) && defined(__AVX512F__)
    for (f32x16& sum : sums) __asm__ volatile("" : "+v"(sum.part[0])::"memory");
#endif
}

// mask ? a : b, per lane.
template <class T>
WHET_INLINE Vec<T> select(typename Vec<T>::Mask mask, Vec<T> a, Vec<T> b) {
    WHET_EACH_PART(p) a.part[p] = mask.part[p] ? a.part[p] : b.part[p];
    return a;
}

template <class To, class From>
WHET_INLINE To bit_cast(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    __builtin_memcpy(&y, &x, sizeof y);
    return y;
}

// ---------------------------------------------------------------- loads and stores

// Part by part: GCC copies a whole Vec of several registers through the stack.
template <class T>
WHET_INLINE Vec<T> load(const T* x) {
    Vec<T> v;
    WHET_EACH_PART(p) __builtin_memcpy(&v.part[p], x + p * Vec<T>::kPartLanes, kNativeBytes);
    return v;
}

template <class T>
WHET_INLINE void store(T* out, Vec<T> v) {
    WHET_EACH_PART(p) __builtin_memcpy(out + p * Vec<T>::kPartLanes, &v.part[p], kNativeBytes);
}

// Whether there is a store that bypasses the caches.
#if defined(__x86_64__)
constexpr bool kStreams = true;
#else
constexpr bool kStreams = false;
#endif

// Stores bypassing the caches if the processor can (`out` aligned to 64 bytes), else an ordinary store.
// finish_streaming() must be called before another thread reads the data.
WHET_INLINE void store_streaming(float* out, f32x16 v) {
#if defined(__AVX512F__)
    _mm512_stream_ps(out, v.part[0]);
#elif defined(__AVX2__)
    WHET_EACH_PART(p) _mm256_stream_ps(out + p * f32x16::kPartLanes, v.part[p]);
#elif defined(__x86_64__)
    WHET_EACH_PART(p) _mm_stream_ps(out + p * f32x16::kPartLanes, v.part[p]);
#else
    store(out, v);
#endif
}
WHET_INLINE void finish_streaming() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// The first n lanes; the others are `fill` on a load and unchanged in memory on a store.
template <class T>
WHET_SHARED Vec<T> load_first(const T* x, int n, T fill) {
    Vec<T> v(fill);
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) {
        const auto first = static_cast<__mmask16>((1u << n) - 1);
        v.part[0] = (typename Vec<T>::Native)_mm512_mask_loadu_ps((__m512)v.part[0], first, x);
    } else if constexpr (sizeof(T) == 2) {
        const auto first = static_cast<__mmask32>((uint64_t{1} << n) - 1);
        v.part[0] = (typename Vec<T>::Native)_mm512_mask_loadu_epi16((__m512i)v.part[0], first, x);
    } else {
        v.part[0] = _mm512_mask_loadu_pd(v.part[0], static_cast<__mmask8>((1u << n) - 1), x);
    }
#else
    T lanes[Vec<T>::kLanes];
    store(lanes, v);
    for (int i = 0; i < n; ++i) lanes[i] = x[i];
    v = load(lanes);
#endif
    return v;
}

template <class T>
WHET_SHARED void store_first(T* out, Vec<T> v, int n) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) {
        _mm512_mask_storeu_ps(out, static_cast<__mmask16>((1u << n) - 1), (__m512)v.part[0]);
    } else if constexpr (sizeof(T) == 2) {
        _mm512_mask_storeu_epi16(out, static_cast<__mmask32>((uint64_t{1} << n) - 1), (__m512i)v.part[0]);
    } else {
        _mm512_mask_storeu_pd(out, static_cast<__mmask8>((1u << n) - 1), v.part[0]);
    }
#else
    T lanes[Vec<T>::kLanes];
    store(lanes, v);
    for (int i = 0; i < n; ++i) out[i] = lanes[i];
#endif
}

// Loads memory into the caches before it is used. WebAssembly has no prefetch, and its loops have so many instructions
// per cache line that misses are serialised: reading all lines first makes the products of a quantised layer up to 1.6
// times as fast. Native code prefetches in its loops.
WHET_INLINE void touch([[maybe_unused]] const void* from, [[maybe_unused]] size_t bytes) {
#if defined(__wasm__)
    const auto* lines = static_cast<const volatile uint8_t*>(from);
    for (size_t i = 0; i < bytes; i += 64) static_cast<void>(lines[i]);
#endif
}

// ---------------------------------------------------------------- conversions

typedef float HalfF32 __attribute__((vector_size(kNativeBytes / 2)));

WHET_INLINE f64x8::Native to_f64(HalfF32 x) {
#if defined(__AVX512F__)
    return _mm512_cvtps_pd(x);  // GCC would convert two halves and join them
#else
    return __builtin_convertvector(x, f64x8::Native);
#endif
}

// Loads eight floats as doubles, and stores doubles as floats with one rounding.
WHET_INLINE f64x8 load_wide(const float* x) {
    f64x8 v;
    WHET_EACH_PART(p) {
        HalfF32 half;
        __builtin_memcpy(&half, x + p * f64x8::kPartLanes, sizeof half);
        v.part[p] = to_f64(half);
    }
    return v;
}

WHET_INLINE void store_narrow(float* out, f64x8 v) {
    WHET_EACH_PART(p) {
#if defined(__AVX512F__)
        const HalfF32 half = _mm512_cvtpd_ps(v.part[p]);
#else
        const HalfF32 half = __builtin_convertvector(v.part[p], HalfF32);
#endif
        __builtin_memcpy(out + p * f64x8::kPartLanes, &half, sizeof half);
    }
}

// Lanes 0-7 and 8-15 as doubles.
struct F64Pair {
    f64x8 low, high;
};
WHET_INLINE F64Pair widen(f32x16 v) {
    F64Pair pair;
    WHET_EACH_PART(p) {
        HalfF32 halves[2];
        __builtin_memcpy(halves, &v.part[p], sizeof halves);
        for (int h = 0; h < 2; ++h) {
            const int at = 2 * p + h;
            f64x8& out = at < kParts ? pair.low : pair.high;
            out.part[at % kParts] = to_f64(halves[h]);
        }
    }
    return pair;
}

// bfloat16 is the upper half of a float32.
WHET_INLINE f32x16 load_bf16(const uint16_t* x) {
    typedef uint16_t Half __attribute__((vector_size(kNativeBytes / 2)));
    typedef uint32_t Word __attribute__((vector_size(kNativeBytes)));
    f32x16 v;
    WHET_EACH_PART(p) {
        Half half;
        __builtin_memcpy(&half, x + p * f32x16::kPartLanes, sizeof half);
#if defined(__AVX512F__)
        // GCC widens through four narrow vectors.
        const Word word = (Word)_mm512_cvtepu16_epi32((__m256i)half);
#else
        const Word word = __builtin_convertvector(half, Word);
#endif
        v.part[p] = (f32x16::Native)(word << 16);
    }
    return v;
}

// Loads int8_t or uint8_t as the lanes of a register of integers. GCC would convert bytes one by one without the
// instructions for it.
template <class Native, class Byte>
WHET_INLINE Native widen_bytes(const Byte* x) {
    constexpr size_t lanes = kNativeBytes / sizeof(Native{}[0]);
    [[maybe_unused]] constexpr bool is_signed = static_cast<Byte>(-1) < 0;
#if defined(__AVX512F__)
    if constexpr (lanes == 16) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
        return (Native)(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
    }
#elif defined(WHET_AVX2)
    if constexpr (lanes == 8) {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x));
        return (Native)(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
    } else {
        const __m128i bytes = _mm_loadu_si32(x);
        return (Native)(is_signed ? _mm256_cvtepi8_epi64(bytes) : _mm256_cvtepu8_epi64(bytes));
    }
#endif
    typedef Byte Bytes __attribute__((vector_size(lanes)));
    Bytes bytes;
    __builtin_memcpy(&bytes, x, sizeof bytes);
    return __builtin_convertvector(bytes, Native);
}

// A mask from bytes, one per lane: set if not zero.
template <class T>
WHET_INLINE typename Vec<T>::Mask load_mask(const uint8_t* x) {
    using Mask = typename Vec<T>::Mask;
    Mask m;
    WHET_EACH_PART(p) m.part[p] = widen_bytes<typename Mask::Native>(x + p * Mask::kPartLanes) != 0;
    return m;
}

// ---------------------------------------------------------------- operations without an operator

#define WHET_PER_WIDTH(f32, f64)    \
    if constexpr (sizeof(T) == 4) { \
        a.part[p] = f32;            \
    } else {                        \
        a.part[p] = f64;            \
    }
#if defined(__AVX512F__)
#define WHET_INTRINSIC(name) _mm512_##name
#elif defined(__AVX2__)
#define WHET_INTRINSIC(name) _mm256_##name
#endif

#if defined(__wasm__)
// The multiply-add of relaxed SIMD is fused on most engines; the loader of the module checks is_fused(). Plain SIMD128
// has none, and emulation takes 20 times as long: there the product is rounded.
#if defined(__wasm_relaxed_simd__)
#define WHET_WASM_MADD(type, a, b, c) __builtin_wasm_relaxed_madd_##type(a, b, c)
#else
#define WHET_WASM_MADD(type, a, b, c) (a) * (b) + (c)
#endif
#endif

// a * b + c, rounded once.
#if defined(WHET_INTRINSIC) || defined(__aarch64__) || defined(__wasm__)
template <class T>
WHET_INLINE Vec<T> fma(Vec<T> a, Vec<T> b, Vec<T> c) {
    WHET_EACH_PART(p) {
#if defined(WHET_INTRINSIC)
        WHET_PER_WIDTH(WHET_INTRINSIC(fmadd_ps)(a.part[p], b.part[p], c.part[p]),
                       WHET_INTRINSIC(fmadd_pd)(a.part[p], b.part[p], c.part[p]))
#elif defined(__aarch64__)
        WHET_PER_WIDTH(vfmaq_f32(c.part[p], a.part[p], b.part[p]), vfmaq_f64(c.part[p], a.part[p], b.part[p]))
#else
        WHET_PER_WIDTH((WHET_WASM_MADD(f32x4, a.part[p], b.part[p], c.part[p])),
                       (WHET_WASM_MADD(f64x2, a.part[p], b.part[p], c.part[p])))
#endif
    }
    return a;
}
#else
// Calls the C library for every lane. Inlined, the calls were two thirds of the unit's code.
template <class T>
__attribute__((noinline)) Vec<T> fma(const Vec<T>& a, const Vec<T>& b, const Vec<T>& c) {
    T x[Vec<T>::kLanes], y[Vec<T>::kLanes], z[Vec<T>::kLanes];
    __builtin_memcpy(x, &a, sizeof x), __builtin_memcpy(y, &b, sizeof y), __builtin_memcpy(z, &c, sizeof z);
#pragma GCC unroll 1
    for (int i = 0; i < Vec<T>::kLanes; ++i) {
        if constexpr (sizeof(T) == 4) {
            x[i] = __builtin_fmaf(x[i], y[i], z[i]);
        } else {
            x[i] = __builtin_fma(x[i], y[i], z[i]);
        }
    }
    Vec<T> sum;
    __builtin_memcpy(&sum, x, sizeof x);
    return sum;
}
#endif

template <class T>
WHET_INLINE Vec<T> sqrt(Vec<T> a) {
    WHET_EACH_PART(p) {
#if defined(WHET_INTRINSIC)
        WHET_PER_WIDTH(WHET_INTRINSIC(sqrt_ps)(a.part[p]), WHET_INTRINSIC(sqrt_pd)(a.part[p]))
#elif defined(__aarch64__)
        WHET_PER_WIDTH(vsqrtq_f32(a.part[p]), vsqrtq_f64(a.part[p]))
#elif defined(__wasm__)
        WHET_PER_WIDTH(__builtin_wasm_sqrt_f32x4(a.part[p]), __builtin_wasm_sqrt_f64x2(a.part[p]))
#else
        for (int i = 0; i < Vec<T>::kPartLanes; ++i) {
            if constexpr (sizeof(T) == 4) {
                a.part[p][i] = __builtin_sqrtf(a.part[p][i]);
            } else {
                a.part[p][i] = __builtin_sqrt(a.part[p][i]);
            }
        }
#endif
    }
    return a;
}

// Maximum and minimum; `b` if either is NaN (so that max(constant, x) propagates NaN in x).
template <class T>
WHET_INLINE Vec<T> max(Vec<T> a, Vec<T> b) {
#if defined(WHET_INTRINSIC)
    WHET_EACH_PART(p) {
        WHET_PER_WIDTH(WHET_INTRINSIC(max_ps)(a.part[p], b.part[p]), WHET_INTRINSIC(max_pd)(a.part[p], b.part[p]))
    }
    return a;
#else
    return select(a > b, a, b);
#endif
}

template <class T>
WHET_INLINE Vec<T> min(Vec<T> a, Vec<T> b) {
#if defined(WHET_INTRINSIC)
    WHET_EACH_PART(p) {
        WHET_PER_WIDTH(WHET_INTRINSIC(min_ps)(a.part[p], b.part[p]), WHET_INTRINSIC(min_pd)(a.part[p], b.part[p]))
    }
    return a;
#else
    return select(a < b, a, b);
#endif
}

// |x|.
WHET_INLINE f32x16 magnitude(f32x16 x) { return bit_cast<f32x16>(bit_cast<i32x16>(x) & i32x16(0x7fffffff)); }

// Adding and subtracting 1.5 * 2^(mantissa bits) rounds to the nearest integer, ties to even.
template <class T>
constexpr T kRounder = sizeof(T) == 4 ? T(12582912) : T(6755399441055744);

// The nearest integer n to a * b, and 2^(n + k) as long as that is normal: n is in the low bits of a * b + kRounder.
template <class T>
struct Rounded {
    Vec<T> shifted;

    WHET_INLINE Rounded(Vec<T> a, Vec<T> b) : shifted(fma(a, b, Vec<T>(kRounder<T>))) {}
    WHET_INLINE Vec<T> value() const { return shifted - Vec<T>(kRounder<T>); }
    template <int k>
    WHET_INLINE Vec<T> exp2() const {
        using Bits = typename BitsOf<T>::Type;
        constexpr int mantissa = sizeof(T) == 4 ? 23 : 52;
        constexpr Bits bias = sizeof(T) == 4 ? 127 : 1023;
        auto bits = bit_cast<Vec<Bits>>(shifted);
        WHET_EACH_PART(p) bits.part[p] = (bits.part[p] << mantissa) + ((bias + k) << mantissa);
        return bit_cast<Vec<T>>(bits);
    }
};

// x * 2^n for integral n, rounded once, including subnormal results, 0 and infinity.
template <class T>
WHET_INLINE Vec<T> scale_exp2(Vec<T> a, Vec<T> n) {
#if defined(__AVX512F__)
    WHET_EACH_PART(p) { WHET_PER_WIDTH(_mm512_scalef_ps(a.part[p], n.part[p]), _mm512_scalef_pd(a.part[p], n.part[p])) }
    return a;
#else
    const Rounded<T> half(n, Vec<T>(T(0.5)));
    return a * half.template exp2<0>() * Rounded<T>(n - half.value(), Vec<T>(T(1))).template exp2<0>();
#endif
}

#undef WHET_PER_WIDTH
#undef WHET_INTRINSIC

// ---------------------------------------------------------------- operations across lanes

// FirstLanes<n>::Type is Lanes<0, 1, ..., n - 1>.
template <int... i>
struct Lanes {};
template <int n, int... i>
struct FirstLanes : FirstLanes<n - 1, n - 1, i...> {};
template <int... i>
struct FirstLanes<0, i...> {
    using Type = Lanes<i...>;
};

template <auto from, class Native, int... i>
WHET_INLINE Native shuffle(Native x, Native y, Lanes<i...>) {
#if defined(__clang__)
    return __builtin_shufflevector(x, y, from(i)...);
#else
    return __builtin_shuffle(x, y, decltype(x < y){from(i)...});  // GCC 11 has no __builtin_shufflevector
#endif
}
// Lane i is lane from(i) of x followed by y.
template <auto from, class Native>
WHET_INLINE Native shuffle(Native x, Native y) {
    return shuffle<from>(x, y, typename FirstLanes<sizeof(Native) / sizeof(x[0])>::Type());
}

// Lane i is lane i ^ distance.
template <int distance>
WHET_INLINE f64x8 swap_lanes(f64x8 v) {
    constexpr int n = f64x8::kPartLanes;
    f64x8 out;
    if constexpr (distance >= n) {
        WHET_EACH_PART(p) out.part[p] = v.part[p ^ (distance / n)];
    } else {
        constexpr auto from = [](int i) { return i ^ distance; };
        WHET_EACH_PART(p) out.part[p] = shuffle<from>(v.part[p], v.part[p]);
    }
    return out;
}

// unzip splits 32 floats in two vectors into even and odd lanes; zip is its inverse.
struct F32Pairs {
    f32x16 even, odd;
};
WHET_INLINE F32Pairs unzip(f32x16 low, f32x16 high) {
    f32x16::Native in[2 * kParts];
    WHET_EACH_PART(p) in[p] = low.part[p], in[kParts + p] = high.part[p];
    constexpr auto even_lane = [](int i) { return 2 * i; };
    constexpr auto odd_lane = [](int i) { return 2 * i + 1; };
    F32Pairs pairs;
    WHET_EACH_PART(p) {
        pairs.even.part[p] = shuffle<even_lane>(in[2 * p], in[2 * p + 1]);
        pairs.odd.part[p] = shuffle<odd_lane>(in[2 * p], in[2 * p + 1]);
    }
    return pairs;
}
WHET_INLINE void zip(F32Pairs pairs, f32x16& low, f32x16& high) {
    constexpr int n = f32x16::kPartLanes;
    constexpr auto low_pairs = [](int i) { return i / 2 + i % 2 * n; };
    constexpr auto high_pairs = [](int i) { return n / 2 + i / 2 + i % 2 * n; };
    f32x16::Native out[2 * kParts];
    WHET_EACH_PART(p) {
        out[2 * p] = shuffle<low_pairs>(pairs.even.part[p], pairs.odd.part[p]);
        out[2 * p + 1] = shuffle<high_pairs>(pairs.even.part[p], pairs.odd.part[p]);
    }
    WHET_EACH_PART(p) low.part[p] = out[p], high.part[p] = out[kParts + p];
}

template <class T>
WHET_INLINE T max_lane(Vec<T> v) {
    T lanes[Vec<T>::kLanes];
    store(lanes, v);
    for (int width = Vec<T>::kLanes / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    }
    return lanes[0];
}

// Converts a float16 number to float, exactly.
WHET_INLINE float f16_as_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) return bit_cast<float>(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    // The bits as the tail of a float, times 2^112: the multiplication normalises float16 subnormals.
    return bit_cast<float>(bit_cast<uint32_t>(bit_cast<float>(rest << 13) * 0x1p+112f) | sign);
}

// Loads 16 float16 numbers as floats, exactly.
WHET_INLINE f32x16 load_f16(const uint16_t* x) {
    f32x16 v;
#if defined(__AVX512F__)
    v.part[0] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
#elif defined(__F16C__)
    WHET_EACH_PART(p) v.part[p] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + 8 * p)));
#elif defined(__aarch64__)
    WHET_EACH_PART(p) v.part[p] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x + 4 * p)));
#else
    // Like f16_as_float; exactly infinity and NaN then get all bits of the exponent set.
    typedef uint16_t Half __attribute__((vector_size(kNativeBytes / 2)));
    typedef uint32_t Word __attribute__((vector_size(kNativeBytes)));
    WHET_EACH_PART(p) {
        Half half;
        __builtin_memcpy(&half, x + p * f32x16::kPartLanes, sizeof half);
        const Word wide = __builtin_convertvector(half, Word), rest = wide & 0x7fff;
        const Word bits = (Word)((f32x16::Native)(rest << 13) * 0x1p+112f);
        v.part[p] = (f32x16::Native)(bits | (wide & 0x8000) << 16 | ((Word)(rest >= 0x7c00) & 0x7f800000));
    }
#endif
    return v;
}

// Stores 16 numbers rounded to float16, to nearest even; overflow gives infinity. NaN is not supported.
WHET_INLINE uint16_t f16_of(float x) {
    const uint32_t sign = bit_cast<uint32_t>(x) >> 16 & 0x8000, bits = bit_cast<uint32_t>(x) & 0x7fffffff;
    // Subnormals are multiples of 2^-24, the last place of 0.5.
    if (bits < 113u << 23) return sign | (bit_cast<uint32_t>(bit_cast<float>(bits) + 0.5f) - (126u << 23));
    const uint32_t rounded = (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
    return sign | (rounded < 0x7c00 ? rounded : 0x7c00);
}

WHET_INLINE void store_f16(uint16_t* out, f32x16 v) {
#if defined(__AVX512F__)
    const __m256i half = _mm512_cvtps_ph(v.part[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), half);
#elif defined(__F16C__)
    WHET_EACH_PART(p) {
        const __m128i half = _mm256_cvtps_ph(v.part[p], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 8 * p), half);
    }
#elif defined(__aarch64__)
    WHET_EACH_PART(p) vst1_u16(out + 4 * p, vreinterpret_u16_f16(vcvt_f16_f32(v.part[p])));
#else
    float lanes[16];
    store(lanes, v);
    for (int i = 0; i < 16; ++i) out[i] = f16_of(lanes[i]);
#endif
}

WHET_INLINE f32x16 to_f32(i32x16 x) {
    f32x16 y;
    WHET_EACH_PART(p) y.part[p] = __builtin_convertvector(x.part[p], f32x16::Native);
    return y;
}

// Loads 16 int8_t or uint8_t as floats.
template <class Byte>
WHET_INLINE f32x16 load_bytes(const Byte* x) {
    i32x16 v;
    WHET_EACH_PART(p) v.part[p] = widen_bytes<i32x16::Native>(x + p * i32x16::kPartLanes);
    return to_f32(v);
}

// Stores the low byte of each lane.
WHET_INLINE void store_low_bytes(int8_t* out, i32x16 v) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8((__m512i)v.part[0]));
#elif defined(WHET_AVX2)
    // Packing saturates: the other bytes are cleared first.
    const __m256i low = (__m256i)(v.part[0] & 0xff), high = (__m256i)(v.part[1] & 0xff);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
#else
    typedef int8_t Bytes __attribute__((vector_size(kNativeBytes / 4)));
    WHET_EACH_PART(p) {
        const Bytes bytes = __builtin_convertvector(v.part[p], Bytes);
        __builtin_memcpy(out + p * i32x16::kPartLanes, &bytes, sizeof bytes);
    }
#endif
}

}  // namespace
}  // namespace whet::WHET_ISA
