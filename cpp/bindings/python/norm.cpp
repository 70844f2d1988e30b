// Bindings of the functions over the last axis: norms, softmax, activations.
//
// Functions return NotImplemented for other than the plain case: float32 or bfloat16, contiguous rows, and an `out`
// that does not overlap inputs, unless it is x.
#include <nanobind/nanobind.h>

#include <cmath>

#include "arrays.h"
#include "bindings.h"
#include "engine/row_functions.h"

namespace nb = nanobind;

namespace whet {
namespace {

bool overlap_apart(const Array& a, const Array& b) { return overlap(a, b) && !same_place(a, b); }

// x and its output array.
struct RowArrays {
    Array x, out;
    Rows x_rows, out_rows;
    nb::object result;

    bool view(nb::handle x_object, nb::handle out_object) {
        return view_rows(x_object, x, x_rows) && view_result(out_object, x_object, x, out, result) &&
               rows_of(out, out_rows) && !overlap_apart(out, x);
    }
};

// A vector of the length of x's last axis, or None.
bool view_weight(nb::handle object, const Array& x, Array& v) {
    return object.is_none() || (view(object.ptr(), v) && v.ndim == 1 && v.shape[0] == x.last() &&
                                (v.dtype == x.dtype || v.dtype == DType::kFloat32));
}

nb::object norm(void (*function)(const NormArguments&), nb::handle x, nb::handle weight, nb::handle bias, double eps,
                nb::handle residual_object, nb::handle out) {
    RowArrays a;
    Array w, b, residual;
    Rows residual_rows;
    if (!(eps >= 0.0 && std::isfinite(eps)) || !a.view(x, out) || !view_weight(weight, a.x, w) ||
        !view_weight(bias, a.x, b) || (w.data != nullptr && b.data != nullptr && w.dtype != b.dtype)) {
        return not_implemented();
    }
    if (!residual_object.is_none() &&
        (!view_rows(residual_object, residual, residual_rows, true) || residual.dtype != a.x.dtype ||
         residual.is_torch != a.x.is_torch || !equal_shapes(residual, a.x) || overlap_apart(residual, a.x) ||
         overlap(a.out, residual))) {
        return not_implemented();
    }
    // Without weights the dtype is irrelevant.
    const DType weight_dtype = w.data != nullptr ? w.dtype : b.data != nullptr ? b.dtype : a.x.dtype;
    function({a.x_rows, residual_rows, a.out_rows, w.data, b.data, weight_dtype, eps});
    return a.result;
}

nb::object rms_norm_call(nb::handle x, nb::handle weight, double eps, nb::handle residual, nb::handle out) {
    return norm(&rms_norm, x, weight, nb::none(), eps, residual, out);
}

nb::object layer_norm_call(nb::handle x, nb::handle weight, nb::handle bias, double eps, nb::handle residual,
                           nb::handle out) {
    return norm(&layer_norm, x, weight, bias, eps, residual, out);
}

nb::object softmax_call(nb::handle x, double scale, bool log, nb::handle out) {
    RowArrays a;
    if (!is_float32_factor(scale) || !a.view(x, out)) return not_implemented();
    softmax(a.x_rows, static_cast<float>(scale), log, a.out_rows);
    return a.result;
}

nb::object activation_call(nb::handle x, Activation kind, nb::handle out) {
    RowArrays a;
    if (!a.view(x, out)) return not_implemented();
    activate(kind, a.x_rows, a.out_rows);
    return a.result;
}

nb::object softcap_call(nb::handle x, double cap, nb::handle out) {
    RowArrays a;
    if (!is_float32_factor(cap) || !a.view(x, out)) return not_implemented();
    softcap(a.x_rows, static_cast<float>(cap), a.out_rows);
    return a.result;
}

// up None: gate is both, concatenated on the last axis.
nb::object swiglu_call(nb::handle gate_object, nb::handle up_object, nb::handle out_object) {
    Array gate, up, out;
    Rows gate_rows, up_rows, out_rows;
    nb::object result;
    if (!view_strided(gate_object.ptr(), gate) || !gate.is_narrow_float() || gate.ndim < 1) return not_implemented();
    if (up_object.is_none()) {
        Py_ssize_t& last = gate.shape[gate.ndim - 1];
        if (last % 2 != 0) return not_implemented();
        last /= 2;
        up = gate;
        up.data = up.at(last);
    } else if (!view_strided(up_object.ptr(), up) || up.dtype != gate.dtype || !equal_shapes(up, gate)) {
        return not_implemented();
    }
    if (!rows_of(gate, gate_rows) || !rows_of(up, up_rows) ||
        !view_result(out_object, gate_object, gate, out, result) || !rows_of(out, out_rows) ||
        overlap_apart(out, gate) || overlap_apart(out, up)) {
        return not_implemented();
    }
    swiglu(gate_rows, up_rows, out_rows);
    return result;
}

}  // namespace

void bind_norm(nb::module_& m) {
    using nb::arg;
    nb::enum_<Activation>(m, "Activation")
        .value("silu", Activation::kSilu)
        .value("gelu", Activation::kGelu)
        .value("gelu_tanh", Activation::kGeluTanh)
        .value("relu2", Activation::kRelu2)
        .value("clamped_swiglu", Activation::kClampedSwiglu);
    m.def("rms_norm", &rms_norm_call, PlainCase(), arg(), arg().none(), arg(), arg().none(), arg().none());
    m.def("layer_norm", &layer_norm_call, PlainCase(), arg(), arg().none(), arg().none(), arg(), arg().none(),
          arg().none());
    m.def("softmax", &softmax_call, PlainCase(), arg(), arg(), arg(), arg().none());
    m.def("activation", &activation_call, PlainCase(), arg(), arg(), arg().none());
    m.def("softcap", &softcap_call, PlainCase(), arg(), arg(), arg().none());
    m.def("swiglu", &swiglu_call, PlainCase(), arg(), arg().none(), arg().none());
}

}  // namespace whet
