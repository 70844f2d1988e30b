// The tasks of the attention kernels. Strides are in elements; the last axis is contiguous.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace whet {

constexpr int kAttentionRows = 256;         // target number of query rows (queries x heads of a KV head) of a task
constexpr int kAttentionMaxBlock = 256;     // largest block of keys; a multiple of 32
constexpr int kDecodeChunk = 256;           // keys of a decode task: fixed, so that results do not depend on threads
constexpr int kAttentionMaxHeadDim = 512;   // head_dim is a multiple of 8
constexpr size_t kDecodePartialExtra = 16;  // floats after a row's sums: maximum, sum of weights, padding

// A block of queries of one sequence, for all query heads that share one KV head.
struct AttentionTask {
    const void *q, *k, *v;  // first query, first head; key 0 and value 0 of the sequence
    void* out;              // like q
    ptrdiff_t q_token, q_head, k_token, v_token, out_token, out_head;
    int64_t n_queries, kv_group, head_dim;  // kv_group: query heads per KV head
    int64_t n_keys;                         // of the sequence
    int64_t position;                       // of the first query among the keys; a query below 0 has no keys
    int64_t window;                         // number of keys attended to, including the query's own
    bool causal;
    int block_size;
    float scale;              // of the base-2 scores
    float softcap;            // scores become softcap tanh(score / softcap); 0: none
    const int64_t* key_rows;  // key j and its value are at token key_rows[j] of k and v; null: j
    float* lse;               // log-sum-exp, base 2, of query i and head h at [i * lse_token + h]; null: not computed
    ptrdiff_t lse_token;
    const float* sinks;  // logits of the query heads without a value; null: none
    void* scratch;       // attention_scratch(task) bytes, aligned to 64

    ptrdiff_t key_row(int64_t j) const { return key_rows == nullptr ? j : key_rows[j]; }
};

// The gradient of one sequence: all queries, for all query heads that share one KV head. lse and out come from the
// forward pass; grad_out, out and grad_q have the strides out_token and out_head.
struct AttentionBackwardTask : AttentionTask {
    const void* grad_out;
    void* grad_q;
    float *grad_k, *grad_v;  // (n_keys, head_dim), in the order of the sequence's keys
};

// Keys [begin, end) of one sequence for its one query, over one or more KV heads.
struct DecodeTask {
    const void *q, *k, *v;  // first head; key 0 and value 0 of the sequence
    ptrdiff_t q_head, k_token, k_head, v_token, v_head;
    int64_t kv_heads, kv_group, head_dim, begin, end;
    float scale;
    float* partial;  // per query head: head_dim rounded up to 32 floats, then kDecodePartialExtra more
    void* scratch;   // decode_scratch(task) bytes, aligned to 64
};

constexpr int kPageTokens = 64;  // tokens of a page of the KV cache

// Query rows against pages of one KV head. A row's state is its unnormalised output (head_dim rounded up to 16 floats),
// then its maximum and its sum of weights, in 16 more.
struct CachedTask {
    const void* queries;       // rows as cached_write_query_* writes them
    const int32_t* positions;  // of the rows: the last key each attends to
    float* state;
    int64_t rows, head_dim, window;  // window: number of keys attended to, including the query's own
    const uint8_t* cache;            // the KV head's keys in page 0, then its values
    size_t page_bytes;
    const int32_t* pages;  // of the sequence, in order
    int64_t begin, end;    // range of `pages` to process
    float scale, softcap;  // as in AttentionTask
};

}  // namespace whet
