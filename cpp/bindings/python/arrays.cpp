#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include "arrays.h"

#include <nanobind/nanobind.h>
#include <numpy/arrayobject.h>

#include <cstring>
#include <utility>

namespace nb = nanobind;

namespace whet {
namespace {

// What this file needs of torch, fetched when the first tensor arrives and kept for the life of the process. A tensor
// is asked through the descriptors of its class: a lookup by name for each question would cost as much as the answer.
struct Torch {
    PyTypeObject* tensor = nullptr;
    PyObject *float32 = nullptr, *float64 = nullptr, *bfloat16 = nullptr, *boolean = nullptr, *from_numpy = nullptr;
    PyObject *int32 = nullptr, *int64 = nullptr, *int8 = nullptr, *uint8 = nullptr, *empty = nullptr;
    PyObject *requires_grad = nullptr, *is_cpu = nullptr, *dtype = nullptr, *shape = nullptr;
    PyObject *is_contiguous = nullptr, *data_ptr = nullptr, *stride = nullptr;
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
    t.int32 = get(module, "int32");
    t.int64 = get(module, "int64");
    t.int8 = get(module, "int8");
    t.uint8 = get(module, "uint8");
    t.empty = get(module, "empty");
    t.from_numpy = get(module, "from_numpy");
    PyObject* tensor = get(module, "Tensor");
    t.requires_grad = get(tensor, "requires_grad");
    t.is_cpu = get(tensor, "is_cpu");
    t.dtype = get(tensor, "dtype");
    t.shape = get(tensor, "shape");
    t.is_contiguous = get(tensor, "is_contiguous");
    t.data_ptr = get(tensor, "data_ptr");
    t.stride = get(tensor, "stride");
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

bool torch_dtype(PyObject* dtype, const Torch& t, DType& out) {
    const std::pair<PyObject*, DType> known[] = {
        {t.float32, DType::kFloat32}, {t.bfloat16, DType::kBFloat16}, {t.float64, DType::kFloat64},
        {t.int64, DType::kInt64},     {t.boolean, DType::kBool},      {t.int32, DType::kInt32},
        {t.int8, DType::kInt8},       {t.uint8, DType::kUInt8},
    };
    for (const auto& [object, name] : known) {
        if (object == dtype) {
            out = name;
            return true;
        }
    }
    return false;
}

// The integers of a tuple, as many as `n` holds; false if that is not what it is.
bool sizes_of(const nb::object& tuple, int& n, Py_ssize_t* sizes) {
    if (!tuple.is_valid() || !PyTuple_Check(tuple.ptr()) || PyTuple_GET_SIZE(tuple.ptr()) > Array::kMaxAxes) {
        return false;
    }
    n = static_cast<int>(PyTuple_GET_SIZE(tuple.ptr()));
    for (int i = 0; i < n; ++i) sizes[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(tuple.ptr(), i));
    return true;
}

bool view_torch(PyObject* object, Array& array, const Torch& t, bool strided) {
    if (attribute_of(object, t.requires_grad).ptr() != Py_False || attribute_of(object, t.is_cpu).ptr() != Py_True) {
        return false;
    }
    int n_strides = 0;
    if (!strided && result_of(object, t.is_contiguous).ptr() != Py_True) return false;
    if (strided && !sizes_of(result_of(object, t.stride), n_strides, array.stride)) return false;
    const nb::object dtype = attribute_of(object, t.dtype);
    if (!torch_dtype(dtype.ptr(), t, array.dtype)) return false;
    if (!sizes_of(attribute_of(object, t.shape), array.ndim, array.shape)) return false;
    const nb::object address = result_of(object, t.data_ptr);
    if (!address.is_valid()) return false;
    array.data = PyLong_AsVoidPtr(address.ptr());
    array.is_torch = true;
    return true;
}

bool numpy_dtype(PyArrayObject* a, DType& out) {
    switch (PyArray_TYPE(a)) {
        case NPY_FLOAT:
            out = DType::kFloat32;
            return true;
        case NPY_DOUBLE:
            out = DType::kFloat64;
            return true;
        case NPY_BOOL:
            out = DType::kBool;
            return true;
        case NPY_INT32:
            out = DType::kInt32;
            return true;
        case NPY_INT64:
            out = DType::kInt64;
            return true;
        case NPY_INT8:
            out = DType::kInt8;
            return true;
        case NPY_UINT8:
            out = DType::kUInt8;
            return true;
        default:
            out = DType::kBFloat16;
            return std::strcmp(PyArray_DESCR(a)->typeobj->tp_name, "ml_dtypes.bfloat16") == 0;
    }
}

bool view_any(PyObject* object, Array& array, bool strided, bool writable) {
    // A subclass may mean more than its numbers (a masked array does): the Python side looks at it.
    if (!PyArray_CheckExact(object)) {
        const Torch* t = torch();
        return t != nullptr && PyObject_TypeCheck(object, t->tensor) && view_torch(object, array, *t, strided);
    }
    auto* a = reinterpret_cast<PyArrayObject*>(object);
    if (!PyArray_ISBEHAVED_RO(a) || (!strided && !PyArray_IS_C_CONTIGUOUS(a)) ||
        (writable && !PyArray_ISWRITEABLE(a)) || PyArray_NDIM(a) > Array::kMaxAxes || !numpy_dtype(a, array.dtype)) {
        return false;
    }
    array.ndim = PyArray_NDIM(a);
    for (int i = 0; i < array.ndim; ++i) {
        array.shape[i] = PyArray_DIM(a, i);
        if (!strided) continue;
        // A field of a structured array may lie between whole elements.
        if (PyArray_STRIDE(a, i) % PyArray_ITEMSIZE(a) != 0) return false;
        array.stride[i] = PyArray_STRIDE(a, i) / PyArray_ITEMSIZE(a);
    }
    array.data = PyArray_DATA(a);
    return true;
}

}  // namespace

void import_numpy() {
    if (_import_array() < 0) nb::raise_python_error();
}

bool view(PyObject* object, Array& array) {
    return view_any(object, array, false, false) && (array.ndim == 1 || array.ndim == 2);
}

bool view_strided(PyObject* object, Array& array, bool writable) { return view_any(object, array, true, writable); }

nb::object new_like(PyObject* like, const Array& array, DType dtype, int ndim, const Py_ssize_t* shape, void** data) {
    if (array.is_torch) {
        const Torch& t = *torch();
        nb::object sizes = nb::steal(PyTuple_New(ndim));
        for (int i = 0; i < ndim; ++i) PyTuple_SET_ITEM(sizes.ptr(), i, PyLong_FromSsize_t(shape[i]));
        const nb::object same = attribute_of(like, t.dtype);
        nb::dict options;
        options["dtype"] = dtype == array.dtype ? same : nb::borrow(t.float32);
        nb::object out = nb::steal(PyObject_Call(t.empty, nb::make_tuple(sizes).ptr(), options.ptr()));
        if (!out.is_valid()) nb::raise_python_error();
        *data = PyLong_AsVoidPtr(result_of(out.ptr(), t.data_ptr).ptr());
        return out;
    }
    npy_intp sizes[Array::kMaxAxes];
    for (int i = 0; i < ndim; ++i) sizes[i] = shape[i];
    PyArray_Descr* descr =
        dtype == array.dtype ? PyArray_DESCR(reinterpret_cast<PyArrayObject*>(like)) : PyArray_DescrFromType(NPY_FLOAT);
    if (dtype == array.dtype) Py_INCREF(descr);  // the new array takes over a reference
    nb::object out = nb::steal(PyArray_Empty(ndim, sizes, descr, 0));
    if (!out.is_valid()) nb::raise_python_error();
    *data = PyArray_DATA(reinterpret_cast<PyArrayObject*>(out.ptr()));
    return out;
}

PyObject* new_array(DType dtype, Py_ssize_t n, Py_ssize_t columns, void** data) {
    npy_intp shape[2] = {n, columns};
    const int type = dtype == DType::kFloat64 ? NPY_DOUBLE : dtype == DType::kInt32 ? NPY_INT32 : NPY_FLOAT;
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
