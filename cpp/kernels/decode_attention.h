// Attention of one query per sequence over its cache: bound by memory.
//
// A primitive for callers with a contiguous cache of their own (whet.decode_attention). The engine does not run it: its
// cache is pages that sequences share, and cached_attention.h reads a shared page once for all of them.
//
// A task processes a run of keys in blocks: scores, a step of the online softmax, values. Keys and values are read in
// place, a few keys at a time and these head by head, so that memory is read nearly sequentially: hardware prefetching
// then works, and with software prefetches the kernel reaches most of the memory bandwidth. A row of a KV head serves
// up to 4 query heads at once. Scores are 16 dot products side by side (query heads x keys), whose lanes sum_each adds
// at the end; values are added column panel by column panel.
//
// A task's result is unnormalised sums with their maximum; merge_decode_* merges those of a row in order. Runs have a
// fixed length, so that a result does not depend on threads or on the batch. bfloat16: products of queries
// and keys by dot_bf16, weights float32, values widened exactly. Rows without keys, or whose scores are all
// -inf: zeros.
#pragma once
#include "kernels/attention_formats.h"
#include "kernels/attention_task.h"
#include "simd/dot.h"
#include "simd/lanes.h"
#include "simd/math.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

namespace decode {

using attention::BFloat16;
using attention::Float32;

constexpr int kBlock = 64;        // keys in a block
constexpr int64_t kAhead = 8192;  // elements of keys or values that are fetched before they are needed
#if defined(__wasm__)
constexpr int kKeysInTurn = 4;  // whose sums 16 registers hold
constexpr int kTileHeads = 1;   // one copy of the code, in a file that is downloaded
#else
constexpr int kKeysInTurn = 16;
constexpr int kTileHeads = 4;
#endif
constexpr float kOnes[4] = {1.0f, 1.0f, 1.0f, 1.0f};

// Rows of elements in memory.
template <class Element>
struct StridedRows {
    const Element* data;
    ptrdiff_t stride;
    WHET_INLINE const Element* operator[](ptrdiff_t i) const { return data + i * stride; }
};

// Rows of n keys or values of all KV heads, to be fetched one by one: key by key, so that memory is read in its order.
template <class Element>
struct Ahead {
    const Element* data = nullptr;
    ptrdiff_t token = 0, head = 0;
    int64_t n = 0, heads = 0;
    size_t row_bytes = 0;
    int64_t at_head = 0;

    WHET_INLINE void fetch_row() {
        if (n <= 0) return;
        const char* row = reinterpret_cast<const char*>(data + at_head * head);
        // Into L2: kAhead elements are as much as L1 holds.
        for (size_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
        if (++at_head < heads) return;
        at_head = 0;
        data += token;
        --n;
    }
};

// Base-2 scores of `rows` queries against n keys, to scores[r * kBlock + key]. rows x keys_at_once is at most 16.
template <class Format, int rows>
WHET_INLINE void scores(StridedRows<typename Format::Element> q, StridedRows<typename Format::Element> k, int n,
                        int dim, float scale, float* out, Ahead<typename Format::Element>* ahead) {
    constexpr int keys = rows == 1 ? 16 : rows == 2 ? 8 : 4;
    for (int key = 0; key < n; key += keys) {
        const typename Format::Element* from[keys];
        for (int j = 0; j < keys; ++j) {
            from[j] = k[key + j < n ? key + j : n - 1];
            if (key + j < n && ahead != nullptr) ahead->fetch_row();
        }
        f32x16 sums[16];
        for (int i = rows * keys; i < 16; ++i) sums[i] = f32x16(0.0f);
        constexpr int in_turn = keys < kKeysInTurn ? keys : kKeysInTurn;
        WHET_UNROLL(4)
        for (int first = 0; first < keys; first += in_turn) {
            f32x16* turn = sums + first;
            f32x16 products[rows][in_turn];
#pragma GCC unroll 4
            for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 16
                for (int j = 0; j < in_turn; ++j) products[r][j] = f32x16(0.0f);
            }
            for (int d = 0; d < dim; d += Format::kLanes) {
                typename Format::Vector query[rows];
#pragma GCC unroll 4
                for (int r = 0; r < rows; ++r) query[r] = Format::load_vector(q[r] + d);
#pragma GCC unroll 16
                for (int j = 0; j < in_turn; ++j) {
                    const typename Format::Vector words = Format::load_vector(from[first + j] + d);
#pragma GCC unroll 4
                    for (int r = 0; r < rows; ++r) {
                        products[r][j] = Format::multiply_add(query[r], words, products[r][j]);
                    }
                }
            }
#pragma GCC unroll 4
            for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 16
                for (int j = 0; j < in_turn; ++j) turn[r * keys + j] = products[r][j];
            }
        }
        float lanes[16];
        store(lanes, sum_each(sums) * f32x16(scale));
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            __builtin_memcpy(out + r * kBlock + key, lanes + r * keys, keys * sizeof(float));
        }
    }
}

