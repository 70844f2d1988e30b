// Attention over a paged KV cache (pages of 64 tokens), for decoding and for prompts.
//
// For one KV head a page stores the keys word by word, 64 tokens per word, and the values as one row of columns per
// token, or per pair of tokens in bfloat16 (words as in attention_formats.h, products as in attention.h). With up to
// kFewRows query rows a page is streamed sequentially: twice the bandwidth of any other order, and prefetching does not
// help. Query rows whose sequences share pages are processed together, so that a shared page is read once; then each
// row continues with its own pages. Pages are processed in order, and sums run over dimensions and tokens in order: a
// row's output depends only on its own keys, to the bit. A page must be finite beyond a row's keys too: their weight is
// 0, but 0 * inf is NaN.
#pragma once
#include "kernels/attention.h"
#include "kernels/attention_task.h"
#include "kernels/convert.h"
#include "kernels/rows.h"
#include "kernels/softcap.h"
#include "simd/lanes.h"
#include "simd/math.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

namespace cached {

using attention::add_products;
using attention::clear;
using attention::kZeroWeight;
using attention::select_lane_range;

constexpr int64_t kTokens = kPageTokens;
#if defined(__wasm__)
constexpr int kFewRows = 0, kManyRows = 4;  // registers of 128 bits
#else
constexpr int kFewRows = 4;  // their sums fit in registers while a page is streamed
constexpr int kManyRows = 8;
#endif

WHET_INLINE int64_t padded_columns(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

// The keys of a page that a row attends to.
struct KeyRange {
    int64_t begin, end;
};

// Writes the base-2 scores of keys [key, key + 16), -inf for masked keys, and updates the row's maxima.
WHET_INLINE void put_score(f32x16 score, const KeyRange& range, int64_t key, float* out, f32x16& maxima) {
    const f32x16 masked_score(-__builtin_inff());
    score = select_lane_range(range.begin - key, range.end - key, score, masked_score);
    maxima = max(score, maxima);
    store(out + key, score);
}

// Calls some<panels>(key) for the panels of 16 keys from `key` on, until all keys [0, end) are in one.
template <int rows, class Some>
WHET_INLINE void each_panels(int64_t end, Some&& some) {
    if (rows <= kFewRows && end > 32) return some.template operator()<4>(0);
    for (int64_t key = 0; key < end; key += 32) some.template operator()<2>(key);
}

// Calls some<n>(column) for n vectors of columns from `column` on, until all columns are in one.
template <int rows, class Some>
WHET_INLINE void each_columns(int64_t columns, Some&& some) {
    int64_t column = 0;
    for (; rows <= kFewRows && column + 64 <= columns; column += 64) some.template operator()<4>(column);
    for (; column + 32 <= columns; column += 32) some.template operator()<2>(column);
    if (column < columns) some.template operator()<1>(column);
}

// A page of words, float32 or pairs of bfloat16, and the queries of a task from `row` on.
template <class Format>
struct WordPage {
    int64_t words, columns;
    const float *queries, *keys, *values;

    static WHET_INLINE int64_t word_count(int64_t head_dim) {
        return (head_dim + Format::kPerWord - 1) / Format::kPerWord;
    }
    WHET_INLINE WordPage(const CachedTask& t, int64_t row, const uint8_t* page)
        : words(word_count(t.head_dim)), columns(padded_columns(t.head_dim)) {
        queries = static_cast<const float*>(t.queries) + row * words;
        keys = reinterpret_cast<const float*>(page);
        values = keys + kTokens * words;
    }
    // Writes base-2 scores of `rows` rows for the panels with keys [0, end), -inf for masked keys.
    template <int rows>
    WHET_INLINE void scores(int64_t end, const KeyRange (&ranges)[rows], float scale, float (&out)[rows][kTokens],
                            f32x16 (&maxima)[rows]) const {
        each_panels<rows>(end, [&]<int panels>(int64_t key) WHET_INLINE_LAMBDA {
            f32x16 sums[rows][panels];
            clear(sums);
            add_products<Format>(sums, queries, words, 1, keys + key, 16, kTokens, words);
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
                for (int c = 0; c < panels; ++c) {
                    put_score(sums[r][c] * f32x16(scale), ranges[r], key + 16 * c, out[r], maxima[r]);
                }
            }
        });
    }
    static WHET_INLINE void store_weights(float* out, int i, f32x16 weights) { Format::store_weights(out, i, weights); }
    // state = state * factors + weights * values over keys [0, end).
    template <int rows>
    WHET_INLINE void add_values(int64_t end, const KeyRange (&ranges)[rows], const float (&weights)[rows][kTokens],
                                const float (&factors)[rows], float* state) const {
        const int64_t steps = (end + Format::kPerWord - 1) / Format::kPerWord;
        each_columns<rows>(columns, [&]<int n>(int64_t column) WHET_INLINE_LAMBDA {
            f32x16 sums[rows][n];
            clear(sums);
            add_products<Format>(sums, &weights[0][0], kTokens, 1, values + column, 16, columns, steps);
            for (int r = 0; r < rows; ++r) {
                if (ranges[r].begin >= ranges[r].end) continue;
                float* out = state + r * (columns + 16) + column;
                for (int c = 0; c < n; ++c)
                    store(out + 16 * c, fma(load(out + 16 * c), f32x16(factors[r]), sums[r][c]));
            }
        });
    }
};

// Soft-caps the scores of a page, and recomputes their maxima.
__attribute__((noinline)) void cap_scores(int64_t rows, int64_t end, const KeyRange* ranges, float cap, float* scores,
                                          f32x16* maxima) {
    const f32x16 caps(cap), inverse(1.0f / cap);
    for (int64_t r = 0; r < rows; ++r) {
        maxima[r] = f32x16(kInitialMax);
        for (int64_t key = 0; key < end; key += 16) {
            float* row = scores + r * kTokens;
            put_score(softcap(load(row + key), caps, inverse), ranges[r], key, row, maxima[r]);
        }
    }
}

// Processes one page for `rows` rows.
template <class Page, int rows>
__attribute__((noinline)) void add_page(const CachedTask& t, int64_t row, int64_t index) {
    const int64_t columns = padded_columns(t.head_dim), stride = columns + 16;
    KeyRange ranges[rows];
    int64_t end = 0;
    for (int r = 0; r < rows; ++r) {
        const int64_t position = t.positions[row + r] - index * kTokens;
        ranges[r] = {position - t.window + 1 > 0 ? position - t.window + 1 : 0, position < 0             ? 0
                                                                                : position + 1 < kTokens ? position + 1
                                                                                                         : kTokens};
        if (ranges[r].begin < ranges[r].end && ranges[r].end > end) end = ranges[r].end;
    }
    if (end == 0) return;
    const Page page(t, row, t.cache + static_cast<size_t>(t.pages[index]) * t.page_bytes);
    alignas(64) float weights[rows][kTokens];
    f32x16 maxima[rows];
    for (f32x16& maximum : maxima) maximum = f32x16(kInitialMax);
    page.scores(end, ranges, t.scale, weights, maxima);
    if (t.softcap > 0.0f) cap_scores(rows, end, ranges, t.softcap, &weights[0][0], maxima);
    float factors[rows];
    for (int r = 0; r < rows; ++r) {
        float* sums = t.state + (row + r) * stride + columns;
        const float maximum = max_lane(max(maxima[r], f32x16(sums[0])));
        factors[r] = exp2_fast(max(f32x16(kZeroWeight), f32x16(sums[0] - maximum)))[0];
        f32x16 sum(0.0f);
        for (int64_t key = 0; key < end; key += 16) {
            // The scores of a row without keys in this page are all -inf.
            const f32x16 weight = exp2_fast(max(f32x16(kZeroWeight), load(&weights[r][key]) - f32x16(maximum)));
            sum += weight;
            Page::store_weights(weights[r], static_cast<int>(key / 16), weight);
        }
        sums[1] = sums[1] * factors[r] + sum_lanes(sum);
        sums[0] = maximum;
    }
    page.add_values(end, ranges, weights, factors, t.state + row * stride);
}

template <class Page>
WHET_INLINE void attend(const CachedTask& t) {
    for (int64_t page = t.begin; page < t.end; ++page) {
        int64_t row = 0;
        for (; row + kManyRows <= t.rows; row += kManyRows) add_page<Page, kManyRows>(t, row, page);
        if (row + 4 <= t.rows) add_page<Page, 4>(t, row, page), row += 4;
#if defined(__wasm__)
        for (; row < t.rows; ++row) add_page<Page, 1>(t, row, page);
#else
        if (row + 3 == t.rows) add_page<Page, 3>(t, row, page), row += 3;  // 3 heads of one query are common
        if (row + 2 <= t.rows) add_page<Page, 2>(t, row, page), row += 2;
        if (row < t.rows) add_page<Page, 1>(t, row, page);
#endif
    }
}

// Scatters the n words of a key to the lane of token `slot`.
WHET_INLINE void write_key(const void* words, int64_t n, int64_t slot, float* keys) {
    for (int64_t i = 0; i < n; ++i)
        __builtin_memcpy(keys + kTokens * i + slot, static_cast<const float*>(words) + i, sizeof *keys);
}

}  // namespace cached

