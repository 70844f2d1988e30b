// Bindings of the moves into and out of a KV cache (sequences, positions, KV heads, head_dim): bytes, whatever they
// mean.
//
// As in primitives.cpp, NotImplemented says that an argument is not the plain case, or points out of the cache.
#include "kv_cache.h"

#include <nanobind/nanobind.h>

#include <cstring>

#include "arrays.h"
#include "row_arrays.h"

namespace nb = nanobind;

namespace whet {
namespace {

nb::object not_implemented() { return nb::borrow(Py_NotImplemented); }

constexpr double kNanosecondsPerByte = 0.1;

size_t item_size(DType dtype) {
    switch (dtype) {
        case DType::kBFloat16:
            return 2;
        case DType::kFloat32:
        case DType::kInt32:
            return 4;
        case DType::kFloat64:
        case DType::kInt64:
            return 8;
        default:
            return 1;
    }
}

// Tokens of an array whose last three axes are tokens, KV heads and head_dim.
struct Tokens {
    char* data;
    size_t item, n_heads, head_bytes;
    Py_ssize_t token_bytes, head_stride_bytes;

    explicit Tokens(const Array& a)
        : data(a.as<char>()),
          item(item_size(a.dtype)),
          n_heads(static_cast<size_t>(a.shape[a.ndim - 2])),
          head_bytes(static_cast<size_t>(a.shape[a.ndim - 1]) * item),
          token_bytes(a.stride[a.ndim - 3] * static_cast<Py_ssize_t>(item)),
          head_stride_bytes(a.stride[a.ndim - 2] * static_cast<Py_ssize_t>(item)) {}

    bool has_whole_tokens() const { return n_heads < 2 || head_stride_bytes == static_cast<Py_ssize_t>(head_bytes); }
    size_t size_bytes() const { return n_heads * head_bytes; }
};

bool has_whole_heads(const Array& a) { return a.shape[a.ndim - 1] < 2 || a.stride[a.ndim - 1] == 1; }

// n tokens from `from` to `to`, each given by its first token's address.
void copy_tokens(const Tokens& to, char* to_data, const Tokens& from, const char* from_data, size_t n) {
    const auto size = static_cast<Py_ssize_t>(to.size_bytes());
    const bool whole = to.has_whole_tokens() && from.has_whole_tokens();
    if (whole && to.token_bytes == size && from.token_bytes == size) {
        std::memcpy(to_data, from_data, n * to.size_bytes());
        return;
    }
    for (size_t t = 0; t < n; ++t, to_data += to.token_bytes, from_data += from.token_bytes) {
        if (whole) {
            std::memcpy(to_data, from_data, to.size_bytes());
            continue;
        }
        for (size_t h = 0; h < to.n_heads; ++h) {
            const auto head = static_cast<Py_ssize_t>(h);
            std::memcpy(to_data + head * to.head_stride_bytes, from_data + head * from.head_stride_bytes,
                        to.head_bytes);
        }
    }
}

bool view_int64(nb::handle object, Array& array, Py_ssize_t n) {
    return view(object.ptr(), array) && array.ndim == 1 && array.dtype == DType::kInt64 && array.shape[0] == n;
}

bool view_cache(nb::handle object, Array& array, bool writable) {
    return view_strided(object.ptr(), array, writable) && array.ndim == 4 && has_whole_heads(array);
}

nb::object kv_append(nb::handle cache_object, nb::handle new_object, nb::handle positions_object) {
    Array cache, added, positions;
    if (!view_cache(cache_object, cache, true) || !view_cache(new_object, added, false) || cache.dtype != added.dtype ||
        cache.shape[0] != added.shape[0] || cache.shape[2] != added.shape[2] || cache.shape[3] != added.shape[3] ||
        !view_int64(positions_object, positions, cache.shape[0])) {
        return not_implemented();
    }
    const int64_t* at = positions.as<int64_t>();
    const Py_ssize_t n_tokens = added.shape[1];
    for (Py_ssize_t b = 0; b < cache.shape[0]; ++b) {
        if (at[b] < 0 || at[b] > cache.shape[1] - n_tokens) return not_implemented();
    }
    const Tokens to(cache), from(added);
    if (overlap(cache, added, to.item)) return not_implemented();
    const auto item = static_cast<Py_ssize_t>(to.item);
    const double work = kNanosecondsPerByte * static_cast<double>(added.size() * item);
    split(static_cast<size_t>(cache.shape[0]), 1, work, [&](size_t begin, size_t end) {
        for (auto b = static_cast<Py_ssize_t>(begin); b < static_cast<Py_ssize_t>(end); ++b) {
            copy_tokens(to, to.data + b * cache.stride[0] * item + at[b] * to.token_bytes, from,
                        from.data + b * added.stride[0] * item, static_cast<size_t>(n_tokens));
        }
    });
    return nb::borrow(cache_object);
}

nb::object kv_gather(nb::handle cache_object, nb::handle rows_object, nb::handle lengths_object,
                     nb::handle out_object) {
    Array cache, rows, lengths, out;
    if (!view_cache(cache_object, cache, false) || !view(rows_object.ptr(), rows) ||
        !view_int64(rows_object, rows, rows.shape[0]) || !view_int64(lengths_object, lengths, rows.shape[0])) {
        return not_implemented();
    }
    Py_ssize_t total = 0;
    for (Py_ssize_t i = 0; i < rows.shape[0]; ++i) {
        const int64_t row = rows.as<int64_t>()[i], length = lengths.as<int64_t>()[i];
        if (row < 0 || row >= cache.shape[0] || length < 0 || length > cache.shape[1]) return not_implemented();
        total += length;
    }
    const Py_ssize_t shape[3] = {total, cache.shape[2], cache.shape[3]};
    nb::object result = nb::borrow(out_object);
    if (out_object.is_none()) {
        result = new_like(cache_object.ptr(), cache, cache.dtype, 3, shape, &out.data);
        out.ndim = 3;
        out.dtype = cache.dtype;
        std::copy_n(shape, 3, out.shape);
        out.stride[0] = shape[1] * shape[2], out.stride[1] = shape[2], out.stride[2] = 1;
    } else if (!view_strided(out_object.ptr(), out, true) || out.ndim != 3 || out.dtype != cache.dtype ||
               !std::equal(shape, shape + 3, out.shape) || !has_whole_heads(out)) {
        return not_implemented();
    }
    const Tokens to(out), from(cache);
    if (overlap(out, cache, from.item)) return not_implemented();
    const auto item = static_cast<Py_ssize_t>(from.item);
    const double work = kNanosecondsPerByte * static_cast<double>(out.size() * item);
    split(static_cast<size_t>(rows.shape[0]), 1, work, [&](size_t begin, size_t end) {
        Py_ssize_t at = 0;
        for (size_t i = 0; i < begin; ++i) at += lengths.as<int64_t>()[i];
        for (size_t i = begin; i < end; ++i) {
            const int64_t length = lengths.as<int64_t>()[i];
            copy_tokens(to, to.data + at * to.token_bytes, from,
                        from.data + rows.as<int64_t>()[i] * cache.stride[0] * item, static_cast<size_t>(length));
            at += length;
        }
    });
    return result;
}

}  // namespace

void bind_kv_cache(nb::module_& m) {
    using nb::arg;
    m.def("kv_append", &kv_append);
    m.def("kv_gather", &kv_gather, arg(), arg(), arg(), arg().none());
}

}  // namespace whet
