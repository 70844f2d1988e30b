#include "engine/low_rank.h"

#include <algorithm>
#include <vector>

#include "kernels/dispatch.h"
#include "runtime/split.h"

namespace whet {
namespace {

constexpr size_t kRowsPerTask = 4, kColumnsPerTask = 512;

ptrdiff_t stride_of(const Rows& rows) { return rows.n_axes == 0 ? 0 : rows.stride[0]; }

// hidden[row] = x[row] a^T for rows [begin, begin + count).
void project_down(const Rows& x, size_t begin, size_t count, size_t rank, const float* a, float* hidden) {
    const auto run = [&](auto kernel, const auto* rows) {
        kernel(rank, rows, stride_of(x), count, x.length, a, hidden);
    };
    if (x.is_bf16()) return run(kernels().lora_down_bf16, x.row<uint16_t>(begin));
    run(kernels().lora_down_f32, x.row<float>(begin));
}

// y[row] += scale hidden[row] b for rows [begin, begin + count).
void add_up(const float* hidden, const Rows& y, size_t begin, size_t count, size_t rank, const float* b, float scale) {
    const auto run = [&](auto kernel, auto* rows) {
        kernel(rank, hidden, count, y.length, b, scale, rows, stride_of(y));
    };
    if (y.is_bf16()) return run(kernels().lora_up_bf16, y.row<uint16_t>(begin));
    run(kernels().lora_up_f32, y.row<float>(begin));
}

// Columns [begin, begin + count): grad += scale hidden^T x.
void add_outer(const float* hidden, const Rows& x, size_t begin, size_t count, size_t rank, float scale, float* grad) {
    const auto run = [&](auto kernel, const auto* columns) {
        kernel(rank, hidden, columns + begin, stride_of(x), x.count, count, scale, grad + begin, x.length);
    };
    if (x.is_bf16()) return run(kernels().lora_outer_bf16, x.row<uint16_t>(0));
    run(kernels().lora_outer_f32, x.row<float>(0));
}

// Rough estimate in nanoseconds.
double work_of(const Rows& x, const Rows& y, size_t rank) {
    return static_cast<double>(x.count * (x.length + y.length)) * 0.03 * static_cast<double>(rank + 1);
}

// Calls body(begin, count) for chunks of kRowsPerTask rows, independent of the number of threads.
template <class F>
void for_row_blocks(size_t rows, double work_ns, F&& body) {
    parallel_for(ceil_div(rows, kRowsPerTask), work_ns, [&](size_t task) {
        const size_t begin = task * kRowsPerTask;
        body(begin, std::min(kRowsPerTask, rows - begin));
    });
}

}  // namespace

void lora_forward(const Rows& x, const Rows& y, const float* a, const float* b, size_t rank, float scale) {
    for_row_blocks(x.count, work_of(x, y, rank), [&](size_t begin, size_t count) {
        float hidden[kRowsPerTask * kMaxRank];
        project_down(x, begin, count, rank, a, hidden);
        add_up(hidden, y, begin, count, rank, b, scale);
    });
}

void lora_add_product(const ArrayView& hidden, const Rows& y, const float* b, float scale) {
    const auto rank = static_cast<size_t>(hidden.shape[1]);
    for_row_blocks(y.count, work_of(y, y, rank), [&](size_t begin, size_t count) {
        float rows[kRowsPerTask * kMaxRank];
        for (size_t i = 0; i < count * rank; ++i) {
            const auto row = static_cast<ptrdiff_t>(begin + i / rank), j = static_cast<ptrdiff_t>(i % rank);
            rows[i] = hidden.as<float>()[row * hidden.stride[0] + j * hidden.stride[1]];
        }
        add_up(rows, y, begin, count, rank, b, scale);
    });
}

void lora_accumulate(const Rows& x, const Rows& g, const float* a, const float* b, size_t rank, float scale,
                     float* grad_a, float* grad_b) {
    constexpr size_t kMaxOnStack = 4;  // rows
    const size_t rows = x.count;
    const double work = work_of(x, g, rank);
    float on_stack[2 * kMaxOnStack * kMaxRank];
    std::vector<float> on_heap(rows <= kMaxOnStack ? 0 : 2 * rows * rank);
    float* hidden_x = on_heap.empty() ? on_stack : on_heap.data();
    float* hidden_g = hidden_x + rows * rank;
    for_row_blocks(rows, work, [&](size_t begin, size_t count) {
        project_down(x, begin, count, rank, a, hidden_x + begin * rank);
        project_down(g, begin, count, rank, b, hidden_g + begin * rank);
    });
    const size_t tasks_a = ceil_div(x.length, kColumnsPerTask), tasks_b = ceil_div(g.length, kColumnsPerTask);
    parallel_for(tasks_a + tasks_b, work, [&](size_t task) {
        const bool is_a = task < tasks_a;
        const Rows& columns = is_a ? x : g;
        const size_t begin = (is_a ? task : task - tasks_a) * kColumnsPerTask;
        add_outer(is_a ? hidden_g : hidden_x, columns, begin, std::min(kColumnsPerTask, columns.length - begin), rank,
                  scale, is_a ? grad_a : grad_b);
    });
}

void lora_batch(const Rows& x, const Rows& y, const LoraAdapters& adapters, const int64_t* index) {
    constexpr size_t kTypicalRank = 4;
    for_row_blocks(x.count, work_of(x, y, kTypicalRank), [&](size_t begin, size_t count) {
        const size_t end = begin + count;
        for (size_t next = begin; begin < end; begin = next) {
            // Consecutive rows with the same adapter are one call: the bits of a row do not depend on other rows.
            while (next < end && index[next] == index[begin]) ++next;
            const int64_t k = index[begin];
            if (k < 0) continue;
            const auto first = static_cast<size_t>(adapters.offsets[k]);
            const size_t rank = static_cast<size_t>(adapters.offsets[k + 1]) - first;
            float hidden[kRowsPerTask * kMaxRank];
            project_down(x, begin, next - begin, rank, adapters.a + first * x.length, hidden);
            add_up(hidden, y, begin, next - begin, rank, adapters.b + first * y.length, adapters.scales[k]);
        }
    });
}

}  // namespace whet
