// Bindings of the products: packed weights and the linear layer over them, gemm and gemv.
//
// As in primitives.cpp, NotImplemented says that an argument is not the plain case.
#include <nanobind/nanobind.h>

#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "engine/gemm.h"
#include "engine/linear.h"
#include "kernels/dispatch.h"
#include "row_arrays.h"
#include "runtime/thread_pool.h"

namespace nb = nanobind;

namespace whet {
namespace {

bool is_matrix_dtype(const Array& a) { return a.dtype == DType::kFloat32 || a.dtype == DType::kBFloat16; }

// The rows of x: all axes but the last, if they lie evenly; false if not, or if a row is not contiguous.
bool rows_of(const Array& x, size_t& rows, size_t& stride) {
    const int last = x.ndim - 1;
    if (x.ndim < 1 || (x.shape[last] > 1 && x.stride[last] != 1)) return false;
    rows = 1;
    stride = static_cast<size_t>(x.shape[last]);
    if (x.ndim == 1) return true;
    if (x.stride[last - 1] < 0) return false;
    stride = static_cast<size_t>(x.stride[last - 1]);
    Py_ssize_t expected = x.stride[last - 1];
    for (int axis = last - 1; axis >= 0; --axis) {
        if (x.shape[axis] > 1 && x.stride[axis] != expected) return false;
        expected *= x.shape[axis];
        rows *= static_cast<size_t>(x.shape[axis]);
    }
    return true;
}

size_t item_size(const Array& a) { return a.dtype == DType::kFloat32 ? 4 : 2; }

struct PackedObject {
    PackedWeight weight;

