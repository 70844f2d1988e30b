// Bindings of the rotary position embedding: query and key of any strides, in place.
//
// Nothing is written before everything has been looked at. NotImplemented means that something is not the plain case,
// or a position outside the table: the Python side (src/whet/ops/rope.py) converts or explains.
#include "rope.h"

#include <algorithm>
#include <vector>

#include "arrays.h"
#include "gil.h"
#include "kernels/dispatch.h"

namespace nb = nanobind;

namespace whet {
namespace {

nb::object not_implemented() { return nb::borrow(Py_NotImplemented); }

struct Token {
    size_t row, column;
};

// Positions (T,), or (B, T).
struct Positions {
    Array array;
    size_t tokens = 0, per_row = 1;  // tokens in all, and along the last axis

    bool view(nb::handle object) {
        if (!view_strided(object.ptr(), array)) return false;
        if (array.ndim != 1 && array.ndim != 2) return false;
        per_row = static_cast<size_t>(array.shape[array.ndim - 1]);
        tokens = array.ndim == 1 ? per_row : per_row * static_cast<size_t>(array.shape[0]);
        return array.dtype == DType::kInt64 || array.dtype == DType::kInt32;
    }
    Token token(size_t t) const { return {t / std::max<size_t>(1, per_row), t % std::max<size_t>(1, per_row)}; }
    void next(Token& token) const {
        if (++token.column == per_row) token = {token.row + 1, 0};
    }
    // Where a token is, in an array whose first axes are these.
    Py_ssize_t offset(const Py_ssize_t* stride, Token token) const {
        const auto row = static_cast<Py_ssize_t>(token.row), column = static_cast<Py_ssize_t>(token.column);
        return array.ndim == 1 ? column * stride[0] : row * stride[0] + column * stride[1];
    }
    int64_t at(Token token) const {
        const Py_ssize_t i = offset(array.stride, token);
        return array.dtype == DType::kInt64 ? array.as<int64_t>()[i] : array.as<int32_t>()[i];
    }
    bool within(int64_t lowest, int64_t highest) const {
        bool all = true;
        Token token{0, 0};
        for (size_t t = 0; t < tokens; ++t, next(token)) all &= lowest <= at(token) && at(token) <= highest;
        return all;
    }
};

// Query or key: (positions..., heads * head_size) or (positions..., heads, head_size). None has no heads.
struct Heads {
    Array array;
    size_t count = 0;
    Py_ssize_t stride = 0;

    bool view(nb::handle object, const Positions& positions, Py_ssize_t head_size) {
        if (object.is_none()) return true;
        if (!view_strided(object.ptr(), array, true)) return false;
        if (array.dtype != DType::kFloat32 && array.dtype != DType::kBFloat16) return false;
        const int leading = positions.array.ndim, last = array.ndim - 1;
        if (last != leading && last != leading + 1) return false;
        for (int i = 0; i < leading; ++i) {
            if (array.shape[i] != positions.array.shape[i]) return false;
        }
        const bool flat = last == leading;
        if (flat ? array.shape[last] % head_size != 0 : array.shape[last] != head_size) return false;
        count = static_cast<size_t>(flat ? array.shape[last] / head_size : array.shape[leading]);
        stride = flat ? head_size : array.stride[leading];
        if (array.size() == 0) return true;
        // Elements that share memory would be rotated more than once.
        for (int i = 0; i < last; ++i) {
            if (array.shape[i] > 1 && array.stride[i] == 0) return false;
        }
        return array.stride[last] == 1;
    }
    void turn(size_t offset, const float* cos_sin, size_t rotary_dim, bool is_neox, bool inverse) const {
        const Kernels& k = kernels();
        if (array.dtype == DType::kFloat32) {
            const auto kernel = is_neox ? k.rope_neox_f32 : k.rope_gptj_f32;
            kernel(array.as<float>() + offset, count, stride, cos_sin, rotary_dim, inverse);
        } else {
            const auto kernel = is_neox ? k.rope_neox_bf16 : k.rope_gptj_bf16;
            kernel(array.as<uint16_t>() + offset, count, stride, cos_sin, rotary_dim, inverse);
        }
    }
};

constexpr size_t kTaskElements = 32768;

// body(first, last) for pieces of the tokens whose size does not depend on the number of threads. A token's heads stay
// together: they share its sines, and one token is too little for two threads.
template <class Body>
void for_tokens(size_t tokens, size_t elements_per_token, double work, Body&& body) {
    const size_t step = std::max<size_t>(1, kTaskElements / std::max<size_t>(1, elements_per_token));
    split(tokens, step, work, body);
}

struct Rope {
    Positions positions;
    Heads query, key;
    size_t rotary_dim = 0;
    bool is_neox, inverse;

    Rope(bool is_neox, bool inverse) : is_neox(is_neox), inverse(inverse) {}

