// Bindings of attention: the plain case of each function.
//
// A function returns NotImplemented for other cases: src/whet/ops/attention.py then converts the input or raises.
#include "engine/attention.h"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "arrays.h"
#include "bindings.h"

namespace nb = nanobind;

namespace whet {
namespace {

// Reads a scale, None for head_dim^-1/2, and converts it for base-2 scores. Returns false unless it is a finite float.
bool read_scale(nb::handle object, Py_ssize_t head_dim, float& scale) {
    if (!object.is_none() && !PyFloat_CheckExact(object.ptr())) return false;
    const double given = object.is_none() ? 1.0 / std::sqrt(head_dim) : PyFloat_AsDouble(object.ptr());
    scale = base_2_scale(given);
    return std::isfinite(scale);
}

bool view_operand(nb::handle object, Array& array) {
    return view_strided(object.ptr(), array) && array.ndim >= 3 && array.is_narrow_float() && array.is_dense();
}

bool view_operands(nb::handle q_object, nb::handle k_object, nb::handle v_object, Array& q, Array& k, Array& v) {
    if (!view_operand(q_object, q) || !view_operand(k_object, k) || !view_operand(v_object, v) || q.dtype != k.dtype ||
        q.dtype != v.dtype || !equal_shapes(k, v)) {
        return false;
    }
    const Py_ssize_t head_dim = q.shape[q.ndim - 1], heads = q.shape[q.ndim - 2], kv_heads = k.shape[k.ndim - 2];
    return head_dim == k.shape[k.ndim - 1] && head_dim >= 32 && head_dim <= kAttentionMaxHeadDim && head_dim % 8 == 0 &&
           heads > 0 && kv_heads > 0 && heads % kv_heads == 0;
}

// A contiguous array of integers.
struct Integers {
    Array array;

