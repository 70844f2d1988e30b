// Arrays from Python at the price of a few attribute reads: NumPy through its C API, torch by asking the tensor.
//
// Only the plain case is taken here: on the CPU, without gradient, one of the dtypes below; bfloat16 is torch's or, in
// NumPy, ml_dtypes'. For everything else the caller returns NotImplemented and the Python side converts it or explains.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>

namespace whet {

enum class DType { kFloat32, kFloat64, kBFloat16, kBool, kInt32, kInt64, kInt8, kUInt8 };

struct Array {
    static constexpr int kMaxAxes = 4;

    void* data = nullptr;
    DType dtype = DType::kFloat32;
    int ndim = 0;
    Py_ssize_t shape[kMaxAxes] = {1, 1, 1, 1};
    Py_ssize_t stride[kMaxAxes] = {0, 0, 0, 0};  // in elements; set by view_strided alone
    bool is_torch = false;

    Py_ssize_t size() const { return shape[0] * shape[1] * shape[2] * shape[3]; }
    bool is_float() const { return dtype == DType::kFloat32 || dtype == DType::kFloat64; }
    template <class T>
    T* as() const {
        return static_cast<T*>(data);
    }
};

// Must run once, at module initialisation; throws if NumPy is missing.
void import_numpy();

// A contiguous array with one or two axes. False if `object` is not that.
bool view(PyObject* object, Array& array);

// An array with up to four axes and any strides. False if `object` is not that, or has to be written to and cannot.
bool view_strided(PyObject* object, Array& array, bool writable = false);

// A new contiguous array of the kind (NumPy or torch) of `like`, with `dtype`, which is float32 or that of `like`.
nanobind::object new_like(PyObject* like, const Array& array, DType dtype, int ndim, const Py_ssize_t* shape,
                          void** data);

// A new NumPy array (n) or, with columns >= 0, (n, columns). New reference; null with a Python error when out of
// memory.
PyObject* new_array(DType dtype, Py_ssize_t n, Py_ssize_t columns, void** data);

// The same memory as a torch tensor. Takes over the reference.
PyObject* to_torch(PyObject* numpy_array);

}  // namespace whet
