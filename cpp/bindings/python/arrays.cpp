#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include "arrays.h"

#include <nanobind/nanobind.h>
#include <numpy/arrayobject.h>

namespace nb = nanobind;

namespace whet {
namespace {

// What this file needs of torch, fetched when the first tensor arrives and kept for the life of the process. A tensor
// is asked through the descriptors of its class: a lookup by name for each question would cost as much as the answer.
struct Torch {
    PyTypeObject* tensor = nullptr;
    PyObject *float32 = nullptr, *float64 = nullptr, *bfloat16 = nullptr, *boolean = nullptr, *from_numpy = nullptr;
    PyObject *requires_grad = nullptr, *is_cpu = nullptr, *dtype = nullptr, *shape = nullptr;
    PyObject *is_contiguous = nullptr, *data_ptr = nullptr;
    bool ready = false;
};

const Torch* torch() {
    static Torch t;
    if (t.ready) return &t;
    PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), "torch");
    bool complete = module != nullptr;
    const auto get = [&](PyObject* object, const char* name) {
        PyObject* attribute = object == nullptr ? nullptr : PyObject_GetAttrString(object, name);
        if (attribute == nullptr) PyErr_Clear(), complete = false;  // torch is still being imported
        return attribute;
    };
    t.float32 = get(module, "float32");
    t.float64 = get(module, "float64");
    t.bfloat16 = get(module, "bfloat16");
    t.boolean = get(module, "bool");
    t.from_numpy = get(module, "from_numpy");
    PyObject* tensor = get(module, "Tensor");
    t.requires_grad = get(tensor, "requires_grad");
    t.is_cpu = get(tensor, "is_cpu");
    t.dtype = get(tensor, "dtype");
    t.shape = get(tensor, "shape");
    t.is_contiguous = get(tensor, "is_contiguous");
    t.data_ptr = get(tensor, "data_ptr");
    t.tensor = reinterpret_cast<PyTypeObject*>(tensor);
    t.ready = complete;
    return complete ? &t : nullptr;
}

// The value of an attribute or the result of a method without arguments; invalid, and no Python error, if that fails.
nb::object attribute_of(PyObject* tensor, PyObject* descriptor) {
    PyObject* value =
        Py_TYPE(descriptor)->tp_descr_get(descriptor, tensor, reinterpret_cast<PyObject*>(Py_TYPE(tensor)));
    if (value == nullptr) PyErr_Clear();
    return nb::steal(value);
}
nb::object result_of(PyObject* tensor, PyObject* method) {
    PyObject* value = PyObject_CallOneArg(method, tensor);
    if (value == nullptr) PyErr_Clear();
    return nb::steal(value);
}

bool view_torch(PyObject* object, Array& array, const Torch& t) {
    if (attribute_of(object, t.requires_grad).ptr() != Py_False || attribute_of(object, t.is_cpu).ptr() != Py_True ||
        result_of(object, t.is_contiguous).ptr() != Py_True) {
        return false;
    }
    const nb::object dtype = attribute_of(object, t.dtype);
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
    const nb::object shape = attribute_of(object, t.shape);
    if (!shape.is_valid() || !PyTuple_Check(shape.ptr())) return false;
    const Py_ssize_t ndim = PyTuple_GET_SIZE(shape.ptr());
    if (ndim < 1 || ndim > 2) return false;
    array.ndim = static_cast<int>(ndim);
    for (int i = 0; i < array.ndim; ++i) array.shape[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(shape.ptr(), i));
    const nb::object address = result_of(object, t.data_ptr);
    if (!address.is_valid()) return false;
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
