// Attention of a block of queries: out = softmax(scale q K^T) V, for the query heads that share a KV head.
//
// The keys are processed in blocks, packed once for all query rows (queries x heads) of the task: K as panels of 16
// keys, dimension by dimension, V as panels of 16 columns, key by key. For each tile of 8 rows and each block, two
// products are computed in registers, scores and output, with a step of the online softmax between them (Milakov &
// Gimelshein 2018; blocks as in FlashAttention-2, Dao 2023): exponents in base 2 relative to the row's running maximum,
// the output rescaled when the maximum grows. Blocks outside the key ranges of a tile are skipped; a masked key has
// weight 0 for any value. Blocks begin at multiples of block_size, and both products sum over dimensions and keys in
// order: a query's output depends only on its own keys and block_size, to the bit.
//
// float32 is computed as float32. bfloat16 pairs are multiplied exactly and added in float32 (dot_bf16, with its rule
// for subnormal numbers); weights are rounded to bfloat16 before the product with V, their sum is not. A row without
// keys, or with only scores of -inf, gives zeros; otherwise NaN and inf propagate as in the formula. Words are defined
// in attention_formats.h. A soft-cap, cap tanh(score / cap), is a separate pass over the scores of a tile and a block:
// without it, its cost is one branch per tile and block. A sink (Agarwal et al., gpt-oss, 2025), a logit without a
// value, adds its weight to the sum of a row, and to lse: the gradient of the scores has the same form with and without
// it.
#pragma once
#include "kernels/attention_formats.h"
#include "kernels/attention_task.h"
#include "kernels/softcap.h"
#include "simd/dot.h"
#include "simd/lanes.h"
#include "simd/math.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

namespace attention {

constexpr int kTileRows = 8;
constexpr int kPanelKeys = 16;
constexpr int kPanels = 2;  // panels of a product tile: 8 x 2 sums in registers
constexpr ptrdiff_t kTileKeys = kPanels * kPanelKeys;
constexpr float kZeroWeight = -127.0f;  // exp2_fast(-127) is 0
constexpr ptrdiff_t kWeightStride = kAttentionMaxBlock;

// sums[r][c] += sum over i of a[r * a_row + i * a_step] b[i * b_step + c * b_column ...], in the order of i.
template <class Format, int rows, int columns>
WHET_INLINE void add_products(f32x16 (&sums)[rows][columns], const float* a, ptrdiff_t a_row, ptrdiff_t a_step,
                              const float* b, ptrdiff_t b_column, ptrdiff_t b_step, ptrdiff_t n) {
    constexpr int at_once = kSumsAtOnce<Format> / columns;
    if constexpr (rows > at_once) {
        auto& some = reinterpret_cast<f32x16(&)[at_once][columns]>(sums[0]);
        auto& others = reinterpret_cast<f32x16(&)[rows - at_once][columns]>(sums[at_once]);
        add_products<Format>(some, a, a_row, a_step, b, b_column, b_step, n);
        return add_products<Format>(others, a + at_once * a_row, a_row, a_step, b, b_column, b_step, n);
    }
    for (ptrdiff_t i = 0; i < n; ++i, a += a_step, b += b_step) {
        f32x16 right[columns];
#pragma GCC unroll 4
        for (int c = 0; c < columns; ++c) right[c] = load(b + c * b_column);
        WHET_UNROLL(8)
        for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
            for (int c = 0; c < columns; ++c) {
                sums[r][c] = Format::multiply_add(a + r * a_row, right[c], sums[r][c]);
            }
            end_row(sums[r]);
        }
    }
}

template <int rows, int columns>
WHET_INLINE void clear(f32x16 (&sums)[rows][columns]) {
    for (auto& row : sums) {
        for (f32x16& sum : row) sum = f32x16(0.0f);
    }
}

// Sizes of a task, and its buffers in the scratch memory (null if scratch is null, to compute only n_floats).
struct ForwardLayout {
    ptrdiff_t tiles, key_words, columns, n_floats = 0;
    float *queries, *outputs, *sums, *maxima, *keys, *values, *weights;

