// Views of Python arrays for the cost of a few attribute reads: NumPy through its C API, torch through its attributes.
//
// Only the plain case is handled here: on the CPU, without gradient, of a DType; bfloat16 is torch's or, in NumPy,
// ml_dtypes'. For other cases a binding returns NotImplemented, and the Python side converts the input or raises. For
// arguments that do not match the signature, nanobind returns NotImplemented from bindings marked as operators
// (PlainCase).
#pragma once
#include <nanobind/nanobind.h>

#include <algorithm>
#include <span>

#include "runtime/array.h"

namespace whet {

struct Array : ArrayView {
    bool is_torch = false;
};

// Called once, at module initialisation; throws if NumPy is missing.
void import_numpy();

using PlainCase = nanobind::is_operator;

// Whether a positive factor and its reciprocal are finite in float32.
constexpr bool is_float32_factor(double x) { return x > 1e-37 && x < 1e37; }

inline nanobind::object not_implemented() { return nanobind::borrow(Py_NotImplemented); }

// Views a contiguous array with one or two axes, without setting strides. Returns false for other objects.
bool view(PyObject* object, Array& array);
// Views a contiguous 1-D array of this dtype. Returns false for other objects.
bool view_vector(nanobind::handle object, DType dtype, Array& array);

// Views an array with up to four axes and any strides. Returns false for other objects, and for read-only arrays that
// must be writable.
bool view_strided(PyObject* object, Array& array, bool writable = false);

// Views the contiguous rows of a float32 or bfloat16 array. Returns false for other objects.
bool view_rows(nanobind::handle object, Array& array, Rows& rows, bool writable = false);

// Reads an int >= 1, or `missing` for None. Returns false for other objects.
bool optional_size(nanobind::handle object, Py_ssize_t missing, Py_ssize_t& size);

// Creates a contiguous array of the library (NumPy or torch) of `like`; dtype is float32 or the dtype of `like`.
nanobind::object new_like(PyObject* like, const Array& array, DType dtype, int ndim, const Py_ssize_t* shape,
                          void** data);

// Output array with the dtype of `like`: `given`, if it is writable and of this shape, or, for None, a new array of the
// library of `like`. Returns false if `given` does not fit.
bool view_result(nanobind::handle given, nanobind::handle like_object, const Array& like, int ndim,
                 const Py_ssize_t* shape, Array& out, nanobind::object& result);
// Output array with the shape, dtype and library of `like`.
bool view_result(nanobind::handle given, nanobind::handle like_object, const Array& like, Array& out,
                 nanobind::object& result);

// Creates a contiguous float32, float64 or int32 array, NumPy or torch. The first form returns a new reference, or null
// with a Python error set.
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
template <class T>
nanobind::object array_of(DType dtype, std::span<const T> values) {
    T* data = nullptr;
    nanobind::object array = new_vector(dtype, values.size(), data);
    std::copy(values.begin(), values.end(), data);
    return array;
}

}  // namespace whet
