// Bindings of matrix products: packed weights and the linear layer over them, gemm and gemv.
//
// As in primitives.cpp, functions return NotImplemented if an argument is not the plain case.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "gil.h"
#include "engine/gemm.h"
#include "engine/linear.h"
#include "kernels/dispatch.h"
#include "runtime/thread_pool.h"

namespace nb = nanobind;

namespace whet {
namespace {

// Computes the stride of rows, in elements. Returns false if they are not evenly spaced.
bool evenly_spaced(const Array& x, Rows& rows, size_t& stride) {
    if (!rows_of(x, rows) || rows.n_axes > 1 || (rows.n_axes == 1 && rows.stride[0] < 0)) return false;
    stride = rows.n_axes == 0 ? rows.length : static_cast<size_t>(rows.stride[0]);
    return true;
}

bool is_dense_vector(const Array& a, size_t n) {
    return a.ndim == 1 && a.shape[0] == static_cast<Py_ssize_t>(n) && a.is_dense();
}

struct PackedObject {
    PackedWeight weight;

    // Packs rows of numbers, with strides in elements, or rows in the format's layout, with strides in bytes.
    void pack_rows(size_t first, size_t count, uintptr_t rows, RowType source, ptrdiff_t row_stride,
                   ptrdiff_t column_stride) {
        const ReleasedGil released;
        weight.pack_rows(first, count, reinterpret_cast<const void*>(rows), source, row_stride, column_stride);
    }
};

nb::object linear_call(const PackedObject& packed, nb::handle x_object, nb::handle bias_object, nb::handle out_object) {
    const PackedWeight& w = packed.weight;
    Array x, bias, out;
    Rows rows, out_rows;
    size_t ldx = 0, ldy = 0;
    if (!view_strided(x_object.ptr(), x) || !x.is_narrow_float() || !evenly_spaced(x, rows, ldx) ||
        rows.length != w.k()) {
        return not_implemented();
    }
    if (!bias_object.is_none() &&
        (!view_strided(bias_object.ptr(), bias) || bias.dtype != DType::kFloat32 || !is_dense_vector(bias, w.n()))) {
        return not_implemented();
    }
    Py_ssize_t shape[Array::kMaxAxes];
    std::copy_n(x.shape, x.ndim, shape);
    shape[x.ndim - 1] = static_cast<Py_ssize_t>(w.n());
    nb::object result;
    if (!view_result(out_object, x_object, x, x.ndim, shape, out, result) || !evenly_spaced(out, out_rows, ldy) ||
        (!out_object.is_none() && (overlap(out, x) || overlap(out, bias)))) {
        return not_implemented();
    }
    const ReleasedGil released;
    if (!rows.is_bf16()) {
        linear(w, x.data, false, ldx, rows.count, bias.as<float>(), out.as<float>(), ldy);
        return result;
    }
    thread_local std::vector<float> sums;
    sums.resize(rows.count * w.n());
    linear(w, x.data, true, ldx, rows.count, bias.as<float>(), sums.data(), w.n());
    for (size_t i = 0; i < rows.count; ++i) {
        kernels().bf16_from_f32(sums.data() + i * w.n(), w.n(), out.as<uint16_t>() + i * ldy);
    }
    return result;
}

nb::object gemm_call(nb::handle a_object, nb::handle b_object, nb::handle out_object, bool transpose_a,
                     bool transpose_b, double alpha, double beta) {
    Array a, b, c;
    if (!view_strided(a_object.ptr(), a) || !view_strided(b_object.ptr(), b) || !a.is_narrow_float() ||
        a.dtype != b.dtype || a.ndim != 2 || b.ndim != 2) {
        return not_implemented();
    }
    const int a_rows = transpose_a ? 1 : 0, b_rows = transpose_b ? 1 : 0;
    const Py_ssize_t k = a.shape[1 - a_rows], shape[2] = {a.shape[a_rows], b.shape[1 - b_rows]};
    nb::object result;
    if (b.shape[b_rows] != k || !view_result(out_object, a_object, a, 2, shape, c, result)) return not_implemented();
    if (!c.is_dense() || (shape[0] > 1 && c.stride[0] < shape[1]) || overlap(c, a) || overlap(c, b)) {
        return not_implemented();
    }
    const ReleasedGil released;
    gemm(a.dtype == DType::kBFloat16, static_cast<size_t>(shape[0]), static_cast<size_t>(shape[1]),
         static_cast<size_t>(k), static_cast<float>(alpha), a.data, a.stride[a_rows], a.stride[1 - a_rows], b.data,
         b.stride[b_rows], b.stride[1 - b_rows], static_cast<float>(beta), c.data, c.stride[0]);
    return result;
}

nb::object gemv_call(nb::handle a_object, nb::handle x_object, nb::handle out_object, bool transpose, double alpha,
                     double beta) {
    Array a, x, y;
    if (!view_strided(a_object.ptr(), a) || !a.is_narrow_float() || a.ndim != 2 || !view_strided(x_object.ptr(), x) ||
        x.dtype != a.dtype) {
        return not_implemented();
    }
    const int rows = transpose ? 1 : 0;
    const Py_ssize_t m = a.shape[rows], n = a.shape[1 - rows];
    // The stride of an axis with fewer than two elements is arbitrary.
    const bool row_major = (n < 2 || a.stride[1 - rows] == 1) && (m < 2 || a.stride[rows] >= n);
    const bool column_major = (m < 2 || a.stride[rows] == 1) && (n < 2 || a.stride[1 - rows] >= m);
    nb::object result;
    if (!is_dense_vector(x, static_cast<size_t>(n)) || (!row_major && !column_major) ||
        !view_result(out_object, a_object, a, 1, &m, y, result) || !y.is_dense() || overlap(y, a) || overlap(y, x)) {
        return not_implemented();
    }
    const auto m_size = static_cast<size_t>(m), n_size = static_cast<size_t>(n);
    const ReleasedGil released;
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
    nb::enum_<RowType>(m, "RowType")
        .value("FLOAT32", RowType::kFloat32)
        .value("BFLOAT16", RowType::kBFloat16)
        .value("FLOAT16", RowType::kFloat16)
        .value("PACKED", RowType::kPacked);
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
                 const ReleasedGil released;
                 self.weight.unpack(reinterpret_cast<void*>(rows), row_stride);
             })
        .def_prop_ro("size_bytes", [](const PackedObject& self) { return self.weight.size_bytes(); });
    m.def("weight_formats", [] {
        nb::list rows;
        for (const FormatTraits& f : format_table()) {
            rows.append(
                nb::make_tuple(f.name, f.block_length, f.block_bytes, f.row_scale_bytes, f.source == RowType::kPacked));
        }
        return rows;
    });
    m.def("dequantize", [](int format, size_t n, size_t k, uintptr_t rows, uintptr_t weight) {
        const ReleasedGil released;
        const FormatTraits& f = traits(static_cast<WeightFormat>(format));
        auto dequantize_row = [&](size_t i) {
            f.dequantize_row(reinterpret_cast<const uint8_t*>(rows) + i * f.row_bytes(k), k,
                             reinterpret_cast<float*>(weight) + i * k);
        };
        parallel_for(n, dequantize_row);
    });
    m.def("linear", &linear_call, PlainCase(), nb::arg("packed"), nb::arg("x"), nb::arg("bias").none(),
          nb::arg("out").none());
    m.def("gemm", &gemm_call, PlainCase(), nb::arg("a"), nb::arg("b"), nb::arg("out").none(), nb::arg("transpose_a"),
          nb::arg("transpose_b"), nb::arg("alpha"), nb::arg("beta"));
    m.def("gemv", &gemv_call, PlainCase(), nb::arg("a"), nb::arg("x"), nb::arg("out").none(), nb::arg("transpose"),
          nb::arg("alpha"), nb::arg("beta"));
}

}  // namespace whet