    WHET_INLINE ForwardLayout(const AttentionTask& t, int per_word) {
        const ptrdiff_t rows = (t.n_queries * t.kv_group + 15) / 16 * 16;
        tiles = (t.n_queries * t.kv_group + kTileRows - 1) / kTileRows;
        key_words = t.head_dim / per_word;
        columns = (t.head_dim + 15) / 16 * 16;
        const auto take = [&](ptrdiff_t n) WHET_INLINE_LAMBDA {
            float* part = t.scratch == nullptr ? nullptr : static_cast<float*>(t.scratch) + n_floats;
            n_floats += n;
            return part;
        };
        queries = take(rows * key_words);
        outputs = take(rows * columns);
        sums = take(rows * 16);
        maxima = take(tiles * 16);
        keys = take(t.block_size * key_words);
        values = take(t.block_size * columns);
        weights = take(kTileRows * kWeightStride);
    }
};

// x in lanes [begin, end) of a panel, `otherwise` in the others.
WHET_INLINE f32x16 select_lane_range(int64_t begin, int64_t end, f32x16 x, f32x16 otherwise) {
    static constexpr int32_t kLane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const auto lane_of = [](int64_t key) WHET_INLINE_LAMBDA {
        return static_cast<int32_t>(key < 0 ? 0 : key > 16 ? 16 : key);
    };
    const i32x16 lane = load(kLane), from(lane_of(begin)), to(lane_of(end));
    return select(lane < from, otherwise, select(lane < to, x, otherwise));
}

// The rows of a tile attend to keys [begin[r], end[r]), which are non-decreasing in r.
struct KeyRanges {
    int64_t begin[kTileRows], end[kTileRows];

    WHET_INLINE KeyRanges(const AttentionTask& t, ptrdiff_t tile) {
        int64_t query = tile * kTileRows / t.kv_group, head = tile * kTileRows % t.kv_group;
        for (int r = 0; r < kTileRows; ++r) {
            const int64_t next = t.position + query + 1;  // the first key after the query's own
            begin[r] = next > t.window ? next - t.window : 0;
            end[r] = t.causal && next < t.n_keys ? (next > 0 ? next : 0) : t.n_keys;
            if (++head == t.kv_group && query + 1 < t.n_queries) ++query, head = 0;
        }
    }
    WHET_INLINE int64_t first() const { return begin[0]; }
    WHET_INLINE int64_t last() const { return end[kTileRows - 1]; }
    WHET_INLINE bool all_cover(int64_t from, int64_t to) const { return begin[kTileRows - 1] <= from && to <= end[0]; }

    // For keys [key, key + 16): x in the lanes of row r's range, `otherwise` in the others.
    WHET_INLINE f32x16 select_in_range(int r, int64_t key, f32x16 x, f32x16 otherwise) const {
        return select_lane_range(begin[r] - key, end[r] - key, x, otherwise);
    }
};

// Packs 16 rows to a panel: word i of row j at out[16 i + j]; a null row is zeros.
template <class Format>
WHET_SHARED void pack_rows_of_panel(float* out, ptrdiff_t n_words, const typename Format::Element* const* from) {
    for (ptrdiff_t word = 0; word < n_words; word += 16) {
        const int n = static_cast<int>(n_words - word < 16 ? n_words - word : 16);
        f32x16 rows[16];
        WHET_UNROLL(16)
        for (int j = 0; j < 16; ++j) {
            rows[j] = from[j] == nullptr ? f32x16(0.0f) : load_words(from[j] + word * Format::kPerWord, n);
        }
        transpose(rows);
        WHET_UNROLL(16)
        for (int i = 0; i < 16; ++i) {
            if (i < n) store(out + (word + i) * 16, rows[i]);
        }
    }
}
template <class Format, class RowOf>
WHET_INLINE void pack_panel(float* out, ptrdiff_t n_words, RowOf&& row_of) {
    const typename Format::Element* from[16];
    for (int j = 0; j < 16; ++j) from[j] = row_of(j);
    pack_rows_of_panel<Format>(out, n_words, from);
}

// Packs query rows in panels of two tiles, and initialises the softmax state.
template <class Format>
WHET_INLINE void pack_queries(const AttentionTask& t, const ForwardLayout& at) {
    const ptrdiff_t rows = t.n_queries * t.kv_group;
    for (ptrdiff_t panel = 0; panel < rows; panel += 16) {
        pack_panel<Format>(at.queries + panel * at.key_words, at.key_words, [&](int j) WHET_INLINE_LAMBDA {
            const ptrdiff_t row = panel + j;
            const auto* q = static_cast<const typename Format::Element*>(t.q);
            return row < rows ? q + row / t.kv_group * t.q_token + row % t.kv_group * t.q_head : nullptr;
        });
    }
    for (float* x = at.outputs; x < at.maxima; x += 16) store(x, f32x16(0.0f));
    for (float* x = at.maxima; x < at.keys; x += 16) store(x, f32x16(kInitialMax));
}

