// Reads and writes rows of float32 or bfloat16 as float32 vectors, and sums over rows: the basis of the row-wise
// kernels (norm.h, softmax.h, activations.h).
#pragma once
#include "simd/dot.h"
#include "simd/math.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

namespace rows {

// Reads `count` <= 16 elements; the other lanes are `fill`.
WHET_INLINE f32x16 read(const float* x, int count, float fill = 0.0f) {
    return count == 16 ? load(x) : load_first(x, count, fill);
}
WHET_INLINE f32x16 read(const uint16_t* x, int count, float fill = 0.0f) {
    if (count == 16) return load_bf16(x);
    float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = i < count ? bit_cast<float>(static_cast<uint32_t>(x[i]) << 16) : fill;
    return load(lanes);
}

// Stores the first `count` lanes; bfloat16 is rounded to nearest even.
WHET_INLINE void put(float* out, f32x16 v, int count) { count == 16 ? store(out, v) : store_first(out, v, count); }
WHET_INLINE void put(uint16_t* out, f32x16 v, int count) {
    if (count == 16) {
        store_bf16(out, v);
        return;
    }
    uint16_t lanes[16];
    store_bf16(lanes, v);
    for (int i = 0; i < count; ++i) out[i] = lanes[i];
}

// Calls body(at, count) for the vectors of [begin, n): count is 16, or less for the last one.
template <class Body>
WHET_INLINE void each(size_t begin, size_t n, Body body) {
    size_t at = begin;
    WHET_UNROLL(4)
    for (; at + 16 <= n; at += 16) body(at, 16);
    if (at >= n) return;
    if (n - at >= 16) __builtin_unreachable();  // so that the last body has no code for whole vectors
    body(at, static_cast<int>(n - at));
}

// Writes out[at ...] = value(at, count). `streaming` stores whole lines of float32 bypassing the caches, for results
// larger than the caches; finish_rows() must be called before another thread reads them. The row at `next`, if not
// null, is prefetched into L1 only. Elements are read before they are written, so that out may be an array that `value`
// reads.
template <class T, class Value>
WHET_INLINE void write(size_t n, T* out, bool streaming, Value value, const T* next = nullptr) {
    size_t begin = 0;
    if constexpr (kStreams && sizeof(T) == sizeof(float)) {
        if (streaming) {
            const size_t to_line = (64 - reinterpret_cast<uintptr_t>(out) % 64) % 64 / sizeof(float);
            begin = to_line < n ? to_line : n;
            if (begin > 0) put(out, value(0, static_cast<int>(begin)), static_cast<int>(begin));
            for (; begin + 16 <= n; begin += 16) {
                if (next != nullptr) __builtin_prefetch(next + begin, 0, 0);
                store_streaming(out + begin, value(begin, 16));
            }
        }
    }
    each(begin, n, [&](size_t at, int count) WHET_INLINE_LAMBDA { put(out + at, value(at, count), count); });
}

// Sums over a row to total[], where add(sums, at, count) adds the terms of 16 elements to each of sums[]: float32
// within blocks of 16 vectors, float64 across blocks. The error is at most 6 float32 roundings, 16 in the last block.
template <int kSums, class Add>
WHET_INLINE void sum(size_t n, double (&total)[kSums], Add add) {
    constexpr size_t kBlock = 256;
    f64x8 wide_total[kSums];
    for (int k = 0; k < kSums; ++k) wide_total[k] = f64x8(0.0);
    const auto add_to_total = [&](int k, f32x16 v) WHET_INLINE_LAMBDA {
        const F64Pair wide = widen(v);
        wide_total[k] += wide.low + wide.high;
    };
    size_t at = 0;
    for (; at + kBlock <= n; at += kBlock) {
        f32x16 part[4][kSums];
        for (auto& sums : part) {
            for (f32x16& sum : sums) sum = f32x16(0.0f);
        }
        WHET_UNROLL(4)
        for (size_t i = 0; i < 16; i += 4) {
#pragma GCC unroll 4
            for (size_t j = 0; j < 4; ++j) add(part[j], at + 16 * (i + j), 16);
        }
        for (int k = 0; k < kSums; ++k) add_to_total(k, (part[0][k] + part[1][k]) + (part[2][k] + part[3][k]));
    }
    f32x16 rest[kSums];
    for (f32x16& sum : rest) sum = f32x16(0.0f);
    each(at, n, [&](size_t i, int count) WHET_INLINE_LAMBDA { add(rest, i, count); });
    for (int k = 0; k < kSums; ++k) {
        add_to_total(k, rest[k]);
        total[k] = segment_sum<8>(wide_total[k])[0];
    }
}

}  // namespace rows

void finish_rows() { finish_streaming(); }

}  // namespace
}  // namespace whet::WHET_ISA
