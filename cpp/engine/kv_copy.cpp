#include "engine/kv_copy.h"

#include <cstring>

#include "runtime/split.h"

namespace whet {
namespace {

// Layout of an array whose last three axes are tokens, KV heads and head_dim; strides in bytes.
struct TokenLayout {
    size_t n_heads, head_bytes;
    ptrdiff_t token_stride, head_stride;

    explicit TokenLayout(const ArrayView& a) {
        const size_t size = item_size(a.dtype);
        n_heads = static_cast<size_t>(a.shape[a.ndim - 2]);
        head_bytes = static_cast<size_t>(a.last()) * size;
        token_stride = a.stride[a.ndim - 3] * static_cast<ptrdiff_t>(size);
        head_stride = a.stride[a.ndim - 2] * static_cast<ptrdiff_t>(size);
    }
    size_t token_bytes() const { return n_heads * head_bytes; }
    bool has_dense_tokens() const { return n_heads < 2 || head_stride == static_cast<ptrdiff_t>(head_bytes); }
    bool is_dense() const { return has_dense_tokens() && token_stride == static_cast<ptrdiff_t>(token_bytes()); }
};

void copy_tokens(const TokenLayout& to, char* to_data, const TokenLayout& from, const char* from_data, size_t n) {
    if (to.is_dense() && from.is_dense()) {
        std::memcpy(to_data, from_data, n * to.token_bytes());
        return;
    }
    const bool dense_tokens = to.has_dense_tokens() && from.has_dense_tokens();
    const size_t copies = dense_tokens ? 1 : to.n_heads, copy_bytes = dense_tokens ? to.token_bytes() : to.head_bytes;
    for (size_t t = 0; t < n; ++t, to_data += to.token_stride, from_data += from.token_stride) {
        for (size_t h = 0; h < copies; ++h) {
            const auto head = static_cast<ptrdiff_t>(h);
            std::memcpy(to_data + head * to.head_stride, from_data + head * from.head_stride, copy_bytes);
        }
    }
}

// Rough estimate of the time to copy an array, in nanoseconds.
double copy_work(const ArrayView& a) {
    return 0.1 * static_cast<double>(a.size()) * static_cast<double>(item_size(a.dtype));
}

char* at(const ArrayView& a, ptrdiff_t element) { return static_cast<char*>(a.at(element)); }

}  // namespace

void append_tokens(const ArrayView& cache, const ArrayView& added, const int64_t* positions) {
    const TokenLayout to(cache), from(added);
    const auto n_tokens = static_cast<size_t>(added.shape[1]);
    parallel_split(static_cast<size_t>(cache.shape[0]), 1, copy_work(added), [&](size_t begin, size_t end) {
        for (auto b = static_cast<ptrdiff_t>(begin); b < static_cast<ptrdiff_t>(end); ++b) {
            copy_tokens(to, at(cache, b * cache.stride[0] + positions[b] * cache.stride[1]), from,
                        at(added, b * added.stride[0]), n_tokens);
        }
    });
}

void gather_tokens(const ArrayView& cache, const int64_t* rows, const int64_t* lengths, size_t n,
                   const ArrayView& out) {
    const TokenLayout to(out), from(cache);
    parallel_split(n, 1, copy_work(out), [&](size_t begin, size_t end) {
        int64_t token = 0;
        for (size_t i = 0; i < begin; ++i) token += lengths[i];
        for (size_t i = begin; i < end; token += lengths[i++]) {
            copy_tokens(to, at(out, token * out.stride[0]), from, at(cache, rows[i] * cache.stride[0]),
                        static_cast<size_t>(lengths[i]));
        }
    });
}

}  // namespace whet
