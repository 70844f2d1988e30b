// Attention of one query per sequence over its contiguous cache: bound by memory bandwidth.
//
// A primitive for callers with a contiguous cache (whet.decode_attention). The engine has a paged cache instead, and
// cached_attention.h reads a page that sequences share once for all of them.
//
// A task processes a chunk of keys in blocks: scores, a step of the online softmax, values. Keys and values are read in
// place, a few keys at a time and head by head, so that memory is read almost sequentially: hardware prefetching then
// works, and with software prefetches the kernel reaches most of the memory bandwidth. A row of a KV head serves up to
// 4 query heads at once. Scores are 16 dot products at a time (query heads x keys), whose lanes sum_each adds at the
// end; values are added column panel by column panel.
//
// A task returns unnormalised sums with their maximum; merge_decode_* merges the chunks of a row in order. Chunks have
// a fixed length, so that a result does not depend on threads or on the batch. bfloat16: products of queries and keys
// by dot_bf16, weights float32, values widened exactly. Rows without keys, or with only scores of -inf, give zeros.
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

constexpr int kBlock = 64;                   // keys in a block
constexpr int64_t kPrefetchElements = 8192;  // prefetch distance, in elements of keys or values
#if defined(__wasm__)
constexpr int kKeysPerPass = 4;  // their sums fit in 16 registers
constexpr int kTileHeads = 1;    // one instantiation, for the size of the download
#else
constexpr int kKeysPerPass = 16;
constexpr int kTileHeads = 4;
#endif
constexpr float kOnes[4] = {1.0f, 1.0f, 1.0f, 1.0f};

// Rows with a stride.
template <class Element>
struct StridedRows {
    const Element* data;
    ptrdiff_t stride;
    WHET_INLINE const Element* operator[](ptrdiff_t i) const { return data + i * stride; }
};

// Prefetches rows of n keys or values of all KV heads one by one, in the order of memory.
template <class Element>
struct Prefetch {
    const Element* data = nullptr;
    ptrdiff_t token = 0, head = 0;
    int64_t n = 0, heads = 0;
    size_t row_bytes = 0;
    int64_t at_head = 0;

