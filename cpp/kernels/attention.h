// Attention of a block of queries: out = softmax(scale q K^T) V, for the query heads that share a KV head.
//
// The keys are processed in blocks, packed once for all query rows (queries x heads) of the task: K as panels of 16
// keys, dimension by dimension, V as panels of 16 columns, key by key. For a tile of 8 rows and a block, two products
// are computed in registers, scores and output, and between them a step of the online softmax (Milakov & Gimelshein
// 2018; blocks as in FlashAttention-2, Dao 2023): exponents in base 2 relative to the row's running maximum, the output
// rescaled when the maximum grows. Blocks that no row of a tile attends to are skipped; a masked key has weight 0,
// whatever its values. Blocks begin at multiples of block_size, and both products sum over dimensions and keys in
// order: a query's output depends only on its own keys and block_size, to the bit, not on the other queries.
//
// float32 is computed as float32. bfloat16 pairs are multiplied exactly and added in float32 (dot_bf16, with its rule
// for subnormal numbers); the weights are rounded to bfloat16 before the product with V, their sum is not. A row
// without keys, or whose scores are all -inf, gives zeros; NaN and inf otherwise as the formula has them. "Words" are
// those of attention_formats.h. A soft-cap of the scores, cap tanh(score / cap), is a pass of its own over the scores
// of a tile and a block, so that attention without one only asks whether there is one.
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
constexpr int kPanel = 16;
constexpr int kPanels = 2;  // panels of a product tile: 8 x 2 sums in registers
constexpr ptrdiff_t kStep = kPanels * kPanel;
constexpr float kNoWeight = -127.0f;  // exp2_fast(-127) is 0
constexpr ptrdiff_t kWeightStride = kAttentionMaxBlock;

// sums[r][c] += sum over i of a[r * a_row + i * a_step] b[i * b_step + c * b_column ...], in the order of i.
template <class Format, int rows, int columns>
WHET_INLINE void add_products(f32x16 (&sums)[rows][columns], const float* a, ptrdiff_t a_row, ptrdiff_t a_step,
                              const float* b, ptrdiff_t b_column, ptrdiff_t b_step, ptrdiff_t n) {
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
        }
    }
}

// Sizes of a task, and where its parts lie in the scratch memory (nowhere, while there is none).
struct ForwardLayout {
    ptrdiff_t tiles, key_words, columns, n_floats = 0;
    float *queries, *outputs, *sums, *tops, *keys, *values, *weights;

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
        tops = take(tiles * 16);
        keys = take(t.block_size * key_words);
        values = take(t.block_size * columns);
        weights = take(kTileRows * kWeightStride);
    }
};

// x in the lanes of a panel's keys [begin, end), counted from its first, and `otherwise` in the others.
WHET_INLINE f32x16 where_seen(int64_t begin, int64_t end, f32x16 x, f32x16 otherwise) {
    static constexpr int32_t kLane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const auto lane_of = [](int64_t key) WHET_INLINE_LAMBDA {
        return static_cast<int32_t>(key < 0 ? 0 : key > 16 ? 16 : key);
    };
    const i32x16 lane = load(kLane), from(lane_of(begin)), to(lane_of(end));
    return select(lane < from, otherwise, select(lane < to, x, otherwise));
}

// Row r of a tile sees keys [begin[r], end[r]). Positions grow with r, and so do both.
struct Visible {
    int64_t begin[kTileRows], end[kTileRows];

    WHET_INLINE Visible(const AttentionTask& t, ptrdiff_t tile) {
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
    WHET_INLINE bool all_see(int64_t from, int64_t to) const { return begin[kTileRows - 1] <= from && to <= end[0]; }

    // x in the lanes of the keys [key, key + 16) that row r sees, `otherwise` in the others.
    WHET_INLINE f32x16 seen(int r, int64_t key, f32x16 x, f32x16 otherwise) const {
        return where_seen(begin[r] - key, end[r] - key, x, otherwise);
    }
};

// Sixteen rows as a panel: word i of row j at out[16 i + j]; a null row is zeros.
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

// Query rows in panels of two tiles, and the state of the softmax before the first key.
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
    for (float* x = at.outputs; x < at.tops; x += 16) store(x, f32x16(0.0f));
    for (float* x = at.tops; x < at.keys; x += 16) store(x, f32x16(kNothing));
}

