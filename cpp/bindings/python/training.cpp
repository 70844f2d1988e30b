// Bindings of the kernels of a training step: addresses and sizes, from src/whet/nn, which has looked at the tensors.
//
// Work is cut into tasks that do not depend on the number of threads, and so do sums: the bits of a gradient are the
// same on any number of them.
#include "training.h"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>
#if defined(__GLIBC__)
#include <malloc.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#endif

#include "kernels/dispatch.h"
#include "row_arrays.h"
#include "tasks.h"

namespace nb = nanobind;

namespace whet {
namespace {

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// Nanoseconds on one core, roughly.
double work_of(size_t elements) { return static_cast<double>(elements) * 0.3; }

size_t rows_per_task(size_t n) { return std::max<size_t>(1, 16384 / std::max<size_t>(1, n)); }

// A training step frees a gigabyte of activations and takes it again. The allocator gives such memory back to the
// system, and its pages, which come one by one and cleared, are a tenth of the step: let it keep the memory. And let
// the heap grow into huge pages, which spare products the misses of the address cache, another tenth: half the
// machine's memory in addresses, of which none is taken before it is used.
void keep_memory() {
#if defined(__GLIBC__)
    static bool done = false;
    if (std::exchange(done, true)) return;
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
    mallopt(M_TRIM_THRESHOLD, -1);
    rlimit addresses{};
    if (getrlimit(RLIMIT_AS, &addresses) != 0 || addresses.rlim_cur != RLIM_INFINITY) return;
    const size_t page = size_t{2} << 20;
    const size_t bytes = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE)) / 2;
    mallopt(M_MMAP_MAX, 0);
    if (void* reserved = std::malloc(bytes)) {
        const uintptr_t begin = (reinterpret_cast<uintptr_t>(reserved) + page - 1) / page * page;
        const uintptr_t end = (reinterpret_cast<uintptr_t>(reserved) + bytes) / page * page;
        if (begin < end) static_cast<void>(madvise(at<void>(begin), end - begin, MADV_HUGEPAGE));
        std::free(reserved);
    }
    mallopt(M_MMAP_MAX, 1 << 16);
#endif
}

// ---------------------------------------------------------------- weights

// Brings the bfloat16 copy of n weights up to date, and answers whether it was not.
bool refresh_bf16(uintptr_t weight, size_t n, uintptr_t copy) {
    std::atomic<bool> changed{false};
    split(n, 65536, work_of(n), [&](size_t begin, size_t end) {
        if (kernels().refresh_bf16(at<float>(weight) + begin, end - begin, at<uint16_t>(copy) + begin)) {
            changed.store(true, std::memory_order_relaxed);
        }
    });
    return changed.load();
}

// out (m, n) = x (m, k) bf16(weight)^T + bias for a few rows, x and out bfloat16; the float32 weight is (n, k), or
// (k, n) by columns. A bias at 0 is none.
void rounded_linear(bool by_columns, uintptr_t weight, size_t n, size_t k, uintptr_t x, size_t m, uintptr_t bias,
                    uintptr_t out) {
    // Of out, for a task: many, so that memory is read in long runs, and few enough to end together.
    const size_t columns = std::clamp<size_t>(n / 8 / 64 * 64, 64, 1024);
    const auto kernel = by_columns ? kernels().rounded_linear_columns : kernels().rounded_linear_rows;
    split(n, columns, work_of(n * k), [&](size_t begin, size_t end) {
        const size_t count = end - begin;
        const float* from = at<float>(weight) + begin * (by_columns ? 1 : k);
        std::vector<float> sums(m * count);
        kernel(from, by_columns ? n : k, count, k, at<uint16_t>(x), k, m, sums.data(), count);
        for (size_t i = 0; i < m; ++i) {
            float* row = sums.data() + i * count;
            for (size_t j = 0; bias != 0 && j < count; ++j) row[j] += at<float>(bias)[begin + j];
            kernels().bf16_from_f32(row, count, at<uint16_t>(out) + i * n + begin);
        }
    });
}

// ---------------------------------------------------------------- row by row

