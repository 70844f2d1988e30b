// Causal attention of a packed training batch, and its gradient, over the pool.
//
// Sequences are concatenated: queries [q_offsets[s], q_offsets[s + 1]) attend to the keys of tokens
// key_rows[k_offsets[s] : k_offsets[s + 1]], aligned at the end. Tokens shared by several sequences, such as a prompt
// with several completions, are stored once.
#pragma once
#include <cstddef>
#include <cstdint>

namespace whet {

// (tokens, heads, head_dim), strides in elements, the last axis contiguous.
struct TokenHeads {
    const void* data = nullptr;
    ptrdiff_t token = 0, head = 0;
};

struct TrainingAttention {
    bool bf16 = false;
    int64_t n_tokens = 0, n_heads = 0, n_kv_heads = 0, head_dim = 0, n_sequences = 0;
    const int64_t *q_offsets = nullptr, *k_offsets = nullptr;  // (n_sequences + 1,)
    const int64_t* key_rows = nullptr;                         // (k_offsets[n_sequences],)
    int64_t window = 0;                                        // keys in the window, including the query's
    double scale = 0.0;
    double softcap = 0.0;          // of scores: softcap tanh(score / softcap); 0: none
    const float* sinks = nullptr;  // (n_heads,): a logit per head without a value; null: none
    TokenHeads q, k, v;
    void* out = nullptr;   // (n_tokens, n_heads, head_dim), contiguous
    float* lse = nullptr;  // (n_tokens, n_heads)
};

// Gradients are contiguous. grad_k and grad_v of a token are sums over readers[reader_offsets[token]:], the indices of
// the token in key_rows, in order: bit-identical for any number of threads.
struct TrainingAttentionGradients {
    const void* out = nullptr;  // gradient of the result
    void *q = nullptr, *k = nullptr, *v = nullptr;
    const int64_t *reader_offsets = nullptr, *readers = nullptr;
};

// Throws std::bad_alloc.
void attention_forward(const TrainingAttention& a);

// `out` and `lse` are results of the forward pass. Throws std::bad_alloc.
void attention_backward(const TrainingAttention& a, const TrainingAttentionGradients& grads);

}  // namespace whet
