// Attention over the pool: cuts sequences into tasks for the kernels and merges the partial results of decoding.
//
// Elements are float32 or bfloat16, strides are in elements, the last axis is contiguous and n_heads is a multiple of
// n_kv_heads: preconditions, checked by the caller. A task is a KV head with a block of queries or a run of keys; the
// cuts do not depend on the number of threads.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/attention_task.h"

namespace whet {

constexpr int64_t kNoWindow = int64_t{1} << 62;

// Converts a scale or softcap for the kernels, whose scores are base 2.
inline float base_2_scale(double scale) { return static_cast<float>(scale * 0x1.71547652b82fep+0); }

// Parameters shared by all sequences of a call.
struct AttentionShape {
    bool bf16 = false;
    int64_t n_heads = 0, n_kv_heads = 0, head_dim = 0;
    ptrdiff_t q_token = 0, q_head = 0, k_token = 0, k_head = 0, v_token = 0, v_head = 0, out_token = 0, out_head = 0;
    int64_t window = kNoWindow;  // keys in the window, including the query's
    bool causal = true;
    int block_size = 0;            // keys per block; 0: chosen by head_dim
    float scale = 0.0f;            // of base-2 scores
    float cap = 0.0f;              // softcap of base-2 scores; 0: none
    const float* sinks = nullptr;  // (n_heads,): logits without a value; null: none

    size_t item_size() const { return bf16 ? sizeof(uint16_t) : sizeof(float); }
    int64_t kv_group() const { return n_heads / n_kv_heads; }
};

// One sequence, its queries aligned with the end of its keys.
struct AttentionSequence {
    const void *q, *k, *v;  // head 0 of the first query, of key 0 and of value 0
    void* out;              // as q
    int64_t n_queries, n_keys;
    const int64_t* key_rows = nullptr;  // key j and its value are key_rows[j] tokens after k and v; null: j
    float* lse = nullptr;               // (n_queries, n_heads): log2-sum-exp2 of the scores; null: not computed
};

// Rough estimate in nanoseconds on one core.
double attention_work(const AttentionShape& shape, const std::vector<AttentionSequence>& sequences);

// out = softmax(scale q K^T) V of every sequence. Throws std::bad_alloc.
void attention(const AttentionShape& shape, const std::vector<AttentionSequence>& sequences);

// Task for queries [begin, end) of a sequence and one KV head; the caller sets its scratch memory.
AttentionTask make_attention_task(const AttentionShape& shape, const AttentionSequence& sequence, int64_t kv_head,
                                  int64_t begin, int64_t end);

// One query per sequence, over keys [begin, end) of that sequence's cache.
struct DecodeSequence {
    const void *q, *k, *v;  // head 0 of the query, of key 0 and of value 0
    void* out;              // head 0
    int64_t begin, end;
};

// Keys are summed in runs of kDecodeChunk, which are merged in order. Throws std::bad_alloc.
void decode_attention(const AttentionShape& shape, const std::vector<DecodeSequence>& sequences);

}  // namespace whet