void rms_norm_to_bf16(uintptr_t x, uintptr_t weight, size_t rows, size_t n, double eps, uintptr_t out) {
    split(rows, rows_per_task(n), work_of(rows * n), [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) {
            kernels().rms_norm_f32_bf16(at<float>(x) + i * n, at<float>(weight), n, eps, at<uint16_t>(out) + i * n);
        }
    });
}

template <class T, class Grad, class Kernel>
void rms_norm_backward_rows(Kernel kernel, uintptr_t x, uintptr_t weight, uintptr_t grad, size_t rows, size_t n,
                            double eps, uintptr_t grad_x, uintptr_t grad_weight) {
    const size_t piece = std::max<size_t>(64, rows_per_task(n)), pieces = (rows + piece - 1) / piece;
    std::vector<float> sums(pieces * n);
    split(rows, piece, work_of(rows * n), [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) {
            kernel(at<T>(x) + i * n, at<float>(weight), at<Grad>(grad) + i * n, n, eps, at<T>(grad_x) + i * n,
                   sums.data() + begin / piece * n);
        }
    });
    for (size_t i = 0; i < n; ++i) {
        double sum = 0.0;
        for (size_t p = 0; p < pieces; ++p) sum += sums[p * n + i];
        at<float>(grad_weight)[i] = static_cast<float>(sum);
    }
}

void rms_norm_backward(bool x_bf16, bool grad_bf16, uintptr_t x, uintptr_t weight, uintptr_t grad, size_t rows,
                       size_t n, double eps, uintptr_t grad_x, uintptr_t grad_weight) {
    const Kernels& k = kernels();
    if (x_bf16) {
        rms_norm_backward_rows<uint16_t, uint16_t>(k.rms_norm_backward_bf16, x, weight, grad, rows, n, eps, grad_x,
                                                   grad_weight);
    } else if (grad_bf16) {
        rms_norm_backward_rows<float, uint16_t>(k.rms_norm_backward_f32_bf16, x, weight, grad, rows, n, eps, grad_x,
                                                grad_weight);
    } else {
        rms_norm_backward_rows<float, float>(k.rms_norm_backward_f32, x, weight, grad, rows, n, eps, grad_x,
                                             grad_weight);
    }
}

void swiglu_backward(bool bf16, uintptr_t gate, uintptr_t up, uintptr_t grad, size_t n, uintptr_t grad_gate,
                     uintptr_t grad_up) {
    split(n, 16384, work_of(n), [&](size_t begin, size_t end) {
        if (bf16) {
            kernels().swiglu_backward_bf16(at<uint16_t>(gate) + begin, at<uint16_t>(up) + begin,
                                           at<uint16_t>(grad) + begin, end - begin, at<uint16_t>(grad_gate) + begin,
                                           at<uint16_t>(grad_up) + begin);
        } else {
            kernels().swiglu_backward_f32(at<float>(gate) + begin, at<float>(up) + begin, at<float>(grad) + begin,
                                          end - begin, at<float>(grad_gate) + begin, at<float>(grad_up) + begin);
        }
    });
}

// Log-probs of a batch's tokens whose logits come in tiles, words [first, first + n) of some rows at a time.
class TokenLogprobs {
public:
    TokenLogprobs(uintptr_t tokens, size_t rows, double temperature, bool with_entropy)
        : tokens_(at<const int64_t>(tokens)), temperature_(temperature), with_entropy_(with_entropy), sums_(rows) {}

    void add(uintptr_t logits, size_t first_row, size_t rows, size_t first, size_t n) {
        split(rows, rows_per_task(n), work_of(rows * n), [&](size_t begin, size_t end) {
            for (size_t i = begin; i < end; ++i) {
                const size_t row = first_row + i;
                kernels().token_logprobs_add_f32(at<float>(logits) + i * n, n, place(tokens_[row], first, n),
                                                 temperature_, with_entropy_, &sums_[row]);
            }
        });
    }

    void end(uintptr_t logprobs, uintptr_t lse, uintptr_t entropy) const {
        for (size_t row = 0; row < sums_.size(); ++row) {
            kernels().token_logprobs_end(sums_[row], temperature_, at<float>(logprobs) + row, at<float>(lse) + row,
                                         with_entropy_ ? at<float>(entropy) + row : nullptr);
        }
    }