    bool read(nb::handle object) { return view(object.ptr(), array) && array.ndim == 1 && array.is_integer(); }
    int64_t operator[](Py_ssize_t i) const { return array.integer(i); }
    // Whether these are offsets: non-decreasing from 0 to n.
    bool are_offsets_of(int64_t n) const {
        if (array.shape[0] < 1 || (*this)[0] != 0 || (*this)[array.shape[0] - 1] != n) return false;
        for (Py_ssize_t i = 1; i < array.shape[0]; ++i) {
            if ((*this)[i] < (*this)[i - 1]) return false;
        }
        return true;
    }
};

AttentionShape shape_of(const Array& q, const Array& k, const Array& v, const Array& out) {
    AttentionShape shape;
    shape.bf16 = q.dtype == DType::kBFloat16;
    shape.n_heads = q.shape[q.ndim - 2], shape.n_kv_heads = k.shape[k.ndim - 2], shape.head_dim = q.shape[q.ndim - 1];
    shape.q_head = q.stride[q.ndim - 2], shape.k_head = k.stride[k.ndim - 2], shape.v_head = v.stride[v.ndim - 2];
    shape.k_token = k.stride[k.ndim - 3], shape.v_token = v.stride[v.ndim - 3];
    shape.q_token = q.stride[q.ndim - 3], shape.out_token = out.stride[out.ndim - 3];
    shape.out_head = out.stride[out.ndim - 2];
    return shape;
}

// Splits q and k into sequences by offsets; None: one sequence, or the rows of a batch. Returns false for offsets that
// do not fit q and k.
bool read_sequences(const Array& q, const Array& k, const Array& v, const Array& out, nb::handle offsets,
                    nb::handle key_offsets, std::vector<AttentionSequence>& sequences) {
    // Sequence i begins at these indices of the first axes.
    const auto add = [&](int64_t q_row, int64_t k_row, int64_t n_queries, int64_t n_keys) {
        sequences.push_back({.q = q.at(q_row * q.stride[0]),
                             .k = k.at(k_row * k.stride[0]),
                             .v = v.at(k_row * v.stride[0]),
                             .out = out.at(q_row * out.stride[0]),
                             .n_queries = n_queries,
                             .n_keys = n_keys});
    };
    if (q.ndim != k.ndim) return false;
    if (q.ndim == 4) {
        if (!offsets.is_none() || !key_offsets.is_none() || q.shape[0] != k.shape[0]) return false;
        for (Py_ssize_t b = 0; b < q.shape[0]; ++b) add(b, b, q.shape[1], k.shape[1]);
        return true;
    }
    if (offsets.is_none()) {
        if (!key_offsets.is_none()) return false;
        add(0, 0, q.shape[0], k.shape[0]);
        return true;
    }
    Integers of_q, of_k;
    if (!of_q.read(offsets) || !of_k.read(key_offsets.is_none() ? offsets : key_offsets) ||
        of_q.array.shape[0] != of_k.array.shape[0] || !of_q.are_offsets_of(q.shape[0]) ||
        !of_k.are_offsets_of(k.shape[0])) {
        return false;
    }
    for (Py_ssize_t s = 0; s + 1 < of_q.array.shape[0]; ++s) {
        add(of_q[s], of_k[s], of_q[s + 1] - of_q[s], of_k[s + 1] - of_k[s]);
    }
    return true;
}

nb::object attention_call(nb::handle q_object, nb::handle k_object, nb::handle v_object, nb::handle offsets,
                          nb::handle key_offsets, bool causal, nb::handle window, nb::handle scale,
                          nb::handle block_size, nb::handle given) {
    Array q, k, v, out;
    nb::object result;
    Py_ssize_t seen = 0, block = 0;
    float factor = 0.0f;
    if (!view_operands(q_object, k_object, v_object, q, k, v) || !optional_size(window, kNoWindow, seen) ||
        (!causal && !window.is_none()) || !read_scale(scale, q.shape[q.ndim - 1], factor) ||
        !optional_size(block_size, 0, block) || block % 32 != 0 || block > kAttentionMaxBlock) {
        return not_implemented();
    }
    // out may alias q: a task reads its queries before it writes.
    if (!view_result(given, q_object, q, out, result) || !out.is_dense()) return not_implemented();
    std::vector<AttentionSequence> sequences;
    if (!read_sequences(q, k, v, out, offsets, key_offsets, sequences)) return not_implemented();
    AttentionShape shape = shape_of(q, k, v, out);
    shape.window = seen, shape.causal = causal, shape.block_size = static_cast<int>(block), shape.scale = factor;
    attention(shape, sequences);
    return result;
}

nb::object decode_attention_call(nb::handle q_object, nb::handle k_object, nb::handle v_object, nb::handle lengths,
                                 nb::handle scale, nb::handle window, nb::handle given) {
    Array q, k, v, out;
    nb::object result;
    Integers length;
    Py_ssize_t seen = 0;
    float factor = 0.0f;
    if (!view_operands(q_object, k_object, v_object, q, k, v) || q.ndim != 3 || k.ndim != 4 ||
        q.shape[0] != k.shape[0] || !length.read(lengths) || length.array.shape[0] != q.shape[0] ||
        !read_scale(scale, q.shape[2], factor) || !optional_size(window, kNoWindow, seen)) {
        return not_implemented();
    }
    if (!view_result(given, q_object, q, out, result) || !out.is_dense()) return not_implemented();
    std::vector<DecodeSequence> sequences;
    for (Py_ssize_t s = 0; s < q.shape[0]; ++s) {
        const int64_t end = length[s];
        if (end < 0 || end > k.shape[1]) return not_implemented();
        sequences.push_back({.q = q.at(s * q.stride[0]),
                             .k = k.at(s * k.stride[0]),
                             .v = v.at(s * v.stride[0]),
                             .out = out.at(s * out.stride[0]),
                             .begin = end - std::min<int64_t>(seen, end),
                             .end = end});
    }
    AttentionShape shape = shape_of(q, k, v, out);
    shape.scale = factor;
    decode_attention(shape, sequences);
    return result;
}

}  // namespace

void bind_attention(nb::module_& m) {
    using nb::arg;
    m.def("attention", &attention_call, PlainCase(), arg("q"), arg("k"), arg("v"), arg("cu_seqlens").none(),
          arg("cu_seqlens_k").none(), arg("causal"), arg("window").none(), arg("scale").none(),
          arg("block_size").none(), arg("out").none());
    m.def("decode_attention", &decode_attention_call, PlainCase(), arg("q"), arg("k_cache"), arg("v_cache"),
          arg("lengths"), arg("scale").none(), arg("window").none(), arg("out").none());
}

}  // namespace whet
