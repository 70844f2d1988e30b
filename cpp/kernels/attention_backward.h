// The gradient of attention (attention.h), for the query heads that share a KV head, over one sequence:
//
//   P = 2^(scale q K^T - lse),   dV = P^T dO,   dS = P (dO V^T - rowsum(dO O)),   dQ = dS K c,   dK = dS^T Q c
//
// with scale in base 2, as in the forward pass, and c = scale ln 2 (FlashAttention-2, Dao 2023, algorithm 2). With a
// soft-cap, scores are s = cap tanh(scale q K^T / cap), and dS is multiplied by 1 - (s / cap)^2. Keys and values are
// packed once; up to 64 query rows at a time are multiplied with blocks of 64 keys, so that P and dS fit in the caches.
// Products are as in attention.h: bfloat16, with P and dS rounded to bfloat16, or float32; sums are float32, in an
// order that depends only on the sequence.
#pragma once
#include "kernels/attention.h"
#include "kernels/attention_task.h"
#include "kernels/rows.h"
#include "simd/activation_math.h"
#include "simd/dot.h"
#include "simd/math.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

namespace attention_backward {

using attention::add_products;
using attention::clear;
using attention::KeyRanges;
using attention::kPanelKeys;
using attention::kPanels;
using attention::kTileKeys;
using attention::kTileRows;
using attention::kZeroWeight;

constexpr ptrdiff_t kRows = 64, kKeys = 64;  // of a block; rows are queries x heads

struct BackwardLayout {
    ptrdiff_t key_words, columns, keys, n_floats = 0;
    float *key_panels, *value_panels, *key_rows, *grad_k, *grad_v;                      // of all keys
    float *query_panels, *grad_panels, *query_rows, *grad_rows, *lse, *delta, *grad_q;  // of a block of rows
    float *p_columns, *s_columns, *s_rows, *p, *softcap_grads;                          // of a block of rows and keys