// One row's n scores to weights 2^(score - maximum); its maximum and sum (in extra[0] and extra[1]) are updated.
// Returns the factor that rescales the sums so far.
WHET_INLINE float weigh(float* scores, int n, float* extra) {
    const int end = (n + 15) / 16 * 16;
    for (int i = n; i < end; ++i) scores[i] = -__builtin_inff();
    const f32x16 old_top(extra[0]), lowest(-127.0f);  // exp2_fast(-127) is 0
    f32x16 top = old_top;
    for (int i = 0; i < end; i += 16) top = max(load(scores + i), top);
    top = max_lanes(top);
    const float factor = exp2_fast(max(lowest, old_top - top))[0];
    f32x16 sum(0.0f);
    for (int i = 0; i < end; i += 16) {
        const f32x16 weight = exp2_fast(max(lowest, load(scores + i) - top));
        sum += weight;
        store(scores + i, weight);
    }
    extra[0] = top[0];
    extra[1] = extra[1] * factor + sum_lanes(sum);
    return factor;
}

// Columns [column, column + 16 columns) of `rows` outputs: times their factors, plus weights times n values.
template <class Format, int rows, int columns>
WHET_INLINE void add_values(StridedRows<typename Format::Element> v, int n, const float* weights, const float* factors,
                            float* out, ptrdiff_t out_row, ptrdiff_t column, Ahead<typename Format::Element>* ahead) {
    constexpr int per_load = Format::kLanes / 16;
    f32x16 sums[rows][columns];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < columns; ++c) sums[r][c] = load(out + r * out_row + column + 16 * c) * f32x16(factors[r]);
    }
    for (int key = 0; key < n; ++key) {
        const typename Format::Element* row = v[key] + column;
        if (ahead != nullptr) ahead->fetch_row();
        f32x16 values[columns];
#pragma GCC unroll 4
        for (int c = 0; c < columns; c += per_load) {
            f32x16 loaded[per_load];
            Format::load_columns(row + 16 * c, loaded);
#pragma GCC unroll 2
            for (int i = 0; i < per_load; ++i) values[c + i] = loaded[i];
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            const f32x16 weight(weights[r * kBlock + key]);
#pragma GCC unroll 4
            for (int c = 0; c < columns; ++c) sums[r][c] = fma(weight, values[c], sums[r][c]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < columns; ++c) store(out + r * out_row + column + 16 * c, sums[r][c]);
    }
}

// One block of n values for `rows` query heads.
template <class Format, int rows>
WHET_INLINE void add_block(StridedRows<typename Format::Element> v, int n, int dim, const float* weights,
                           const float* factors, float* partial, ptrdiff_t partial_row,
                           Ahead<typename Format::Element>* ahead) {
    ptrdiff_t column = 0;
    for (; column + 64 <= dim; column += 64, ahead = nullptr) {
        add_values<Format, rows, 4>(v, n, weights, factors, partial, partial_row, column, ahead);
    }
    for (; column < dim; column += Format::kLanes, ahead = nullptr) {
        add_values<Format, rows, Format::kLanes / 16>(v, n, weights, factors, partial, partial_row, column, ahead);
    }
}

// body(first head, rows) for tiles of kTileHeads query heads and one of what is left, the number of rows as a type.
template <int n>
struct Count {
    static constexpr int value = n;
};
template <class Body>
WHET_INLINE void each_tile(int64_t group, Body&& body) {
    int64_t head = 0;
    for (; head + kTileHeads <= group; head += kTileHeads) body(head, Count<kTileHeads>());
    if constexpr (kTileHeads > 1) {
        if (group - head == 3) body(head, Count<3>());
        if (group - head == 2) body(head, Count<2>());
        if (group - head == 1) body(head, Count<1>());
    }
}