    // Of a token among words [first, first + n); n where it is not.
    static size_t place(int64_t token, size_t first, size_t n) {
        const auto word = static_cast<size_t>(token);
        return word < first ? n : word - first;
    }

private:
    const int64_t* tokens_;
    double temperature_;
    bool with_entropy_;
    std::vector<TokenSums> sums_;
};

// Logits [first, first + n) of a vocabulary, in rows of n; out in rows of n.
void token_logprobs_backward(bool out_bf16, uintptr_t logits, size_t rows, size_t n, uintptr_t tokens, size_t first,
                             double temperature, uintptr_t lse, uintptr_t logprobs, uintptr_t grads, uintptr_t out) {
    split(rows, rows_per_task(n), work_of(rows * n), [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) {
            const size_t own = TokenLogprobs::place(at<int64_t>(tokens)[i], first, n);
            const float* z = at<float>(logits) + i * n;
            const float l = at<float>(lse)[i], p = at<float>(logprobs)[i], g = at<float>(grads)[i];
            if (out_bf16) {
                kernels().token_logprobs_backward_bf16(z, n, own, temperature, l, p, g, at<uint16_t>(out) + i * n);
            } else {
                kernels().token_logprobs_backward_f32(z, n, own, temperature, l, p, g, at<float>(out) + i * n);
            }
        }
    });
}

void adamw(size_t n, uintptr_t p, uintptr_t grad, uintptr_t m, uintptr_t v, uintptr_t copy, double lr, double beta1,
           double beta2, double eps, double weight_decay, double t, double grad_scale) {
    AdamWStep step;
    step.keep = static_cast<float>(1.0 - lr * weight_decay);
    step.beta2 = static_cast<float>(beta2);
    step.toward = static_cast<float>(1.0 - beta1);
    step.square = static_cast<float>(1.0 - beta2);
    step.root = static_cast<float>(std::sqrt(1.0 - std::pow(beta2, t)));
    step.eps = static_cast<float>(eps);
    step.step = static_cast<float>(lr / (1.0 - std::pow(beta1, t)));
    step.grad_scale = static_cast<float>(grad_scale);
    split(n, 65536, work_of(n), [&](size_t begin, size_t end) {
        kernels().adamw_f32(step, end - begin, at<float>(p) + begin, at<float>(grad) + begin, at<float>(m) + begin,
                            at<float>(v) + begin, copy == 0 ? nullptr : at<uint16_t>(copy) + begin);
    });
}

// ---------------------------------------------------------------- attention

// Sequences laid end to end: queries [q_offsets[s], q_offsets[s + 1]) see the keys whose tokens are
// key_rows[k_offsets[s] ... k_offsets[s + 1]), and stand at their end. out and gradients are (tokens, heads, head_dim).
struct Attention {
    bool bf16 = false;
    int64_t n_tokens = 0, n_heads = 0, n_kv_heads = 0, head_dim = 0, n_sequences = 0;
    uintptr_t q = 0, k = 0, v = 0, out = 0, lse = 0, q_offsets = 0, k_offsets = 0, key_rows = 0;
    int64_t q_token = 0, q_head = 0, k_token = 0, k_head = 0, v_token = 0, v_head = 0;
    int64_t window = 0;
    double scale = 0.0;

    size_t item_size() const { return bf16 ? 2 : 4; }
    const int64_t* queries() const { return at<const int64_t>(q_offsets); }
    const int64_t* keys() const { return at<const int64_t>(k_offsets); }