// Packs keys [begin, begin + n) in panels of 16, padded with zeros to an even number of panels.
template <class Format>
WHET_INLINE void pack_keys(const AttentionTask& t, const ForwardLayout& at, int64_t begin, ptrdiff_t n) {
    const auto* k = static_cast<const typename Format::Element*>(t.k);
    const ptrdiff_t end = (n + kTileKeys - 1) / kTileKeys * kTileKeys;
    for (ptrdiff_t panel = 0; panel < end; panel += kPanelKeys) {
        pack_panel<Format>(at.keys + panel * at.key_words, at.key_words, [&](int j) WHET_INLINE_LAMBDA {
            return panel + j < n ? k + t.key_row(begin + panel + j) * t.k_token : nullptr;
        });
    }
}

// Packs values [begin, begin + n), one row of columns per word of keys. Returns whether all are finite.
template <class Format>
WHET_INLINE bool pack_values(const AttentionTask& t, const ForwardLayout& at, int64_t begin, ptrdiff_t n) {
    using Element = typename Format::Element;
    static constexpr Element zeros[16] = {};
    f32x16 infinities(0.0f);
    float* out = at.values;
    for (ptrdiff_t key = 0; key < n; key += Format::kPerWord) {
        const Element* v = static_cast<const Element*>(t.v);
        const Element* first = v + t.key_row(begin + key) * t.v_token;
        const Element* second = key + 1 < n ? v + t.key_row(begin + key + 1) * t.v_token : nullptr;
        for (ptrdiff_t c = 0; c < at.columns; c += 16, out += 16) {
            const int n_columns = static_cast<int>(t.head_dim - c < 16 ? t.head_dim - c : 16);
            const f32x16 words = Format::value_words(first + c, second == nullptr ? zeros : second + c, n_columns);
            infinities += Format::infinities(words);
            store(out, words);
        }
    }
    return sum_lanes(infinities) == 0.0f;
}

// Writes to `weights` the base-2 scores of a tile against the panels with keys [begin, end) of the block at key
// `block`, -inf for masked keys. Returns the maximum of each row, in lanes 0-7 and again in 8-15.
template <class Format>
WHET_INLINE f32x16 scores(const ForwardLayout& at, ptrdiff_t tile, const KeyRanges& ranges, int64_t block,
                          ptrdiff_t begin, ptrdiff_t end, float scale) {
    const f32x16 scales(scale), masked_score(-__builtin_inff());
    f32x16 maxima[kTileRows];
    for (f32x16& maximum : maxima) maximum = f32x16(kInitialMax);
    const float* queries = at.queries + tile / 2 * 16 * at.key_words + tile % 2 * kTileRows;
    for (ptrdiff_t key = begin / kTileKeys * kTileKeys; key < end; key += kTileKeys) {
        f32x16 sums[kTileRows][kPanels];
        clear(sums);
        add_products<Format>(sums, queries, 1, 16, at.keys + key * at.key_words, kPanelKeys * at.key_words, kPanelKeys,
                             at.key_words);
        const bool masked = !ranges.all_cover(block + key, block + key + kTileKeys);
        WHET_UNROLL(8)
        for (int r = 0; r < kTileRows; ++r) {
            WHET_UNROLL(4)
            for (int c = 0; c < kPanels; ++c) {
                f32x16 score = sums[r][c] * scales;
                if (masked) score = ranges.select_in_range(r, block + key + c * kPanelKeys, score, masked_score);
                maxima[r] = max(score, maxima[r]);
                store(at.weights + r * kWeightStride + key + c * kPanelKeys, score);
            }
        }
    }
    return max_each(maxima);
}

