// Arrays seen as rows along their last axis, and the split of rows over the pool: what the bindings of row-wise
// functions share.
#pragma once
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>

#include "arrays.h"
#include "gil.h"

namespace whet {

// All axes but the last, in as few as their strides allow.
struct Rows {
    size_t count = 1, length = 1;
    int n_axes = 0;
    Py_ssize_t shape[Array::kMaxAxes] = {}, stride[Array::kMaxAxes] = {};

    Py_ssize_t offset(size_t row) const {
        if (n_axes == 1) return static_cast<Py_ssize_t>(row) * stride[0];
        Py_ssize_t at = 0;
        for (int axis = n_axes - 1; axis >= 0; --axis) {
            const auto size = static_cast<size_t>(shape[axis]);
            at += static_cast<Py_ssize_t>(row % size) * stride[axis];
            row /= size;
        }
        return at;
    }

    bool is_contiguous() const { return count < 2 || (n_axes == 1 && stride[0] == static_cast<Py_ssize_t>(length)); }
};

// False if there is no axis, or the elements of a row are not side by side. `array` is from view_strided.
inline bool rows_of(const Array& array, Rows& rows) {
    const int last = array.ndim - 1;
    if (last < 0 || (array.shape[last] > 1 && array.stride[last] != 1)) return false;
    rows.length = static_cast<size_t>(array.shape[last]);
    for (int axis = 0; axis < last; ++axis) {
        rows.count *= static_cast<size_t>(array.shape[axis]);
        if (array.shape[axis] == 1) continue;
        const int n = rows.n_axes;
        if (n > 0 && rows.stride[n - 1] == array.shape[axis] * array.stride[axis]) {
            rows.shape[n - 1] *= array.shape[axis];
            rows.stride[n - 1] = array.stride[axis];
            continue;
        }
        rows.shape[n] = array.shape[axis];
        rows.stride[n] = array.stride[axis];
        ++rows.n_axes;
    }
    return true;
}

inline bool equal_shapes(const Array& a, const Array& b) {
    return a.ndim == b.ndim && std::equal(a.shape, a.shape + a.ndim, b.shape);
}

// Whether a and b, from view_strided and of these item sizes, share memory.
inline bool overlap(const Array& a, size_t a_item, const Array& b, size_t b_item) {
    if (a.data == nullptr || b.data == nullptr || a.size() == 0 || b.size() == 0) return false;
    const auto span = [](const Array& array, size_t item_size, const char*& begin, const char*& end) {
        begin = end = array.as<const char>();
        for (int axis = 0; axis < array.ndim; ++axis) {
            const Py_ssize_t reach = (array.shape[axis] - 1) * array.stride[axis] * static_cast<Py_ssize_t>(item_size);
            (reach < 0 ? begin : end) += reach;
        }
        end += item_size;
    };
    const char *a_begin, *a_end, *b_begin, *b_end;
    span(a, a_item, a_begin, a_end);
    span(b, b_item, b_begin, b_end);
    return a_begin < b_end && b_begin < a_end;
}
inline bool overlap(const Array& a, const Array& b, size_t item_size) { return overlap(a, item_size, b, item_size); }

// Whether a and b are the same elements in the same places.
inline bool same_place(const Array& a, const Array& b) {
    return a.data == b.data && equal_shapes(a, b) && std::equal(a.stride, a.stride + a.ndim, b.stride);
}

}  // namespace whet
