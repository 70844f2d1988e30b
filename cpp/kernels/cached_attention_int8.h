// Attention over a paged KV cache of integers: cached_attention.h with 0.55 of the memory of bfloat16.
//
// A key of a token and KV head is scale * x / 2 with integers x of 9 bits, scale = max |key| / 127.5, and its value is
// scale * x with integers of 8 bits, scale = max |value| / 127; scales are bfloat16, rounded up. Queries, keys and
// values are first multiplied by a Hadamard matrix, which leaves their products unchanged and spreads outliers of
// single dimensions over all: it halves the error of the scores (QuaRot, Ashkboos et al. 2024, section 4). A page of
// one KV head is, in this order:
//     keys          words of 4 dimensions of a token, 64 tokens per word: bytes x / 2 + 128, rounded down
//     key bits      words of 4 dimensions, 64 tokens per word: bit k of a byte is the lowest bit of x of word 8 i + k
//     key scales    per token
//     values        words of 4 tokens of a column, padded columns per word: bytes x + 128
//     value scales  per token
//
// Queries, and products of softmax weights and value scales, become integers of 16 bits, 256 high + low: their error is
// at most 2^-16 of the largest of a row. Sums of products of integers are exact. NaN or infinity in a key or value
// makes its scale NaN.
#pragma once
#include "kernels/cached_attention.h"
#include "simd/dot.h"
#include "simd/lanes.h"

namespace whet::WHET_ISA {
namespace {

namespace cached {

constexpr float kMostInt8 = 127.0f, kMostInt9 = 255.0f, kMostInt16 = 127.0f * 256.0f + 127.0f;

// Sizes of a page's parts, in the order of the page.
struct Int8Layout {
    int64_t words, columns;

    WHET_INLINE explicit Int8Layout(int64_t head_dim) : words((head_dim + 3) / 4), columns(padded_columns(head_dim)) {}
    WHET_INLINE int64_t bits() const { return 4 * kTokens * words; }
    WHET_INLINE int64_t key_scales() const { return bits() + 4 * kTokens * ((words + 7) / 8); }
    WHET_INLINE int64_t values() const { return key_scales() + 2 * kTokens; }
    WHET_INLINE int64_t value_scales() const { return values() + kTokens * columns; }
    // A query: high bytes, low bytes, scale, and -128 times the sum of the integers.
    WHET_INLINE int64_t query_bytes() const { return 8 * words + 8; }
};

// |x|, infinity for NaN: min returns its second argument if one is NaN.
WHET_INLINE f32x16 magnitude_or_infinity(f32x16 x) { return min(magnitude(x), f32x16(__builtin_inff())); }

// The scale of the integers of a row, NaN if the largest magnitude is not finite, and its inverse, or 0.
struct Scale {
    float scale, inverse;

    WHET_INLINE explicit Scale(float step) : scale(step + (step - step)), inverse(1.0f / step) {
        if (!(step > 0.0f && step < __builtin_inff() && inverse < __builtin_inff())) inverse = 0.0f;
    }
    WHET_INLINE uint16_t bf16() const { return static_cast<uint16_t>(bit_cast<uint32_t>(scale) >> 16); }
};

// The largest magnitude of n numbers.
WHET_INLINE float largest_of(const float* x, size_t n) {
    f32x16 top(0.0f);
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        top = max(magnitude_or_infinity(rows::read(x + at, count)), top);
    });
    return max_lane(top);
}

// x rounded up to a bfloat16.
WHET_INLINE float round_up_to_bf16(float x) { return bit_cast<float>((bit_cast<uint32_t>(x) + 0xffff) & 0xffff0000u); }

// The integers x * inverse, rounded.
WHET_INLINE i32x16 to_integers(f32x16 x, float inverse) {
    const Rounded<float> rounded(x, f32x16(inverse));
    return bit_cast<i32x16>(rounded.shifted) - bit_cast<i32x16>(f32x16(kRounder<float>));
}

// Stores 256 high + low = x.
WHET_INLINE void store_planes(i32x16 x, int8_t* high, int8_t* low) {
    store_low_bytes(low, x);
    x = x + i32x16(128);
    WHET_EACH_PART(p) x.part[p] = x.part[p] >> 8;
    store_low_bytes(high, x);
}

template <class T>
WHET_INLINE T read_as(const uint8_t* from) {
    T x;
    __builtin_memcpy(&x, from, sizeof x);
    return x;
}

template <int rows, int columns>
WHET_INLINE void multiply(i32x16 (&sums)[rows][columns], int32_t factor) {
    for (auto& row : sums) {
        for (i32x16& sum : row) sum = sum * i32x16(factor);
    }
}

// sums[r][c] += the sum over i of the products of word i of row r with the bytes that `bytes_of` loads for it.
template <int rows, int columns, class BytesOf>
WHET_INLINE void add_dots(i32x16 (&sums)[rows][columns], const uint8_t* words, int64_t stride, int64_t n,
                          BytesOf&& bytes_of) {
    for (int64_t i = 0; i < n; ++i, words += 4) {
        u8x64 bytes[columns];
#pragma GCC unroll 4
        for (int c = 0; c < columns; ++c) bytes[c] = bytes_of(i, c);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            const auto factors = bit_cast<i8x64>(i32x16(read_as<int32_t>(words + r * stride)));
#pragma GCC unroll 4
            for (int c = 0; c < columns; ++c) sums[r][c] = dot_int8(sums[r][c], bytes[c], factors);
        }
    }
}

