// Bindings of the primitives: the plain case of each function, straight to the kernels.
//
// A function returns NotImplemented for whatever is not the plain case: its Python side (src/whet/ops) then converts
// the input or explains what is wrong with it. Rows are split over the pool in pieces whose size does not depend on
// the number of threads, and partial sums are added in order: the same bits on any number of threads.
#include "primitives.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <vector>

#include "arrays.h"
#include "gil.h"
#include "kernels/dispatch.h"
#include "runtime/packing.h"

namespace nb = nanobind;

namespace whet {
namespace {

nb::object not_implemented() { return nb::borrow(Py_NotImplemented); }

nb::object float_array(DType dtype, Py_ssize_t n, Py_ssize_t columns, bool as_torch, void** data) {
    PyObject* array = new_array(dtype, n, columns, data);
    if (array != nullptr && as_torch) array = to_torch(array);
    if (array == nullptr) nb::raise_python_error();
    return nb::steal(array);
}

bool optional_size(nb::handle object, Py_ssize_t& size) {
    if (object.is_none()) return true;
    if (!PyLong_CheckExact(object.ptr())) return false;
    size = PyLong_AsSsize_t(object.ptr());
    if (size == -1 && PyErr_Occurred()) PyErr_Clear();
    return size > 0;
}

// Rows and columns of a 2-D array, or of a flat one cut into rows of `length` (0: not given).
bool rows_and_columns(const Array& a, Py_ssize_t length, Py_ssize_t& rows, Py_ssize_t& columns) {
    if (a.ndim == 2) {
        rows = a.shape[0], columns = a.shape[1];
        return length == 0 || length == columns;
    }
    if (length == 0 || a.shape[0] == 0 || a.shape[0] % length != 0) return false;
    rows = a.shape[0] / length, columns = length;
    return true;
}

// ---------------------------------------------------------------- token KL

constexpr size_t kPiece = 4096;  // tokens: what one task sums

// A kernel's total[2]; what was dropped from an infinite sum is NaN and means nothing.
double total_of(const double total[2]) { return std::isfinite(total[0]) ? total[0] + total[1] : total[0]; }

// One sum per row of `columns` tokens.
template <class T, class Kernel>
void sum_rows(Kernel kernel, const T* p, const T* q, const uint8_t* mask, size_t rows, size_t columns, double* sums) {
    const double work = static_cast<double>(rows) * static_cast<double>(columns) * (sizeof(T) == 4 ? 0.35 : 1.0);
    const auto mask_at = [&](size_t i) { return mask == nullptr ? nullptr : mask + i; };
    if (columns <= kPiece) {
        const size_t rows_per_task = std::max<size_t>(1, kPiece / std::max<size_t>(1, columns));
        for_each((rows + rows_per_task - 1) / rows_per_task, work, [&](size_t task) {
            const size_t end = std::min(rows, (task + 1) * rows_per_task);
            for (size_t row = task * rows_per_task; row < end; ++row) {
                double total[2] = {0.0, 0.0};
                kernel(p + row * columns, q + row * columns, mask_at(row * columns), columns, total);
                sums[row] = total_of(total);
            }
        });
        return;
    }
    const size_t pieces = (columns + kPiece - 1) / kPiece;
    std::vector<double> parts(2 * rows * pieces, 0.0);
    for_each(rows * pieces, work, [&](size_t task) {
        const size_t begin = task % pieces * kPiece, at = task / pieces * columns + begin;
        kernel(p + at, q + at, mask_at(at), std::min(kPiece, columns - begin), &parts[2 * task]);
    });
    for (size_t row = 0; row < rows; ++row) {
        double total[2] = {0.0, 0.0};
        for (size_t piece = row * pieces; piece < (row + 1) * pieces; ++piece) {
            // TwoSum, as in simd/math.h.
            const double part = parts[2 * piece], sum = total[0] + part, back = sum - total[0];
            total[1] += (total[0] - (sum - back)) + (part - back) + parts[2 * piece + 1];
            total[0] = sum;
        }
        sums[row] = total_of(total);
    }
}

void token_kl_rows(bool schulman, const Array& p, const Array& q, const uint8_t* mask, size_t rows, size_t columns,
                   double* sums) {
    const Kernels& k = kernels();
    if (p.dtype == DType::kFloat32) {
        sum_rows(schulman ? k.token_kl_schulman_f32 : k.token_kl_f32, p.as<float>(), q.as<float>(), mask, rows, columns,
                 sums);
    } else {
        sum_rows(schulman ? k.token_kl_schulman_f64 : k.token_kl_f64, p.as<double>(), q.as<double>(), mask, rows,
                 columns, sums);
    }
}

bool same_shape(const Array& a, const Array& b) {
    return a.ndim == b.ndim && a.shape[0] == b.shape[0] && a.shape[1] == b.shape[1];
}

// Both arrays and the mask, if they are of one shape and dtype.
bool view_logprobs(nb::handle policy, nb::handle ref, nb::handle mask, bool float32_only, Array& p, Array& q,
                   Array& m) {
    if (!view(policy.ptr(), p) || !view(ref.ptr(), q) || !same_shape(p, q) || p.dtype != q.dtype || !p.is_float() ||
        (float32_only && p.dtype != DType::kFloat32)) {
        return false;
    }
    return mask.is_none() || (view(mask.ptr(), m) && m.dtype == DType::kBool && same_shape(p, m));
}

nb::object token_kl(nb::handle policy, nb::handle ref, nb::handle mask, bool schulman, bool float32_only) {
    Array p, q, m;
    if (!view_logprobs(policy, ref, mask, float32_only, p, q, m) || p.ndim != 1) return not_implemented();
    double sum = 0.0;
    token_kl_rows(schulman, p, q, m.as<uint8_t>(), 1, static_cast<size_t>(p.size()), &sum);
    return nb::steal(PyFloat_FromDouble(sum));
}

nb::object batch_token_kl(nb::handle policy, nb::handle ref, nb::handle seq_len, nb::handle mask, bool schulman,
                          bool float32_only) {
    Array p, q, m;
    Py_ssize_t length = 0, rows = 0, columns = 0;
    if (!view_logprobs(policy, ref, mask, float32_only, p, q, m) || !optional_size(seq_len, length) ||
        !rows_and_columns(p, length, rows, columns)) {
        return not_implemented();
    }
    void* data = nullptr;
    nb::object out = float_array(p.dtype, rows, -1, p.is_torch, &data);
    const size_t n = static_cast<size_t>(rows);
    if (p.dtype == DType::kFloat64) {
        token_kl_rows(schulman, p, q, m.as<uint8_t>(), n, static_cast<size_t>(columns), static_cast<double*>(data));
        return out;
    }
    double few[64];
    std::vector<double> many(n <= 64 ? 0 : n);
    double* sums = n <= 64 ? few : many.data();
    token_kl_rows(schulman, p, q, m.as<uint8_t>(), n, static_cast<size_t>(columns), sums);
    std::copy_n(sums, n, static_cast<float*>(data));
    return out;
}

// ---------------------------------------------------------------- group advantages

enum class Scale { kGroup, kBatch, kNone };

template <class T, class Advantages, class Deviation>
void group_advantages_rows(Advantages advantages, Deviation deviation, const T* rewards, size_t n_groups,
                           size_t group_size, Scale scale, double ddof, double eps, T* out) {
    double batch_scale = __builtin_nan("");
    if (scale == Scale::kNone) batch_scale = 1.0;
    if (scale == Scale::kBatch) {
        batch_scale = deviation(rewards, n_groups * group_size, ddof);
        // Infinity makes every advantage of a batch without spread 0.
        batch_scale = eps >= 0.0 ? batch_scale + eps : batch_scale < 1e-8 ? __builtin_inf() : batch_scale;
    }
    // A multiple of 8 groups a task, so that vectors never straddle tasks.
    const size_t groups_per_task = std::max<size_t>(8, kPiece / 4 / group_size / 8 * 8);
    for_each((n_groups + groups_per_task - 1) / groups_per_task, static_cast<double>(n_groups * group_size),
             [&](size_t task) {
                 const size_t begin = task * groups_per_task, count = std::min(groups_per_task, n_groups - begin);
                 const size_t at = begin * group_size;
                 advantages(rewards + at, count, group_size, ddof, eps, batch_scale, out + at);
             });
}

// group_size False: the rows of the rewards are groups.
nb::object group_advantages(nb::handle rewards, nb::handle group_size, Scale scale, double ddof, double eps) {
    Array r;
    Py_ssize_t size = 0, rows = 1, columns = 0;
    if (!view(rewards.ptr(), r) || !r.is_float() || r.size() == 0) return not_implemented();
    if ((group_size.ptr() != Py_False && !optional_size(group_size, size)) ||
        !rows_and_columns(r, size, rows, columns)) {
        return not_implemented();
    }
    void* data = nullptr;
    nb::object out = float_array(r.dtype, r.shape[0], r.ndim == 2 ? r.shape[1] : -1, r.is_torch, &data);
    const Kernels& k = kernels();
    const auto n_groups = static_cast<size_t>(rows), per_group = static_cast<size_t>(columns);
    if (r.dtype == DType::kFloat32) {
        group_advantages_rows(k.group_advantages_f32, k.batch_deviation_f32, r.as<float>(), n_groups, per_group, scale,
                              ddof, eps, static_cast<float*>(data));
    } else {
        group_advantages_rows(k.group_advantages_f64, k.batch_deviation_f64, r.as<double>(), n_groups, per_group, scale,
                              ddof, eps, static_cast<double*>(data));
    }
    return out;
}

// The same for rewards (G,) and the default settings.
PyObject* one_group_advantages(PyObject* rewards) noexcept {
    Array r;
    if (!view(rewards, r) || r.ndim != 1 || !r.is_float() || r.shape[0] == 0) Py_RETURN_NOTIMPLEMENTED;
    void* data = nullptr;
    PyObject* out = new_array(r.dtype, r.shape[0], -1, &data);
    if (out != nullptr && r.is_torch) out = to_torch(out);
    if (out == nullptr) return nullptr;
    constexpr double kDdof = 0.0, kNoEps = -1.0, kNoBatchScale = __builtin_nan("");
    const auto n = static_cast<size_t>(r.shape[0]);
    try {
        if (r.dtype == DType::kFloat32) {
            kernels().group_advantages_f32(r.as<float>(), 1, n, kDdof, kNoEps, kNoBatchScale,
                                           static_cast<float*>(data));
        } else {
            kernels().group_advantages_f64(r.as<double>(), 1, n, kDdof, kNoEps, kNoBatchScale,
                                           static_cast<double*>(data));
        }
    } catch (const std::exception& error) {  // WHET_ISA names no instruction set
        Py_DECREF(out);
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
    return out;
}

// The Python function compute_group_advantages, and a C function of its name that answers the plain call, f(rewards),
// itself and hands on every other: loops call it once a group, where a Python frame would take as long as the rest.
PyObject* general_group_advantages = nullptr;

PyObject* call_group_advantages(PyObject*, PyObject* const* args, Py_ssize_t n_args, PyObject* names) noexcept {
    if (n_args == 1 && names == nullptr) {
        PyObject* result = one_group_advantages(args[0]);
        if (result != Py_NotImplemented) return result;
        Py_DECREF(result);
    }
    return PyObject_Vectorcall(general_group_advantages, args, static_cast<size_t>(n_args), names);
}

nb::object plain_group_advantages_first(nb::object function) {
    // As inspect.signature reads a C function's: name(parameters), a line of dashes, the docstring.
    static const std::string name = nb::cast<std::string>(function.attr("__name__"));
    static std::string doc = name + "(rewards, *";
    for (auto [option, value] : nb::cast<nb::dict>(function.attr("__kwdefaults__"))) {
        doc += ", " + nb::cast<std::string>(option) + "=" + nb::cast<std::string>(nb::repr(value));
    }
    doc += ")\n--\n\n" + nb::cast<std::string>(function.attr("__doc__"));
    // By way of void(*)(), as CPython does it: GCC warns of the direct cast.
    const auto call = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_group_advantages));
    static PyMethodDef definition = {name.c_str(), call, METH_FASTCALL | METH_KEYWORDS, doc.c_str()};
    general_group_advantages = nb::object(function).release().ptr();
    const nb::object module_name = function.attr("__module__"), module = nb::module_::import_(module_name);
    // Of its module, as pickle looks functions up.
    return nb::steal(PyCFunction_NewEx(&definition, module.ptr(), module_name.ptr()));
}

// ---------------------------------------------------------------- log-probabilities

template <class T, class Kernel>
void logprobs_rows(Kernel kernel, const T* logits, const int64_t* token_ids, size_t rows, size_t vocab_size,
                   double temperature, float* logprobs, float* entropy) {
    for_each(rows, static_cast<double>(rows * vocab_size) * 0.25, [&](size_t row) {
        kernel(logits + row * vocab_size, vocab_size, static_cast<size_t>(token_ids[row]), temperature, logprobs + row,
               entropy == nullptr ? nullptr : entropy + row);
    });
}

// token_ids: the address of rows checked int64 indices.
nb::object token_logprobs(nb::handle logits, uintptr_t token_ids, double temperature, bool with_entropy) {
    Array x;
    if (!view(logits.ptr(), x) || x.ndim != 2) return not_implemented();
    if (x.dtype != DType::kFloat32 && x.dtype != DType::kBFloat16) return not_implemented();
    void *logprobs = nullptr, *entropy = nullptr;
    nb::object out = float_array(DType::kFloat32, x.shape[0], -1, x.is_torch, &logprobs), second;
    if (with_entropy) second = float_array(DType::kFloat32, x.shape[0], -1, x.is_torch, &entropy);
    const auto rows = static_cast<size_t>(x.shape[0]), vocab_size = static_cast<size_t>(x.shape[1]);
    const auto* ids = reinterpret_cast<const int64_t*>(token_ids);
    if (x.dtype == DType::kFloat32) {
        logprobs_rows(kernels().token_logprobs_f32, x.as<float>(), ids, rows, vocab_size, temperature,
                      static_cast<float*>(logprobs), static_cast<float*>(entropy));
    } else {
        logprobs_rows(kernels().token_logprobs_bf16, x.as<uint16_t>(), ids, rows, vocab_size, temperature,
                      static_cast<float*>(logprobs), static_cast<float*>(entropy));
    }
    return with_entropy ? nb::object(nb::make_tuple(out, second)) : out;
}

// ---------------------------------------------------------------- GAE and packing

template <class T, class Kernel>
void gae_rows(Kernel kernel, const Array& r, const Array& v, const uint8_t* dones, const double* last_values,
              double gamma, double lambda, void* advantages, void* returns) {
    const auto rows = static_cast<size_t>(r.ndim == 1 ? 1 : r.shape[0]);
    const auto n = static_cast<size_t>(r.ndim == 1 ? r.shape[0] : r.shape[1]);
    for_each(rows, static_cast<double>(rows * n), [&](size_t row) {
        const size_t at = row * n;
        kernel(r.as<T>() + at, v.as<T>() + at, dones + at, last_values[row], n, gamma, lambda,
               static_cast<T*>(advantages) + at, static_cast<T*>(returns) + at);
    });
}

// last_value: a float for one trajectory, else one float64 per row.
nb::object gae(nb::handle rewards, nb::handle values, nb::handle dones, nb::handle last_value, double gamma,
               double lambda) {
    Array r, v, d, last;
    if (!view(rewards.ptr(), r) || !view(values.ptr(), v) || !view(dones.ptr(), d) || !same_shape(r, v) ||
        !same_shape(r, d) || d.dtype != DType::kBool || !r.is_float() || v.dtype != r.dtype || r.size() == 0) {
        return not_implemented();
    }
    double only = 0.0;
    const double* last_values = &only;
    if (r.ndim == 1) {
        if (!PyFloat_CheckExact(last_value.ptr())) return not_implemented();
        only = PyFloat_AS_DOUBLE(last_value.ptr());
    } else {
        if (!view(last_value.ptr(), last) || last.dtype != DType::kFloat64 || last.ndim != 1 ||
            last.shape[0] != r.shape[0]) {
            return not_implemented();
        }
        last_values = last.as<double>();
    }
    void *advantages = nullptr, *returns = nullptr;
    const Py_ssize_t columns = r.ndim == 2 ? r.shape[1] : -1;
    nb::object first = float_array(r.dtype, r.shape[0], columns, r.is_torch, &advantages);
    nb::object second = float_array(r.dtype, r.shape[0], columns, r.is_torch, &returns);
    if (r.dtype == DType::kFloat32) {
        gae_rows<float>(kernels().gae_f32, r, v, d.as<uint8_t>(), last_values, gamma, lambda, advantages, returns);
    } else {
        gae_rows<double>(kernels().gae_f64, r, v, d.as<uint8_t>(), last_values, gamma, lambda, advantages, returns);
    }
    return nb::make_tuple(first, second);
}

// lengths: the address of n checked int64 lengths.
nb::object pack(uintptr_t lengths, int64_t n, int64_t max_length) {
    Packing packing;
    {
        const nb::gil_scoped_release release;
        packing = pack_sequences(reinterpret_cast<const int64_t*>(lengths), n, max_length);
    }
    nb::object out = nb::steal(PyList_New(static_cast<Py_ssize_t>(packing.bin_begin.size() - 1)));
    if (!out.is_valid()) nb::raise_python_error();
    for (size_t b = 0; b + 1 < packing.bin_begin.size(); ++b) {
        const int64_t begin = packing.bin_begin[b], size = packing.bin_begin[b + 1] - begin;
        PyObject* bin = PyList_New(size);
        if (bin == nullptr) nb::raise_python_error();
        PyList_SET_ITEM(out.ptr(), static_cast<Py_ssize_t>(b), bin);
        for (int64_t i = 0; i < size; ++i) {
            PyObject* index = PyLong_FromLongLong(packing.indices[static_cast<size_t>(begin + i)]);
            if (index == nullptr) nb::raise_python_error();
            PyList_SET_ITEM(bin, i, index);
        }
    }
    return out;
}

}  // namespace

// What takes no None has no named arguments either: nanobind calls it in its quickest way.
void bind_primitives(nb::module_& m) {
    using nb::arg;
    nb::enum_<Scale>(m, "Scale")
        .value("GROUP", Scale::kGroup)
        .value("BATCH", Scale::kBatch)
        .value("NONE", Scale::kNone);
    m.def("token_kl", &token_kl, arg(), arg(), arg().none(), arg(), arg());
    m.def("batch_token_kl", &batch_token_kl, arg(), arg(), arg().none(), arg().none(), arg(), arg());
    m.def("group_advantages", &group_advantages);
    m.def("plain_group_advantages_first", &plain_group_advantages_first);
    m.def("token_logprobs", &token_logprobs);
    m.def("gae", &gae, arg(), arg(), arg(), arg().none(), arg(), arg());
    m.def("pack_sequences", &pack);
}

}  // namespace whet