    WHET_INLINE BackwardLayout(const AttentionBackwardTask& t, int per_word) {
        key_words = t.head_dim / per_word;
        columns = (t.head_dim + 31) / 32 * 32;
        keys = (t.n_keys + kTileKeys - 1) / kTileKeys * kTileKeys;
        const auto take = [&](ptrdiff_t n) WHET_INLINE_LAMBDA {
            float* part = t.scratch == nullptr ? nullptr : static_cast<float*>(t.scratch) + n_floats;
            n_floats += (n + 15) / 16 * 16;
            return part;
        };
        key_panels = take(keys * key_words);
        value_panels = take(keys * key_words);
        key_rows = take(keys / per_word * columns);
        grad_k = take(keys * columns);
        grad_v = take(keys * columns);
        query_panels = take(kRows * key_words);
        grad_panels = take(kRows * key_words);
        query_rows = take(kRows / per_word * columns);
        grad_rows = take(kRows / per_word * columns);
        lse = take(kRows);
        delta = take(kRows);
        grad_q = take(kRows * columns);
        p_columns = take(kRows / per_word * kKeys);
        s_columns = take(kRows / per_word * kKeys);
        s_rows = take(kRows * kKeys / per_word);
        p = take(kTileRows * kTileKeys);
        softcap_grads = take(t.softcap > 0.0f ? kTileRows * kTileKeys : 0);
    }
};

// Packs rows in panels of 16 like the keys in attention.h; row_of(i) is null beyond the last row.
template <class Format>
__attribute__((noinline)) void pack_one_panel(float* out, ptrdiff_t n_words,
                                              const typename Format::Element* const* from) {
    attention::pack_rows_of_panel<Format>(out, n_words, from);
}
template <class Format, class RowOf>
WHET_INLINE void pack_panels(float* out, ptrdiff_t n_rows, ptrdiff_t n_words, RowOf&& row_of) {
    for (ptrdiff_t panel = 0; panel < n_rows; panel += kPanelKeys) {
        const typename Format::Element* from[kPanelKeys];
        for (int j = 0; j < kPanelKeys; ++j) from[j] = row_of(panel + j);
        pack_one_panel<Format>(out + panel * n_words, n_words, from);
    }
}

// Packs rows like the values in attention.h: one row of columns per word of rows; a null row is zeros.
template <class Format>
__attribute__((noinline)) void pack_words(float* out, const typename Format::Element* first,
                                          const typename Format::Element* second, ptrdiff_t head_dim,
                                          ptrdiff_t columns) {
    static constexpr typename Format::Element zeros[16] = {};
    for (ptrdiff_t c = 0; c < columns; c += 16) {
        const int n = static_cast<int>(head_dim - c < 0 ? 0 : head_dim - c < 16 ? head_dim - c : 16);
        const auto* a = first == nullptr ? zeros : first + c;
        store(out + c, n == 0 ? f32x16(0.0f) : Format::value_words(a, second == nullptr ? zeros : second + c, n));
    }
}
template <class Format, class RowOf>
WHET_INLINE void pack_rows(float* out, ptrdiff_t n_rows, ptrdiff_t head_dim, ptrdiff_t columns, RowOf&& row_of) {
    for (ptrdiff_t row = 0; row < n_rows; row += Format::kPerWord, out += columns) {
        const auto* second = Format::kPerWord == 1 ? nullptr : row_of(row + 1);
        pack_words<Format>(out, row_of(row), second, head_dim, columns);
    }
}

// Stores two rows of 32 numbers for products over rows: interleaved as bfloat16 pairs, or one after the other.
template <class Format>
WHET_INLINE void store_columns(float* out, f32x16 (&even)[kPanels], f32x16 (&odd)[kPanels]) {
#pragma GCC unroll 4
    for (int c = 0; c < kPanels; ++c) {
        if constexpr (Format::kPerWord == 2) {
            store(out + c * kPanelKeys, bit_cast<f32x16>(zip_bf16(even[c], odd[c])));
        } else {
            store(out + c * kPanelKeys, even[c]);
            store(out + kKeys + c * kPanelKeys, odd[c]);
        }
    }
}

// P and dS of a tile of 8 rows against the keys [key, key + 32) of a block.
template <class Format, bool capped>
__attribute__((noinline)) void compute_tile_gradient(const AttentionBackwardTask& t, const BackwardLayout& at,
                                                     ptrdiff_t tile, const KeyRanges& ranges, int64_t block,
                                                     ptrdiff_t key) {
    const f32x16 zero(0.0f), masked_score(kZeroWeight);
    [[maybe_unused]] const f32x16 inverse(capped ? 1.0f / t.softcap : 0.0f);
    const bool masked = !ranges.all_cover(block + key, block + key + kTileKeys);
    const ptrdiff_t row = tile * kTileRows, panel = (row / 16 * 16) * at.key_words + row % 16;
    const float* keys = at.key_panels + (block + key) * at.key_words;
    const float* values = at.value_panels + (block + key) * at.key_words;
    const auto select_in_range = [&](int r, int c, f32x16 x, f32x16 otherwise) WHET_INLINE_LAMBDA {
        return masked ? ranges.select_in_range(r, block + key + c * kPanelKeys, x, otherwise) : x;
    };
    f32x16 sums[kTileRows][kPanels];
    clear(sums);
    add_products<Format>(sums, at.query_panels + panel, 1, 16, keys, kPanelKeys * at.key_words, kPanelKeys,
                         at.key_words);
#pragma GCC unroll 8
    for (int r = 0; r < kTileRows; ++r) {
        const f32x16 lse(at.lse[row + r]);
#pragma GCC unroll 4
        for (int c = 0; c < kPanels; ++c) {
            f32x16 score;
            if constexpr (capped) {
                const f32x16 bounded = tanh(sums[r][c] * f32x16(t.scale) * inverse);
                store(at.softcap_grads + r * kTileKeys + c * kPanelKeys, fma(-bounded, bounded, f32x16(1.0f)));
                score = fma(bounded, f32x16(t.softcap), -lse);
            } else {
                score = fma(sums[r][c], f32x16(t.scale), -lse);
            }
            sums[r][c] = exp2_fast(max(masked_score, select_in_range(r, c, score, masked_score)));
            store(at.p + r * kTileKeys + c * kPanelKeys, sums[r][c]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kTileRows; r += 2) {
        store_columns<Format>(at.p_columns + (row + r) / Format::kPerWord * kKeys + key, sums[r], sums[r + 1]);
    }
    clear(sums);
    add_products<Format>(sums, at.grad_panels + panel, 1, 16, values, kPanelKeys * at.key_words, kPanelKeys,
                         at.key_words);
#pragma GCC unroll 8
    for (int r = 0; r < kTileRows; ++r) {
        const f32x16 delta(at.delta[row + r]);
        float* out = at.s_rows + (row + r) * kKeys / Format::kPerWord;
#pragma GCC unroll 4
        for (int c = 0; c < kPanels; ++c) {
            const f32x16 p = load(at.p + r * kTileKeys + c * kPanelKeys);
            f32x16 grad = p * (sums[r][c] - delta);
            if constexpr (capped) grad = grad * load(at.softcap_grads + r * kTileKeys + c * kPanelKeys);
            sums[r][c] = select_in_range(r, c, grad, zero);
            Format::store_weights(out, static_cast<int>(key / kPanelKeys) + c, sums[r][c]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kTileRows; r += 2) {
        store_columns<Format>(at.s_columns + (row + r) / Format::kPerWord * kKeys + key, sums[r], sums[r + 1]);
    }
}

// out (n_rows, columns) += a b, n_rows a multiple of 8; a and b as in add_products.
template <class Format>
__attribute__((noinline)) void add_matrix(float* out, ptrdiff_t n_rows, ptrdiff_t columns, const float* a,
                                          ptrdiff_t a_row, ptrdiff_t a_step, const float* b, ptrdiff_t n) {
    for (ptrdiff_t row = 0; row < n_rows; row += kTileRows) {
        for (ptrdiff_t column = 0; column < columns; column += kTileKeys) {
            float* to = out + row * columns + column;
            f32x16 sums[kTileRows][kPanels];
#pragma GCC unroll 8
            for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 4
                for (int c = 0; c < kPanels; ++c) sums[r][c] = load(to + r * columns + c * kPanelKeys);
            }
            add_products<Format>(sums, a + row * a_row, a_row, a_step, b + column, kPanelKeys, columns, n);
#pragma GCC unroll 8
            for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 4
                for (int c = 0; c < kPanels; ++c) store(to + r * columns + c * kPanelKeys, sums[r][c]);
            }
        }
    }
}

template <class Format>
WHET_INLINE void pack_all_keys(const AttentionBackwardTask& t, const BackwardLayout& at) {
    using Element = typename Format::Element;
    const auto key = [&](ptrdiff_t j) WHET_INLINE_LAMBDA {
        return j < t.n_keys ? static_cast<const Element*>(t.k) + t.key_row(j) * t.k_token : nullptr;
    };
    const auto value = [&](ptrdiff_t j) WHET_INLINE_LAMBDA {
        return j < t.n_keys ? static_cast<const Element*>(t.v) + t.key_row(j) * t.v_token : nullptr;
    };
    pack_panels<Format>(at.key_panels, at.keys, at.key_words, key);
    pack_panels<Format>(at.value_panels, at.keys, at.key_words, value);
    pack_rows<Format>(at.key_rows, at.keys, t.head_dim, at.columns, key);
    for (float* x = at.grad_k; x < at.query_panels; x += 16) store(x, f32x16(0.0f));
}

// Packs `count` rows (a multiple of 8) of queries and dO from row `first`, with their lse and delta = rowsum(dO O).
template <class Format>
WHET_INLINE void pack_block(const AttentionBackwardTask& t, const BackwardLayout& at, ptrdiff_t first,
                            ptrdiff_t count) {
    using Element = typename Format::Element;
    const ptrdiff_t n_rows = t.n_queries * t.kv_group;
    const auto out_at = [&](ptrdiff_t row) WHET_INLINE_LAMBDA {
        return row / t.kv_group * t.out_token + row % t.kv_group * t.out_head;
    };
    const auto query = [&](ptrdiff_t i) WHET_INLINE_LAMBDA {
        const ptrdiff_t row = first + i;
        const auto* q = static_cast<const Element*>(t.q);
        return row < n_rows ? q + row / t.kv_group * t.q_token + row % t.kv_group * t.q_head : nullptr;
    };
    const auto grad = [&](ptrdiff_t i) WHET_INLINE_LAMBDA {
        return first + i < n_rows ? static_cast<const Element*>(t.grad_out) + out_at(first + i) : nullptr;
    };
    pack_panels<Format>(at.query_panels, count, at.key_words, query);
    pack_panels<Format>(at.grad_panels, count, at.key_words, grad);
    pack_rows<Format>(at.query_rows, count, t.head_dim, at.columns, query);
    pack_rows<Format>(at.grad_rows, count, t.head_dim, at.columns, grad);
    for (ptrdiff_t i = 0; i < count; ++i) {
        const ptrdiff_t row = first + i;
        at.lse[i] = row < n_rows ? t.lse[row / t.kv_group * t.lse_token + row % t.kv_group] : __builtin_inff();
        f32x16 sum(0.0f);
        for (ptrdiff_t c = 0; row < n_rows && c < t.head_dim; c += 16) {
            const int n = static_cast<int>(t.head_dim - c < 16 ? t.head_dim - c : 16);
            const auto* out = static_cast<const Element*>(t.out) + out_at(row);
            sum = fma(rows::read(grad(i) + c, n), rows::read(out + c, n), sum);
        }
        at.delta[i] = sum_lanes(sum);
    }
    for (ptrdiff_t i = 0; i < count * at.columns; i += 16) store(at.grad_q + i, f32x16(0.0f));
}

template <class Format>
WHET_INLINE void compute_gradient(const AttentionBackwardTask& t) {
    using Element = typename Format::Element;
    const BackwardLayout at(t, Format::kPerWord);
    const f32x16 factor(t.scale * 0x1.62e42fefa39efp-1f);
    const ptrdiff_t n_rows = t.n_queries * t.kv_group;
    const auto tile_at =
        t.softcap > 0.0f ? &compute_tile_gradient<Format, true> : &compute_tile_gradient<Format, false>;
    pack_all_keys<Format>(t, at);
    for (ptrdiff_t first = 0; first < n_rows; first += kRows) {
        const ptrdiff_t left = (n_rows - first + kTileRows - 1) / kTileRows * kTileRows;
        const ptrdiff_t count = left < kRows ? left : kRows, tile = first / kTileRows, tiles = count / kTileRows;
        pack_block<Format>(t, at, first, count);
        const int64_t begin = KeyRanges(t, tile).first() / kKeys * kKeys, end = KeyRanges(t, tile + tiles - 1).last();
        for (int64_t block = begin; block < end; block += kKeys) {
            const ptrdiff_t keys = at.keys - block < kKeys ? at.keys - block : kKeys;
            for (ptrdiff_t i = 0; i < tiles; ++i) {
                const KeyRanges ranges(t, tile + i);
                for (ptrdiff_t key = 0; key < keys; key += kTileKeys) {
                    tile_at(t, at, i, ranges, block, key);
                }
            }
            const ptrdiff_t row_words = count / Format::kPerWord, words = keys / Format::kPerWord;
            add_matrix<Format>(at.grad_v + block * at.columns, keys, at.columns, at.p_columns, 1, kKeys, at.grad_rows,
                               row_words);
            add_matrix<Format>(at.grad_k + block * at.columns, keys, at.columns, at.s_columns, 1, kKeys, at.query_rows,
                               row_words);
            add_matrix<Format>(at.grad_q, count, at.columns, at.s_rows, kKeys / Format::kPerWord, 1,
                               at.key_rows + block / Format::kPerWord * at.columns, words);
        }
        for (ptrdiff_t i = 0; i < count && first + i < n_rows; ++i) {
            const ptrdiff_t row = first + i;
            Element* out =
                static_cast<Element*>(t.grad_q) + row / t.kv_group * t.out_token + row % t.kv_group * t.out_head;
            for (ptrdiff_t c = 0; c < t.head_dim; c += 16) {
                const int n = static_cast<int>(t.head_dim - c < 16 ? t.head_dim - c : 16);
                rows::put(out + c, load(at.grad_q + i * at.columns + c) * factor, n);
            }
        }
    }
    for (int64_t key = 0; key < t.n_keys; ++key) {
        for (ptrdiff_t c = 0; c < t.head_dim; c += 16) {
            const int n = static_cast<int>(t.head_dim - c < 16 ? t.head_dim - c : 16);
            rows::put(t.grad_k + key * t.head_dim + c, load(at.grad_k + key * at.columns + c) * factor, n);
            rows::put(t.grad_v + key * t.head_dim + c, load(at.grad_v + key * at.columns + c), n);
        }
    }
}

}  // namespace attention_backward

// Bytes of scratch memory that a task needs.
size_t attention_backward_scratch(const AttentionBackwardTask& task) {
    AttentionBackwardTask bare = task;
    bare.scratch = nullptr;
    return static_cast<size_t>(attention_backward::BackwardLayout(bare, 1).n_floats) * sizeof(float);
}

constexpr auto attention_backward_f32 = attention_backward::compute_gradient<attention::Float32>;
constexpr auto attention_backward_bf16 = attention_backward::compute_gradient<attention::BFloat16>;

}  // namespace
}  // namespace whet::WHET_ISA
