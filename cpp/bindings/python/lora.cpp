// Bindings of the low-rank adapters: the plain case of each function.
//
// x and y have contiguous rows, with any row stride. For other cases functions return NotImplemented, and
// src/whet/ops/lora.py converts the input or raises.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdlib>

#include "arrays.h"
#include "bindings.h"
#include "engine/low_rank.h"

namespace nb = nanobind;

namespace whet {
namespace {

// Rows (..., columns) with a single row stride.
struct EvenRows {
    Array array;
    Rows rows;

    bool view(nb::handle object, bool writable = false) {
        if (!view_rows(object, array, rows, writable) || rows.n_axes > 1 || rows.length == 0) return false;
        // Overlapping rows cannot be written in parallel.
        return !writable || rows.n_axes == 0 || std::abs(rows.stride[0]) >= static_cast<ptrdiff_t>(rows.length);
    }
    bool has_same_rows(const EvenRows& other) const {
        return array.ndim == other.array.ndim &&
               std::equal(array.shape, array.shape + array.ndim - 1, other.array.shape);
    }
};

// Contiguous (rank, columns) float32, with the same columns as the rows.
struct Factor {
    Array array;

    bool view(nb::handle object, const EvenRows& rows, bool writable = false) {
        return view_strided(object.ptr(), array, writable) && array.ndim == 2 && array.dtype == DType::kFloat32 &&
               array.is_dense() && (array.stride[0] == array.shape[1] || array.shape[0] <= 1) &&
               array.shape[1] == rows.array.last();
    }
    Py_ssize_t rank() const { return array.shape[0]; }
    float* data() const { return array.as<float>(); }
};

bool is_rank(Py_ssize_t rank) { return rank >= 1 && rank <= static_cast<Py_ssize_t>(kMaxRank); }

// y += scale (x a^T) b. Returns false if the arguments are not the plain case.
bool forward(nb::handle x_object, nb::handle y_object, nb::handle a_object, nb::handle b_object, double scale) {
    EvenRows x, y;
    Factor a, b;
    if (!x.view(x_object) || !y.view(y_object, true) || !a.view(a_object, x) || !b.view(b_object, y) ||
        a.rank() != b.rank() || !is_rank(a.rank()) || !x.has_same_rows(y)) {
        return false;
    }
    // In place, a row of x is read before the same row of y is written, but not before other rows are.
    if ((overlap(x.array, y.array) && !same_place(x.array, y.array)) || overlap(a.array, y.array) ||
        overlap(b.array, y.array)) {
        return false;
    }
    lora_forward(x.rows, y.rows, a.data(), b.data(), static_cast<size_t>(a.rank()), static_cast<float>(scale));
    return true;
}

// weight += scale hidden b: the second half of forward.
bool add_product(nb::handle hidden_object, nb::handle b_object, nb::handle weight_object, double scale) {
    EvenRows weight;
    Array hidden;
    Factor b;
    if (!weight.view(weight_object, true) || !view_strided(hidden_object.ptr(), hidden) || !b.view(b_object, weight) ||
        hidden.ndim != 2 || hidden.dtype != DType::kFloat32 || hidden.shape[1] != b.rank() || !is_rank(b.rank()) ||
        static_cast<size_t>(hidden.shape[0]) != weight.rows.count) {
        return false;
    }
    lora_add_product(hidden, weight.rows, b.data(), static_cast<float>(scale));
    return true;
}

// grad_a += scale (g b^T)^T x,  grad_b += scale (x a^T)^T g.
bool accumulate(nb::handle x_object, nb::handle g_object, nb::handle a_object, nb::handle b_object, double scale,
                nb::handle grad_a_object, nb::handle grad_b_object) {
    EvenRows x, g;
    Factor a, b, grad_a, grad_b;
    if (!x.view(x_object) || !g.view(g_object) || !a.view(a_object, x) || !b.view(b_object, g) ||
        !grad_a.view(grad_a_object, x, true) || !grad_b.view(grad_b_object, g, true) || !x.has_same_rows(g) ||
        !is_rank(a.rank()) || b.rank() != a.rank() || grad_a.rank() != a.rank() || grad_b.rank() != a.rank()) {
        return false;
    }
    lora_accumulate(x.rows, g.rows, a.data(), b.data(), static_cast<size_t>(a.rank()), static_cast<float>(scale),
                    grad_a.data(), grad_b.data());
    return true;
}

// Row i: y += scale (x a^T) b with adapter index[i]; -1: none.
bool batch(nb::handle x_object, nb::handle y_object, nb::handle a_object, nb::handle b_object,
           nb::handle offsets_object, nb::handle scales_object, nb::handle index_object) {
    EvenRows x, y;
    Factor a, b;
    Array offsets, scales, index;
    if (!x.view(x_object) || !y.view(y_object, true) || !a.view(a_object, x) || !b.view(b_object, y) ||
        a.rank() != b.rank() || !x.has_same_rows(y) || !view_vector(offsets_object, DType::kInt64, offsets) ||
        !view_vector(scales_object, DType::kFloat32, scales) || !view_vector(index_object, DType::kInt64, index) ||
        offsets.shape[0] != scales.shape[0] + 1 || static_cast<size_t>(index.shape[0]) != x.rows.count) {
        return false;
    }
    const auto *begins = offsets.as<int64_t>(), *adapter = index.as<int64_t>();
    for (Py_ssize_t k = 0; k < scales.shape[0]; ++k) {
        if (begins[k] < 0 || !is_rank(begins[k + 1] - begins[k]) || begins[k + 1] > a.rank()) return false;
    }
    const bool all_known =
        std::all_of(adapter, adapter + index.shape[0], [&](int64_t k) { return k >= -1 && k < scales.shape[0]; });
    if (!all_known) return false;
    lora_batch(x.rows, y.rows, {a.data(), b.data(), begins, scales.as<float>()}, adapter);
    return true;
}

// Wraps a function for Python: returns None on success, else NotImplemented.
template <auto function, class... Arguments>
nb::object answered(Arguments... arguments) {
    return nb::borrow(function(arguments...) ? Py_None : Py_NotImplemented);
}

}  // namespace

void bind_lora(nb::module_& m) {
    using H = nb::handle;
    m.def("lora_forward", &answered<&forward, H, H, H, H, double>, PlainCase());
    m.def("lora_add_product", &answered<&add_product, H, H, H, double>, PlainCase());
    m.def("lora_accumulate", &answered<&accumulate, H, H, H, H, double, H, H>, PlainCase());
    m.def("lora_batch", &answered<&batch, H, H, H, H, H, H, H>, PlainCase());
}

}  // namespace whet