    WHET_INLINE void fetch_row() {
        if (n <= 0) return;
        const char* row = reinterpret_cast<const char*>(data + at_head * head);
        // To L2: kPrefetchElements elements would fill L1.
        for (size_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
        if (++at_head < heads) return;
        at_head = 0;
        data += token;
        --n;
    }
};

// Writes base-2 scores of `rows` queries against n keys to out[r * kBlock + key]. rows x keys is at most 16.
template <class Format, int rows>
WHET_INLINE void scores(StridedRows<typename Format::Element> q, StridedRows<typename Format::Element> k, int n,
                        int dim, float scale, float* out, Prefetch<typename Format::Element>* prefetch) {
    constexpr int keys = rows == 1 ? 16 : rows == 2 ? 8 : 4;
    for (int key = 0; key < n; key += keys) {
        const typename Format::Element* from[keys];
        for (int j = 0; j < keys; ++j) {
            from[j] = k[key + j < n ? key + j : n - 1];
            if (key + j < n && prefetch != nullptr) prefetch->fetch_row();
        }
        f32x16 sums[16];
        for (int i = rows * keys; i < 16; ++i) sums[i] = f32x16(0.0f);
        constexpr int per_pass = keys < kKeysPerPass ? keys : kKeysPerPass;
        WHET_UNROLL(4)
        for (int first = 0; first < keys; first += per_pass) {
            f32x16* pass_sums = sums + first;
            f32x16 products[rows][per_pass];
#pragma GCC unroll 4
            for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 16
                for (int j = 0; j < per_pass; ++j) products[r][j] = f32x16(0.0f);
            }
            for (int d = 0; d < dim; d += Format::kLanes) {
                typename Format::Vector query[rows];
#pragma GCC unroll 4
                for (int r = 0; r < rows; ++r) query[r] = Format::load_vector(q[r] + d);
#pragma GCC unroll 16
                for (int j = 0; j < per_pass; ++j) {
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
                for (int j = 0; j < per_pass; ++j) pass_sums[r * keys + j] = products[r][j];
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

// Converts a row's n scores to weights 2^(score - maximum), and updates its maximum and sum (extra[0] and extra[1]).
// Returns the factor that rescales the sums so far.
WHET_INLINE float exp_weights(float* scores, int n, float* extra) {
    const int end = (n + 15) / 16 * 16;
    for (int i = n; i < end; ++i) scores[i] = -__builtin_inff();
    const f32x16 old_maximum(extra[0]), lowest(-127.0f);  // exp2_fast(-127) is 0
    f32x16 maximum = old_maximum;
    for (int i = 0; i < end; i += 16) maximum = max(load(scores + i), maximum);
    maximum = max_lanes(maximum);
    const float factor = exp2_fast(max(lowest, old_maximum - maximum))[0];
    f32x16 sum(0.0f);
    for (int i = 0; i < end; i += 16) {
        const f32x16 weight = exp2_fast(max(lowest, load(scores + i) - maximum));
        sum += weight;
        store(scores + i, weight);
    }
    extra[0] = maximum[0];
    extra[1] = extra[1] * factor + sum_lanes(sum);
    return factor;
}

// Rescales columns [column, column + 16 columns) of `rows` outputs by their factors, and adds weights times n values.
template <class Format, int rows, int columns>
WHET_INLINE void add_values(StridedRows<typename Format::Element> v, int n, const float* weights, const float* factors,
                            float* out, ptrdiff_t out_row, ptrdiff_t column,
                            Prefetch<typename Format::Element>* prefetch) {
    constexpr int per_load = Format::kLanes / 16;
    f32x16 sums[rows][columns];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < columns; ++c) sums[r][c] = load(out + r * out_row + column + 16 * c) * f32x16(factors[r]);
    }
    for (int key = 0; key < n; ++key) {
        const typename Format::Element* row = v[key] + column;
        if (prefetch != nullptr) prefetch->fetch_row();
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
                           Prefetch<typename Format::Element>* prefetch) {
    ptrdiff_t column = 0;
    for (; column + 64 <= dim; column += 64, prefetch = nullptr) {
        add_values<Format, rows, 4>(v, n, weights, factors, partial, partial_row, column, prefetch);
    }
    for (; column < dim; column += Format::kLanes, prefetch = nullptr) {
        add_values<Format, rows, Format::kLanes / 16>(v, n, weights, factors, partial, partial_row, column, prefetch);
    }
}

// Calls body<rows>(first head) for tiles of kTileHeads query heads and one tile of the rest.
template <class Body>
WHET_INLINE void each_tile(int64_t kv_group, Body&& body) {
    int64_t head = 0;
    for (; head + kTileHeads <= kv_group; head += kTileHeads) body.template operator()<kTileHeads>(head);
    if constexpr (kTileHeads > 1) {
        if (kv_group - head == 3) body.template operator()<3>(head);
        if (kv_group - head == 2) body.template operator()<2>(head);
        if (kv_group - head == 1) body.template operator()<1>(head);
    }
}

// Copies rows of head_dim elements to rows of `dim`, padded with zeros.
template <class Element>
WHET_INLINE StridedRows<Element> pad_rows(StridedRows<Element> x, ptrdiff_t n, ptrdiff_t head_dim, ptrdiff_t dim,
                                          Element* copy) {
    for (ptrdiff_t i = 0; i < n; ++i) {
        __builtin_memcpy(copy + i * dim, x[i], static_cast<size_t>(head_dim) * sizeof(Element));
        for (ptrdiff_t d = head_dim; d < dim; ++d) copy[i * dim + d] = 0;
    }
    return {copy, dim};
}

// n rounded up to a multiple of `to`.
WHET_INLINE ptrdiff_t round_up(int64_t n, int to) { return static_cast<ptrdiff_t>((n + to - 1) / to * to); }

// The buffers of a task in its scratch memory.
template <class Element>
struct DecodeLayout {
    ptrdiff_t dim, partial_row;
    float *weights, *factors;
    Element *queries, *copies;

    WHET_INLINE DecodeLayout(const DecodeTask& t, int lanes) {
        dim = round_up(t.head_dim, lanes);
        partial_row = round_up(t.head_dim, 32) + static_cast<ptrdiff_t>(kDecodePartialExtra);
        weights = static_cast<float*>(t.scratch);
        factors = weights + t.kv_heads * t.kv_group * kBlock;
        queries = reinterpret_cast<Element*>(factors + round_up(t.kv_heads * t.kv_group, 16));
        copies = queries + t.kv_heads * t.kv_group * dim;
    }
};

// The prefetch of rows from kPrefetchElements elements after `key` to the end of the task.
template <class Element>
WHET_INLINE Prefetch<Element> make_prefetch(const DecodeTask& t, const void* data, ptrdiff_t token, ptrdiff_t head,
                                            int64_t key) {
    key += (kPrefetchElements + t.kv_heads * t.head_dim - 1) / (t.kv_heads * t.head_dim);
    if (key >= t.end) return {};
    return {static_cast<const Element*>(data) + key * token,  token, head, t.end - key, t.kv_heads,
            static_cast<size_t>(t.head_dim) * sizeof(Element)};
}

// Computes scores, then weights, of keys [key, key + n) for all heads.
template <class Format>
WHET_INLINE void exp_weights_of_block(const DecodeTask& t, const DecodeLayout<typename Format::Element>& at,
                                      int64_t key, int n) {
    using Element = typename Format::Element;
    const Element* all_keys = static_cast<const Element*>(t.k) + key * t.k_token;
    auto prefetch = make_prefetch<Element>(t, t.k, t.k_token, t.k_head, key);
    // The fewest keys that fill a vector of scores in every tile.
    const int step = t.kv_group % 4 == 1 ? 16 : t.kv_group % 4 == 2 ? 8 : 4;
    for (int from = 0; from < n; from += step) {
        const int n_keys = n - from < step ? n - from : step;
        for (int64_t kv_head = 0; kv_head < t.kv_heads; ++kv_head) {
            StridedRows<Element> k{all_keys + from * t.k_token + kv_head * t.k_head, t.k_token};
            if (at.dim != t.head_dim) k = pad_rows(k, n_keys, t.head_dim, at.dim, at.copies);
            each_tile(t.kv_group, [&]<int rows>(int64_t in_group) WHET_INLINE_LAMBDA {
                const int64_t head = kv_head * t.kv_group + in_group;
                const StridedRows<Element> q{at.queries + head * at.dim, at.dim};
                scores<Format, rows>(q, k, n_keys, static_cast<int>(at.dim), t.scale, at.weights + head * kBlock + from,
                                     in_group == 0 ? &prefetch : nullptr);
            });
        }
    }
    for (int64_t head = 0; head < t.kv_heads * t.kv_group; ++head) {
        float* extra = t.partial + (head + 1) * at.partial_row - kDecodePartialExtra;
        at.factors[head] = exp_weights(at.weights + head * kBlock, n, extra);
    }
}

// Adds the values of these keys times their weights.
template <class Format>
WHET_INLINE void add_block_values(const DecodeTask& t, const DecodeLayout<typename Format::Element>& at, int64_t key,
                                  int n) {
    using Element = typename Format::Element;
    constexpr int step = 8;
    const Element* all_values = static_cast<const Element*>(t.v) + key * t.v_token;
    auto prefetch = make_prefetch<Element>(t, t.v, t.v_token, t.v_head, key);
    for (int from = 0; from < n; from += step) {
        const int n_keys = n - from < step ? n - from : step;
        for (int64_t kv_head = 0; kv_head < t.kv_heads; ++kv_head) {
            StridedRows<Element> v{all_values + from * t.v_token + kv_head * t.v_head, t.v_token};
            if (at.dim != t.head_dim) v = pad_rows(v, n_keys, t.head_dim, at.dim, at.copies);
            each_tile(t.kv_group, [&]<int rows>(int64_t in_group) WHET_INLINE_LAMBDA {
                const int64_t head = kv_head * t.kv_group + in_group;
                add_block<Format, rows>(v, n_keys, static_cast<int>(at.dim), at.weights + head * kBlock + from,
                                        from == 0 ? at.factors + head : kOnes, t.partial + head * at.partial_row,
                                        at.partial_row, in_group == 0 ? &prefetch : nullptr);
            });
        }
    }
}

template <class Format>
WHET_INLINE void attend(const DecodeTask& t) {
    using Element = typename Format::Element;
    const DecodeLayout<Element> at(t, Format::kLanes);
    const int64_t heads = t.kv_heads * t.kv_group;
    pad_rows<Element>({static_cast<const Element*>(t.q), t.q_head}, heads, t.head_dim, at.dim, at.queries);
    for (int64_t head = 0; head < heads; ++head) {
        float* row = t.partial + head * at.partial_row;
        for (ptrdiff_t i = 0; i < at.partial_row; i += 16) store(row + i, f32x16(0.0f));
        row[at.partial_row - static_cast<ptrdiff_t>(kDecodePartialExtra)] = kInitialMax;
    }
    for (int64_t key = t.begin; key < t.end; key += kBlock) {
        const int n = static_cast<int>(t.end - key < kBlock ? t.end - key : kBlock);
        exp_weights_of_block<Format>(t, at, key, n);
        add_block_values<Format>(t, at, key, n);
    }
}

// Merges n partial sums of a row, `stride` floats apart, in order, and divides by the sum of weights.
template <class Format>
WHET_INLINE void merge(const float* partials, size_t n, size_t stride, size_t head_dim, typename Format::Element* out) {
    const float* extras = partials + round_up(static_cast<int64_t>(head_dim), 32);
    float maximum = kInitialMax, total = 0.0f;
    for (size_t i = 0; i < n; ++i) maximum = extras[i * stride] > maximum ? extras[i * stride] : maximum;
    const auto factor = [&](size_t i) WHET_INLINE_LAMBDA {
        return exp2_fast(max(f32x16(-127.0f), f32x16(extras[i * stride] - maximum)));
    };
    for (size_t i = 0; i < n; ++i) total += factor(i)[0] * extras[i * stride + 1];
    const f32x16 inverse(total == 0.0f ? 0.0f : 1.0f / total);
    for (size_t c = 0; c < head_dim; c += Format::kLanes) {
        f32x16 sums[Format::kLanes / 16];
        for (f32x16& sum : sums) sum = f32x16(0.0f);
        for (size_t i = 0; i < n; ++i) {
            const f32x16 rescale = factor(i);
            const float* from = partials + i * stride + c;
            for (f32x16& sum : sums) sum = fma(load(from), rescale, sum), from += 16;
        }
        for (f32x16& sum : sums) sum = sum * inverse;
        const size_t left = head_dim - c;
        Format::store_columns(out + c, sums, static_cast<int>(left < Format::kLanes ? left : Format::kLanes));
    }
}

}  // namespace decode

// Bytes of scratch memory that a task needs.
size_t decode_scratch(const DecodeTask& t) {
    const int64_t heads = t.kv_heads * t.kv_group, dim = decode::round_up(t.head_dim, 32);
    return static_cast<size_t>(heads * (decode::kBlock + dim) + decode::round_up(heads, 16) + decode::kBlock * dim) *
           sizeof(float);
}

constexpr auto decode_attention_f32 = decode::attend<decode::Float32>;
constexpr auto decode_attention_bf16 = decode::attend<decode::BFloat16>;
constexpr auto merge_decode_f32 = decode::merge<decode::Float32>;
constexpr auto merge_decode_bf16 = decode::merge<decode::BFloat16>;

}  // namespace
}  // namespace whet::WHET_ISA
