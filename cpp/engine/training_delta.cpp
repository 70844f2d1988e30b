#include "engine/training_delta.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "engine/config.h"
#include "engine/scratch.h"
#include "kernels/dispatch.h"
#include "runtime/ceil_div.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

// Tokens of a sequence.
struct Span {
    size_t begin, end;
    size_t n() const { return end - begin; }
    size_t n_blocks() const { return ceil_div(n(), kDeltaBlock); }
};

// A sequence that starts from zeros, and those that continue it.
using Tree = std::vector<Span>;

std::vector<Tree> find_trees(const TrainingDelta& d) {
    std::vector<Tree> trees;
    for (size_t s = 0; s < d.n_sequences; ++s) {
        const Span own{static_cast<size_t>(d.q_offsets[s]), static_cast<size_t>(d.q_offsets[s + 1])};
        const int64_t n_before = d.k_offsets[s + 1] - d.k_offsets[s] - static_cast<int64_t>(own.n());
        if (own.n() == 0) continue;
        if (n_before == 0) {
            trees.push_back({own});
            continue;
        }
        const auto last = static_cast<size_t>(d.key_rows[d.k_offsets[s] + n_before - 1]);
        if (trees.empty() || last + 1 != trees.back()[0].end) {
            throw std::invalid_argument("a sequence does not continue the last one that starts from zeros");
        }
        trees.back().push_back(own);
    }
    return trees;
}

size_t state_size(const TrainingDelta& d) { return ModelConfig::state_size(d.dim, d.key_dim); }

// Nanoseconds of all tokens and heads, for `number_ns` per number of a state; rough.
double work(const TrainingDelta& d, double number_ns) {
    const auto tokens = static_cast<double>(d.q_offsets[d.n_sequences]);
    return number_ns * tokens * static_cast<double>(d.n_heads * state_size(d));
}

// The task of the tokens of a head, without states and results.
DeltaTask make_task(const TrainingDelta& d, size_t head, Span tokens) {
    const size_t key_head = d.is_tiled ? head % d.n_key_heads : head / (d.n_heads / d.n_key_heads);
    const float* row = d.qkv + tokens.begin * d.channels();
    const size_t gate = tokens.begin * d.n_heads + head;
    return {.n = tokens.n(),
            .key_dim = d.key_dim,
            .value_dim = d.dim,
            .q = row + d.first_query() + key_head * d.key_dim,
            .k = row + d.first_key() + key_head * d.key_dim,
            .v = row + d.first_value() + head * d.dim,
            .stride = d.channels(),
            .decay = d.decay + gate,
            .beta = d.beta + gate,
            .gate_stride = d.n_heads,
            .from = nullptr,
            .to = nullptr,
            .out = nullptr,
            .out_stride = 0,
            .corrects = d.corrects,
            .skip = d.skip == nullptr ? 0.0f : d.skip[head]};
}

void run(const TrainingDelta& d, size_t head, Span tokens, const float* from, float* to, float* out, size_t stride) {
    DeltaTask task = make_task(d, head, tokens);
    task.from = from, task.to = to, task.out = out, task.out_stride = stride;
    kernels().delta_rule_f32(task);
}

size_t round_to_lines(size_t n) { return ceil_div(n, kDeltaSlice) * kDeltaSlice; }

// Numbers of scratch memory of backward_head().
size_t backward_scratch(const TrainingDelta& d, const Tree& tree) {
    size_t blocks = 0;
    for (const Span& own : tree) blocks = std::max(blocks, own.n_blocks());
    return (3 + blocks) * state_size(d) + round_to_lines(d.dim) +
           kernels().delta_backward_scratch(kDeltaBlock, d.key_dim, d.dim);
}

