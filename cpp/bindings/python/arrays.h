// Arrays from Python at the price of a few attribute reads: NumPy through its C API, torch by asking the tensor.
//
// Only the plain case is read here: on the CPU, without gradient, of a DType; bfloat16 is torch's or, in NumPy,
// ml_dtypes'. For everything else a binding returns NotImplemented, and the Python side converts it or explains; so
// does nanobind, for arguments that its signature does not take, where the binding is marked as an operator
// (PlainCase).
#pragma once
#include <nanobind/nanobind.h>

#include "runtime/array.h"

namespace whet {

struct Array : ArrayView {
    bool is_torch = false;
};

// Must run once, at module initialisation; throws if NumPy is missing.
void import_numpy();

using PlainCase = nanobind::is_operator;

// Whether float32 holds a factor above 0, and its reciprocal.
constexpr bool is_float32_factor(double x) { return x > 1e-37 && x < 1e37; }

inline nanobind::object not_implemented() { return nanobind::borrow(Py_NotImplemented); }

// A contiguous array with one or two axes; its strides are not set. False if `object` is not that.
bool view(PyObject* object, Array& array);
// The same with one axis, of this dtype.
bool view_vector(nanobind::handle object, DType dtype, Array& array);

// An array with up to four axes and any strides. False if `object` is not that, or has to be written to and cannot.
bool view_strided(PyObject* object, Array& array, bool writable = false);

// The rows of a float32 or bfloat16 array, each contiguous. False if `object` is not that.
bool view_rows(nanobind::handle object, Array& array, Rows& rows, bool writable = false);

// None is `missing`. False for anything but None and an int from 1 up.
bool optional_size(nanobind::handle object, Py_ssize_t missing, Py_ssize_t& size);

// A new contiguous array of the kind (NumPy or torch) of `like`, with `dtype`, which is float32 or that of `like`.
nanobind::object new_like(PyObject* like, const Array& array, DType dtype, int ndim, const Py_ssize_t* shape,
                          void** data);

// The place of a result of the dtype of `like`: `given`, if it is writable and of this shape, or a new array like
// `like` where it is None. False if it does not fit.
bool view_result(nanobind::handle given, nanobind::handle like_object, const Array& like, int ndim,
                 const Py_ssize_t* shape, Array& out, nanobind::object& result);
// The same in the shape of `like`, and of its kind.
bool view_result(nanobind::handle given, nanobind::handle like_object, const Array& like, Array& out,
                 nanobind::object& result);

// A new contiguous array of float32, float64 or int32, NumPy or torch; the first form returns a new reference, or null
// with a Python error.
PyObject* new_array(DType dtype, int ndim, const Py_ssize_t* shape, bool as_torch, void** data) noexcept;
template <class T>
nanobind::object new_vector(DType dtype, size_t n, T*& data) {
    const auto size = static_cast<Py_ssize_t>(n);
    void* memory = nullptr;
    PyObject* array = new_array(dtype, 1, &size, false, &memory);
    if (array == nullptr) nanobind::raise_python_error();
    data = static_cast<T*>(memory);
    return nanobind::steal(array);
}

}  // namespace whet