// A page of integers, and the queries of a task from `row` on.
struct Int8Page {
    Int8Layout layout;
    const uint8_t *queries, *page;

    WHET_INLINE Int8Page(const CachedTask& t, int64_t row, const uint8_t* at) : layout(t.head_dim), page(at) {
        queries = static_cast<const uint8_t*>(t.queries) + row * layout.query_bytes();
    }
    WHET_INLINE f32x16 scales(int64_t offset, int64_t token) const {
        return load_bf16(reinterpret_cast<const uint16_t*>(page + offset) + token);
    }

    // The sum of 256 high + low times byte + bit / 2 is 128 (2 high byte + high bit) + low byte: high * 256 is close
    // enough to the query for the lowest bit of a key.
    template <int rows>
    WHET_INLINE void scores(int64_t end, const KeyRange (&ranges)[rows], float scale, float (&out)[rows][kTokens],
                            f32x16 (&maxima)[rows]) const {
        each_panels<rows>(end, [&]<int panels>(int64_t key) WHET_INLINE_LAMBDA {
            const auto bytes_of = [&](int64_t word, int c)
                                      WHET_INLINE_LAMBDA { return load(page + 4 * (word * kTokens + key + 16 * c)); };
            const auto bits_of = [&](int64_t word, int c) WHET_INLINE_LAMBDA {
                auto words =
                    bit_cast<Vec<uint32_t>>(load(page + layout.bits() + 4 * (word / 8 * kTokens + key + 16 * c)));
                WHET_EACH_PART(p) words.part[p] = words.part[p] >> static_cast<uint32_t>(word % 8);
                return bit_cast<u8x64>(words) & u8x64(1);
            };
            const int64_t stride = layout.query_bytes(), words = layout.words;
            i32x16 sums[rows][panels];
            for (auto& row : sums) {
                for (i32x16& sum : row) sum = i32x16(0);
            }
            add_dots(sums, queries, stride, words, bytes_of);
            multiply(sums, 2);
            add_dots(sums, queries, stride, words, bits_of);
            multiply(sums, 128);
            add_dots(sums, queries + 4 * words, stride, words, bytes_of);
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) {
                const uint8_t* query = queries + r * stride;
                const f32x16 factor(scale * read_as<float>(query + 8 * words));
                const i32x16 offset(read_as<int32_t>(query + 8 * words + 4));
#pragma GCC unroll 4
                for (int c = 0; c < panels; ++c) {
                    const int64_t at = key + 16 * c;
                    const f32x16 score = to_f32(sums[r][c] + offset) * (factor * scales(layout.key_scales(), at));
                    put_score(score, ranges[r], at, out[r], maxima[r]);
                }
            }
        });
    }

    static WHET_INLINE void store_weights(float* out, int i, f32x16 weights) { store(out + 16 * i, weights); }

    template <int rows>
    WHET_INLINE void add_values(int64_t end, const KeyRange (&ranges)[rows], const float (&weights)[rows][kTokens],
                                const float (&factors)[rows], float* state) const {
        alignas(64) uint8_t planes[rows][2 * kTokens];
        float units[rows];
        int32_t offsets[rows];
        const int64_t padded = (end + 15) / 16 * 16;
        for (int r = 0; r < rows; ++r) {
            f32x16 products[kTokens / 16], top(0.0f), sum(0.0f);
            for (int64_t key = 0; key < padded; key += 16) {
                f32x16& product = products[key / 16];
                product = load(&weights[r][key]) * scales(layout.value_scales(), key);
                product = select_lane_range(ranges[r].begin - key, ranges[r].end - key, product, f32x16(0.0f));
                top = max(magnitude_or_infinity(product), top);
            }
            const Scale scale(max_lane(top) / kMostInt16);
            for (int64_t key = 0; key < padded; key += 16) {
                const i32x16 integers = to_integers(products[key / 16], scale.inverse);
                sum += to_f32(integers);
                auto* high = reinterpret_cast<int8_t*>(planes[r] + key);
                store_planes(integers, high, high + kTokens);
            }
            units[r] = scale.scale;
            offsets[r] = -128 * static_cast<int32_t>(sum_lanes(sum));
        }
        const int64_t columns = layout.columns;
        each_columns<rows>(columns, [&]<int n>(int64_t column) WHET_INLINE_LAMBDA {
            const auto bytes_of = [&](int64_t word, int c) WHET_INLINE_LAMBDA {
                return load(page + layout.values() + 4 * (word * columns + column + 16 * c));
            };
            i32x16 sums[rows][n];
            for (auto& row : sums) {
                for (i32x16& sum : row) sum = i32x16(0);
            }
            add_dots(sums, planes[0], 2 * kTokens, padded / 4, bytes_of);
            multiply(sums, 256);
            add_dots(sums, planes[0] + kTokens, 2 * kTokens, padded / 4, bytes_of);
            for (int r = 0; r < rows; ++r) {
                if (ranges[r].begin >= ranges[r].end) continue;
                float* out = state + r * (columns + 16) + column;
                for (int c = 0; c < n; ++c) {
                    const f32x16 added = to_f32(sums[r][c] + i32x16(offsets[r])) * f32x16(units[r]);
                    store(out + 16 * c, fma(load(out + 16 * c), f32x16(factors[r]), added));
                }
            }
        });
    }
};

