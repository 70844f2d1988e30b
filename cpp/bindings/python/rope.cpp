// Bindings of the rotary position embedding: query and key of any strides, in place.
//
// All arguments are checked before anything is written. Functions return NotImplemented if an argument is not the plain
// case, or a position is outside the table: src/whet/ops/rope.py then converts the input or raises.
#include "engine/rope.h"

#include <nanobind/nanobind.h>

#include <algorithm>

#include "arrays.h"
#include "bindings.h"

namespace nb = nanobind;

namespace whet {
namespace {

bool view_positions(nb::handle object, ArrayView& positions) {
    Array array;
    if (!view_strided(object.ptr(), array) || !array.is_integer() || array.ndim < 1 || array.ndim > 2) return false;
    positions = array;
    return true;
}

// None: no heads.
bool view_heads(nb::handle object, const ArrayView& positions, Py_ssize_t head_size, RopeHeads& heads) {
    if (object.is_none()) return true;
    Array a;
    if (!view_strided(object.ptr(), a, true) || !a.is_narrow_float()) return false;
    const int leading = positions.ndim, last = a.ndim - 1;
    const bool is_flat = last == leading;
    if ((!is_flat && last != leading + 1) || !std::equal(a.shape, a.shape + leading, positions.shape) ||
        (is_flat ? a.shape[last] % head_size != 0 : a.shape[last] != head_size)) {
        return false;
    }
    heads = {.array = a,
             .count = static_cast<size_t>(is_flat ? a.shape[last] / head_size : a.shape[leading]),
             .stride = is_flat ? head_size : a.stride[leading]};
    // Overlapping elements would be rotated more than once.
    for (int i = 0; i < last; ++i) {
        if (a.size() > 0 && a.shape[i] > 1 && a.stride[i] == 0) return false;
    }
    return a.is_dense();
}

bool view_rope(nb::handle positions, nb::handle query, nb::handle key, nb::handle head_size, Py_ssize_t rotary_dim,
               Rope& rope) {
    Py_ssize_t size = 0;
    rope.rotary_dim = static_cast<size_t>(rotary_dim);
    return optional_size(head_size, 0, size) && rotary_dim >= 2 && rotary_dim % 2 == 0 && rotary_dim <= size &&
           view_positions(positions, rope.positions) && !query.is_none() &&
           view_heads(query, rope.positions, size, rope.query) && view_heads(key, rope.positions, size, rope.key);
}

// Returns None on success.
nb::object apply_rope(nb::handle positions, nb::handle query, nb::handle key, nb::handle head_size, nb::handle cache,
                      bool is_neox, bool inverse) {
    Array table;
    Rope rope{.is_neox = is_neox, .inverse = inverse};
    if (!view_strided(cache.ptr(), table) || table.ndim != 2 || table.dtype != DType::kFloat32 ||
        table.stride[1] != 1 || !view_rope(positions, query, key, head_size, table.shape[1], rope) ||
        !positions_within(rope.positions, 0, table.shape[0] - 1)) {
        return not_implemented();
    }
    rotate_by_table(rope, table);
    return nb::none();
}

// inv_freq: contiguous float64. Returns None on success.
nb::object apply_rope_freqs(nb::handle positions, nb::handle query, nb::handle key, nb::handle head_size,
                            nb::handle inv_freq, double scale, bool is_neox, bool inverse) {
    constexpr int64_t kMaxPosition = int64_t{1} << 31;
    Array freqs;
    Rope rope{.is_neox = is_neox, .inverse = inverse};
    if (!view_vector(inv_freq, DType::kFloat64, freqs) ||
        !view_rope(positions, query, key, head_size, 2 * freqs.shape[0], rope) ||
        !positions_within(rope.positions, -kMaxPosition, kMaxPosition)) {
        return not_implemented();
    }
    rotate_by_freqs(rope, freqs.as<double>(), scale);
    return nb::none();
}

// Fills table (rows, 2 n), contiguous float32, from inv_freq (n), contiguous float64; checked by the caller.
void rope_table(nb::handle inv_freq, double scale, nb::handle table) {
    Array freqs, out;
    if (!view(inv_freq.ptr(), freqs) || !view(table.ptr(), out)) throw nb::type_error("rope_table");
    fill_rope_table(freqs.as<double>(), static_cast<size_t>(freqs.shape[0]), scale, static_cast<size_t>(out.shape[0]),
                    out.as<float>());
}

}  // namespace

void bind_rope(nb::module_& m) {
    const auto any = [] { return nb::arg().none(); };
    m.def("apply_rope", &apply_rope, PlainCase(), any(), any(), any(), any(), any(), nb::arg(), nb::arg());
    m.def("apply_rope_freqs", &apply_rope_freqs, PlainCase(), any(), any(), any(), any(), any(), nb::arg(), nb::arg(),
          nb::arg());
    m.def("rope_table", &rope_table);
}

}  // namespace whet
