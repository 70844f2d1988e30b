// Bindings of the low-rank adapters: the plain case of each function, straight to the kernels.
//
// Rows x and y may lie apart (any stride between rows, none within one). Whatever is not the plain case is answered
// NotImplemented, and src/whet/ops/lora.py converts or explains. Work is split in rows or in columns, of which none
// shares a sum with another: the same bits on any number of threads.
#include "lora.h"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <vector>

#include "arrays.h"
#include "gil.h"
#include "kernels/dispatch.h"
#include "row_arrays.h"
#include "runtime/ceil_div.h"

namespace nb = nanobind;

namespace whet {
namespace {

constexpr size_t kMaxRank = 8, kRowsPerTask = 4, kColumnsPerTask = 512;

// Rows (..., columns) at one distance from each other.
struct Rows {
    Array array;
    size_t rows = 0, columns = 0;
    ptrdiff_t stride = 0;

    bool is_bf16() const { return array.dtype == DType::kBFloat16; }
    template <class T>
    T* at(size_t row) const {
        return array.as<T>() + static_cast<ptrdiff_t>(row) * stride;
    }
};

bool view_rows(nb::handle object, Rows& out, bool writable = false) {
    Array& a = out.array;
    if (!view_strided(object.ptr(), a, writable) || a.ndim == 0) return false;
    if (a.dtype != DType::kFloat32 && a.dtype != DType::kBFloat16) return false;
    const int last = a.ndim - 1;
    out.columns = static_cast<size_t>(a.shape[last]);
    out.rows = 1;
    if (a.size() == 0) {  // whose strides mean nothing
        out.rows = 0;
        return out.columns > 0;
    }
    if (a.stride[last] != 1 && a.shape[last] > 1) return false;
    for (int i = last - 1; i >= 0; --i) {
        if (a.shape[i] == 1) continue;
        if (out.rows <= 1) {
            out.stride = a.stride[i];
        } else if (a.stride[i] != out.stride * static_cast<ptrdiff_t>(out.rows)) {
            return false;
        }
        out.rows *= static_cast<size_t>(a.shape[i]);
    }
    // Rows that overlap cannot be written side by side.
    return !writable || out.rows <= 1 || std::abs(out.stride) >= static_cast<ptrdiff_t>(out.columns);
}

// (rank, columns) float32, rank in [1, 8].
bool view_factor(nb::handle object, Array& out, bool writable = false) {
    return view_strided(object.ptr(), out, writable) && out.ndim == 2 && out.dtype == DType::kFloat32 &&
           (out.stride[1] == 1 || out.shape[1] <= 1) && (out.stride[0] == out.shape[1] || out.shape[0] <= 1);
}

bool same_rows(const Rows& x, const Rows& y) {
    return x.array.ndim == y.array.ndim && x.rows == y.rows &&
           std::equal(x.array.shape, x.array.shape + x.array.ndim - 1, y.array.shape);
}

bool same_rank(const Array& a, const Array& b) {
    return a.shape[0] == b.shape[0] && a.shape[0] >= 1 && a.shape[0] <= static_cast<Py_ssize_t>(kMaxRank);
}

// hidden[row] = x[row] a^T for rows [begin, begin + count).
void down(const Rows& x, size_t begin, size_t count, size_t rank, const float* a, float* hidden) {
    if (x.is_bf16()) {
        kernels().lora_down_bf16(rank, x.at<uint16_t>(begin), x.stride, count, x.columns, a, hidden);
    } else {
        kernels().lora_down_f32(rank, x.at<float>(begin), x.stride, count, x.columns, a, hidden);
    }
}

void up(const float* hidden, const Rows& y, size_t begin, size_t count, size_t rank, const float* b, float scale) {
    if (y.is_bf16()) {
        kernels().lora_up_bf16(rank, hidden, count, y.columns, b, scale, y.at<uint16_t>(begin), y.stride);
    } else {
        kernels().lora_up_f32(rank, hidden, count, y.columns, b, scale, y.at<float>(begin), y.stride);
    }
}

// Columns [begin, begin + count) of grad += scale hidden^T x.
void outer(const float* hidden, const Rows& x, size_t begin, size_t count, size_t rank, float scale, float* grad) {
    if (x.is_bf16()) {
        kernels().lora_outer_bf16(rank, hidden, x.array.as<uint16_t>() + begin, x.stride, x.rows, count, scale,
                                  grad + begin, x.columns);
    } else {
        kernels().lora_outer_f32(rank, hidden, x.array.as<float>() + begin, x.stride, x.rows, count, scale,
                                 grad + begin, x.columns);
    }
}

double work_of(const Rows& x, const Rows& y, size_t rank) {
    return static_cast<double>(x.rows * (x.columns + y.columns)) * 0.03 * static_cast<double>(rank + 1);
}

// y += scale (x a^T) b. True if it was done.
bool forward(nb::handle x_object, nb::handle y_object, nb::handle a_object, nb::handle b_object, double scale) {
    Rows x, y;
    Array a, b;
    if (!view_rows(x_object, x) || !view_rows(y_object, y, true) || !view_factor(a_object, a) ||
        !view_factor(b_object, b)) {
        return false;
    }
    if (!same_rank(a, b) || !same_rows(x, y) || static_cast<size_t>(a.shape[1]) != x.columns ||
        static_cast<size_t>(b.shape[1]) != y.columns) {
        return false;
    }
    // A row of x is read before its row of y is written, but not before those of other rows.
    const size_t x_item = x.is_bf16() ? 2 : 4, y_item = y.is_bf16() ? 2 : 4;
    if (overlap(x.array, x_item, y.array, y_item) && !(x_item == y_item && same_place(x.array, y.array))) return false;
    if (overlap(a, sizeof(float), y.array, y_item) || overlap(b, sizeof(float), y.array, y_item)) return false;
    const auto rank = static_cast<size_t>(a.shape[0]);
    for_each(ceil_div(x.rows, kRowsPerTask), work_of(x, y, rank), [&](size_t task) {
        const size_t begin = task * kRowsPerTask, count = std::min(kRowsPerTask, x.rows - begin);
        float hidden[kRowsPerTask * kMaxRank];
        down(x, begin, count, rank, a.as<float>(), hidden);
        up(hidden, y, begin, count, rank, b.as<float>(), static_cast<float>(scale));
    });
    return true;
}

// weight += scale hidden b: the last half of forward, with hidden given.
bool add_product(nb::handle hidden_object, nb::handle b_object, nb::handle y_object, double scale) {
    Rows y;
    Array hidden, b;
    if (!view_rows(y_object, y, true) || !view_strided(hidden_object.ptr(), hidden) || !view_factor(b_object, b)) {
        return false;
    }
    if (hidden.ndim != 2 || hidden.dtype != DType::kFloat32 || hidden.shape[1] != b.shape[0] || !same_rank(b, b) ||
        static_cast<size_t>(hidden.shape[0]) != y.rows || static_cast<size_t>(b.shape[1]) != y.columns) {
        return false;
    }
    const auto rank = static_cast<size_t>(b.shape[0]);
    for_each(ceil_div(y.rows, kRowsPerTask), work_of(y, y, rank), [&](size_t task) {
        const size_t begin = task * kRowsPerTask, count = std::min(kRowsPerTask, y.rows - begin);
        float rows[kRowsPerTask * kMaxRank];
        for (size_t i = 0; i < count * rank; ++i) {
            const auto row = static_cast<ptrdiff_t>(begin + i / rank), j = static_cast<ptrdiff_t>(i % rank);
            rows[i] = hidden.as<float>()[row * hidden.stride[0] + j * hidden.stride[1]];
        }
        up(rows, y, begin, count, rank, b.as<float>(), static_cast<float>(scale));
    });
    return true;
}

// grad_a += scale (g b^T)^T x,  grad_b += scale (x a^T)^T g.
bool accumulate(nb::handle x_object, nb::handle g_object, nb::handle a_object, nb::handle b_object, double scale,
                nb::handle grad_a_object, nb::handle grad_b_object) {
    Rows x, g;
    Array a, b, grad_a, grad_b;
    if (!view_rows(x_object, x) || !view_rows(g_object, g) || !view_factor(a_object, a) || !view_factor(b_object, b) ||
        !view_factor(grad_a_object, grad_a, true) || !view_factor(grad_b_object, grad_b, true)) {
        return false;
    }
    if (!same_rank(a, b) || !same_rank(a, grad_a) || !same_rank(a, grad_b) || a.shape[1] != grad_a.shape[1] ||
        b.shape[1] != grad_b.shape[1] || !same_rows(x, g) || static_cast<size_t>(a.shape[1]) != x.columns ||
        static_cast<size_t>(b.shape[1]) != g.columns) {
        return false;
    }
    const auto rank = static_cast<size_t>(a.shape[0]), rows = x.rows;
    const double work = work_of(x, g, rank);
    constexpr size_t kFew = 4;
    float few[2 * kFew * kMaxRank];
    std::vector<float> many(rows <= kFew ? 0 : 2 * rows * rank);
    float* hidden_x = rows <= kFew ? few : many.data();
    float* hidden_g = hidden_x + rows * rank;
    for_each(ceil_div(rows, kRowsPerTask), work, [&](size_t task) {
        const size_t begin = task * kRowsPerTask, count = std::min(kRowsPerTask, rows - begin);
        down(x, begin, count, rank, a.as<float>(), hidden_x + begin * rank);
        down(g, begin, count, rank, b.as<float>(), hidden_g + begin * rank);
    });
    const size_t tasks_a = ceil_div(x.columns, kColumnsPerTask), tasks_b = ceil_div(g.columns, kColumnsPerTask);
    for_each(tasks_a + tasks_b, work, [&](size_t task) {
        const bool is_a = task < tasks_a;
        const Rows& columns = is_a ? x : g;
        const size_t begin = (is_a ? task : task - tasks_a) * kColumnsPerTask;
        outer(is_a ? hidden_g : hidden_x, columns, begin, std::min(kColumnsPerTask, columns.columns - begin), rank,
              static_cast<float>(scale), (is_a ? grad_a : grad_b).as<float>());
    });
    return true;
}

bool flat(nb::handle object, DType dtype, Array& out) {
    return view(object.ptr(), out) && out.ndim == 1 && out.dtype == dtype;
}

// Row i of y += scale (x a^T) b with the adapter index[i]; -1: none. Adapter k is rows [offsets[k], offsets[k + 1]) of
// a and b, scaled by scales[k].
bool batch(nb::handle x_object, nb::handle y_object, nb::handle a_object, nb::handle b_object,
           nb::handle offsets_object, nb::handle scales_object, nb::handle index_object) {
    Rows x, y;
    Array a, b, offsets, scales, index;
    if (!view_rows(x_object, x) || !view_rows(y_object, y, true) || !view_factor(a_object, a) ||
        !view_factor(b_object, b) || !flat(offsets_object, DType::kInt64, offsets) ||
        !flat(scales_object, DType::kFloat32, scales) || !flat(index_object, DType::kInt64, index)) {
        return false;
    }
    if (a.shape[0] != b.shape[0] || !same_rows(x, y) || static_cast<size_t>(a.shape[1]) != x.columns ||
        static_cast<size_t>(b.shape[1]) != y.columns || offsets.shape[0] != scales.shape[0] + 1 ||
        static_cast<size_t>(index.shape[0]) != x.rows) {
        return false;
    }
    const auto* begins = offsets.as<int64_t>();
    const auto* of_row = index.as<int64_t>();
    const int64_t n = scales.shape[0];
    for (int64_t k = 0; k < n; ++k) {
        const int64_t rank = begins[k + 1] - begins[k];
        if (begins[k] < 0 || rank < 1 || rank > static_cast<int64_t>(kMaxRank) || begins[k + 1] > a.shape[0]) {
            return false;
        }
    }
    for (size_t i = 0; i < x.rows; ++i) {
        if (of_row[i] < -1 || of_row[i] >= n) return false;
    }
    for_each(ceil_div(x.rows, kRowsPerTask), work_of(x, y, 4), [&](size_t task) {
        const size_t end = std::min(x.rows, (task + 1) * kRowsPerTask);
        for (size_t begin = task * kRowsPerTask, next = begin; begin < end; begin = next) {
            // Neighbours with the same adapter go together; a row's bits are the same alone.
            while (next < end && of_row[next] == of_row[begin]) ++next;
            const int64_t k = of_row[begin];
            if (k < 0) continue;
            const auto rank = static_cast<size_t>(begins[k + 1] - begins[k]), at = static_cast<size_t>(begins[k]);
            float hidden[kRowsPerTask * kMaxRank];
            down(x, begin, next - begin, rank, a.as<float>() + at * x.columns, hidden);
            up(hidden, y, begin, next - begin, rank, b.as<float>() + at * y.columns, scales.as<float>()[k]);
        }
    });
    return true;
}

// A function for Python: None if it was done, else NotImplemented.
template <auto function, class... Arguments>
nb::object answered(Arguments... arguments) {
    return nb::borrow(function(arguments...) ? Py_None : Py_NotImplemented);
}

}  // namespace

void bind_lora(nb::module_& m) {
    using H = nb::handle;
    m.def("lora_forward", &answered<&forward, H, H, H, H, double>);
    m.def("lora_add_product", &answered<&add_product, H, H, H, double>);
    m.def("lora_accumulate", &answered<&accumulate, H, H, H, H, double, H, H>);
    m.def("lora_batch", &answered<&batch, H, H, H, H, H, H, H>);
}

}  // namespace whet
