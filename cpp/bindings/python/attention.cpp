// Bindings of attention: the plain case of each function.
//
// A function returns NotImplemented for whatever is not the plain case: src/whet/ops/attention.py then converts the
// input or explains what is wrong with it.
#include "attention.h"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "arrays.h"
#include "engine/attention.h"
#include "gil.h"

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
bool read_scale(nb::handle object, Py_ssize_t head_dim, float& scale) {
    if (!object.is_none() && !PyFloat_CheckExact(object.ptr())) return false;
    const double given = object.is_none() ? 1.0 / std::sqrt(head_dim) : PyFloat_AS_DOUBLE(object.ptr());
    scale = base_2_scale(given);
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

void* at(const Array& a, int64_t element) { return a.as<char>() + element * (a.dtype == DType::kFloat32 ? 4 : 2); }

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

// None: one sequence, or the rows of a batch. False if the offsets are not those of sequences in q and k.
bool read_sequences(const Array& q, const Array& k, const Array& v, const Array& out, nb::handle offsets,
                    nb::handle key_offsets, std::vector<AttentionSequence>& sequences) {
    // Sequence i begins with these rows of the first axes.
    const auto add = [&](int64_t q_row, int64_t k_row, int64_t n_queries, int64_t n_keys) {
        sequences.push_back({.q = at(q, q_row * q.stride[0]),
                             .k = at(k, k_row * k.stride[0]),
                             .v = at(v, k_row * v.stride[0]),
                             .out = at(out, q_row * out.stride[0]),
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
    int64_t seen = 0, block = 0;
    float factor = 0.0f;
    if (!view_operands(q_object, k_object, v_object, q, k, v) || !optional_size(window, kNoWindow, seen) ||
        (!causal && !window.is_none()) || !read_scale(scale, q.shape[q.ndim - 1], factor) ||
        !optional_size(block_size, 0, block) || block % 32 != 0 || block > kAttentionMaxBlock) {
        return not_implemented();
    }
    // A result may be the queries' own memory: a task reads its queries before it writes.
    if (!result_for(given, q_object, q, out, result)) return not_implemented();
    std::vector<AttentionSequence> sequences;
    if (!read_sequences(q, k, v, out, offsets, key_offsets, sequences)) return not_implemented();
    AttentionShape shape = shape_of(q, k, v, out);
    shape.window = seen, shape.causal = causal, shape.block_size = static_cast<int>(block), shape.scale = factor;
    const ReleaseGil release(attention_work(shape, sequences));
    attention(shape, sequences);
    return result;
}

nb::object decode_attention_call(nb::handle q_object, nb::handle k_object, nb::handle v_object, nb::handle lengths,
                                 nb::handle scale, nb::handle window, nb::handle given) {
    Array q, k, v, out;
    nb::object result;
    Integers length;
    int64_t seen = 0;
    float factor = 0.0f;
    if (!view_operands(q_object, k_object, v_object, q, k, v) || q.ndim != 3 || k.ndim != 4 ||
        q.shape[0] != k.shape[0] || !length.read(lengths) || length.array.shape[0] != q.shape[0] ||
        !read_scale(scale, q.shape[2], factor) || !optional_size(window, kNoWindow, seen)) {
        return not_implemented();
    }
    if (!result_for(given, q_object, q, out, result)) return not_implemented();
    std::vector<DecodeSequence> sequences;
    for (Py_ssize_t s = 0; s < q.shape[0]; ++s) {
        const int64_t end = length[s];
        if (end < 0 || end > k.shape[1]) return not_implemented();
        sequences.push_back({.q = at(q, s * q.stride[0]),
                             .k = at(k, s * k.stride[0]),
                             .v = at(v, s * v.stride[0]),
                             .out = at(out, s * out.stride[0]),
                             .begin = end - std::min(seen, end),
                             .end = end});
    }
    AttentionShape shape = shape_of(q, k, v, out);
    shape.scale = factor;
    const ReleaseGil release(decode_attention_work(shape, sequences));
    decode_attention(shape, sequences);
    return result;
}

}  // namespace

void bind_attention(nb::module_& m) {
    using nb::arg;
    m.def("attention", &attention_call, arg("q"), arg("k"), arg("v"), arg("cu_seqlens").none(),
          arg("cu_seqlens_k").none(), arg("causal"), arg("window").none(), arg("scale").none(),
          arg("block_size").none(), arg("out").none());
    m.def("decode_attention", &decode_attention_call, arg("q"), arg("k_cache"), arg("v_cache"), arg("lengths"),
          arg("scale").none(), arg("window").none(), arg("out").none());
}

}  // namespace whet
