// Arrays from Python at the price of a few attribute reads: NumPy through its C API, torch by asking the tensor.
//
// Only the plain case is taken here: contiguous, float32 / float64 / bool / bf16 (torch), one or two axes, on the CPU,
// without gradient. For everything else the caller returns NotImplemented and the Python side converts it or explains.
#pragma once
#include <Python.h>
#include <cstdint>

namespace whet {

enum class DType { kFloat32, kFloat64, kBFloat16, kBool };

struct Array {
    void* data = nullptr;
    DType dtype = DType::kFloat32;
    int ndim = 0;
    Py_ssize_t shape[2] = {1, 1};
    bool is_torch = false;

    Py_ssize_t size() const { return shape[0] * shape[1]; }
    bool is_float() const { return dtype == DType::kFloat32 || dtype == DType::kFloat64; }
    template <class T>
    T* as() const {
        return static_cast<T*>(data);
    }
};

// Must run once, at module initialisation; throws if NumPy is missing.
void import_numpy();

// False if `object` is not the plain case.
bool view(PyObject* object, Array& array);

// A new NumPy array (n) or, with columns >= 0, (n, columns). New reference; null with a Python error when out of
// memory.
PyObject* new_array(DType dtype, Py_ssize_t n, Py_ssize_t columns, void** data);

// The same memory as a torch tensor. Takes over the reference.
PyObject* to_torch(PyObject* numpy_array);

}  // namespace whet
