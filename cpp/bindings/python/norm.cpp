// Bindings of what works on the last axis: norms, softmax, activations.
//
// As in primitives.cpp, NotImplemented says that an argument is not the plain case: float32 or bfloat16, rows side by
// side, and an `out` that shares no memory with what is read, but for x itself.
#include "norm.h"

#include <nanobind/nanobind.h>

#include <algorithm>

#include "arrays.h"
#include "engine/config.h"
#include "kernels/dispatch.h"
#include "row_arrays.h"

namespace nb = nanobind;

namespace whet {
namespace {

nb::object not_implemented() { return nb::borrow(Py_NotImplemented); }

// Rows of a task: enough to be worth one, and no more than 64 tasks.
size_t rows_per_task(const Rows& rows) {
    constexpr size_t kTaskElements = 16384, kTasks = 64;
    return std::max({size_t{1}, kTaskElements / std::max<size_t>(1, rows.length), rows.count / kTasks});
}

// A result this large would push everything else out of the caches, itself too: it is stored past them.
constexpr size_t kStreamingBytes = size_t{32} << 20;

bool is_narrow_float(const Array& a) { return a.dtype == DType::kFloat32 || a.dtype == DType::kBFloat16; }

size_t item_size(const Array& a) { return a.dtype == DType::kFloat32 ? 4 : 2; }

bool view_rows(nb::handle object, Array& array, Rows& rows, bool writable = false) {
    return view_strided(object.ptr(), array, writable) && is_narrow_float(array) && rows_of(array, rows);
}

// `object` as the place for a result like x, or a new one if it is None.
bool view_out(nb::handle object, nb::handle x_object, const Array& x, nb::object& result, Array& out, Rows& rows) {
    if (object.is_none()) {
        result = new_like(x_object.ptr(), x, x.dtype, x.ndim, x.shape, &out.data);
        out.dtype = x.dtype;
        out.ndim = x.ndim;
        Py_ssize_t stride = 1;
        for (int axis = x.ndim - 1; axis >= 0; --axis) {
            out.shape[axis] = x.shape[axis];
            out.stride[axis] = stride;
            stride *= x.shape[axis];
        }
        return rows_of(out, rows);
    }
    result = nb::borrow(object);
    return view_rows(object, out, rows, true) && out.dtype == x.dtype && out.is_torch == x.is_torch &&
           equal_shapes(out, x) && (!overlap(out, x, item_size(x)) || same_place(out, x));
}

// ---------------------------------------------------------------- norms

struct NormArrays {
    Array x, residual, weight, bias, out;
    Rows x_rows, residual_rows, out_rows;
    nb::object result;
    double eps = 0.0;
};

// A vector of x's last axis, or None.
bool view_vector(nb::handle object, const Array& x, Array& v) {
    return object.is_none() || (view(object.ptr(), v) && v.ndim == 1 && v.shape[0] == x.shape[x.ndim - 1] &&
                                (v.dtype == x.dtype || v.dtype == DType::kFloat32));
}

bool view_norm(nb::handle x, nb::handle weight, nb::handle bias, nb::handle residual, nb::handle out, NormArrays& a) {
    if (!view_rows(x, a.x, a.x_rows) || !view_vector(weight, a.x, a.weight) || !view_vector(bias, a.x, a.bias)) {
        return false;
    }
    if (a.weight.data != nullptr && a.bias.data != nullptr && a.weight.dtype != a.bias.dtype) return false;
    const size_t size = item_size(a.x);
    if (!residual.is_none() &&
        (!view_rows(residual, a.residual, a.residual_rows, true) || a.residual.dtype != a.x.dtype ||
         a.residual.is_torch != a.x.is_torch || !equal_shapes(a.residual, a.x) ||
         (overlap(a.residual, a.x, size) && !same_place(a.residual, a.x)))) {
        return false;
    }
    return view_out(out, x, a.x, a.result, a.out, a.out_rows) && !overlap(a.out, a.residual, size);
}

// kernel(x, residual, out, streaming) for each row, with the elements' type.
template <class T, class Kernel>
void each_row(const NormArrays& a, const Kernel& kernel) {
    const size_t n = a.x_rows.length, per_task = rows_per_task(a.x_rows);
    const bool streaming = a.x_rows.count * n * sizeof(T) >= kStreamingBytes;
    split(a.x_rows.count, per_task, static_cast<double>(a.x_rows.count * n) * 0.06, [&](size_t begin, size_t end) {
        for (size_t row = begin; row < end; ++row) {
            T* residual = a.residual.data == nullptr ? nullptr : a.residual.as<T>() + a.residual_rows.offset(row);
            kernel(a.x.as<T>() + a.x_rows.offset(row), residual, a.out.as<T>() + a.out_rows.offset(row), n, streaming);
        }
        if (streaming) kernels().finish_rows();
    });
}

template <class T, class W, class Kernel>
void rms_norm_rows(const NormArrays& a, Kernel kernel) {
    each_row<T>(a, [&](const T* x, T* residual, T* out, size_t n, bool streaming) {
        kernel(x, residual, a.weight.as<W>(), n, a.eps, streaming, out);
    });
}

template <class T, class W, class Kernel>
void layer_norm_rows(const NormArrays& a, Kernel kernel) {
    each_row<T>(a, [&](const T* x, T* residual, T* out, size_t n, bool streaming) {
        kernel(x, residual, a.weight.as<W>(), a.bias.as<W>(), n, a.eps, streaming, out);
    });
}

nb::object rms_norm(nb::handle x, nb::handle weight, double eps, nb::handle residual, nb::handle out) {
    NormArrays a;
    if (!view_norm(x, weight, nb::none(), residual, out, a)) return not_implemented();
    a.eps = eps;
    const Kernels& k = kernels();
    if (a.x.dtype == DType::kFloat32) {
        rms_norm_rows<float, float>(a, k.rms_norm_f32);
    } else if (a.weight.data != nullptr && a.weight.dtype == DType::kFloat32) {
        rms_norm_rows<uint16_t, float>(a, k.rms_norm_bf16_f32);
    } else {
        rms_norm_rows<uint16_t, uint16_t>(a, k.rms_norm_bf16);
    }
    return a.result;
}

nb::object layer_norm(nb::handle x, nb::handle weight, nb::handle bias, double eps, nb::handle residual,
                      nb::handle out) {
    NormArrays a;
    if (!view_norm(x, weight, bias, residual, out, a)) return not_implemented();
    a.eps = eps;
    const Kernels& k = kernels();
    const Array& vector = a.weight.data != nullptr ? a.weight : a.bias;
    if (a.x.dtype == DType::kFloat32) {
        layer_norm_rows<float, float>(a, k.layer_norm_f32);
    } else if (vector.data != nullptr && vector.dtype == DType::kFloat32) {
        layer_norm_rows<uint16_t, float>(a, k.layer_norm_bf16_f32);
    } else {
        layer_norm_rows<uint16_t, uint16_t>(a, k.layer_norm_bf16);
    }
    return a.result;
}

// ---------------------------------------------------------------- softmax

nb::object softmax(nb::handle x_object, double scale, bool log, nb::handle out_object) {
    Array x, out;
    Rows x_rows, out_rows;
    nb::object result;
    if (!view_rows(x_object, x, x_rows) || !view_out(out_object, x_object, x, result, out, out_rows)) {
        return not_implemented();
    }
    const size_t n = x_rows.length, per_task = rows_per_task(x_rows);
    const auto run = [&]<class T>(void (*kernel)(const T*, size_t, float, T*)) {
        split(x_rows.count, per_task, static_cast<double>(x_rows.count * n) * 0.4, [&](size_t begin, size_t end) {
            for (size_t row = begin; row < end; ++row) {
                kernel(x.as<T>() + x_rows.offset(row), n, static_cast<float>(scale),
                       out.as<T>() + out_rows.offset(row));
            }
        });
    };
    const Kernels& k = kernels();
    if (x.dtype == DType::kFloat32) {
        run(log ? k.log_softmax_f32 : k.softmax_f32);
    } else {
        run(log ? k.log_softmax_bf16 : k.softmax_bf16);
    }
    return result;
}

// ---------------------------------------------------------------- activations

constexpr size_t kPieceElements = 16384;

// body(row, at, n) for pieces of rows; arrays that are contiguous are one row.
template <class F>
void each_piece(const Rows& rows, bool contiguous, bool streaming, F&& body) {
    const size_t n = rows.length, size = rows.count * n;
    const double work = static_cast<double>(size) * 0.3;
    if (contiguous) {
        split(size, kPieceElements, work, [&](size_t begin, size_t end) {
            body(size_t{0}, begin, end - begin);
            if (streaming) kernels().finish_rows();
        });
        return;
    }
    split(rows.count, rows_per_task(rows), work, [&](size_t begin, size_t end) {
        for (size_t row = begin; row < end; ++row) body(row, size_t{0}, n);
        if (streaming) kernels().finish_rows();
    });
}

nb::object activation(nb::handle x_object, Activation kind, nb::handle out_object) {
    Array x, out;
    Rows x_rows, out_rows;
    nb::object result;
    if (!view_rows(x_object, x, x_rows) || !view_out(out_object, x_object, x, result, out, out_rows)) {
        return not_implemented();
    }
    const auto run = [&]<class T>(void (*kernel)(const T*, size_t, bool, T*)) {
        const bool streaming = x_rows.count * x_rows.length * sizeof(T) >= kStreamingBytes;
        each_piece(x_rows, x_rows.is_contiguous() && out_rows.is_contiguous(), streaming,
                   [&](size_t row, size_t at, size_t n) {
                       kernel(x.as<T>() + x_rows.offset(row) + at, n, streaming,
                              out.as<T>() + out_rows.offset(row) + at);
                   });
    };
    const Kernels& k = kernels();
    const bool wide = x.dtype == DType::kFloat32;
    switch (kind) {
        case Activation::kSilu:
            wide ? run(k.silu_f32) : run(k.silu_bf16);
            break;
        case Activation::kGelu:
            wide ? run(k.gelu_f32) : run(k.gelu_bf16);
            break;
        case Activation::kGeluTanh:
            wide ? run(k.gelu_tanh_f32) : run(k.gelu_tanh_bf16);
            break;
    }
    return result;
}

// up None: gate holds both, side by side on its last axis.
nb::object swiglu(nb::handle gate_object, nb::handle up_object, nb::handle out_object) {
    Array gate, up, out;
    Rows gate_rows, up_rows, out_rows;
    nb::object result;
    if (!view_strided(gate_object.ptr(), gate) || !is_narrow_float(gate) || gate.ndim < 1) return not_implemented();
    if (up_object.is_none()) {
        Py_ssize_t& last = gate.shape[gate.ndim - 1];
        if (last % 2 != 0) return not_implemented();
        last /= 2;
        up = gate;
        up.data = up.as<char>() + static_cast<size_t>(last) * item_size(gate);
    } else if (!view_strided(up_object.ptr(), up) || up.dtype != gate.dtype || !equal_shapes(up, gate)) {
        return not_implemented();
    }
    if (!rows_of(gate, gate_rows) || !rows_of(up, up_rows) ||
        !view_out(out_object, gate_object, gate, result, out, out_rows) ||
        (overlap(out, up, item_size(up)) && !same_place(out, up))) {
        return not_implemented();
    }
    const auto run = [&]<class T>(void (*kernel)(const T*, const T*, size_t, bool, T*)) {
        const bool streaming = gate_rows.count * gate_rows.length * sizeof(T) >= kStreamingBytes;
        const bool contiguous = gate_rows.is_contiguous() && up_rows.is_contiguous() && out_rows.is_contiguous();
        each_piece(gate_rows, contiguous, streaming, [&](size_t row, size_t at, size_t n) {
            kernel(gate.as<T>() + gate_rows.offset(row) + at, up.as<T>() + up_rows.offset(row) + at, n, streaming,
                   out.as<T>() + out_rows.offset(row) + at);
        });
    };
    gate.dtype == DType::kFloat32 ? run(kernels().swiglu_f32) : run(kernels().swiglu_bf16);
    return result;
}

}  // namespace

void bind_norm(nb::module_& m) {
    using nb::arg;
    nb::enum_<Activation>(m, "Activation")
        .value("SILU", Activation::kSilu)
        .value("GELU", Activation::kGelu)
        .value("GELU_TANH", Activation::kGeluTanh);
    m.def("rms_norm", &rms_norm, arg(), arg().none(), arg(), arg().none(), arg().none());
    m.def("layer_norm", &layer_norm, arg(), arg().none(), arg().none(), arg(), arg().none(), arg().none());
    m.def("softmax", &softmax, arg(), arg(), arg(), arg().none());
    m.def("activation", &activation, arg(), arg(), arg().none());
    m.def("swiglu", &swiglu, arg(), arg().none(), arg().none());
}

}  // namespace whet
