// Bindings of copies into and out of a contiguous KV cache (sequences, positions, KV heads, head_dim) of any dtype.
//
// Functions return NotImplemented if an argument is not the plain case, or an index is outside the cache.
#include <nanobind/nanobind.h>

#include "arrays.h"
#include "bindings.h"
#include "engine/kv_copy.h"

namespace nb = nanobind;

namespace whet {
namespace {

bool view_cache(nb::handle object, Array& array, bool writable) {
    return view_strided(object.ptr(), array, writable) && array.ndim == 4 && array.is_dense();
}

nb::object kv_append(nb::handle cache_object, nb::handle new_object, nb::handle positions_object) {
    Array cache, added, positions;
    if (!view_cache(cache_object, cache, true) || !view_cache(new_object, added, false) || cache.dtype != added.dtype ||
        cache.shape[0] != added.shape[0] || cache.shape[2] != added.shape[2] || cache.shape[3] != added.shape[3] ||
        !view_vector(positions_object, DType::kInt64, positions) || positions.shape[0] != cache.shape[0] ||
        overlap(cache, added)) {
        return not_implemented();
    }
    const auto* first = positions.as<int64_t>();
    for (Py_ssize_t b = 0; b < cache.shape[0]; ++b) {
        if (first[b] < 0 || first[b] > cache.shape[1] - added.shape[1]) return not_implemented();
    }
    append_tokens(cache, added, first);
    return nb::borrow(cache_object);
}

nb::object kv_gather(nb::handle cache_object, nb::handle rows_object, nb::handle lengths_object,
                     nb::handle out_object) {
    Array cache, rows, lengths, out;
    if (!view_cache(cache_object, cache, false) || !view_vector(rows_object, DType::kInt64, rows) ||
        !view_vector(lengths_object, DType::kInt64, lengths) || lengths.shape[0] != rows.shape[0]) {
        return not_implemented();
    }
    const auto *row = rows.as<int64_t>(), *length = lengths.as<int64_t>();
    Py_ssize_t total = 0;
    for (Py_ssize_t i = 0; i < rows.shape[0]; ++i) {
        if (row[i] < 0 || row[i] >= cache.shape[0] || length[i] < 0 || length[i] > cache.shape[1]) {
            return not_implemented();
        }
        total += length[i];
    }
    const Py_ssize_t shape[3] = {total, cache.shape[2], cache.shape[3]};
    nb::object result;
    if (!view_result(out_object, cache_object, cache, 3, shape, out, result) || !out.is_dense() ||
        overlap(out, cache)) {
        return not_implemented();
    }
    gather_tokens(cache, row, length, static_cast<size_t>(rows.shape[0]), out);
    return result;
}

}  // namespace

void bind_kv_cache(nb::module_& m) {
    using nb::arg;
    m.def("kv_append", &kv_append, PlainCase());
    m.def("kv_gather", &kv_gather, PlainCase(), arg(), arg(), arg(), arg().none());
}

}  // namespace whet
