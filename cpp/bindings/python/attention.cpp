// Bindings of attention: the plain case of each function, cut into tasks and handed to the pool.
//
// A task is a KV head with either a block of queries or a run of keys; neither cut depends on the number of threads. A
// function returns NotImplemented for whatever is not the plain case: src/whet/ops/attention.py then converts the input
// or explains what is wrong with it.
#include "attention.h"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "arrays.h"
#include "kernels/dispatch.h"
#include "tasks.h"

namespace nb = nanobind;

namespace whet {
namespace {

nb::object not_implemented() { return nb::borrow(Py_NotImplemented); }

// None is `missing`. False for anything but None and an int from 1 up.
bool optional_size(nb::handle object, int64_t missing, int64_t& size) {
    size = missing;
    if (object.is_none()) return true;
    if (!PyLong_CheckExact(object.ptr())) return false;
    int overflow = 0;
    size = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
    return overflow == 0 && size > 0;
}

// The factor of base-2 scores; None is head_dim^-1/2. False for anything but None and a finite float.
bool base_2_scale(nb::handle object, Py_ssize_t head_dim, float& scale) {
    if (!object.is_none() && !PyFloat_CheckExact(object.ptr())) return false;
    const double given = object.is_none() ? 1.0 / std::sqrt(head_dim) : PyFloat_AS_DOUBLE(object.ptr());
    scale = static_cast<float>(given * 0x1.71547652b82fep+0);
    return std::isfinite(scale);
}

// Whether neighbours on the last axis are neighbours in memory; an empty array has no neighbours.
bool is_dense(const Array& a) { return a.stride[a.ndim - 1] == 1 || a.size() == 0; }

bool is_operand(const Array& a) { return (a.dtype == DType::kFloat32 || a.dtype == DType::kBFloat16) && is_dense(a); }

bool same_shape(const Array& a, const Array& b) {
    return a.ndim == b.ndim && std::equal(a.shape, a.shape + a.ndim, b.shape);
}

bool view_operands(nb::handle q_object, nb::handle k_object, nb::handle v_object, Array& q, Array& k, Array& v) {
    if (!view_strided(q_object.ptr(), q) || !view_strided(k_object.ptr(), k) || !view_strided(v_object.ptr(), v) ||
        q.ndim < 3 || k.ndim < 3 || !is_operand(q) || !is_operand(k) || !is_operand(v) || q.dtype != k.dtype ||
        q.dtype != v.dtype || !same_shape(k, v)) {
        return false;
    }
    const Py_ssize_t head_dim = q.shape[q.ndim - 1], heads = q.shape[q.ndim - 2], kv_heads = k.shape[k.ndim - 2];
    return head_dim == k.shape[k.ndim - 1] && head_dim >= 32 && head_dim <= kAttentionMaxHeadDim && head_dim % 8 == 0 &&
           heads > 0 && kv_heads > 0 && heads % kv_heads == 0;
}

// `given` as the result if it fits `q`, or a new array like q if there is none. False if it does not fit.
bool result_for(nb::handle given, nb::handle q_object, const Array& q, Array& out, nb::object& object) {
    if (given.is_none()) {
        out = q;
        object = new_like(q_object.ptr(), q, q.dtype, q.ndim, q.shape, &out.data);
        Py_ssize_t stride = 1;
        for (int axis = q.ndim - 1; axis >= 0; --axis) {
            out.stride[axis] = stride;
            stride *= q.shape[axis];
        }
        return true;
    }
    object = nb::borrow(given);
    return view_strided(given.ptr(), out, true) && same_shape(out, q) && out.dtype == q.dtype &&
           out.is_torch == q.is_torch && is_dense(out);
}

// Integers of a contiguous array.
struct Integers {
    Array array;