// Rows of head_dim elements copied to rows of `dim`, zeros at the end.
template <class Element>
WHET_INLINE StridedRows<Element> padded(StridedRows<Element> x, ptrdiff_t n, ptrdiff_t head_dim, ptrdiff_t dim,
                                        Element* copy) {
    for (ptrdiff_t i = 0; i < n; ++i) {
        __builtin_memcpy(copy + i * dim, x[i], static_cast<size_t>(head_dim) * sizeof(Element));
        for (ptrdiff_t d = head_dim; d < dim; ++d) copy[i * dim + d] = 0;
    }
    return {copy, dim};
}

// head_dim as vectors of a dot product have it; a partial row is that of 32 for both formats.
WHET_INLINE ptrdiff_t rounded_up(int64_t n, int to) { return static_cast<ptrdiff_t>((n + to - 1) / to * to); }

// Where the parts of a task lie in its scratch memory.
template <class Element>
struct DecodeLayout {
    ptrdiff_t dim, partial_row;
    float *weights, *factors;
    Element *queries, *copies;

    WHET_INLINE DecodeLayout(const DecodeTask& t, int lanes) {
        dim = rounded_up(t.head_dim, lanes);
        partial_row = rounded_up(t.head_dim, 32) + static_cast<ptrdiff_t>(kDecodePartialExtra);
        weights = static_cast<float*>(t.scratch);
        factors = weights + t.kv_heads * t.kv_group * kBlock;
        queries = reinterpret_cast<Element*>(factors + rounded_up(t.kv_heads * t.kv_group, 16));
        copies = queries + t.kv_heads * t.kv_group * dim;
    }
};

// The rows of keys or values kAhead elements after those of `key`, to the end of the task.
template <class Element>
WHET_INLINE Ahead<Element> ahead_of(const DecodeTask& t, const void* data, ptrdiff_t token, ptrdiff_t head,
                                    int64_t key) {
    key += (kAhead + t.kv_heads * t.head_dim - 1) / (t.kv_heads * t.head_dim);
    if (key >= t.end) return {};
    return {static_cast<const Element*>(data) + key * token,  token, head, t.end - key, t.kv_heads,
            static_cast<size_t>(t.head_dim) * sizeof(Element)};
}

// Keys [key, key + n) of all heads: scores, then weights.
template <class Format>
WHET_INLINE void weigh_block(const DecodeTask& t, const DecodeLayout<typename Format::Element>& at, int64_t key,
                             int n) {
    using Element = typename Format::Element;
    const Element* all_keys = static_cast<const Element*>(t.k) + key * t.k_token;
    auto ahead = ahead_of<Element>(t, t.k, t.k_token, t.k_head, key);
    // As few keys at a time as fill a vector of scores in every tile.
    const int step = t.kv_group % 4 == 1 ? 16 : t.kv_group % 4 == 2 ? 8 : 4;
    for (int from = 0; from < n; from += step) {
        const int n_keys = n - from < step ? n - from : step;
        for (int64_t kv_head = 0; kv_head < t.kv_heads; ++kv_head) {
            StridedRows<Element> k{all_keys + from * t.k_token + kv_head * t.k_head, t.k_token};
            if (at.dim != t.head_dim) k = padded(k, n_keys, t.head_dim, at.dim, at.copies);
            each_tile(t.kv_group, [&](int64_t in_group, auto rows) WHET_INLINE_LAMBDA {
                const int64_t head = kv_head * t.kv_group + in_group;
                const StridedRows<Element> q{at.queries + head * at.dim, at.dim};
                scores<Format, decltype(rows)::value>(q, k, n_keys, static_cast<int>(at.dim), t.scale,
                                                      at.weights + head * kBlock + from,
                                                      in_group == 0 ? &ahead : nullptr);
            });
        }
    }
    for (int64_t head = 0; head < t.kv_heads * t.kv_group; ++head) {
        float* extra = t.partial + (head + 1) * at.partial_row - kDecodePartialExtra;
        at.factors[head] = weigh(at.weights + head * kBlock, n, extra);
    }
}

// The values to those weights.
template <class Format>
WHET_INLINE void add_weighed(const DecodeTask& t, const DecodeLayout<typename Format::Element>& at, int64_t key,
                             int n) {
    using Element = typename Format::Element;
    constexpr int step = 8;
    const Element* all_values = static_cast<const Element*>(t.v) + key * t.v_token;
    auto ahead = ahead_of<Element>(t, t.v, t.v_token, t.v_head, key);
    for (int from = 0; from < n; from += step) {
        const int n_keys = n - from < step ? n - from : step;
        for (int64_t kv_head = 0; kv_head < t.kv_heads; ++kv_head) {
            StridedRows<Element> v{all_values + from * t.v_token + kv_head * t.v_head, t.v_token};
            if (at.dim != t.head_dim) v = padded(v, n_keys, t.head_dim, at.dim, at.copies);
            each_tile(t.kv_group, [&](int64_t in_group, auto rows) WHET_INLINE_LAMBDA {
                const int64_t head = kv_head * t.kv_group + in_group;
                add_block<Format, decltype(rows)::value>(
                    v, n_keys, static_cast<int>(at.dim), at.weights + head * kBlock + from,
                    from == 0 ? at.factors + head : kOnes, t.partial + head * at.partial_row, at.partial_row,
                    in_group == 0 ? &ahead : nullptr);
            });
        }
    }
}

