#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include "arrays.h"

#include <nanobind/nanobind.h>
#include <numpy/arrayobject.h>

namespace nb = nanobind;

namespace whet {
namespace {

// What this file needs of torch, fetched when the first tensor arrives. Kept for the life of the process.
struct Torch {
    PyTypeObject* tensor = nullptr;
    PyObject *float32 = nullptr, *float64 = nullptr, *bfloat16 = nullptr, *boolean = nullptr, *from_numpy = nullptr;
};

struct Names {
    PyObject *requires_grad = PyUnicode_InternFromString("requires_grad"),
             *is_cpu = PyUnicode_InternFromString("is_cpu"), *dtype = PyUnicode_InternFromString("dtype"),
             *shape = PyUnicode_InternFromString("shape"), *is_contiguous = PyUnicode_InternFromString("is_contiguous"),
             *data_ptr = PyUnicode_InternFromString("data_ptr");
};

const Torch* torch() {
    static Torch t;
    if (t.tensor != nullptr) return &t;
    PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), "torch");
    if (module == nullptr) return nullptr;
    const auto get = [&](const char* name) {
        PyObject* attribute = PyObject_GetAttrString(module, name);
        if (attribute == nullptr) PyErr_Clear();  // torch is still being imported
        return attribute;
    };
    t.float32 = get("float32");
    t.float64 = get("float64");
    t.bfloat16 = get("bfloat16");
    t.boolean = get("bool");
    t.from_numpy = get("from_numpy");
    PyObject* tensor = get("Tensor");
    if (t.from_numpy == nullptr || t.boolean == nullptr) return nullptr;
    t.tensor = reinterpret_cast<PyTypeObject*>(tensor);
    return t.tensor == nullptr ? nullptr : &t;
}

bool is_true(PyObject* result) {
    const bool yes = result == Py_True;
    if (result == nullptr) PyErr_Clear();
    Py_XDECREF(result);
    return yes;
}

bool view_torch(PyObject* object, Array& array, const Torch& t) {
    static const Names names;
    if (is_true(PyObject_GetAttr(object, names.requires_grad)) || !is_true(PyObject_GetAttr(object, names.is_cpu)) ||
        !is_true(PyObject_CallMethodNoArgs(object, names.is_contiguous))) {
        return false;
    }
    const nb::object dtype = nb::steal(PyObject_GetAttr(object, names.dtype));
    if (dtype.ptr() == t.float32) {
        array.dtype = DType::kFloat32;
    } else if (dtype.ptr() == t.float64) {
        array.dtype = DType::kFloat64;
    } else if (dtype.ptr() == t.bfloat16) {
        array.dtype = DType::kBFloat16;
    } else if (dtype.ptr() == t.boolean) {
        array.dtype = DType::kBool;
    } else {
        return false;
    }
    const nb::object shape = nb::steal(PyObject_GetAttr(object, names.shape));
    if (!shape.is_valid() || !PyTuple_Check(shape.ptr())) return PyErr_Clear(), false;
    const Py_ssize_t ndim = PyTuple_GET_SIZE(shape.ptr());
    if (ndim < 1 || ndim > 2) return false;
    array.ndim = static_cast<int>(ndim);
    for (int i = 0; i < array.ndim; ++i) array.shape[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(shape.ptr(), i));
    const nb::object address = nb::steal(PyObject_CallMethodNoArgs(object, names.data_ptr));
    if (!address.is_valid()) return PyErr_Clear(), false;
    array.data = PyLong_AsVoidPtr(address.ptr());
    array.is_torch = true;
    return true;
}

}  // namespace

void import_numpy() {
    if (_import_array() < 0) nb::raise_python_error();
}

bool view(PyObject* object, Array& array) {
    // A subclass may mean more than its numbers (a masked array does): the Python side looks at it.
    if (!PyArray_CheckExact(object)) {
        const Torch* t = torch();
        return t != nullptr && PyObject_TypeCheck(object, t->tensor) && view_torch(object, array, *t);
    }
    auto* a = reinterpret_cast<PyArrayObject*>(object);
    if (!PyArray_IS_C_CONTIGUOUS(a) || !PyArray_ISBEHAVED_RO(a)) return false;
    switch (PyArray_TYPE(a)) {
        case NPY_FLOAT:
            array.dtype = DType::kFloat32;
            break;
        case NPY_DOUBLE:
            array.dtype = DType::kFloat64;
            break;
        case NPY_BOOL:
            array.dtype = DType::kBool;
            break;
        default:
            return false;
    }
    array.ndim = PyArray_NDIM(a);
    if (array.ndim < 1 || array.ndim > 2) return false;
    for (int i = 0; i < array.ndim; ++i) array.shape[i] = PyArray_DIM(a, i);
    array.data = PyArray_DATA(a);
    return true;
}

PyObject* new_array(DType dtype, Py_ssize_t n, Py_ssize_t columns, void** data) {
    npy_intp shape[2] = {n, columns};
    const int type = dtype == DType::kFloat64 ? NPY_DOUBLE : NPY_FLOAT;
    PyObject* array = PyArray_SimpleNew(columns < 0 ? 1 : 2, shape, type);
    if (array != nullptr) *data = PyArray_DATA(reinterpret_cast<PyArrayObject*>(array));
    return array;
}

PyObject* to_torch(PyObject* numpy_array) {
    PyObject* tensor = PyObject_CallOneArg(torch()->from_numpy, numpy_array);
    Py_DECREF(numpy_array);
    return tensor;
}

}  // namespace whet
