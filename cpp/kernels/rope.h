// Rotary position embedding (Su et al., 2021, equation 34), in place on the heads of one token.
//
// Each pair (a, b) of a head is rotated by the angle of its token and index: (a cos - b sin, a sin + b cos). NeoX pairs
// element i with i + rotary_dim / 2, GPT-J element 2i with 2i + 1; `inverse` rotates back. Elements from rotary_dim on
// are unchanged. float32 arithmetic, one rounding to nearest even on a bfloat16 store. cos_sin holds rotary_dim / 2
// cosines and then as many sines. The caller splits tokens over threads.
#pragma once
#include "kernels/rows.h"
#include "simd/dot.h"
#include "simd/math.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

namespace rope {

// Loads and stores the first n <= 16 pairs from `at` on: the first members in `even`, the second members in `odd`.
struct Neox {
    template <class T>
    static constexpr bool kBy32 = sizeof(T) == sizeof(uint16_t);  // see rotate_by_32

    template <class T>
    WHET_INLINE static F32Pairs get(const T* x, size_t half, size_t at, int n) {
        return {rows::read(x + at, n), rows::read(x + half + at, n)};
    }
    template <class T>
    WHET_INLINE static void put(T* x, size_t half, size_t at, F32Pairs v, int n) {
        rows::put(x + at, v.even, n);
        rows::put(x + half + at, v.odd, n);
    }
};

struct Gptj {
    template <class T>
    static constexpr bool kBy32 = false;

    // How many of 2n elements fit in the first of two vectors.
    WHET_INLINE static int in_low(int n) { return 2 * n < f32x16::kLanes ? 2 * n : f32x16::kLanes; }
    WHET_INLINE static F32Pairs get(const float* x, size_t, size_t at, int n) {
        const f32x16 low = rows::read(x + 2 * at, in_low(n));
        return unzip(low, rows::read(x + 2 * at + in_low(n), 2 * n - in_low(n)));
    }
    WHET_INLINE static void put(float* x, size_t, size_t at, F32Pairs v, int n) {
        f32x16 low, high;
        zip(v, low, high);
        rows::put(x + 2 * at, low, in_low(n));
        rows::put(x + 2 * at + in_low(n), high, 2 * n - in_low(n));
    }
    WHET_INLINE static F32Pairs get(const uint16_t* x, size_t, size_t at, int n) {
        const u16x32 v = n == 16 ? load(x + 2 * at) : load_first(x + 2 * at, 2 * n, uint16_t{0});
        return {even_bf16(v), odd_bf16(v)};
    }
    WHET_INLINE static void put(uint16_t* x, size_t, size_t at, F32Pairs v, int n) {
        const u16x32 pairs = zip_bf16(v.even, v.odd);
        n == 16 ? store(x + 2 * at, pairs) : store_first(x + 2 * at, pairs, 2 * n);
    }
};

WHET_INLINE F32Pairs rotate(F32Pairs v, f32x16 cos, f32x16 sin) {
    return {fma(-v.odd, sin, v.even * cos), fma(v.even, sin, v.odd * cos)};
}

// Rotates NeoX pairs [at, at + 32 n) in bfloat16: splitting 32 numbers into even and odd lanes and zipping
// them again is cheaper than widening and narrowing 16 at a time.
template <int n>
WHET_INLINE void rotate_by_32(uint16_t* x, size_t n_heads, ptrdiff_t head_stride, const float* cos_sin, size_t half,
                              size_t at, f32x16 sign) {
    constexpr size_t kStep = u16x32::kLanes, kLanes = f32x16::kLanes;
    F32Pairs cos[n], sin[n];
    WHET_UNROLL(2)
    for (size_t i = 0; i < n; ++i) {
        const float *c = cos_sin + at + i * kStep, *s = c + half;
        cos[i] = unzip(load(c), load(c + kLanes));
        sin[i] = unzip(sign * load(s), sign * load(s + kLanes));
    }
    for (size_t head = 0; head < n_heads; ++head, x += head_stride) {
        WHET_UNROLL(2)
        for (size_t i = 0; i < n; ++i) {
            uint16_t *first = x + at + i * kStep, *second = first + half;
            const u16x32 a = load(first), b = load(second);
            const F32Pairs even = rotate({even_bf16(a), even_bf16(b)}, cos[i].even, sin[i].even);
            const F32Pairs odd = rotate({odd_bf16(a), odd_bf16(b)}, cos[i].odd, sin[i].odd);
            store(first, zip_bf16(even.even, odd.even));
            store(second, zip_bf16(even.odd, odd.odd));
        }
    }
}

// Rotates pairs [at, at + 16 n) of all heads, or only the first `count` of 16; their cosines and sines stay in
// registers.
template <class Pairs, int n, class T>
WHET_INLINE void rotate_block(T* x, size_t n_heads, ptrdiff_t head_stride, const float* cos_sin, size_t half, size_t at,
                              f32x16 sign, int count = 16) {
    if constexpr (n > 1 && Pairs::template kBy32<T>) {
        return rotate_by_32<n / 2>(x, n_heads, head_stride, cos_sin, half, at, sign);
    } else {
        constexpr size_t kStep = f32x16::kLanes;
        f32x16 cos[n], sin[n];
        WHET_UNROLL(4)
        for (size_t i = 0; i < n; ++i) {
            cos[i] = rows::read(cos_sin + at + i * kStep, count);
            sin[i] = sign * rows::read(cos_sin + half + at + i * kStep, count);
        }
        for (size_t head = 0; head < n_heads; ++head, x += head_stride) {
            WHET_UNROLL(4)
            for (size_t i = 0; i < n; ++i) {
                const F32Pairs pairs = Pairs::get(x, half, at + i * kStep, count);
                Pairs::put(x, half, at + i * kStep, rotate(pairs, cos[i], sin[i]), count);
            }
        }
    }
}

template <class Pairs, class T>
WHET_INLINE void rotate_heads(T* x, size_t n_heads, ptrdiff_t head_stride, const float* cos_sin, size_t rotary_dim,
                              bool inverse) {
    constexpr size_t kStep = f32x16::kLanes;
    const f32x16 sign(inverse ? -1.0f : 1.0f);
    const size_t half = rotary_dim / 2;
    size_t at = 0;
    for (; at + 4 * kStep <= half; at += 4 * kStep) {
        rotate_block<Pairs, 4>(x, n_heads, head_stride, cos_sin, half, at, sign);
    }
    for (; at + 2 * kStep <= half; at += 2 * kStep) {
        rotate_block<Pairs, 2>(x, n_heads, head_stride, cos_sin, half, at, sign);
    }
    rows::each(at, half, [&](size_t pair, int count) WHET_INLINE_LAMBDA {
        rotate_block<Pairs, 1>(x, n_heads, head_stride, cos_sin, half, pair, sign, count);
    });
}

// Taylor coefficients of sin(r) / r and cos(r) in r^2. For |r| <= pi / 4 the first omitted term is below 1e-10.
constexpr double kSin[] = {1.0, -1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880, -1.0 / 39916800};
constexpr double kCos[] = {1.0, -1.0 / 2, 1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800, 1.0 / 479001600};
constexpr double kPiHalfHigh = 0x1.921fb54442d18p+0, kPiHalfLow = 0x1.1a62633145c07p-54;

// sin and cos of an angle, both within 1e-10 if n = angle / (pi / 2) is below 2^31: n pi / 2 is subtracted in two parts
// by fma, so that large angles have only their own rounding error.
WHET_INLINE void sin_cos(f64x8 angle, f64x8& sin, f64x8& cos) {
    const Rounded<double> quarters(angle, f64x8(0.63661977236758134308));
    const f64x8 n = quarters.value();
    const f64x8 r = fma(n, f64x8(-kPiHalfLow), fma(n, f64x8(-kPiHalfHigh), angle)), z = r * r;
    const f64x8 s = r * polynomial(z, kSin), c = polynomial(z, kCos);
    const auto quarter = bit_cast<i64x8>(quarters.shifted);  // n in its low bits
    const auto odd = (quarter & i64x8(1)) != i64x8(0);
    sin = select(odd, c, s), cos = select(odd, s, c);
    sin = select((quarter & i64x8(2)) != i64x8(0), -sin, sin);
    cos = select(((quarter + i64x8(1)) & i64x8(2)) != i64x8(0), -cos, cos);
}

}  // namespace rope