constexpr auto cached_attention_f32 = cached::attend<cached::WordPage<attention::Float32>>;
constexpr auto cached_attention_bf16 = cached::attend<cached::WordPage<attention::BFloat16>>;

// Initialises the state of rows before their first page.
void cached_init_state(float* state, int64_t rows, int64_t head_dim) {
    const int64_t columns = cached::padded_columns(head_dim);
    for (int64_t row = 0; row < rows; ++row, state += columns + 16) {
        for (int64_t c = 0; c < columns + 16; c += 16) store(state + c, f32x16(0.0f));
        state[columns] = kInitialMax;
    }
}
// Writes a row's output (head_dim) after its last page; sink: the logit of its head, -inf: none.
void cached_output(const float* state, float sink, int64_t head_dim, float* out) {
    const int64_t columns = cached::padded_columns(head_dim);
    const float sum = state[columns + 1] + attention::sink_weight(sink, state[columns]);
    const f32x16 inverse(1.0f / sum);
    rows::each(0, static_cast<size_t>(head_dim), [&](size_t at, int count) WHET_INLINE_LAMBDA {
        rows::put(out + at, load(state + at) * inverse, count);
    });
}

// Writes a query (head_dim) in the cache's format.
void cached_write_query_f32(const float* query, int64_t head_dim, void* out) {
    __builtin_memcpy(out, query, static_cast<size_t>(head_dim) * sizeof *query);
}
void cached_write_query_bf16(const float* query, int64_t head_dim, void* out) {
    auto* rounded = static_cast<uint16_t*>(out);
    bf16_from_f32(query, static_cast<size_t>(head_dim), rounded);
    if (head_dim % 2 != 0) rounded[head_dim] = 0;
}