// Soft-caps the scores in `weights`; returns the maximum of each row, like `scores`.
__attribute__((noinline)) f32x16 cap_scores(const ForwardLayout& at, const KeyRanges& ranges, int64_t block,
                                            ptrdiff_t begin, ptrdiff_t end, float cap) {
    const f32x16 caps(cap), inverse(1.0f / cap), masked_score(-__builtin_inff());
    f32x16 maxima[kTileRows];
    for (int r = 0; r < kTileRows; ++r) {
        maxima[r] = f32x16(kInitialMax);
        for (ptrdiff_t key = begin / kTileKeys * kTileKeys; key < (end + kTileKeys - 1) / kTileKeys * kTileKeys;
             key += kPanelKeys) {
            float* at_key = at.weights + r * kWeightStride + key;
            const f32x16 score =
                ranges.select_in_range(r, block + key, softcap(load(at_key), caps, inverse), masked_score);
            maxima[r] = max(score, maxima[r]);
            store(at_key, score);
        }
    }
    return max_each(maxima);
}

// Converts scores to weights 2^(score - maximum) and adds them lane-wise to the sums, after rescaling by `factors`.
template <class Format>
WHET_INLINE void exp_weights(const ForwardLayout& at, ptrdiff_t tile, const float* factors, ptrdiff_t begin,
                             ptrdiff_t end) {
    for (int r = 0; r < kTileRows; ++r) {
        float* row = at.weights + r * kWeightStride;
        float* total = at.sums + (tile * kTileRows + r) * 16;
        const f32x16 maximum(at.maxima[tile * 16 + r]);
        f32x16 sum = load(total) * f32x16(factors[r]);
        for (ptrdiff_t key = begin / kTileKeys * kTileKeys; key < end; key += kTileKeys) {
            WHET_UNROLL(4)
            for (int c = 0; c < kPanels; ++c) {
                const ptrdiff_t i = key / kPanelKeys + c;
                const f32x16 weight = exp2_fast(max(f32x16(kZeroWeight), load(row + i * kPanelKeys) - maximum));
                sum += weight;
                Format::store_weights(row, static_cast<int>(i), weight);
            }
        }
        store(total, sum);
    }
}

// Rescales output columns of a tile by `factors`, and adds weights times values over the block's keys [begin, end).
template <class Format, int columns>
WHET_INLINE void add_values(const ForwardLayout& at, ptrdiff_t tile, const float* factors, ptrdiff_t begin,
                            ptrdiff_t end, ptrdiff_t column) {
    float* out = at.outputs + tile * kTileRows * at.columns + column;
    f32x16 sums[kTileRows][columns];
    WHET_UNROLL(8)
    for (int r = 0; r < kTileRows; ++r) {
        WHET_UNROLL(4)
        for (int c = 0; c < columns; ++c) sums[r][c] = load(out + r * at.columns + c * 16) * f32x16(factors[r]);
    }
    const ptrdiff_t first = begin / Format::kPerWord, n = (end + Format::kPerWord - 1) / Format::kPerWord - first;
    add_products<Format>(sums, at.weights + first, kWeightStride, 1, at.values + first * at.columns + column, 16,
                         at.columns, n);
    WHET_UNROLL(8)
    for (int r = 0; r < kTileRows; ++r) {
        WHET_UNROLL(4)
        for (int c = 0; c < columns; ++c) store(out + r * at.columns + c * 16, sums[r][c]);
    }
}

// add_values row by row over only the row's range: a weight of 0 times a non-finite value would be NaN.
template <class Format>
WHET_INLINE void add_values_in_range(const ForwardLayout& at, ptrdiff_t tile, const KeyRanges& ranges,
                                     const float* factors, int64_t block, ptrdiff_t begin, ptrdiff_t end) {
    for (int r = 0; r < kTileRows; ++r) {
        const int64_t from = ranges.begin[r] - block < begin ? begin : ranges.begin[r] - block;
        const int64_t to = ranges.end[r] - block < end ? ranges.end[r] - block : end;
        for (ptrdiff_t column = 0; column < at.columns; column += 16) {
            float* out = at.outputs + (tile * kTileRows + r) * at.columns + column;
            f32x16 sum = load(out) * f32x16(factors[r]);
            for (int64_t key = from / Format::kPerWord * Format::kPerWord; key < to; key += Format::kPerWord) {
                const ptrdiff_t word = key / Format::kPerWord;
                const f32x16 value =
                    Format::keep(load(at.values + word * at.columns + column), key >= from, key + 1 < to);
                sum = Format::multiply_add(at.weights + r * kWeightStride + word, value, sum);
            }
            store(out, sum);
        }
    }
}

