#include "engine/attention.h"

#include <algorithm>

#include "engine/scratch.h"
#include "kernels/dispatch.h"
#include "runtime/split.h"

namespace whet {
namespace {

const char* at(const void* base, int64_t element, size_t item_size) {
    return static_cast<const char*>(base) + element * static_cast<int64_t>(item_size);
}
char* at(void* base, int64_t element, size_t item_size) {
    return static_cast<char*>(base) + element * static_cast<int64_t>(item_size);
}

struct QueryBlock {
    const AttentionSequence* sequence;
    int64_t begin, end;

    double cost() const {
        const int64_t position = sequence->n_keys - sequence->n_queries + begin;
        return static_cast<double>(end - begin) * static_cast<double>(sequence->n_keys + position);
    }
};

// Cuts queries into even blocks of at most kAttentionRows rows, cheapest first: the pool claims the last task first.
std::vector<QueryBlock> cut(const AttentionShape& shape, const std::vector<AttentionSequence>& sequences) {
    const int64_t size = std::max<int64_t>(1, kAttentionRows / shape.kv_group());
    std::vector<QueryBlock> blocks;
    for (const AttentionSequence& sequence : sequences) {
        const int64_t n = sequence.n_queries, n_blocks = (n + size - 1) / size;
        for (int64_t b = 0; b < n_blocks; ++b) blocks.push_back({&sequence, n * b / n_blocks, n * (b + 1) / n_blocks});
    }
    std::sort(blocks.begin(), blocks.end(),
              [](const QueryBlock& a, const QueryBlock& b) { return a.cost() < b.cost(); });
    return blocks;
}

// A run of keys of one sequence.
struct KeyRun {
    const DecodeSequence* sequence;
    int64_t begin, end;
};

// Rough estimate in nanoseconds on one core.
double decode_attention_work(const AttentionShape& shape, const std::vector<DecodeSequence>& sequences) {
    double keys = 0.0;
    for (const DecodeSequence& s : sequences) keys += static_cast<double>(s.end - s.begin);
    return keys * static_cast<double>(shape.n_kv_heads * shape.head_dim) * 0.15;
}

}  // namespace

AttentionTask make_attention_task(const AttentionShape& shape, const AttentionSequence& sequence, int64_t kv_head,
                                  int64_t begin, int64_t end) {
    const size_t size = shape.item_size();
    const int64_t head = kv_head * shape.kv_group();
    AttentionTask task{};
    task.q = at(sequence.q, begin * shape.q_token + head * shape.q_head, size);
    task.k = at(sequence.k, kv_head * shape.k_head, size);
    task.v = at(sequence.v, kv_head * shape.v_head, size);
    task.out = at(sequence.out, begin * shape.out_token + head * shape.out_head, size);
    task.q_token = shape.q_token, task.q_head = shape.q_head;
    task.k_token = shape.k_token, task.v_token = shape.v_token;
    task.out_token = shape.out_token, task.out_head = shape.out_head;
    task.n_queries = end - begin, task.n_keys = sequence.n_keys;
    task.kv_group = shape.kv_group(), task.head_dim = shape.head_dim;
    task.position = sequence.n_keys - sequence.n_queries + begin;
    task.window = shape.window, task.causal = shape.causal;
    task.block_size = shape.block_size != 0 ? shape.block_size : shape.head_dim <= 128 ? 256 : 128;
    task.scale = shape.scale, task.softcap = shape.cap;
    task.sinks = shape.sinks == nullptr ? nullptr : shape.sinks + head;
    task.key_rows = sequence.key_rows;
    task.lse = sequence.lse == nullptr ? nullptr : sequence.lse + begin * shape.n_heads + head;
    task.lse_token = shape.n_heads;
    return task;
}

double attention_work(const AttentionShape& shape, const std::vector<AttentionSequence>& sequences) {
    double scores = 0.0;
    for (const AttentionSequence& s : sequences) {
        const int64_t per_query = std::max(s.n_keys, 2 * s.n_keys - s.n_queries / 2);
        scores += static_cast<double>(s.n_queries) * static_cast<double>(per_query);
    }
    return scores * static_cast<double>(shape.n_heads * shape.head_dim) * 0.01;
}

void attention(const AttentionShape& shape, const std::vector<AttentionSequence>& sequences) {
    const std::vector<QueryBlock> blocks = cut(shape, sequences);
    const auto kv_heads = static_cast<size_t>(shape.n_kv_heads);
    const auto kernel = shape.bf16 ? kernels().attention_bf16 : kernels().attention_f32;
    parallel_for(blocks.size() * kv_heads, attention_work(shape, sequences), [&](size_t i) {
        const QueryBlock& block = blocks[i / kv_heads];
        AttentionTask task =
            make_attention_task(shape, *block.sequence, static_cast<int64_t>(i % kv_heads), block.begin, block.end);
        task.scratch = scratch<char>(kernels().attention_scratch(task), Scratch::kTask);
        kernel(task);
    });
}

void decode_attention(const AttentionShape& shape, const std::vector<DecodeSequence>& sequences) {
    std::vector<KeyRun> runs;
    std::vector<size_t> first(1, 0);  // first run of each sequence, and the total
    for (const DecodeSequence& s : sequences) {
        for (int64_t run = s.begin / kDecodeChunk * kDecodeChunk; run < s.end; run += kDecodeChunk) {
            runs.push_back({&s, std::max(s.begin, run), std::min<int64_t>(s.end, run + kDecodeChunk)});
        }
        first.push_back(runs.size());
    }
    const Kernels& kernel = kernels();
    const size_t size = shape.item_size(), heads = static_cast<size_t>(shape.n_heads);
    const auto head_dim = static_cast<size_t>(shape.head_dim);
    const size_t row = (head_dim + 31) / 32 * 32 + kDecodePartialExtra;
    auto* const partials = scratch<float>(runs.size() * heads * row, Scratch::kRuns);
    // If the heads of a key are contiguous, one task reads them all, sequentially.
    const bool together = shape.k_token > shape.k_head;
    const int64_t parts = together ? 1 : shape.n_kv_heads;
    const auto run = shape.bf16 ? kernel.decode_attention_bf16 : kernel.decode_attention_f32;
    parallel_for(runs.size() * static_cast<size_t>(parts), decode_attention_work(shape, sequences), [&](size_t i) {
        const KeyRun& keys = runs[i / static_cast<size_t>(parts)];
        const int64_t kv_head = static_cast<int64_t>(i) % parts, head = kv_head * shape.kv_group();
        DecodeTask task{};
        task.q = at(keys.sequence->q, head * shape.q_head, size);
        task.k = at(keys.sequence->k, kv_head * shape.k_head, size);
        task.v = at(keys.sequence->v, kv_head * shape.v_head, size);
        task.q_head = shape.q_head, task.k_token = shape.k_token, task.v_token = shape.v_token;
        task.k_head = shape.k_head, task.v_head = shape.v_head;
        task.kv_heads = shape.n_kv_heads / parts, task.kv_group = shape.kv_group(), task.head_dim = shape.head_dim;
        task.begin = keys.begin, task.end = keys.end, task.scale = shape.scale;
        task.partial = partials + (i / static_cast<size_t>(parts) * heads + static_cast<size_t>(head)) * row;
        task.scratch = scratch<char>(kernel.decode_scratch(task), Scratch::kTask);
        run(task);
    });
    const double merging = static_cast<double>(runs.size() * heads * head_dim) * 0.05;
    parallel_for(sequences.size() * heads, merging, [&](size_t i) {
        const size_t s = i / heads, h = i % heads, n = first[s + 1] - first[s];
        const float* from = partials + (first[s] * heads + h) * row;
        char* to = at(sequences[s].out, static_cast<int64_t>(h) * shape.out_head, size);
        if (shape.bf16) {
            kernel.merge_decode_bf16(from, n, heads * row, head_dim, reinterpret_cast<uint16_t*>(to));
        } else {
            kernel.merge_decode_f32(from, n, heads * row, head_dim, reinterpret_cast<float*>(to));
        }
    });
}

}  // namespace whet
