#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include "arrays.h"

#include <nanobind/nanobind.h>
#include <numpy/arrayobject.h>

#include <algorithm>
#include <iterator>

namespace nb = nanobind;

namespace whet {
namespace {

struct DTypeNames {
    int numpy;
    const char* torch;
};
// Indexed by DType. NumPy's bfloat16 is registered by ml_dtypes, with a type number assigned at run time.
constexpr DTypeNames kDTypes[] = {{NPY_FLOAT, "float32"}, {NPY_DOUBLE, "float64"}, {NPY_NOTYPE, "bfloat16"},
                                  {NPY_BOOL, "bool"},     {NPY_INT32, "int32"},    {NPY_INT64, "int64"},
                                  {NPY_INT8, "int8"},     {NPY_UINT8, "uint8"}};
constexpr size_t kNDTypes = std::size(kDTypes);

const DTypeNames& names_of(DType dtype) { return kDTypes[static_cast<size_t>(dtype)]; }

// An attribute that C code reads through its descriptor: a lookup by name would cost as much as the read.
struct Attribute {
    PyObject* descriptor = nullptr;
    descrgetfunc get = nullptr;
};

// Types and descriptors of torch, fetched with the first tensor and cached for the life of the process.
struct Torch {
    PyTypeObject* tensor = nullptr;
    PyObject* dtypes[kNDTypes] = {};
    Attribute requires_grad, is_cpu, dtype, shape;
    PyObject *from_numpy = nullptr, *empty = nullptr;
    PyObject *is_contiguous = nullptr, *data_ptr = nullptr, *stride = nullptr, *is_neg = nullptr;
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
    const auto get_attribute = [&](PyObject* type, const char* name) {
        Attribute attribute{get(type, name)};
        if (attribute.descriptor == nullptr) return attribute;
        void* slot = PyType_GetSlot(Py_TYPE(attribute.descriptor), Py_tp_descr_get);
        attribute.get = reinterpret_cast<descrgetfunc>(slot);
        return attribute;
    };
    for (size_t i = 0; i < kNDTypes; ++i) t.dtypes[i] = get(module, kDTypes[i].torch);
    t.empty = get(module, "empty");
    t.from_numpy = get(module, "from_numpy");
    PyObject* tensor = get(module, "Tensor");
    t.requires_grad = get_attribute(tensor, "requires_grad");
    t.is_cpu = get_attribute(tensor, "is_cpu");
    t.dtype = get_attribute(tensor, "dtype");
    t.shape = get_attribute(tensor, "shape");
    t.is_contiguous = get(tensor, "is_contiguous");
    t.data_ptr = get(tensor, "data_ptr");
    t.stride = get(tensor, "stride");
    t.is_neg = get(tensor, "is_neg");
    t.tensor = reinterpret_cast<PyTypeObject*>(tensor);
    t.ready = complete;
    return complete ? &t : nullptr;
}

// The value of an attribute, or the result of a method without arguments; invalid, without a Python error, on failure.
nb::object attribute_of(PyObject* tensor, const Attribute& attribute) {
    PyObject* value = attribute.get(attribute.descriptor, tensor, reinterpret_cast<PyObject*>(Py_TYPE(tensor)));
    if (value == nullptr) PyErr_Clear();
    return nb::steal(value);
}
nb::object result_of(PyObject* tensor, PyObject* method) {
    PyObject* value = PyObject_Vectorcall(method, &tensor, 1, nullptr);
    if (value == nullptr) PyErr_Clear();
    return nb::steal(value);
}

bool torch_dtype(PyObject* dtype, const Torch& t, DType& out) {
    const auto* found = std::find(std::begin(t.dtypes), std::end(t.dtypes), dtype);
    out = static_cast<DType>(found - t.dtypes);
    return found != std::end(t.dtypes);
}

// Whether this is the type of ml_dtypes' bfloat16.
bool is_bfloat16(PyTypeObject* type) {
    static PyTypeObject* bfloat16 = nullptr;
    if (type == bfloat16) return true;
    const nb::handle t(reinterpret_cast<PyObject*>(type));
    if (!nb::str("bfloat16").equal(t.attr("__name__")) || !nb::str("ml_dtypes").equal(t.attr("__module__"))) {
        return false;
    }
    bfloat16 = type;
    return true;
}

bool numpy_dtype(PyArrayObject* a, DType& out) {
    const int type = PyArray_TYPE(a);
    const auto* found = std::find_if(std::begin(kDTypes), std::end(kDTypes),
                                     [=](const DTypeNames& names) { return names.numpy == type; });
    out = static_cast<DType>(found - kDTypes);
    if (found != std::end(kDTypes)) return true;
    out = DType::kBFloat16;
    return is_bfloat16(PyArray_DESCR(a)->typeobj);
}

// Reads a tuple of integers into `n`, which has its length; returns false otherwise.
bool sizes_of(const nb::object& tuple, int& n, Py_ssize_t* sizes) {
    if (!tuple.is_valid() || !PyTuple_Check(tuple.ptr())) return false;
    const Py_ssize_t size = PyTuple_Size(tuple.ptr());
    if (size > Array::kMaxAxes) return false;
    n = static_cast<int>(size);
    for (int i = 0; i < n; ++i) sizes[i] = PyLong_AsSsize_t(PyTuple_GetItem(tuple.ptr(), i));
    return true;
}

bool view_torch(PyObject* object, Array& array, const Torch& t, bool strided) {
    if (attribute_of(object, t.requires_grad).ptr() != Py_False || attribute_of(object, t.is_cpu).ptr() != Py_True) {
        return false;
    }
    int n_strides = 0;
    // The strides of a contiguous tensor follow from its shape; reading them from torch takes twice the time.
    const bool contiguous = result_of(object, t.is_contiguous).ptr() == Py_True;
    if (!contiguous && (!strided || !sizes_of(result_of(object, t.stride), n_strides, array.stride))) return false;
    const nb::object dtype = attribute_of(object, t.dtype);
    if (!torch_dtype(dtype.ptr(), t, array.dtype)) return false;
    // A lazily negated tensor stores values with the opposite sign.
    if (result_of(object, t.is_neg).ptr() != Py_False) return false;
    if (!sizes_of(attribute_of(object, t.shape), array.ndim, array.shape)) return false;
    if (strided && contiguous) set_contiguous(array);
    const nb::object address = result_of(object, t.data_ptr);
    if (!address.is_valid()) return false;
    array.data = PyLong_AsVoidPtr(address.ptr());
    array.is_torch = true;
    return array.data != nullptr || array.size() == 0;  // null: a fake or wrapper tensor, or freed storage
}

bool view_any(PyObject* object, Array& array, bool strided, bool writable) {
    // A subclass may have more than numbers (masked arrays do): the Python side handles it.
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
        // The stride of a field of a structured array may not be a multiple of its size.
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

bool view_vector(nb::handle object, DType dtype, Array& array) {
    return view(object.ptr(), array) && array.ndim == 1 && array.dtype == dtype;
}

bool view_strided(PyObject* object, Array& array, bool writable) { return view_any(object, array, true, writable); }

bool view_rows(nb::handle object, Array& array, Rows& rows, bool writable) {
    return view_strided(object.ptr(), array, writable) && array.is_narrow_float() && rows_of(array, rows);
}

bool optional_size(nb::handle object, Py_ssize_t missing, Py_ssize_t& size) {
    size = missing;
    if (object.is_none()) return true;
    if (!PyLong_CheckExact(object.ptr())) return false;
    size = PyLong_AsSsize_t(object.ptr());
    if (size == -1 && PyErr_Occurred()) PyErr_Clear();
    return size > 0;
}

nb::object new_like(PyObject* like, const Array& array, DType dtype, int ndim, const Py_ssize_t* shape, void** data) {
    if (array.is_torch) {
        const Torch& t = *torch();
        nb::object sizes = nb::steal(PyTuple_New(ndim));
        for (int i = 0; i < ndim; ++i) PyTuple_SetItem(sizes.ptr(), i, PyLong_FromSsize_t(shape[i]));
        const nb::object same = attribute_of(like, t.dtype);
        nb::dict options;
        options["dtype"] = dtype == array.dtype ? same : nb::borrow(t.dtypes[static_cast<size_t>(DType::kFloat32)]);
        nb::object out = nb::steal(PyObject_Call(t.empty, nb::make_tuple(sizes).ptr(), options.ptr()));
        if (!out.is_valid()) nb::raise_python_error();
        *data = PyLong_AsVoidPtr(result_of(out.ptr(), t.data_ptr).ptr());
        return out;
    }
    npy_intp sizes[Array::kMaxAxes];
    for (int i = 0; i < ndim; ++i) sizes[i] = shape[i];
    PyArray_Descr* descr =
        dtype == array.dtype ? PyArray_DESCR(reinterpret_cast<PyArrayObject*>(like)) : PyArray_DescrFromType(NPY_FLOAT);
    if (dtype == array.dtype) Py_INCREF(reinterpret_cast<PyObject*>(descr));  // the new array steals a reference
    nb::object out = nb::steal(PyArray_Empty(ndim, sizes, descr, 0));
    if (!out.is_valid()) nb::raise_python_error();
    *data = PyArray_DATA(reinterpret_cast<PyArrayObject*>(out.ptr()));
    return out;
}

bool view_result(nb::handle given, nb::handle like_object, const Array& like, int ndim, const Py_ssize_t* shape,
                 Array& out, nb::object& result) {
    if (!given.is_none()) {
        result = nb::borrow(given);
        return view_strided(given.ptr(), out, true) && out.dtype == like.dtype && out.ndim == ndim &&
               std::equal(shape, shape + ndim, out.shape);
    }
    result = new_like(like_object.ptr(), like, like.dtype, ndim, shape, &out.data);
    out.dtype = like.dtype, out.ndim = ndim, out.is_torch = like.is_torch;
    std::copy_n(shape, ndim, out.shape);
    set_contiguous(out);
    return true;
}

bool view_result(nb::handle given, nb::handle like_object, const Array& like, Array& out, nb::object& result) {
    return view_result(given, like_object, like, like.ndim, like.shape, out, result) && out.is_torch == like.is_torch;
}

PyObject* new_array(DType dtype, int ndim, const Py_ssize_t* shape, bool as_torch, void** data) noexcept {
    PyObject* array = PyArray_SimpleNew(ndim, shape, names_of(dtype).numpy);
    if (array == nullptr) return nullptr;
    *data = PyArray_DATA(reinterpret_cast<PyArrayObject*>(array));
    if (!as_torch) return array;
    PyObject* tensor = PyObject_Vectorcall(torch()->from_numpy, &array, 1, nullptr);
    Py_DECREF(array);
    return tensor;
}

}  // namespace whet