    // Queries [begin, end) of a sequence, for a KV head.
    void fill(AttentionTask& task, int64_t sequence, int64_t kv_head, int64_t begin, int64_t end) const {
        const int64_t first = queries()[sequence], n_queries = queries()[sequence + 1] - first;
        const auto bytes = [&](uintptr_t base, int64_t element) {
            return at<char>(base) + element * static_cast<int64_t>(item_size());
        };
        const int64_t head = kv_head * (n_heads / n_kv_heads), token = first + begin;
        task.group = n_heads / n_kv_heads, task.head_dim = head_dim;
        task.q = bytes(q, token * q_token + head * q_head);
        task.k = bytes(k, kv_head * k_head), task.v = bytes(v, kv_head * v_head);
        task.out = bytes(out, (token * n_heads + head) * head_dim);
        task.q_token = q_token, task.q_head = q_head, task.k_token = k_token, task.v_token = v_token;
        task.out_token = n_heads * head_dim, task.out_head = head_dim;
        task.n_queries = end - begin, task.n_keys = keys()[sequence + 1] - keys()[sequence];
        task.position = task.n_keys - n_queries + begin;
        task.window = window, task.causal = true, task.block_size = head_dim <= 128 ? 256 : 128;
        task.scale = static_cast<float>(scale * 0x1.71547652b82fep+0);
        task.key_rows = at<const int64_t>(key_rows) + keys()[sequence];
        task.lse = at<float>(lse) + token * n_heads + head, task.lse_token = n_heads;
    }
};

struct Block {
    int64_t sequence, begin, end;
    double cost;
};

// run(block, KV head) over the pool, which takes the last task first: let it be the longest.
template <class F>
void for_blocks(const Attention& a, std::vector<Block>& blocks, F&& run) {
    std::stable_sort(blocks.begin(), blocks.end(), [](const Block& x, const Block& y) { return x.cost < y.cost; });
    double work = 0.0;
    for (const Block& block : blocks) work += block.cost;
    const auto heads = static_cast<size_t>(a.n_kv_heads);
    for_each(blocks.size() * heads, work * static_cast<double>(a.n_heads * a.head_dim) * 0.02,
             [&](size_t i) { return run(blocks[i / heads], static_cast<int64_t>(i % heads)); });
}

void attention_forward(const Attention& a) {
    std::vector<Block> blocks;
    const int64_t size = std::max<int64_t>(1, kAttentionRows / (a.n_heads / a.n_kv_heads));
    for (int64_t s = 0; s < a.n_sequences; ++s) {
        const int64_t n = a.queries()[s + 1] - a.queries()[s], n_keys = a.keys()[s + 1] - a.keys()[s];
        for (int64_t begin = 0; begin < n; begin += size) {
            const int64_t end = std::min(n, begin + size);
            blocks.push_back({s, begin, end, static_cast<double>((end - begin) * (n_keys - n + end))});
        }
    }
    const auto kernel = a.bf16 ? kernels().attention_bf16 : kernels().attention_f32;
    for_blocks(a, blocks, [&](const Block& block, int64_t kv_head) {
        AttentionTask task{};
        a.fill(task, block.sequence, kv_head, block.begin, block.end);
        task.scratch = task_scratch.at_least(kernels().attention_scratch(task));
        if (task.scratch != nullptr) kernel(task);
        return task.scratch != nullptr;
    });
}