    bool read(nb::handle object) {
        return view(object.ptr(), array) && array.ndim == 1 &&
               (array.dtype == DType::kInt64 || array.dtype == DType::kInt32);
    }
    int64_t operator[](Py_ssize_t i) const {
        return array.dtype == DType::kInt64 ? array.as<int64_t>()[i] : array.as<int32_t>()[i];
    }
    // Whether these are offsets: from 0 up to n.
    bool are_offsets_of(int64_t n) const {
        if (array.shape[0] < 1 || (*this)[0] != 0 || (*this)[array.shape[0] - 1] != n) return false;
        for (Py_ssize_t i = 1; i < array.shape[0]; ++i) {
            if ((*this)[i] < (*this)[i - 1]) return false;
        }
        return true;
    }
};

char* at(const Array& a, int64_t element) { return a.as<char>() + element * (a.dtype == DType::kFloat32 ? 4 : 2); }

// ---------------------------------------------------------------- prefill

// A block of queries of one sequence, for every KV head.
struct QueryBlock {
    int64_t q_element, out_element;  // where its first query is
    int64_t k_row;                   // where key 0 of its sequence is on the first axis of k and v
    int64_t n_queries, n_keys, position;

    double cost() const { return static_cast<double>(n_queries) * static_cast<double>(n_keys + position); }
};

struct Sequences {
    const Array &q, &k, &out;
    int64_t block_queries;
    std::vector<QueryBlock> blocks;

