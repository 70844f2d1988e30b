#include "engine/training_attention.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "engine/attention.h"
#include "engine/scratch.h"
#include "kernels/dispatch.h"
#include "runtime/split.h"

namespace whet {
namespace {

AttentionShape shape_of(const TrainingAttention& a) {
    AttentionShape shape;
    shape.bf16 = a.bf16;
    shape.n_heads = a.n_heads, shape.n_kv_heads = a.n_kv_heads, shape.head_dim = a.head_dim;
    shape.q_token = a.q.token, shape.q_head = a.q.head;
    shape.k_token = a.k.token, shape.k_head = a.k.head;
    shape.v_token = a.v.token, shape.v_head = a.v.head;
    shape.out_token = a.n_heads * a.head_dim, shape.out_head = a.head_dim;
    shape.window = a.window, shape.scale = base_2_scale(a.scale);
    shape.cap = base_2_scale(a.softcap);
    shape.sinks = a.sinks;
    return shape;
}

std::vector<AttentionSequence> sequences_of(const TrainingAttention& a) {
    const auto size = static_cast<int64_t>(a.bf16 ? sizeof(uint16_t) : sizeof(float));
    std::vector<AttentionSequence> sequences;
    for (int64_t s = 0; s < a.n_sequences; ++s) {
        const int64_t token = a.q_offsets[s];
        sequences.push_back({.q = static_cast<const char*>(a.q.data) + token * a.q.token * size,
                             .k = a.k.data,
                             .v = a.v.data,
                             .out = static_cast<char*>(a.out) + token * a.n_heads * a.head_dim * size,
                             .n_queries = a.q_offsets[s + 1] - token,
                             .n_keys = a.k_offsets[s + 1] - a.k_offsets[s],
                             .key_rows = a.key_rows + a.k_offsets[s],
                             .lse = a.lse + token * a.n_heads});
    }
    return sequences;
}

// grad (n_tokens, n_kv_heads, head_dim) of keys or values: sums the partial gradients (n_kv_heads, key rows, head_dim)
// of each token in order.
void add_readers(const TrainingAttention& a, const TrainingAttentionGradients& grads, const float* parts, void* grad) {
    const int64_t n_rows = a.k_offsets[a.n_sequences], d = a.head_dim;
    const double work = static_cast<double>(n_rows * a.n_kv_heads * d) * 0.15;
    parallel_split(static_cast<size_t>(a.n_tokens), 64, work, [&](size_t begin, size_t end) {
        std::vector<float> sum(static_cast<size_t>(d));
        for (size_t token = begin; token < end; ++token) {
            for (int64_t head = 0; head < a.n_kv_heads; ++head) {
                std::fill(sum.begin(), sum.end(), 0.0f);
                for (int64_t r = grads.reader_offsets[token]; r < grads.reader_offsets[token + 1]; ++r) {
                    const float* part = parts + (head * n_rows + grads.readers[r]) * d;
                    for (int64_t c = 0; c < d; ++c) sum[static_cast<size_t>(c)] += part[c];
                }
                const int64_t to = (static_cast<int64_t>(token) * a.n_kv_heads + head) * d;
                if (a.bf16) {
                    kernels().bf16_from_f32(sum.data(), sum.size(), static_cast<uint16_t*>(grad) + to);
                } else {
                    std::copy(sum.begin(), sum.end(), static_cast<float*>(grad) + to);
                }
            }
        }
    });
}

}  // namespace

void attention_forward(const TrainingAttention& a) { attention(shape_of(a), sequences_of(a)); }

void attention_backward(const TrainingAttention& a, const TrainingAttentionGradients& grads) {
    const AttentionShape shape = shape_of(a);
    std::vector<AttentionSequence> sequences = sequences_of(a);
    const double work = attention_work(shape, sequences);
    std::erase_if(sequences, [](const AttentionSequence& s) { return s.n_keys == 0; });
    // Longest task last: the pool claims the last task first.
    std::sort(sequences.begin(), sequences.end(), [](const AttentionSequence& x, const AttentionSequence& y) {
        return x.n_queries * x.n_keys < y.n_queries * y.n_keys;
    });
    const int64_t n_rows = a.k_offsets[a.n_sequences], d = a.head_dim;
    const auto n_floats = static_cast<size_t>(n_rows * a.n_kv_heads * d), kv_heads = static_cast<size_t>(a.n_kv_heads);
    const auto of_keys = std::make_unique_for_overwrite<float[]>(n_floats);
    const auto of_values = std::make_unique_for_overwrite<float[]>(n_floats);
    const auto kernel = a.bf16 ? kernels().attention_backward_bf16 : kernels().attention_backward_f32;
    parallel_for(sequences.size() * kv_heads, work, [&](size_t i) {
        const AttentionSequence& sequence = sequences[i / kv_heads];
        const auto kv_head = static_cast<int64_t>(i % kv_heads);
        AttentionBackwardTask task{make_attention_task(shape, sequence, kv_head, 0, sequence.n_queries), nullptr,
                                   nullptr, nullptr, nullptr};
        const ptrdiff_t to_out = static_cast<const char*>(task.out) - static_cast<const char*>(a.out);
        task.grad_out = static_cast<const char*>(grads.out) + to_out;
        task.grad_q = static_cast<char*>(grads.q) + to_out;
        const int64_t first = (kv_head * n_rows + (sequence.key_rows - a.key_rows)) * d;
        task.grad_k = of_keys.get() + first, task.grad_v = of_values.get() + first;
        task.scratch = scratch<char>(kernels().attention_backward_scratch(task), Scratch::kTask);
        kernel(task);
    });
    add_readers(a, grads, of_keys.get(), grads.k);
    add_readers(a, grads, of_values.get(), grads.v);
}

}  // namespace whet