// Keys [begin, begin + n) as panels of 16, zeros after the last to an even number of panels.
template <class Format>
WHET_INLINE void pack_keys(const AttentionTask& t, const ForwardLayout& at, int64_t begin, ptrdiff_t n) {
    const auto* k = static_cast<const typename Format::Element*>(t.k);
    const ptrdiff_t end = (n + kStep - 1) / kStep * kStep;
    for (ptrdiff_t panel = 0; panel < end; panel += kPanel) {
        pack_panel<Format>(at.keys + panel * at.key_words, at.key_words, [&](int j) WHET_INLINE_LAMBDA {
            return panel + j < n ? k + t.key_row(begin + panel + j) * t.k_token : nullptr;
        });
    }
}

// Values [begin, begin + n), a row of columns for each word of keys. Returns whether all are finite.
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

// Base-2 scores of a tile against the panels that hold keys [begin, end) of the block that starts at key `block`: to
// `weights`, -inf where a row does not see a key. Returns the greatest of each row, in lanes 0-7 and again in 8-15.
template <class Format>
WHET_INLINE f32x16 scores(const ForwardLayout& at, ptrdiff_t tile, const Visible& visible, int64_t block,
                          ptrdiff_t begin, ptrdiff_t end, float scale) {
    const f32x16 scales(scale), unseen(-__builtin_inff());
    f32x16 tops[kTileRows];
    for (f32x16& top : tops) top = f32x16(kNothing);
    const float* queries = at.queries + tile / 2 * 16 * at.key_words + tile % 2 * kTileRows;
    for (ptrdiff_t key = begin / kStep * kStep; key < end; key += kStep) {
        f32x16 sums[kTileRows][kPanels];
        for (auto& row : sums) {
            for (f32x16& sum : row) sum = f32x16(0.0f);
        }
        add_products<Format>(sums, queries, 1, 16, at.keys + key * at.key_words, kPanel * at.key_words, kPanel,
                             at.key_words);
        const bool masked = !visible.all_see(block + key, block + key + kStep);
        WHET_UNROLL(8)
        for (int r = 0; r < kTileRows; ++r) {
            WHET_UNROLL(4)
            for (int c = 0; c < kPanels; ++c) {
                f32x16 score = sums[r][c] * scales;
                if (masked) score = visible.seen(r, block + key + c * kPanel, score, unseen);
                tops[r] = max(score, tops[r]);
                store(at.weights + r * kWeightStride + key + c * kPanel, score);
            }
        }
    }
    return max_each(tops);
}

// Soft-caps the scores that `scores` has left in `weights`; returns the greatest of each row, as it does.
__attribute__((noinline)) f32x16 cap_scores(const ForwardLayout& at, const Visible& visible, int64_t block,
                                            ptrdiff_t begin, ptrdiff_t end, float cap) {
    const f32x16 caps(cap), inverse(1.0f / cap), unseen(-__builtin_inff());
    f32x16 tops[kTileRows];
    for (int r = 0; r < kTileRows; ++r) {
        tops[r] = f32x16(kNothing);
        for (ptrdiff_t key = begin / kStep * kStep; key < (end + kStep - 1) / kStep * kStep; key += kPanel) {
            float* at_key = at.weights + r * kWeightStride + key;
            const f32x16 score = visible.seen(r, block + key, softcap(load(at_key), caps, inverse), unseen);
            tops[r] = max(score, tops[r]);
            store(at_key, score);
        }
    }
    return max_each(tops);
}