    // Rows of numbers at an address with strides in elements, or in the format's own layout with strides in bytes.
    void pack_rows(size_t first, size_t count, uintptr_t rows, Source source, ptrdiff_t row_stride,
                   ptrdiff_t column_stride) {
        const nb::gil_scoped_release release;
        weight.pack_rows(first, count, reinterpret_cast<const void*>(rows), source, row_stride, column_stride);
    }
};

nb::object linear_call(const PackedObject& packed, nb::handle x_object, nb::handle bias_object, nb::handle out_object) {
    Array x, bias, out;
    size_t rows = 0, ldx = 0, ldy = 0, out_rows = 0;
    const PackedWeight& w = packed.weight;
    if (!view_strided(x_object.ptr(), x) || !is_matrix_dtype(x) || !rows_of(x, rows, ldx) ||
        x.shape[x.ndim - 1] != static_cast<Py_ssize_t>(w.k())) {
        return nb::borrow(Py_NotImplemented);
    }
    if (!bias_object.is_none() &&
        (!view_strided(bias_object.ptr(), bias) || bias.dtype != DType::kFloat32 || bias.ndim != 1 ||
         bias.shape[0] != static_cast<Py_ssize_t>(w.n()) || (bias.shape[0] > 1 && bias.stride[0] != 1))) {
        return nb::borrow(Py_NotImplemented);
    }
    const bool bf16 = x.dtype == DType::kBFloat16;
    nb::object result = nb::borrow(out_object);
    if (out_object.is_none()) {
        Py_ssize_t shape[Array::kMaxAxes];
        for (int i = 0; i < x.ndim; ++i) shape[i] = x.shape[i];
        shape[x.ndim - 1] = static_cast<Py_ssize_t>(w.n());
        result = new_like(x_object.ptr(), x, x.dtype, x.ndim, shape, &out.data);
        ldy = w.n();
    } else if (!view_strided(out_object.ptr(), out, true) || out.dtype != x.dtype || out.ndim != x.ndim ||
               !rows_of(out, out_rows, ldy) || out_rows != rows ||
               out.shape[out.ndim - 1] != static_cast<Py_ssize_t>(w.n()) || overlap(out, x, item_size(x)) ||
               (bias.data != nullptr && !bf16 && overlap(out, bias, sizeof(float)))) {
        return nb::borrow(Py_NotImplemented);
    }
    const nb::gil_scoped_release release;
    if (!bf16) {
        linear(w, x.data, false, ldx, rows, bias.as<float>(), out.as<float>(), ldy);
        return result;
    }
    thread_local std::vector<float> sums;
    sums.resize(rows * w.n());
    linear(w, x.data, true, ldx, rows, bias.as<float>(), sums.data(), w.n());
    for (size_t i = 0; i < rows; ++i) {
        kernels().bf16_from_f32(sums.data() + i * w.n(), w.n(), out.as<uint16_t>() + i * ldy);
    }
    return result;
}

nb::object gemm_call(nb::handle a_object, nb::handle b_object, nb::handle out_object, bool transpose_a,
                     bool transpose_b, double alpha, double beta) {
    Array a, b, c;
    if (!view_strided(a_object.ptr(), a) || !view_strided(b_object.ptr(), b) || !is_matrix_dtype(a) ||
        a.dtype != b.dtype || a.ndim != 2 || b.ndim != 2) {
        return nb::borrow(Py_NotImplemented);
    }
    const int a_rows = transpose_a ? 1 : 0, b_rows = transpose_b ? 1 : 0;
    const Py_ssize_t m = a.shape[a_rows], k = a.shape[1 - a_rows], n = b.shape[1 - b_rows];
    if (b.shape[b_rows] != k) return nb::borrow(Py_NotImplemented);
    nb::object result = nb::borrow(out_object);
    if (out_object.is_none()) {
        const Py_ssize_t shape[2] = {m, n};
        result = new_like(a_object.ptr(), a, a.dtype, 2, shape, &c.data);
        c.stride[0] = n;
    } else if (!view_strided(out_object.ptr(), c, true) || c.dtype != a.dtype || c.ndim != 2 || c.shape[0] != m ||
               c.shape[1] != n || (n > 1 && c.stride[1] != 1) || (m > 1 && c.stride[0] < n) ||
               overlap(c, a, item_size(a)) || overlap(c, b, item_size(b))) {
        return nb::borrow(Py_NotImplemented);
    }
    const nb::gil_scoped_release release;
    gemm(a.dtype == DType::kBFloat16, static_cast<size_t>(m), static_cast<size_t>(n), static_cast<size_t>(k),
         static_cast<float>(alpha), a.data, a.stride[a_rows], a.stride[1 - a_rows], b.data, b.stride[b_rows],
         b.stride[1 - b_rows], static_cast<float>(beta), c.data, c.stride[0]);
    return result;
}

nb::object gemv_call(nb::handle a_object, nb::handle x_object, nb::handle out_object, bool transpose, double alpha,
                     double beta) {
    Array a, x, y;
    if (!view_strided(a_object.ptr(), a) || !is_matrix_dtype(a) || a.ndim != 2 || !view_strided(x_object.ptr(), x) ||
        x.ndim != 1 || x.dtype != a.dtype || (x.shape[0] > 1 && x.stride[0] != 1)) {
        return nb::borrow(Py_NotImplemented);
    }
    const int rows = transpose ? 1 : 0;
    const Py_ssize_t m = a.shape[rows], n = a.shape[1 - rows];
    // The stride of an axis of one or none means nothing.
    const bool row_major = (n < 2 || a.stride[1 - rows] == 1) && (m < 2 || a.stride[rows] >= n);
    const bool column_major = (m < 2 || a.stride[rows] == 1) && (n < 2 || a.stride[1 - rows] >= m);
    if (x.shape[0] != n || (!row_major && !column_major)) return nb::borrow(Py_NotImplemented);
    nb::object result = nb::borrow(out_object);
    if (out_object.is_none()) {
        result = new_like(a_object.ptr(), a, a.dtype, 1, &m, &y.data);
    } else if (!view_strided(out_object.ptr(), y, true) || y.dtype != a.dtype || y.ndim != 1 || y.shape[0] != m ||
               (m > 1 && y.stride[0] != 1) || overlap(y, a, item_size(a)) || overlap(y, x, item_size(x))) {
        return nb::borrow(Py_NotImplemented);
    }
    const auto m_size = static_cast<size_t>(m), n_size = static_cast<size_t>(n);
    const nb::gil_scoped_release release;
    const auto product = [&](bool bf16, const float* x_values, float* y_values) {
        gemv(bf16, m_size, n_size, static_cast<float>(alpha), a.data, row_major ? a.stride[rows] : 1,
             row_major ? 1 : a.stride[1 - rows], x_values, static_cast<float>(beta), y_values);
    };
    if (a.dtype == DType::kFloat32) {
        product(false, x.as<float>(), y.as<float>());
        return result;
    }
    thread_local std::vector<float> wide_x, wide_y;
    wide_x.resize(n_size);
    wide_y.resize(m_size);
    kernels().f32_from_bf16(x.as<uint16_t>(), n_size, wide_x.data());
    if (beta != 0.0) kernels().f32_from_bf16(y.as<uint16_t>(), m_size, wide_y.data());
    product(true, wide_x.data(), wide_y.data());
    kernels().bf16_from_f32(wide_y.data(), m_size, y.as<uint16_t>());
    return result;
}

}  // namespace

void bind_linear(nb::module_& m) {
    nb::enum_<Source>(m, "Source")
        .value("FLOAT32", Source::kFloat32)
        .value("BFLOAT16", Source::kBFloat16)
        .value("FLOAT16", Source::kFloat16)
        .value("PACKED", Source::kPacked);
    nb::class_<PackedObject>(m, "PackedWeight")
        .def("__init__",
             [](PackedObject* self, int format, size_t n, size_t k) {
                 new (self) PackedObject{PackedWeight(static_cast<WeightFormat>(format), n, k)};
             })
        .def("pack_rows", &PackedObject::pack_rows, nb::arg("first"), nb::arg("count"), nb::kw_only(), nb::arg("rows"),
             nb::arg("source"), nb::arg("row_stride"), nb::arg("column_stride"))
        .def("row", [](const PackedObject& self, size_t i,
                       uintptr_t out) { self.weight.row(i, reinterpret_cast<float*>(out)); })
        .def("unpack",
             [](const PackedObject& self, uintptr_t rows, size_t row_stride) {
                 const nb::gil_scoped_release release;
                 self.weight.unpack(reinterpret_cast<void*>(rows), row_stride);
             })
        .def_prop_ro("size_bytes", [](const PackedObject& self) { return self.weight.size_bytes(); });
    m.def("weight_formats", [] {
        nb::list rows;
        for (const FormatTraits& f : format_table()) {
            rows.append(
                nb::make_tuple(f.name, f.block_length, f.block_bytes, f.row_scale_bytes, f.source == Source::kPacked));
        }
        return rows;
    });
    m.def("quantize", [](int format, size_t n, size_t k, uintptr_t weight, uintptr_t rows) {
        const nb::gil_scoped_release release;
        const FormatTraits& f = traits(static_cast<WeightFormat>(format));
        auto quantize_row = [&](size_t i) {
            f.quantize_row(reinterpret_cast<const float*>(weight) + i * k, k,
                           reinterpret_cast<uint8_t*>(rows) + i * f.row_bytes(k));
        };
        parallel_for(n, quantize_row);
    });
    m.def("dequantize", [](int format, size_t n, size_t k, uintptr_t rows, uintptr_t weight) {
        const nb::gil_scoped_release release;
        const FormatTraits& f = traits(static_cast<WeightFormat>(format));
        auto dequantize_row = [&](size_t i) {
            f.dequantize_row(reinterpret_cast<const uint8_t*>(rows) + i * f.row_bytes(k), k,
                             reinterpret_cast<float*>(weight) + i * k);
        };
        parallel_for(n, dequantize_row);
    });
    m.def("linear", &linear_call, nb::arg("packed"), nb::arg("x"), nb::arg("bias").none(), nb::arg("out").none());
    m.def("gemm", &gemm_call, nb::arg("a"), nb::arg("b"), nb::arg("out").none(), nb::arg("transpose_a"),
          nb::arg("transpose_b"), nb::arg("alpha"), nb::arg("beta"));
    m.def("gemv", &gemv_call, nb::arg("a"), nb::arg("x"), nb::arg("out").none(), nb::arg("transpose"), nb::arg("alpha"),
          nb::arg("beta"));
}

}  // namespace whet
