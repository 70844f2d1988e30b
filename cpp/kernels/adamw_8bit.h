// One step of AdamW on a block of weights whose moments are stored in 8 bits (Dettmers et al. 2021, arXiv 2110.02861).
//
// A code is 0, or 8 steps per octave below the largest magnitude of its block: 16 octaves of m, whose sign is the
// highest bit, 32 of v. The bits of a float count such steps: an eighth of an octave is 1 << kStepBits of them. Codes
// are rounded stochastically, without bias, as steps of beta2 are below the distance of two codes: a nearest code would
// keep v from falling. A v above 0 has at least the lowest code, so that no update divides by only eps.
#pragma once
#include "kernels/adamw.h"
#include "kernels/adamw_step.h"
#include "kernels/rows.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

namespace moments8 {

using u32x16 = Vec<uint32_t>;

constexpr int kStepBits = 20;
constexpr int32_t kOne = 0x3f800000;  // the bits of 1.0f
constexpr int32_t kTopM = 127, kTopV = 255, kSign = 128;

template <int n>
WHET_INLINE u32x16 shift_right(u32x16 x) {
    WHET_EACH_PART(p) x.part[p] = x.part[p] >> n;
    return x;
}

// The magnitude of a code above 0, relative to the lowest.
WHET_INLINE float magnitude_of(int32_t code) { return bit_cast<float>(kOne + ((code - 1) << kStepBits)); }

WHET_INLINE i32x16 read_codes(const uint8_t* codes, int count) {
    uint8_t lanes[16] = {};
    if (count < 16) {
        for (int i = 0; i < count; ++i) lanes[i] = codes[i];
        codes = lanes;
    }
    i32x16 v;
    WHET_EACH_PART(p) v.part[p] = widen_bytes<i32x16::Native>(codes + p * i32x16::kPartLanes);
    return v;
}

WHET_INLINE void put_codes(uint8_t* codes, i32x16 v, int count) {
    int8_t lanes[16];
    store_low_bytes(lanes, v);
    for (int i = 0; i < count; ++i) codes[i] = static_cast<uint8_t>(lanes[i]);
}

WHET_INLINE f32x16 decode(i32x16 code, f32x16 lowest) {
    const i32x16 bits = code * i32x16(1 << kStepBits) + i32x16(kOne - (1 << kStepBits));
    return select(code > i32x16(0), bit_cast<f32x16>(bits) * lowest, f32x16(0.0f));
}

// random: kStepBits uniform bits. Below the lowest code, the code is 0 or that, or that if `floors`.
template <bool floors>
WHET_INLINE i32x16 encode(f32x16 x, f32x16 lowest, int32_t top, i32x16 random) {
    const f32x16 ratio = x / lowest;
    const i32x16 steps = bit_cast<i32x16>(ratio) - i32x16(kOne) + random;
    i32x16 code = i32x16(1) + bit_cast<i32x16>(shift_right<kStepBits>(bit_cast<u32x16>(steps)));
    code = select(code < i32x16(top), code, i32x16(top));
    const i32x16 kept = to_f32(random) < ratio * f32x16(static_cast<float>(1 << kStepBits));
    const i32x16 lowest_code = floors ? i32x16(1) : i32x16(1) & kept;
    code = select(ratio < f32x16(1.0f), lowest_code, code);
    return code & (x > f32x16(0.0f));
}

// 32 bits for each of 16 elements, by their index: a hash of two multiplications (Wellons 2018,
// https://nullprogram.com/blog/2018/07/31/), with half of the seed added before each.
WHET_INLINE u32x16 random_bits(uint64_t seed, size_t first) {
    alignas(64) static constexpr uint32_t kLane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    u32x16 x = load(kLane) + u32x16(static_cast<uint32_t>(seed) + static_cast<uint32_t>(first));
    x = (x ^ shift_right<16>(x)) * u32x16(0x7feb352d) + u32x16(static_cast<uint32_t>(seed >> 32));
    x = (x ^ shift_right<15>(x)) * u32x16(0x846ca68b);
    return x ^ shift_right<16>(x);
}

}  // namespace moments8

// The step of n <= kMomentBlock weights with the codes m and v and their largest magnitudes. The random numbers depend
// on the seed and on `first`, the index of the first weight.
void adamw_8bit(const AdamWStep& s, uint64_t seed, size_t first, size_t n, float* p, const float* grad, uint8_t* m,
                uint8_t* v, float* m_scale, float* v_scale) {
    using namespace moments8;
    const AdamWLanes lanes(s);
    const float per_m = 1.0f / magnitude_of(kTopM), per_v = 1.0f / magnitude_of(kTopV);
    alignas(64) float new_m[kMomentBlock], new_v[kMomentBlock];
    f32x16 most_m(0.0f), most_v(0.0f);
    f32x16 lowest_m(*m_scale * per_m), lowest_v(*v_scale * per_v);
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        const i32x16 code = read_codes(m + at, count);
        const f32x16 size = decode(code & i32x16(kTopM), lowest_m);
        f32x16 new_p = rows::read(p + at, count), mean = select(code > i32x16(kTopM), -size, size);
        f32x16 square = decode(read_codes(v + at, count), lowest_v);
        lanes.update(rows::read(grad + at, count), new_p, mean, square);
        rows::put(p + at, new_p, count);
        store(new_m + at, mean);
        store(new_v + at, square);
        most_m = max(most_m, magnitude(mean));
        most_v = max(most_v, square);
    });
    *m_scale = max_lane(most_m), *v_scale = max_lane(most_v);
    lowest_m = f32x16(*m_scale * per_m), lowest_v = f32x16(*v_scale * per_v);
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        const u32x16 random = random_bits(seed, first + at);
        // 16 random bits are the high ones of kStepBits; the middle of the others makes up for them.
        const auto of_m = bit_cast<i32x16>((random & u32x16(0xffff)) * u32x16(16) + u32x16(8));
        const auto of_v = bit_cast<i32x16>(shift_right<16>(random) * u32x16(16) + u32x16(8));
        const f32x16 mean = load(new_m + at);
        const i32x16 sign = (mean < f32x16(0.0f)) & i32x16(kSign);
        put_codes(m + at, encode<false>(magnitude(mean), lowest_m, kTopM, of_m) | sign, count);
        put_codes(v + at, encode<true>(load(new_v + at), lowest_v, kTopV, of_v), count);
    });
}

}  // namespace
}  // namespace whet::WHET_ISA
