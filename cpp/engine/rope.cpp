#include "engine/rope.h"

#include <algorithm>
#include <vector>

#include "kernels/dispatch.h"
#include "runtime/split.h"

namespace whet {
namespace {

struct Token {
    ptrdiff_t row, column;
};

// Iterates over the tokens of positions (T,) or (B, T).
class Tokens {
public:
    explicit Tokens(const ArrayView& positions)
        : positions_(positions), per_row_(positions.last()), count_(static_cast<size_t>(positions.size())) {}

    size_t count() const { return count_; }
    Token token(size_t i) const {
        const ptrdiff_t per_row = std::max<ptrdiff_t>(1, per_row_), at = static_cast<ptrdiff_t>(i);
        return {at / per_row, at % per_row};
    }
    void advance(Token& token) const {
        if (++token.column == per_row_) token = {token.row + 1, 0};
    }
    // Offset of a token in an array whose first axes match the positions.
    ptrdiff_t offset(const ArrayView& array, Token token) const {
        if (positions_.ndim == 1) return token.column * array.stride[0];
        return token.row * array.stride[0] + token.column * array.stride[1];
    }
    int64_t position(Token token) const { return positions_.integer(offset(positions_, token)); }

private:
    const ArrayView& positions_;
    ptrdiff_t per_row_;
    size_t count_;
};

// Calls body(first, last) for chunks of tokens. The heads of a token are not split: they share its sines, and one token
// is too little work for two threads.
template <class F>
void for_tokens(size_t tokens, size_t elements_per_token, double work_ns, F&& body) {
    constexpr size_t kTaskElements = 32768;
    parallel_split(tokens, std::max<size_t>(1, kTaskElements / std::max<size_t>(1, elements_per_token)), work_ns, body);
}

void rotate_heads(const Rope& rope, const RopeHeads& heads, ptrdiff_t offset, const float* cos_sin) {
    const Kernels& k = kernels();
    const auto run = [&](auto kernel, auto* x) {
        kernel(x + offset, heads.count, heads.stride, cos_sin, rope.rotary_dim, rope.inverse);
    };
    if (heads.array.is_float32()) {
        run(rope.is_neox ? k.rope_neox_f32 : k.rope_gptj_f32, heads.array.as<float>());
    } else {
        run(rope.is_neox ? k.rope_neox_bf16 : k.rope_gptj_bf16, heads.array.as<uint16_t>());
    }
}

void rotate_token(const Rope& rope, const Tokens& tokens, Token token, const float* cos_sin) {
    for (const RopeHeads* heads : {&rope.query, &rope.key}) {
        if (heads->count > 0) rotate_heads(rope, *heads, tokens.offset(heads->array, token), cos_sin);
    }
}

size_t elements_per_token(const Rope& rope) { return (rope.query.count + rope.key.count) * rope.rotary_dim; }

double work_of(size_t tokens, size_t elements) { return 0.1 * static_cast<double>(tokens * elements); }

// Always inline: GCC removes calls to functions that only prefetch.
__attribute__((always_inline)) inline void prefetch(const float* x, size_t n) {
    for (size_t i = 0; i < n; i += 16) __builtin_prefetch(x + i);
}

}  // namespace

bool positions_within(const ArrayView& positions, int64_t lowest, int64_t highest) {
    const Tokens tokens(positions);
    bool all = true;
    Token token{0, 0};
    for (size_t t = 0; t < tokens.count(); ++t, tokens.advance(token)) {
        all &= lowest <= tokens.position(token) && tokens.position(token) <= highest;
    }
    return all;
}

void rotate_by_table(const Rope& rope, const ArrayView& table) {
    const Tokens tokens(rope.positions);
    const auto row = [&](Token token) { return table.as<float>() + tokens.position(token) * table.stride[0]; };
    // Rows of the table are accessed in random order: prefetch the next row if rotating a token takes long enough.
    const size_t elements = elements_per_token(rope);
    const bool prefetches = elements >= 1024;
    for_tokens(tokens.count(), elements, work_of(tokens.count(), elements), [&](size_t first, size_t last) {
        Token next = tokens.token(first);
        for (size_t t = first; t < last; ++t) {
            const Token token = next;
            tokens.advance(next);
            if (prefetches && t + 1 < last) prefetch(row(next), rope.rotary_dim);
            rotate_token(rope, tokens, token, row(token));
        }
    });
}

void rotate_by_freqs(const Rope& rope, const double* inv_freq, double scale) {
    const Tokens tokens(rope.positions);
    const size_t elements = elements_per_token(rope) + 8 * rope.rotary_dim;  // sine and cosine cost 8 rotations
    for_tokens(tokens.count(), elements, work_of(tokens.count(), elements), [&](size_t first, size_t last) {
        constexpr size_t kMaxOnStack = 256;
        float on_stack[kMaxOnStack];
        std::vector<float> on_heap(rope.rotary_dim <= kMaxOnStack ? 0 : rope.rotary_dim);
        float* cos_sin = on_heap.empty() ? on_stack : on_heap.data();
        Token token = tokens.token(first);
        for (size_t t = first; t < last; ++t, tokens.advance(token)) {
            kernels().rope_cos_sin(static_cast<double>(tokens.position(token)), inv_freq, rope.rotary_dim / 2, scale,
                                   cos_sin);
            rotate_token(rope, tokens, token, cos_sin);
        }
    });
}

void fill_rope_table(const double* inv_freq, size_t n, double scale, size_t rows, float* table) {
    for_tokens(rows, 8 * n, static_cast<double>(rows * n), [&](size_t first, size_t last) {
        for (size_t row = first; row < last; ++row) {
            kernels().rope_cos_sin(static_cast<double>(row), inv_freq, n, scale, table + row * 2 * n);
        }
    });
}

}  // namespace whet