template <class Format>
WHET_INLINE void attend(const DecodeTask& t) {
    using Element = typename Format::Element;
    const DecodeLayout<Element> at(t, Format::kLanes);
    const int64_t heads = t.kv_heads * t.kv_group;
    padded<Element>({static_cast<const Element*>(t.q), t.q_head}, heads, t.head_dim, at.dim, at.queries);
    for (int64_t head = 0; head < heads; ++head) {
        float* row = t.partial + head * at.partial_row;
        for (ptrdiff_t i = 0; i < at.partial_row; i += 16) store(row + i, f32x16(0.0f));
        row[at.partial_row - static_cast<ptrdiff_t>(kDecodePartialExtra)] = kNothing;
    }
    for (int64_t key = t.begin; key < t.end; key += kBlock) {
        const int n = static_cast<int>(t.end - key < kBlock ? t.end - key : kBlock);
        weigh_block<Format>(t, at, key, n);
        add_weighed<Format>(t, at, key, n);
    }
}

// One row's partial sums, n of them `stride` floats apart, joined in order and divided by their weight.
template <class Format>
WHET_INLINE void merge(const float* partials, ptrdiff_t n, ptrdiff_t stride, int64_t head_dim,
                       typename Format::Element* out) {
    const float* extras = partials + rounded_up(head_dim, 32);
    float top = kNothing, total = 0.0f;
    for (ptrdiff_t i = 0; i < n; ++i) top = extras[i * stride] > top ? extras[i * stride] : top;
    const auto factor = [&](ptrdiff_t i) WHET_INLINE_LAMBDA {
        return exp2_fast(max(f32x16(-127.0f), f32x16(extras[i * stride] - top)));
    };
    for (ptrdiff_t i = 0; i < n; ++i) total += factor(i)[0] * extras[i * stride + 1];
    const f32x16 inverse(total == 0.0f ? 0.0f : 1.0f / total);
    for (int64_t c = 0; c < head_dim; c += Format::kLanes) {
        f32x16 sums[Format::kLanes / 16];
        for (f32x16& sum : sums) sum = f32x16(0.0f);
        for (ptrdiff_t i = 0; i < n; ++i) {
            const f32x16 shrunk = factor(i);
            const float* from = partials + i * stride + c;
            for (f32x16& sum : sums) sum = fma(load(from), shrunk, sum), from += 16;
        }
        for (f32x16& sum : sums) sum = sum * inverse;
        const int64_t left = head_dim - c;
        Format::store_columns(out + c, sums, static_cast<int>(left < Format::kLanes ? left : Format::kLanes));
    }
}

}  // namespace decode

// Bytes of scratch memory that a task needs.
size_t decode_scratch(const DecodeTask& t) {
    const int64_t heads = t.kv_heads * t.kv_group, dim = decode::rounded_up(t.head_dim, 32);
    return static_cast<size_t>(heads * (decode::kBlock + dim) + decode::rounded_up(heads, 16) + decode::kBlock * dim) *
           sizeof(float);
}

void decode_attention_f32(const DecodeTask& task) { decode::attend<decode::Float32>(task); }
void decode_attention_bf16(const DecodeTask& task) { decode::attend<decode::BFloat16>(task); }

void merge_decode_f32(const float* partials, size_t n, size_t stride, size_t head_dim, float* out) {
    decode::merge<decode::Float32>(partials, static_cast<ptrdiff_t>(n), static_cast<ptrdiff_t>(stride),
                                   static_cast<int64_t>(head_dim), out);
}
void merge_decode_bf16(const float* partials, size_t n, size_t stride, size_t head_dim, uint16_t* out) {
    decode::merge<decode::BFloat16>(partials, static_cast<ptrdiff_t>(n), static_cast<ptrdiff_t>(stride),
                                    static_cast<int64_t>(head_dim), out);
}

}  // namespace
}  // namespace whet::WHET_ISA