// Writes key and value (head_dim) of one token to `slot` of a page of one KV head.
void cached_write_kv_f32(const float* key, const float* value, int64_t head_dim, int64_t slot, void* page) {
    auto* keys = static_cast<float*>(page);
    float* values = keys + cached::kTokens * head_dim + slot * cached::padded_columns(head_dim);
    cached::write_key(key, head_dim, slot, keys);
    __builtin_memcpy(values, value, static_cast<size_t>(head_dim) * sizeof *values);
}
void cached_write_kv_bf16(const float* key, const float* value, int64_t head_dim, int64_t slot, void* page) {
    const int64_t words = cached::WordPage<attention::BFloat16>::word_count(head_dim),
                  columns = cached::padded_columns(head_dim);
    uint16_t rounded[kAttentionMaxHeadDim + 1] = {};
    bf16_from_f32(key, static_cast<size_t>(head_dim), rounded);
    cached::write_key(rounded, words, slot, static_cast<float*>(page));
    bf16_from_f32(value, static_cast<size_t>(head_dim), rounded);
    auto* values = reinterpret_cast<uint16_t*>(static_cast<float*>(page) + cached::kTokens * words) +
                   slot / 2 * 2 * columns + slot % 2;
    for (int64_t i = 0; i < head_dim; ++i) values[2 * i] = rounded[i];
}

}  // namespace
}  // namespace whet::WHET_ISA
