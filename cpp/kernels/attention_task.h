// One task of the attention kernels. Strides are in elements; the last axis is contiguous.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace whet {

constexpr int kAttentionRows = 256;         // query rows (queries x heads of a KV head) that a task should have
constexpr int kAttentionMaxBlock = 256;     // keys in a block, at most; a multiple of 32
constexpr int kDecodeChunk = 256;           // keys of a decode task: fixed, so that results do not depend on threads
constexpr int kAttentionMaxHeadDim = 256;   // and a head_dim is a multiple of 8
constexpr size_t kDecodePartialExtra = 16;  // floats after a row's sums: its maximum, its sum of weights, padding

// A block of queries of one sequence, for all query heads that share one KV head.
struct AttentionTask {
    const void *q, *k, *v;  // the first query's first head; key and value 0 of the sequence
    void* out;              // as q
    ptrdiff_t q_token, q_head, k_token, v_token, out_token, out_head;
    int64_t n_queries, kv_group, head_dim;  // kv_group: query heads per KV head
    int64_t n_keys;                         // of the sequence
    int64_t position;                       // of the first query among the keys; below 0 it sees nothing
    int64_t window;                         // keys seen, the query's own included
    bool causal;
    int block_size;
    float scale;              // of the base-2 scores
    float softcap;            // of the same: cap tanh(score / cap); 0: none
    const int64_t* key_rows;  // key j and its value are key_rows[j] tokens after k and v; null: j
    float* lse;               // of query i and head h at [i * lse_token + h], in base 2; null: not wanted
    ptrdiff_t lse_token;
    void* scratch;  // attention_scratch(task) bytes, aligned to 64

    ptrdiff_t key_row(int64_t j) const { return key_rows == nullptr ? j : key_rows[j]; }
};

// The gradient of one sequence: all of its queries, for all query heads that share one KV head. lse and out are those
// of the forward pass; grad_out, out and grad_q have the strides out_token and out_head.
struct AttentionBackwardTask : AttentionTask {
    const void* grad_out;
    void* grad_q;
    float *grad_k, *grad_v;  // (n_keys, head_dim), of the sequence's keys in their order
};

// Keys [begin, end) of one sequence for its one query, over one or more KV heads.
struct DecodeTask {
    const void *q, *k, *v;  // the first head; key and value 0 of the sequence
    ptrdiff_t q_head, k_token, k_head, v_token, v_head;
    int64_t kv_heads, kv_group, head_dim, begin, end;
    float scale;
    float* partial;  // for each query head head_dim rounded up to 32 floats, and kDecodePartialExtra more
    void* scratch;   // decode_scratch(task) bytes, aligned to 64
};

constexpr int kPageTokens = 64;  // keys and values that a page of a cache holds

// Query rows against some pages of one KV head. A row's state is its unnormalised output (head_dim rounded up to 16
// floats), then its maximum and its sum of weights, in 16 more.
struct CachedTask {
    const void* queries;       // (rows, head_dim) of the cache's dtype, a bfloat16 row padded to an even length
    const int32_t* positions;  // of the rows: the last key that each sees
    float* state;
    int64_t rows, head_dim, window;  // window: keys seen, the query's own included
    const uint8_t* cache;            // the KV head's keys in page 0; its values follow
    size_t page_bytes;
    const int32_t* pages;  // of the sequence, from its first key on
    int64_t begin, end;    // which of them
    float scale, softcap;  // as AttentionTask has them
};

}  // namespace whet