// Scores to weights 2^(score - top), and their sums lane by lane; the sums so far are multiplied by `factors`.
template <class Format>
WHET_INLINE void weigh(const ForwardLayout& at, ptrdiff_t tile, const float* factors, ptrdiff_t begin, ptrdiff_t end) {
    for (int r = 0; r < kTileRows; ++r) {
        float* row = at.weights + r * kWeightStride;
        float* total = at.sums + (tile * kTileRows + r) * 16;
        const f32x16 top(at.tops[tile * 16 + r]);
        f32x16 sum = load(total) * f32x16(factors[r]);
        for (ptrdiff_t key = begin / kStep * kStep; key < end; key += kStep) {
            WHET_UNROLL(4)
            for (int c = 0; c < kPanels; ++c) {
                const ptrdiff_t i = key / kPanel + c;
                const f32x16 weight = exp2_fast(max(f32x16(kNoWeight), load(row + i * kPanel) - top));
                sum += weight;
                Format::store_weights(row, static_cast<int>(i), weight);
            }
        }
        store(total, sum);
    }
}

// Output columns of a tile: multiplied by `factors`, plus weights times values over the block's keys [begin, end).
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

// The same, row by row over the keys that the row sees: a weight of 0 does not hide a value that is not finite.
template <class Format>
WHET_INLINE void add_seen_values(const ForwardLayout& at, ptrdiff_t tile, const Visible& visible, const float* factors,
                                 int64_t block, ptrdiff_t begin, ptrdiff_t end) {
    for (int r = 0; r < kTileRows; ++r) {
        const int64_t from = visible.begin[r] - block < begin ? begin : visible.begin[r] - block;
        const int64_t to = visible.end[r] - block < end ? visible.end[r] - block : end;
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

// One tile against the packed block of n keys from key `block` on.
template <class Format>
WHET_INLINE void add_block(const AttentionTask& t, const ForwardLayout& at, ptrdiff_t tile, int64_t block, ptrdiff_t n,
                           bool finite) {
    const Visible visible(t, tile);
    const ptrdiff_t begin = visible.first() > block ? visible.first() - block : 0;
    const ptrdiff_t end = visible.last() - block < n ? visible.last() - block : n;
    if (begin >= end) return;
    float factors[16];
    const f32x16 old_top = load(at.tops + tile * 16);
    f32x16 top = scores<Format>(at, tile, visible, block, begin, end, t.scale);
    if (t.softcap > 0.0f) top = cap_scores(at, visible, block, begin, end, t.softcap);
    top = max(top, old_top);
    store(at.tops + tile * 16, top);
    store(factors, exp2_fast(max(f32x16(kNoWeight), old_top - top)));
    weigh<Format>(at, tile, factors, begin, end);
    constexpr int word = Format::kPerWord;
    if (!finite && !visible.all_see(block + begin / word * word, block + (end + word - 1) / word * word)) {
        add_seen_values<Format>(at, tile, visible, factors, block, begin, end);
        return;
    }
    ptrdiff_t column = 0;
    for (; column + 32 <= at.columns; column += 32) add_values<Format, 2>(at, tile, factors, begin, end, column);
    if (column < at.columns) add_values<Format, 1>(at, tile, factors, begin, end, column);
}

template <class Format>
WHET_INLINE void store_outputs(const AttentionTask& t, const ForwardLayout& at) {
    for (ptrdiff_t row = 0; row < t.n_queries * t.kv_group; ++row) {
        const float sum = sum_lanes(load(at.sums + row * 16));
        const f32x16 inverse(sum == 0.0f ? 0.0f : 1.0f / sum);
        if (t.lse != nullptr) {
            const float top = at.tops[row / kTileRows * 16 + row % kTileRows];
            // A row without keys has no weights in the gradient either.
            t.lse[row / t.kv_group * t.lse_token + row % t.kv_group] =
                sum == 0.0f ? __builtin_inff() : top + static_cast<float>(__builtin_log2(sum));
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
    const int64_t first = Visible(t, 0).first() / t.block_size * t.block_size;
    const int64_t last = Visible(t, at.tiles - 1).last();
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

void attention_f32(const AttentionTask& task) { attention::attend<attention::Float32>(task); }
void attention_bf16(const AttentionTask& task) { attention::attend<attention::BFloat16>(task); }

}  // namespace
}  // namespace whet::WHET_ISA