// Adds to the gradients of q and k of the tokens of a tree, (tokens, key_dim) each, and writes the others of a head.
void backward_head(const TrainingDelta& d, const TrainingDeltaGradients& grads, size_t head, const Tree& tree,
                   float* grad_q, float* grad_k, float* memory) {
    const size_t size = state_size(d);
    float *end = memory, *grad_end = end + size, *grad = grad_end + size;  // end: of the tree's first sequence
    float *ignored = grad + size, *states = ignored + round_to_lines(d.dim);
    if (tree.size() > 1) run(d, head, tree[0], nullptr, end, ignored, 0);
    std::fill_n(grad_end, size, 0.0f);
    for (size_t s = tree.size(); s-- > 0;) {
        const Span& own = tree[s];
        const size_t n_blocks = own.n_blocks();
        const auto block_of = [&](size_t block) {
            const size_t begin = own.begin + block * kDeltaBlock;
            return Span{begin, std::min(own.end, begin + kDeltaBlock)};
        };
        if (s == 0) {
            std::fill_n(states, size, 0.0f);
        } else {
            std::copy_n(end, size, states);
            std::fill_n(grad, size, 0.0f);
        }
        for (size_t block = 0; block + 1 < n_blocks; ++block) {
            float* from = states + block * size;
            run(d, head, block_of(block), from, from + size, ignored, 0);
        }
        for (size_t block = n_blocks; block-- > 0;) {
            const Span tokens = block_of(block);
            DeltaTask task = make_task(d, head, tokens);
            task.from = states + block * size;
            const size_t in_tree = (tokens.begin - tree[0].begin) * d.key_dim;
            const size_t gate = tokens.begin * d.n_heads + head;
            kernels().delta_rule_backward_f32(
                {.forward = task,
                 .grad_out = grads.out + tokens.begin * d.n_heads * d.dim + head * d.dim,
                 .grad_out_stride = d.n_heads * d.dim,
                 .grad_state = s == 0 ? grad_end : grad,
                 .grad_q = grad_q + in_tree,
                 .grad_k = grad_k + in_tree,
                 .grad_v = grads.qkv + tokens.begin * d.channels() + d.first_value() + head * d.dim,
                 .grad_v_stride = d.channels(),
                 .grad_decay = grads.decay + gate,
                 .grad_beta = grads.beta + gate,
                 .scratch = states + n_blocks * size});
        }
        if (s > 0) kernels().blend_f32(grad, size, 1.0f, 1.0f, grad_end);
    }
}

}  // namespace

void delta_forward(const TrainingDelta& d, float* out, size_t stride) {
    const std::vector<Tree> trees = find_trees(d);
    parallel_for(trees.size() * d.n_heads, work(d, 0.04), [&](size_t task) {
        const Tree& tree = trees[task / d.n_heads];
        const size_t head = task % d.n_heads, size = state_size(d);
        float *end = scratch<float>(2 * size, Scratch::kTask), *to = end;
        for (const Span& own : tree) {
            const bool is_first = &own == tree.data();
            run(d, head, own, is_first ? nullptr : end, to, out + own.begin * stride + head * d.dim, stride);
            to = end + size;
        }
    });
}

void delta_backward(const TrainingDelta& d, const TrainingDeltaGradients& grads) {
    const std::vector<Tree> trees = find_trees(d);
    parallel_for(trees.size() * d.n_key_heads, work(d, 0.16), [&](size_t task) {
        const Tree& tree = trees[task / d.n_key_heads];
        const size_t key_head = task % d.n_key_heads, group = d.n_heads / d.n_key_heads;
        const size_t begin = tree[0].begin, n = tree.back().end - begin, size = round_to_lines(n * d.key_dim);
        float* grad_q = scratch<float>(2 * size + backward_scratch(d, tree), Scratch::kTask);
        float* grad_k = grad_q + size;
        std::fill_n(grad_q, 2 * size, 0.0f);
        for (size_t i = 0; i < group; ++i) {
            const size_t head = d.is_tiled ? key_head + i * d.n_key_heads : key_head * group + i;
            backward_head(d, grads, head, tree, grad_q, grad_k, grad_k + size);
        }
        for (size_t i = 0; i < n; ++i) {
            float* to = grads.qkv + (begin + i) * d.channels() + key_head * d.key_dim;
            std::copy_n(grad_q + i * d.key_dim, d.key_dim, to + d.first_query());
            std::copy_n(grad_k + i * d.key_dim, d.key_dim, to + d.first_key());
        }
    });
}

}  // namespace whet