// grad_k and grad_v of a token are the sums over readers[readers_offsets[token] ...): the places of key_rows where it
// stands, in their order.
void attention_backward(const Attention& a, uintptr_t grad_out, uintptr_t grad_q, uintptr_t grad_k, uintptr_t grad_v,
                        uintptr_t readers_offsets, uintptr_t readers) {
    std::vector<Block> blocks;
    for (int64_t s = 0; s < a.n_sequences; ++s) {
        const int64_t n = a.queries()[s + 1] - a.queries()[s], n_keys = a.keys()[s + 1] - a.keys()[s];
        if (n_keys > 0) blocks.push_back({s, 0, n, static_cast<double>(n * n_keys)});
    }
    const int64_t n_places = a.keys()[a.n_sequences], d = a.head_dim;
    const auto n_floats = static_cast<size_t>(n_places * a.n_kv_heads * d);
    const auto of_keys = std::make_unique_for_overwrite<float[]>(n_floats);
    const auto of_values = std::make_unique_for_overwrite<float[]>(n_floats);
    const auto kernel = a.bf16 ? kernels().attention_backward_bf16 : kernels().attention_backward_f32;
    for_blocks(a, blocks, [&](const Block& block, int64_t kv_head) {
        AttentionBackwardTask task{};
        a.fill(task, block.sequence, kv_head, block.begin, block.end);
        const int64_t to_out = static_cast<const char*>(task.out) - at<char>(a.out);
        task.grad_out = at<char>(grad_out) + to_out, task.grad_q = at<char>(grad_q) + to_out;
        const int64_t place = (kv_head * n_places + a.keys()[block.sequence]) * d;
        task.grad_k = of_keys.get() + place, task.grad_v = of_values.get() + place;
        task.scratch = task_scratch.at_least(kernels().attention_backward_scratch(task));
        if (task.scratch != nullptr) kernel(task);
        return task.scratch != nullptr;
    });
    const auto* offsets = at<const int64_t>(readers_offsets);
    const auto* places = at<const int64_t>(readers);
    split(static_cast<size_t>(a.n_tokens), 64, work_of(n_floats), [&](size_t begin, size_t end) {
        std::vector<float> sum(static_cast<size_t>(d));
        for (size_t token = begin; token < end; ++token) {
            for (int64_t head = 0; head < a.n_kv_heads; ++head) {
                for (const bool keys : {true, false}) {
                    const float* parts = (keys ? of_keys : of_values).get() + head * n_places * d;
                    std::fill(sum.begin(), sum.end(), 0.0f);
                    for (int64_t r = offsets[token]; r < offsets[token + 1]; ++r) {
                        const float* part = parts + places[r] * d;
                        for (int64_t c = 0; c < d; ++c) sum[static_cast<size_t>(c)] += part[c];
                    }
                    const int64_t to = (static_cast<int64_t>(token) * a.n_kv_heads + head) * d;
                    const uintptr_t grad = keys ? grad_k : grad_v;
                    if (a.bf16) {
                        kernels().bf16_from_f32(sum.data(), sum.size(), at<uint16_t>(grad) + to);
                    } else {
                        std::copy(sum.begin(), sum.end(), at<float>(grad) + to);
                    }
                }
            }
        }
    });
}

}  // namespace

void bind_training(nb::module_& m) {
    m.def("keep_memory", &keep_memory);
    m.def("refresh_bf16", &refresh_bf16);
    m.def("rounded_linear", &rounded_linear);
    m.def("rms_norm_to_bf16", &rms_norm_to_bf16);
    m.def("rms_norm_backward", &rms_norm_backward);
    m.def("swiglu_backward", &swiglu_backward);
    m.def("token_logprobs_backward", &token_logprobs_backward);
    nb::class_<TokenLogprobs>(m, "TokenLogprobs")
        .def(nb::init<uintptr_t, size_t, double, bool>())
        .def("add", &TokenLogprobs::add)
        .def("end", &TokenLogprobs::end);
    m.def("adamw", &adamw);
    nb::class_<Attention>(m, "TrainingAttention")
        .def(nb::init<>())
        .def_rw("bf16", &Attention::bf16)
        .def_rw("n_tokens", &Attention::n_tokens)
        .def_rw("n_heads", &Attention::n_heads)
        .def_rw("n_kv_heads", &Attention::n_kv_heads)
        .def_rw("head_dim", &Attention::head_dim)
        .def_rw("n_sequences", &Attention::n_sequences)
        .def_rw("q", &Attention::q)
        .def_rw("k", &Attention::k)
        .def_rw("v", &Attention::v)
        .def_rw("out", &Attention::out)
        .def_rw("lse", &Attention::lse)
        .def_rw("q_offsets", &Attention::q_offsets)
        .def_rw("k_offsets", &Attention::k_offsets)
        .def_rw("key_rows", &Attention::key_rows)
        .def_rw("q_token", &Attention::q_token)
        .def_rw("q_head", &Attention::q_head)
        .def_rw("k_token", &Attention::k_token)
        .def_rw("k_head", &Attention::k_head)
        .def_rw("v_token", &Attention::v_token)
        .def_rw("v_head", &Attention::v_head)
        .def_rw("window", &Attention::window)
        .def_rw("scale", &Attention::scale)
        .def("forward", &attention_forward)
        .def("backward", &attention_backward);
}

}  // namespace whet