// Butterflies between lanes i and i ^ distance of each of two vectors.
template <int distance>
WHET_INLINE void add_and_subtract(f32x16& a, f32x16& b) {
    swap_pair<distance>(a, b);
    const f32x16 sum = a + b, difference = a - b;
    a = sum, b = difference;
    swap_pair<distance>(a, b);
}

// Multiplies each block of x by the Hadamard matrix of the largest power of two that divides n, scaled to be its own
// inverse. x has room for a multiple of 32 numbers.
void rotate_by_hadamard(float* x, int64_t n) {
    const int64_t size = n & -n;
    for (int64_t i = n; i < (n + 31) / 32 * 32; ++i) x[i] = 0.0f;
    for (int64_t i = 0; i < n; i += 32) {
        f32x16 a = load(x + i), b = load(x + i + 16);
        if (size > 1) add_and_subtract<1>(a, b);
        if (size > 2) add_and_subtract<2>(a, b);
        if (size > 4) add_and_subtract<4>(a, b);
        if (size > 8) add_and_subtract<8>(a, b);
        store(x + i, a);
        store(x + i + 16, b);
    }
    for (int64_t distance = 16; distance < size; distance *= 2) {
        for (int64_t i = 0; i < n; i += 16) {
            if ((i & distance) != 0) continue;
            const f32x16 a = load(x + i), b = load(x + i + distance);
            store(x + i, a + b);
            store(x + i + distance, a - b);
        }
    }
    const f32x16 factor(1.0f / __builtin_sqrtf(static_cast<float>(size)));
    for (int64_t i = 0; i < n; i += 16) store(x + i, load(x + i) * factor);
}

// A row of head_dim numbers, rotated.
struct RotatedRow {
    alignas(64) float x[kAttentionMaxHeadDim + 32];
    size_t n;