    bool view(nb::handle p, nb::handle q, nb::handle k, nb::handle head_size, Py_ssize_t n) {
        if (!PyLong_CheckExact(head_size.ptr())) return false;
        const Py_ssize_t size = PyLong_AsSsize_t(head_size.ptr());
        if (size == -1 && PyErr_Occurred()) PyErr_Clear();
        rotary_dim = static_cast<size_t>(n);
        return n >= 2 && n % 2 == 0 && n <= size && positions.view(p) && !q.is_none() &&
               query.view(q, positions, size) && key.view(k, positions, size);
    }
    size_t elements_per_token() const { return (query.count + key.count) * rotary_dim; }
    void turn(Token token, const float* cos_sin) const {
        query.turn(static_cast<size_t>(positions.offset(query.array.stride, token)), cos_sin, rotary_dim, is_neox,
                   inverse);
        if (key.count == 0) return;
        key.turn(static_cast<size_t>(positions.offset(key.array.stride, token)), cos_sin, rotary_dim, is_neox, inverse);
    }
};

// Always inline: GCC drops calls of a function that does nothing but prefetch.
__attribute__((always_inline)) inline void prefetch(const float* x, size_t n) {
    for (size_t i = 0; i < n; i += 16) __builtin_prefetch(x + i);
}

// None when done.
nb::object apply_rope(nb::handle positions, nb::handle query, nb::handle key, nb::handle head_size, nb::handle cache,
                      bool is_neox, bool inverse) {
    Array table;
    Rope rope(is_neox, inverse);
    if (!view_strided(cache.ptr(), table) || table.ndim != 2 || table.dtype != DType::kFloat32 ||
        !rope.view(positions, query, key, head_size, table.shape[1]) || table.stride[1] != 1 ||
        !rope.positions.within(0, table.shape[0] - 1)) {
        return not_implemented();
    }
    const size_t tokens = rope.positions.tokens, each = rope.elements_per_token();
    const auto row = [&](Token token) { return table.as<float>() + rope.positions.at(token) * table.stride[0]; };
    // The rows of the table lie anywhere in memory: the next one is asked for while a token with enough work is
    // rotated.
    const bool worth_asking = each >= 1024;
    for_tokens(tokens, each, 0.1 * static_cast<double>(tokens * each), [&](size_t first, size_t last) {
        Token token = rope.positions.token(first);
        for (size_t t = first; t < last; ++t) {
            const Token now = token;
            rope.positions.next(token);
            if (worth_asking && t + 1 < last) prefetch(row(token), rope.rotary_dim);
            rope.turn(now, row(now));
        }
    });
    return nb::none();
}

constexpr int64_t kFarthest = int64_t{1} << 31;

// inv_freq: contiguous float64. None when done.
nb::object apply_rope_freqs(nb::handle positions, nb::handle query, nb::handle key, nb::handle head_size,
                            nb::handle inv_freq, double scale, bool is_neox, bool inverse) {
    Array f;
    Rope rope(is_neox, inverse);
    if (!view(inv_freq.ptr(), f) || f.ndim != 1 || f.dtype != DType::kFloat64 ||
        !rope.view(positions, query, key, head_size, 2 * f.shape[0]) || !rope.positions.within(-kFarthest, kFarthest)) {
        return not_implemented();
    }
    const size_t tokens = rope.positions.tokens, each = rope.elements_per_token() + 8 * rope.rotary_dim;
    for_tokens(tokens, each, 0.1 * static_cast<double>(tokens * each), [&](size_t first, size_t last) {
        float few[256];
        std::vector<float> many(rope.rotary_dim <= 256 ? 0 : rope.rotary_dim);
        float* cos_sin = many.empty() ? few : many.data();
        Token token = rope.positions.token(first);
        for (size_t t = first; t < last; ++t, rope.positions.next(token)) {
            kernels().rope_cos_sin(static_cast<double>(rope.positions.at(token)), f.as<double>(), rope.rotary_dim / 2,
                                   scale, cos_sin);
            rope.turn(token, cos_sin);
        }
    });
    return nb::none();
}

// Fills table (rows, 2 n), contiguous float32, from inv_freq (n), contiguous float64; arguments come checked.
void rope_table(nb::handle inv_freq, double scale, nb::handle table) {
    Array f, out;
    if (!view(inv_freq.ptr(), f) || !view(table.ptr(), out)) throw nb::type_error("rope_table");
    const auto n = static_cast<size_t>(f.shape[0]), rows = static_cast<size_t>(out.shape[0]);
    for_tokens(rows, 8 * n, static_cast<double>(rows * n), [&](size_t first, size_t last) {
        for (size_t row = first; row < last; ++row) {
            kernels().rope_cos_sin(static_cast<double>(row), f.as<double>(), n, scale, out.as<float>() + row * 2 * n);
        }
    });
}

}  // namespace

void bind_rope(nb::module_& m) {
    const auto any = [] { return nb::arg().none(); };
    m.def("apply_rope", &apply_rope, any(), any(), any(), any(), any(), nb::arg(), nb::arg());
    m.def("apply_rope_freqs", &apply_rope_freqs, any(), any(), any(), any(), any(), nb::arg(), nb::arg(), nb::arg());
    m.def("rope_table", &rope_table);
}

}  // namespace whet