    // Queries are aligned with the end of the keys.
    void add(int64_t q_element, int64_t k_row, int64_t out_element, int64_t n_queries, int64_t n_keys) {
        const int64_t n_blocks = (n_queries + block_queries - 1) / block_queries;
        for (int64_t b = 0; b < n_blocks; ++b) {
            const int64_t begin = n_queries * b / n_blocks, end = n_queries * (b + 1) / n_blocks;
            blocks.push_back({q_element + begin * q.stride[q.ndim - 3], out_element + begin * out.stride[out.ndim - 3],
                              k_row, end - begin, n_keys, n_keys - n_queries + begin});
        }
    }
};

// None: one sequence, or the rows of a batch. False if the offsets are not those of sequences in q and k.
bool add_sequences(Sequences& sequences, nb::handle offsets, nb::handle key_offsets) {
    const Array &q = sequences.q, &k = sequences.k, &out = sequences.out;
    if (q.ndim != k.ndim) return false;
    if (q.ndim == 4) {
        if (!offsets.is_none() || !key_offsets.is_none() || q.shape[0] != k.shape[0]) return false;
        for (Py_ssize_t b = 0; b < q.shape[0]; ++b) {
            sequences.add(b * q.stride[0], b, b * out.stride[0], q.shape[1], k.shape[1]);
        }
        return true;
    }
    if (offsets.is_none()) {
        if (!key_offsets.is_none()) return false;
        sequences.add(0, 0, 0, q.shape[0], k.shape[0]);
        return true;
    }
    Integers of_q, of_k;
    if (!of_q.read(offsets) || !of_k.read(key_offsets.is_none() ? offsets : key_offsets) ||
        of_q.array.shape[0] != of_k.array.shape[0] || !of_q.are_offsets_of(q.shape[0]) ||
        !of_k.are_offsets_of(k.shape[0])) {
        return false;
    }
    for (Py_ssize_t s = 0; s + 1 < of_q.array.shape[0]; ++s) {
        sequences.add(of_q[s] * q.stride[0], of_k[s], of_q[s] * out.stride[0], of_q[s + 1] - of_q[s],
                      of_k[s + 1] - of_k[s]);
    }
    return true;
}

nb::object attention(nb::handle q_object, nb::handle k_object, nb::handle v_object, nb::handle offsets,
                     nb::handle key_offsets, bool causal, nb::handle window, nb::handle scale, nb::handle block_size,
                     nb::handle given) {
    Array q, k, v, out;
    nb::object result;
    int64_t seen = 0, block = 0;
    AttentionTask common{};
    if (!view_operands(q_object, k_object, v_object, q, k, v) || !optional_size(window, INT64_MAX, seen) ||
        (!causal && !window.is_none()) || !base_2_scale(scale, q.shape[q.ndim - 1], common.scale) ||
        !optional_size(block_size, q.shape[q.ndim - 1] <= 128 ? 256 : 128, block) || block % 32 != 0 ||
        block > kAttentionMaxBlock) {
        return not_implemented();
    }
    const int token = q.ndim - 3, head = q.ndim - 2;
    const Py_ssize_t kv_heads = k.shape[k.ndim - 2];
    common.group = q.shape[head] / kv_heads;
    common.head_dim = q.shape[head + 1];
    // A result may be the queries' own memory: a task reads its queries before it writes.
    if (!result_for(given, q_object, q, out, result)) return not_implemented();
    Sequences sequences{q, k, out, std::max<int64_t>(1, kAttentionRows / common.group), {}};
    if (!add_sequences(sequences, offsets, key_offsets)) return not_implemented();
    common.q_token = q.stride[token], common.q_head = q.stride[head];
    common.k_token = k.stride[k.ndim - 3], common.v_token = v.stride[v.ndim - 3];
    common.out_token = out.stride[token], common.out_head = out.stride[head];
    common.window = seen, common.causal = causal, common.block_size = static_cast<int>(block);
    std::vector<QueryBlock>& blocks = sequences.blocks;
    // The pool takes the last task first: let it be the longest.
    std::stable_sort(blocks.begin(), blocks.end(),
                     [](const QueryBlock& a, const QueryBlock& b) { return a.cost() < b.cost(); });
    double work = 0.0;
    for (const QueryBlock& b : blocks) work += b.cost();
    work *= static_cast<double>(q.shape[head] * q.shape[head + 1]) * 0.02;
    const Kernels& kernel = kernels();
    const auto run = q.dtype == DType::kFloat32 ? kernel.attention_f32 : kernel.attention_bf16;
    for_each(blocks.size() * static_cast<size_t>(kv_heads), work, [&](size_t i) {
        const QueryBlock& b = blocks[i / static_cast<size_t>(kv_heads)];
        const auto kv_head = static_cast<int64_t>(i % static_cast<size_t>(kv_heads));
        AttentionTask task = common;
        task.q = at(q, b.q_element + kv_head * task.group * task.q_head);
        task.out = at(out, b.out_element + kv_head * task.group * task.out_head);
        task.k = at(k, b.k_row * k.stride[0] + kv_head * k.stride[head]);
        task.v = at(v, b.k_row * v.stride[0] + kv_head * v.stride[head]);
        task.n_queries = b.n_queries, task.n_keys = b.n_keys, task.position = b.position;
        task.scratch = task_scratch.at_least(kernel.attention_scratch(task));
        if (task.scratch != nullptr) run(task);
        return task.scratch != nullptr;
    });
    return result;
}

// ---------------------------------------------------------------- decode

// A run of keys of one sequence.
struct KeyRun {
    Py_ssize_t sequence;
    int64_t begin, end;
};

nb::object decode_attention(nb::handle q_object, nb::handle k_object, nb::handle v_object, nb::handle lengths,
                            nb::handle scale, nb::handle window, nb::handle given) {
    Array q, k, v, out;
    nb::object result;
    Integers length;
    int64_t seen = 0;
    DecodeTask common{};
    if (!view_operands(q_object, k_object, v_object, q, k, v) || q.ndim != 3 || k.ndim != 4 ||
        q.shape[0] != k.shape[0] || !length.read(lengths) || length.array.shape[0] != q.shape[0] ||
        !base_2_scale(scale, q.shape[2], common.scale) || !optional_size(window, INT64_MAX, seen)) {
        return not_implemented();
    }
    std::vector<KeyRun> runs;
    std::vector<size_t> first(1, 0);  // run of each sequence, and the end
    double work = 0.0;
    for (Py_ssize_t s = 0; s < q.shape[0]; ++s) {
        const int64_t end = length[s], begin = std::max<int64_t>(0, end - std::min(seen, end));
        if (end < 0 || end > k.shape[1]) return not_implemented();
        for (int64_t run = begin / kDecodeChunk * kDecodeChunk; run < end; run += kDecodeChunk) {
            runs.push_back({s, std::max(begin, run), std::min<int64_t>(end, run + kDecodeChunk)});
        }
        first.push_back(runs.size());
        work += static_cast<double>((end - begin) * k.shape[2] * q.shape[2]) * 0.3;
    }
    if (!result_for(given, q_object, q, out, result)) return not_implemented();
    const auto heads = static_cast<size_t>(q.shape[1]), kv_heads = static_cast<size_t>(k.shape[2]);
    const auto head_dim = static_cast<size_t>(q.shape[2]);
    const size_t row = (head_dim + 31) / 32 * 32 + kDecodePartialExtra;
    auto* partials = static_cast<float*>(call_scratch.at_least(runs.size() * heads * row * sizeof(float)));
    if (partials == nullptr && !runs.empty()) throw std::bad_alloc();
    // Where the heads of a key lie side by side, one task reads them all: memory in its order.
    const bool together = k.stride[1] > k.stride[2];
    const size_t parts = together ? 1 : kv_heads;
    const Kernels& kernel = kernels();
    const bool is_float32 = q.dtype == DType::kFloat32;
    common.q_head = q.stride[1], common.k_token = k.stride[1], common.v_token = v.stride[1];
    common.k_head = k.stride[2], common.v_head = v.stride[2];
    common.kv_heads = static_cast<int64_t>(kv_heads / parts), common.head_dim = q.shape[2];
    common.group = static_cast<int64_t>(heads / kv_heads);
    const auto run = is_float32 ? kernel.decode_attention_f32 : kernel.decode_attention_bf16;
    for_each(runs.size() * parts, work, [&](size_t i) {
        const KeyRun& keys = runs[i / parts];
        const auto kv_head = static_cast<int64_t>(i % parts);
        DecodeTask task = common;
        task.q = at(q, keys.sequence * q.stride[0] + kv_head * task.group * q.stride[1]);
        task.k = at(k, keys.sequence * k.stride[0] + kv_head * k.stride[2]);
        task.v = at(v, keys.sequence * v.stride[0] + kv_head * v.stride[2]);
        task.begin = keys.begin, task.end = keys.end;
        task.partial = partials + (i / parts * heads + i % parts * static_cast<size_t>(task.group)) * row;
        task.scratch = task_scratch.at_least(kernel.decode_scratch(task));
        if (task.scratch != nullptr) run(task);
        return task.scratch != nullptr;
    });
    const double merging = static_cast<double>(runs.size() * heads * head_dim) * 0.1;
    for_each(static_cast<size_t>(q.shape[0]) * heads, merging, [&](size_t i) {
        const size_t s = i / heads, h = i % heads, n = first[s + 1] - first[s];
        const float* from = partials + (first[s] * heads + h) * row;
        char* to = at(out, static_cast<int64_t>(s) * out.stride[0] + static_cast<int64_t>(h) * out.stride[1]);
        if (is_float32) {
            kernel.merge_decode_f32(from, n, heads * row, head_dim, reinterpret_cast<float*>(to));
        } else {
            kernel.merge_decode_bf16(from, n, heads * row, head_dim, reinterpret_cast<uint16_t*>(to));
        }
        return true;
    });
    return result;
}

}  // namespace

void bind_attention(nb::module_& m) {
    using nb::arg;
    m.def("attention", &attention, arg("q"), arg("k"), arg("v"), arg("cu_seqlens").none(), arg("cu_seqlens_k").none(),
          arg("causal"), arg("window").none(), arg("scale").none(), arg("block_size").none(), arg("out").none());
    m.def("decode_attention", &decode_attention, arg("q"), arg("k_cache"), arg("v_cache"), arg("lengths"),
          arg("scale").none(), arg("window").none(), arg("out").none());
}

}  // namespace whet