// One tile against the packed block of n keys that starts at key `block`.
template <class Format>
WHET_INLINE void add_block(const AttentionTask& t, const ForwardLayout& at, ptrdiff_t tile, int64_t block, ptrdiff_t n,
                           bool finite) {
    const KeyRanges ranges(t, tile);
    const ptrdiff_t begin = ranges.first() > block ? ranges.first() - block : 0;
    const ptrdiff_t end = ranges.last() - block < n ? ranges.last() - block : n;
    if (begin >= end) return;
    float factors[16];
    const f32x16 old_maximum = load(at.maxima + tile * 16);
    f32x16 maximum = scores<Format>(at, tile, ranges, block, begin, end, t.scale);
    if (t.softcap > 0.0f) maximum = cap_scores(at, ranges, block, begin, end, t.softcap);
    maximum = max(maximum, old_maximum);
    store(at.maxima + tile * 16, maximum);
    store(factors, exp2_fast(max(f32x16(kZeroWeight), old_maximum - maximum)));
    exp_weights<Format>(at, tile, factors, begin, end);
    constexpr int word = Format::kPerWord;
    if (!finite && !ranges.all_cover(block + begin / word * word, block + (end + word - 1) / word * word)) {
        add_values_in_range<Format>(at, tile, ranges, factors, block, begin, end);
        return;
    }
    ptrdiff_t column = 0;
    for (; column + 32 <= at.columns; column += 32) add_values<Format, 2>(at, tile, factors, begin, end, column);
    if (column < at.columns) add_values<Format, 1>(at, tile, factors, begin, end, column);
}

// Weight of a sink relative to a row's maximum. A maximum far below it gives 2^126, with which other weights vanish.
WHET_INLINE float sink_weight(float sink, float maximum) {
    const float score = sink * ExpConstants<float>::kLog2E - maximum;
    alignas(64) float weight[16];
    store(weight, exp2_fast(min(f32x16(126.0f), max(f32x16(kZeroWeight), f32x16(score)))));
    return weight[0];
}

template <class Format>
WHET_INLINE void store_outputs(const AttentionTask& t, const ForwardLayout& at) {
    for (ptrdiff_t row = 0; row < t.n_queries * t.kv_group; ++row) {
        const float maximum = at.maxima[row / kTileRows * 16 + row % kTileRows];
        float sum = sum_lanes(load(at.sums + row * 16));
        if (t.sinks != nullptr && sum != 0.0f) sum += sink_weight(t.sinks[row % t.kv_group], maximum);
        const f32x16 inverse(sum == 0.0f ? 0.0f : 1.0f / sum);
        if (t.lse != nullptr) {
            // With lse = inf, a row without keys has weights 0 in the backward pass.
            t.lse[row / t.kv_group * t.lse_token + row % t.kv_group] =
                sum == 0.0f ? __builtin_inff() : maximum + static_cast<float>(__builtin_log2(sum));
        }
        auto* out = static_cast<typename Format::Element*>(t.out) + row / t.kv_group * t.out_token +
                    row % t.kv_group * t.out_head;
        for (ptrdiff_t c = 0; c < at.columns; c += 16) {
            const int n = static_cast<int>(t.head_dim - c < 16 ? t.head_dim - c : 16);
            Format::store_out(out + c, load(at.outputs + row * at.columns + c) * inverse, n);
        }
    }
}

template <class Format>
WHET_INLINE void attend(const AttentionTask& t) {
    const ForwardLayout at(t, Format::kPerWord);
    pack_queries<Format>(t, at);
    const int64_t first = KeyRanges(t, 0).first() / t.block_size * t.block_size;
    const int64_t last = KeyRanges(t, at.tiles - 1).last();
    for (int64_t block = first; block < last; block += t.block_size) {
        const ptrdiff_t n = last - block < t.block_size ? last - block : t.block_size;
        pack_keys<Format>(t, at, block, n);
        const bool finite = pack_values<Format>(t, at, block, n);
        for (ptrdiff_t tile = 0; tile < at.tiles; ++tile) add_block<Format>(t, at, tile, block, n, finite);
    }
    store_outputs<Format>(t, at);
}

}  // namespace attention

// Bytes of scratch memory that a task needs.
size_t attention_scratch(const AttentionTask& task) {
    AttentionTask bare = task;
    bare.scratch = nullptr;
    return static_cast<size_t>(attention::ForwardLayout(bare, 1).n_floats) * sizeof(float);
}

constexpr auto attention_f32 = attention::attend<attention::Float32>;
constexpr auto attention_bf16 = attention::attend<attention::BFloat16>;

}  // namespace
}  // namespace whet::WHET_ISA
