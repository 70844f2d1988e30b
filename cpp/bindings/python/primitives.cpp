// Bindings of the primitives: the plain case of each function.
//
// A function returns NotImplemented for other cases: its Python side (src/whet/ops) then converts the input or raises.
#include "engine/primitives.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <exception>
#include <string>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "gil.h"
#include "runtime/packing.h"

namespace nb = nanobind;

namespace whet {
namespace {

// Creates an array of this dtype, with the shape and library of `like`.
nb::object new_result(DType dtype, const Array& like, int ndim, void** data) {
    PyObject* array = new_array(dtype, ndim, like.shape, like.is_torch, data);
    if (array == nullptr) nb::raise_python_error();
    return nb::steal(array);
}

// Rows and columns of a 2-D array, or of a 1-D array split into rows of `length` (0: not given).
bool rows_and_columns(const Array& a, Py_ssize_t length, size_t& rows, size_t& columns) {
    if (a.ndim == 1 && (length == 0 || a.shape[0] == 0 || a.shape[0] % length != 0)) return false;
    columns = static_cast<size_t>(a.ndim == 2 ? a.shape[1] : length);
    rows = static_cast<size_t>(a.ndim == 2 ? a.shape[0] : a.shape[0] / length);
    return a.ndim == 1 || length == 0 || length == a.shape[1];
}

// ---------------------------------------------------------------- token KL

// Views both arrays and the mask. Returns false unless they have one shape and dtype.
bool view_logprobs(nb::handle policy, nb::handle ref, nb::handle mask, bool float32_only, Array& p, Array& q,
                   Array& m) {
    if (!view(policy.ptr(), p) || !view(ref.ptr(), q) || !equal_shapes(p, q) || p.dtype != q.dtype || !p.is_float() ||
        (float32_only && p.dtype != DType::kFloat32)) {
        return false;
    }
    return mask.is_none() || (view(mask.ptr(), m) && m.dtype == DType::kBool && equal_shapes(p, m));
}

nb::object token_kl_call(nb::handle policy, nb::handle ref, nb::handle mask, bool schulman, bool float32_only) {
    Array p, q, m;
    if (!view_logprobs(policy, ref, mask, float32_only, p, q, m) || p.ndim != 1) return not_implemented();
    double sum = 0.0;
    token_kl(schulman, p, q, m.as<uint8_t>(), 1, static_cast<size_t>(p.size()), &sum);
    return nb::steal(PyFloat_FromDouble(sum));
}

nb::object batch_token_kl(nb::handle policy, nb::handle ref, nb::handle seq_len, nb::handle mask, bool schulman,
                          bool float32_only) {
    Array p, q, m;
    Py_ssize_t length = 0;
    size_t rows = 0, columns = 0;
    if (!view_logprobs(policy, ref, mask, float32_only, p, q, m) || !optional_size(seq_len, 0, length) ||
        !rows_and_columns(p, length, rows, columns)) {
        return not_implemented();
    }
    void* data = nullptr;
    Array like = p;
    like.shape[0] = static_cast<Py_ssize_t>(rows);
    nb::object out = new_result(p.dtype, like, 1, &data);
    if (p.dtype == DType::kFloat64) {
        token_kl(schulman, p, q, m.as<uint8_t>(), rows, columns, static_cast<double*>(data));
        return out;
    }
    constexpr size_t kMaxOnStack = 64;
    double on_stack[kMaxOnStack];
    std::vector<double> on_heap(rows <= kMaxOnStack ? 0 : rows);
    double* sums = on_heap.empty() ? on_stack : on_heap.data();
    token_kl(schulman, p, q, m.as<uint8_t>(), rows, columns, sums);
    std::copy_n(sums, rows, static_cast<float*>(data));
    return out;
}

// ---------------------------------------------------------------- group advantages

// group_size False: each row of rewards is a group.
nb::object group_advantages_call(nb::handle rewards, nb::handle group_size, AdvantageScale scale, double ddof,
                                 double eps) {
    Array r;
    Py_ssize_t length = 0;
    size_t n_groups = 0, size = 0;
    if (!view(rewards.ptr(), r) || !r.is_float() || r.size() == 0 ||
        (group_size.ptr() != Py_False && !optional_size(group_size, 0, length)) ||
        !rows_and_columns(r, length, n_groups, size)) {
        return not_implemented();
    }
    void* data = nullptr;
    nb::object out = new_result(r.dtype, r, r.ndim, &data);
    group_advantages(r, n_groups, size, scale, ddof, eps, data);
    return out;
}

// compute_group_advantages for rewards (G,) and default settings.
PyObject* single_group_advantages(PyObject* rewards) noexcept {
    Array r;
    if (!view(rewards, r) || r.ndim != 1 || !r.is_float() || r.shape[0] == 0) Py_RETURN_NOTIMPLEMENTED;
    void* data = nullptr;
    PyObject* out = new_array(r.dtype, 1, r.shape, r.is_torch, &data);
    if (out == nullptr) return nullptr;
    constexpr double kDdof = 0.0, kNoEps = -1.0;
    try {
        group_advantages(r, 1, static_cast<size_t>(r.shape[0]), AdvantageScale::kGroup, kDdof, kNoEps, data);
    } catch (const std::exception& error) {  // invalid WHET_ISA
        Py_DECREF(out);
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
    return out;
}

// The Python function compute_group_advantages, and a C function of the same name that handles the plain call
// f(rewards) and forwards all others: loops call it once per group, where a Python frame would cost as much as the
// rest.
PyObject* general_group_advantages = nullptr;

PyObject* call_group_advantages(PyObject*, PyObject* const* args, Py_ssize_t n_args, PyObject* names) {
    if (n_args == 1 && names == nullptr) {
        PyObject* result = single_group_advantages(args[0]);
        if (result != Py_NotImplemented) return result;
        Py_DECREF(result);
    }
    return PyObject_Vectorcall(general_group_advantages, args, static_cast<size_t>(n_args), names);
}

// Docstring with the text signature that inspect.signature reads: name(parameters), a line of dashes, the docstring.
std::string describe_group_advantages(nb::handle function) {
    std::string text = nb::cast<std::string>(function.attr("__name__")) + "(rewards, *";
    for (auto [option, value] : nb::cast<nb::dict>(function.attr("__kwdefaults__"))) {
        text += ", " + nb::cast<std::string>(option) + "=" + nb::cast<std::string>(nb::repr(value));
    }
    const nb::object doc = function.attr("__doc__");  // None under -OO
    return text + ")\n--\n\n" + (doc.is_none() ? "" : nb::cast<std::string>(doc));
}

nb::object plain_group_advantages_first(nb::object function) {
    static const std::string name = nb::cast<std::string>(function.attr("__name__"));
    static const std::string doc = describe_group_advantages(function);
    // Cast through void(*)(), as CPython does: GCC warns of the direct cast.
    const auto call = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_group_advantages));
    static PyMethodDef definition = {name.c_str(), call, METH_FASTCALL | METH_KEYWORDS, doc.c_str()};
    general_group_advantages = nb::object(function).release().ptr();
    const nb::object module_name = function.attr("__module__"), module = nb::module_::import_(module_name);
    // The module, for pickle.
    return nb::steal(PyCFunction_NewEx(&definition, module.ptr(), module_name.ptr()));
}

// ---------------------------------------------------------------- log-probabilities

// token_ids: (rows,) int64, validated against the vocabulary size.
nb::object token_logprobs_call(nb::handle logits, nb::handle token_ids, double temperature, bool with_entropy) {
    Array x, ids;
    if (!view(logits.ptr(), x) || x.ndim != 2 || !x.is_narrow_float() || !view_vector(token_ids, DType::kInt64, ids) ||
        ids.shape[0] != x.shape[0]) {
        return not_implemented();
    }
    void *logprobs = nullptr, *entropy = nullptr;
    nb::object first = new_result(DType::kFloat32, x, 1, &logprobs), second;
    if (with_entropy) second = new_result(DType::kFloat32, x, 1, &entropy);
    token_logprobs(x, ids.as<int64_t>(), temperature, static_cast<float*>(logprobs), static_cast<float*>(entropy));
    return with_entropy ? nb::object(nb::make_tuple(first, second)) : first;
}

// ---------------------------------------------------------------- GAE and packing

// last_value: a float for a single trajectory, else (rows,) float64.
nb::object gae_call(nb::handle rewards, nb::handle values, nb::handle dones, nb::handle last_value, double gamma,
                    double lambda) {
    Array r, v, d, last;
    const auto is_share = [](double x) { return x >= 0.0 && x <= 1.0; };
    if (!is_share(gamma) || !is_share(lambda) || !view(rewards.ptr(), r) || !view(values.ptr(), v) ||
        !view(dones.ptr(), d) || !equal_shapes(r, v) || !equal_shapes(r, d) || d.dtype != DType::kBool ||
        !r.is_float() || v.dtype != r.dtype || r.size() == 0) {
        return not_implemented();
    }
    double only = 0.0;
    const double* last_values = &only;
    if (r.ndim == 1) {
        if (!PyFloat_CheckExact(last_value.ptr())) return not_implemented();
        only = PyFloat_AsDouble(last_value.ptr());
    } else {
        if (!view_vector(last_value, DType::kFloat64, last) || last.shape[0] != r.shape[0]) return not_implemented();
        last_values = last.as<double>();
    }
    void *advantages = nullptr, *returns = nullptr;
    nb::object first = new_result(r.dtype, r, r.ndim, &advantages), second = new_result(r.dtype, r, r.ndim, &returns);
    gae(r, v, d.as<uint8_t>(), last_values, gamma, lambda, advantages, returns);
    return nb::make_tuple(first, second);
}

// lengths: int64, validated.
nb::object pack(nb::handle lengths, int64_t max_length) {
    Array n;
    if (!view_vector(lengths, DType::kInt64, n)) throw nb::type_error("pack_sequences: lengths is not (n,) int64");
    Packing packing;
    {
        const ReleasedGil released;
        packing = pack_sequences(n.as<int64_t>(), n.shape[0], max_length);
    }
    nb::list bins;
    for (size_t b = 0; b + 1 < packing.bin_begin.size(); ++b) {
        const int64_t begin = packing.bin_begin[b], size = packing.bin_begin[b + 1] - begin;
        nb::object bin = nb::steal(PyList_New(size));
        if (!bin.is_valid()) nb::raise_python_error();
        for (int64_t i = 0; i < size; ++i) {
            PyObject* index = PyLong_FromLongLong(packing.indices[static_cast<size_t>(begin + i)]);
            if (index == nullptr) nb::raise_python_error();
            PyList_SetItem(bin.ptr(), i, index);
        }
        bins.append(bin);
    }
    return bins;
}

}  // namespace

// Functions whose arguments are never None have unnamed arguments: nanobind dispatches those fastest.
void bind_primitives(nb::module_& m) {
    using nb::arg;
    nb::enum_<AdvantageScale>(m, "Scale")
        .value("GROUP", AdvantageScale::kGroup)
        .value("BATCH", AdvantageScale::kBatch)
        .value("NONE", AdvantageScale::kNone);
    m.def("token_kl", &token_kl_call, PlainCase(), arg(), arg(), arg().none(), arg(), arg());
    m.def("batch_token_kl", &batch_token_kl, PlainCase(), arg(), arg(), arg().none(), arg().none(), arg(), arg());
    m.def("group_advantages", &group_advantages_call, PlainCase());
    m.def("plain_group_advantages_first", &plain_group_advantages_first);
    m.def("token_logprobs", &token_logprobs_call, PlainCase());
    m.def("gae", &gae_call, PlainCase(), arg(), arg(), arg(), arg().none(), arg(), arg());
    m.def("pack_sequences", &pack);
}

}  // namespace whet