constexpr auto rope_neox_f32 = rope::rotate_heads<rope::Neox, float>;
constexpr auto rope_neox_bf16 = rope::rotate_heads<rope::Neox, uint16_t>;
constexpr auto rope_gptj_f32 = rope::rotate_heads<rope::Gptj, float>;
constexpr auto rope_gptj_bf16 = rope::rotate_heads<rope::Gptj, uint16_t>;

// Writes scale cos(position inv_freq[i]) to cos_sin[i] and scale sin(...) to cos_sin[n + i], for i in [0, n), computed
// in float64 with one rounding to float32.
void rope_cos_sin(double position, const double* inv_freq, size_t n, double scale, float* cos_sin) {
    constexpr size_t kStep = f64x8::kLanes;
    for (size_t at = 0; at < n; at += kStep) {
        const size_t count = n - at < kStep ? n - at : kStep;
        f64x8 sin, cos;
        rope::sin_cos(f64x8(position) * load_first(inv_freq + at, static_cast<int>(count), 0.0), sin, cos);
        cos = cos * f64x8(scale), sin = sin * f64x8(scale);
        if (count == kStep) {
            store_narrow(cos_sin + at, cos);
            store_narrow(cos_sin + n + at, sin);
            continue;
        }
        float last[2 * kStep];
        store_narrow(last, cos);
        store_narrow(last + kStep, sin);
        __builtin_memcpy(cos_sin + at, last, count * sizeof(float));
        __builtin_memcpy(cos_sin + n + at, last + kStep, count * sizeof(float));
    }
}

}  // namespace
}  // namespace whet::WHET_ISA