    WHET_INLINE RotatedRow(const float* from, int64_t head_dim) : n(static_cast<size_t>(head_dim)) {
        __builtin_memcpy(x, from, n * sizeof *x);
        rotate_by_hadamard(x, head_dim);
    }
};

// Calls put(i, integer) for the integers of a row.
template <class Put>
WHET_INLINE void each_integer(const RotatedRow& row, const Scale& scale, Put&& put) {
    for (size_t at = 0; at < row.n; at += 16) {
        int32_t integers[16];
        store(integers, to_integers(load(row.x + at), scale.inverse));
        for (size_t i = 0; i < 16 && at + i < row.n; ++i) put(static_cast<int64_t>(at + i), integers[i]);
    }
}

}  // namespace cached

constexpr auto cached_attention_int8 = cached::attend<cached::Int8Page>;

// Writes a query (head_dim) for cached_attention_int8, in the form of cached::Int8Layout.
void cached_write_query_int8(const float* query, int64_t head_dim, void* out) {
    const cached::Int8Layout layout(head_dim);
    const cached::RotatedRow row(query, head_dim);
    const cached::Scale scale(cached::largest_of(row.x, row.n) / cached::kMostInt16);
    auto* bytes = static_cast<int8_t*>(out);
    __builtin_memset(bytes, 0, static_cast<size_t>(8 * layout.words));
    int32_t sum = 0;
    cached::each_integer(row, scale, [&](int64_t i, int32_t x) WHET_INLINE_LAMBDA {
        bytes[i] = static_cast<int8_t>((x + 128) >> 8);
        bytes[4 * layout.words + i] = static_cast<int8_t>(x);
        sum += x;
    });
    sum *= -128;
    __builtin_memcpy(bytes + 8 * layout.words, &scale.scale, sizeof scale.scale);
    __builtin_memcpy(bytes + 8 * layout.words + 4, &sum, sizeof sum);
}

// Writes key and value (head_dim) of one token to `slot` of a page of one KV head.
void cached_write_kv_int8(const float* key, const float* value, int64_t head_dim, int64_t slot, void* page) {
    using cached::kTokens;
    const cached::Int8Layout layout(head_dim);
    auto* bytes = static_cast<uint8_t*>(page);
    const cached::RotatedRow keys(key, head_dim), values(value, head_dim);
    const cached::Scale steps(cached::round_up_to_bf16(cached::largest_of(keys.x, keys.n) / cached::kMostInt9));
    cached::each_integer(keys, steps, [&](int64_t i, int32_t x) WHET_INLINE_LAMBDA {
        const int64_t word = i / 4, in_word = 4 * slot + i % 4;
        bytes[4 * kTokens * word + in_word] = static_cast<uint8_t>((x >> 1) + 128);
        uint8_t& bits = bytes[layout.bits() + 4 * kTokens * (word / 8) + in_word];
        bits = static_cast<uint8_t>((bits & ~(1 << word % 8)) | (x & 1) << word % 8);
    });
    const cached::Scale scale(cached::round_up_to_bf16(cached::largest_of(values.x, values.n) / cached::kMostInt8));
    uint8_t* column = bytes + layout.values() + slot / 4 * 4 * layout.columns + slot % 4;
    cached::each_integer(
        values, scale, [&](int64_t i, int32_t x) WHET_INLINE_LAMBDA { column[4 * i] = static_cast<uint8_t>(x + 128); });
    // A key's integers are halves of its step.
    const uint16_t scales[] = {cached::Scale(2.0f * steps.scale).bf16(), scale.bf16()};
    __builtin_memcpy(bytes + layout.key_scales() + 2 * slot, &scales[0], 2);
    __builtin_memcpy(bytes + layout.value_scales() + 2 * slot, &scales[1], 2);
}

// cached_output, rotated back.
void cached_output_int8(const float* state, float sink, int64_t head_dim, float* out) {
    alignas(64) float row[kAttentionMaxHeadDim + 32];
    cached_output(state, sink, head_dim, row);
    cached::rotate_by_hadamard(row, head_dim);
    __builtin_memcpy(out, row, static_cast<size_t>(head_dim) * sizeof *out);
}

}  // namespace
}  // namespace whet::WHET_ISA
