// Views of a host language's arrays (memory, shape and strides), and their rows along the last axis.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace whet {

enum class DType { kFloat32, kFloat64, kBFloat16, kBool, kInt32, kInt64, kInt8, kUInt8 };

// Whether the build has float32 kernels only, as for WebAssembly.
#if defined(__wasm__)
constexpr bool kFloat32Only = true;
#else
constexpr bool kFloat32Only = false;
#endif

constexpr size_t item_size(DType dtype) {
    constexpr size_t kSizes[] = {4, 8, 2, 1, 4, 8, 1, 1};
    return kSizes[static_cast<size_t>(dtype)];
}

struct ArrayView {
    static constexpr int kMaxAxes = 4;

    void* data = nullptr;
    DType dtype = DType::kFloat32;
    int ndim = 0;
    ptrdiff_t shape[kMaxAxes] = {1, 1, 1, 1};
    ptrdiff_t stride[kMaxAxes] = {0, 0, 0, 0};  // in elements

    ptrdiff_t size() const { return shape[0] * shape[1] * shape[2] * shape[3]; }
    ptrdiff_t last() const { return shape[ndim - 1]; }
    bool is_float32() const { return kFloat32Only || dtype == DType::kFloat32; }
    bool is_float() const { return dtype == DType::kFloat32 || dtype == DType::kFloat64; }
    bool is_narrow_float() const { return dtype == DType::kFloat32 || dtype == DType::kBFloat16; }
    bool is_integer() const { return dtype == DType::kInt32 || dtype == DType::kInt64; }
    // Whether the last axis is contiguous; true if it has fewer than two elements or the array is empty.
    bool is_dense() const { return ndim > 0 && (stride[ndim - 1] == 1 || last() < 2 || size() == 0); }
    template <class T>
    T* as() const {
        return static_cast<T*>(data);
    }
    void* at(ptrdiff_t element) const { return as<char>() + element * static_cast<ptrdiff_t>(whet::item_size(dtype)); }
    int64_t integer(ptrdiff_t element) const {
        return dtype == DType::kInt64 ? as<int64_t>()[element] : as<int32_t>()[element];
    }
};

// Sets the strides of a contiguous array of this shape.
inline void set_contiguous(ArrayView& array) {
    ptrdiff_t stride = 1;
    for (int axis = array.ndim - 1; axis >= 0; --axis) {
        array.stride[axis] = stride;
        stride *= array.shape[axis];
    }
}

inline bool equal_shapes(const ArrayView& a, const ArrayView& b) {
    return a.ndim == b.ndim && std::equal(a.shape, a.shape + a.ndim, b.shape);
}

// Whether a and b are views of the same elements with the same strides.
inline bool same_place(const ArrayView& a, const ArrayView& b) {
    return a.data == b.data && a.dtype == b.dtype && equal_shapes(a, b) &&
           std::equal(a.stride, a.stride + a.ndim, b.stride);
}

// Whether a and b share memory.
inline bool overlap(const ArrayView& a, const ArrayView& b) {
    if (a.data == nullptr || b.data == nullptr || a.size() == 0 || b.size() == 0) return false;
    const auto span = [](const ArrayView& array, const char*& begin, const char*& end) {
        const size_t size = item_size(array.dtype);
        begin = end = array.as<const char>();
        for (int axis = 0; axis < array.ndim; ++axis) {
            const ptrdiff_t reach = (array.shape[axis] - 1) * array.stride[axis] * static_cast<ptrdiff_t>(size);
            (reach < 0 ? begin : end) += reach;
        }
        end += size;
    };
    const char *a_begin, *a_end, *b_begin, *b_end;
    span(a, a_begin, a_end);
    span(b, b_begin, b_end);
    return a_begin < b_end && b_begin < a_end;
}

// An array as `count` rows of `length` elements: all axes except the last, merged as far as their strides allow.
struct Rows {
    void* data = nullptr;
    DType dtype = DType::kFloat32;
    size_t count = 1, length = 1;
    int n_axes = 0;
    ptrdiff_t shape[ArrayView::kMaxAxes] = {}, stride[ArrayView::kMaxAxes] = {};

    bool is_bf16() const { return !kFloat32Only && dtype == DType::kBFloat16; }
    template <class T>
    T* row(size_t i) const {
        return data == nullptr ? nullptr : static_cast<T*>(data) + offset(i);
    }
    ptrdiff_t offset(size_t row) const {
        if (n_axes == 1) return static_cast<ptrdiff_t>(row) * stride[0];
        ptrdiff_t at = 0;
        for (int axis = n_axes - 1; axis >= 0; --axis) {
            const auto size = static_cast<size_t>(shape[axis]);
            at += static_cast<ptrdiff_t>(row % size) * stride[axis];
            row /= size;
        }
        return at;
    }
    bool is_contiguous() const { return count < 2 || (n_axes == 1 && stride[0] == static_cast<ptrdiff_t>(length)); }
};

// Returns false for a 0-d array, and if the elements of a row are not contiguous.
inline bool rows_of(const ArrayView& array, Rows& rows) {
    if (!array.is_dense()) return false;
    rows = {.data = array.data, .dtype = array.dtype, .length = static_cast<size_t>(array.last())};
    for (int axis = 0; axis < array.ndim - 1; ++axis) {
        rows.count *= static_cast<size_t>(array.shape[axis]);
        if (array.shape[axis] == 1 || array.size() == 0) continue;
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

}  // namespace whet
