// The gradient of the gated delta rule (kernels/delta_rule.h) over a block of n tokens, by products of matrices (Yang,
// Wang, Zhang, Shen, Kim 2024). S is the state before the block, G_i and E_i the decay from there to token i and from
// token i to the block's end, and D_ij that from token j to token i, 0 for j > i:
//
//   L = tril_-1(K K^T D),  A = Q K^T D,  W = V - G K S - L U,  U = beta W            W and U row by row
//   S' = G_n S + (E K)^T U,  O = G Q S + A U
//
// From dO and dS', with dW and dV row by row from the last:
//
//   dW = E K dS' + A^T dO - L^T dV,  dV = beta dW,  dbeta = rowsum(dW W),  X = dO U^T D,  Y = -tril_-1(dV U^T D)
//   dQ = G dO S^T + X K,  dK = dK_read + dK_write
//   dK_read = Y K - G dV S^T,  dK_write = E U dS'^T + X^T Q + Y^T K
//   dS = G_n dS' + Q^T (G dO) - K^T (G dV)
//
// Without correction L, Y, W's and dW's terms with L, and all terms with dV except dV itself are 0, and dV += skip dO.
//
// q and k_read are multiplied by G, and k_write is divided by it: log(G_i), the sum of log(decay) up to token i, has
// the gradient rowsum(Q dQ + K dK_read - K dK_write), and log(G_n) also <S', dS'>.
#pragma once
#include "kernels/delta_task.h"
#include "kernels/rows.h"
#include "simd/lanes.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

namespace delta {

// Number (i, k) is data[i * row + k * column].
struct Left {
    const float* data;
    size_t row, column;
};

// Number (i, 16 j + lane) is data[i * row + j * vector + lane].
template <class T>
struct Rows {
    T* data;
    size_t row, vector = 16;
};

template <int kRows, int kVectors>
WHET_INLINE void multiply_tile(Left a, Rows<const float> b, size_t k, float scale, bool add, Rows<float> c) {
    f32x16 sums[kRows][kVectors];
    for (auto& row : sums) {
        for (f32x16& sum : row) sum = f32x16(0.0f);
    }
    for (size_t at = 0; at < k; ++at) {
        f32x16 right[kVectors];
        for (int j = 0; j < kVectors; ++j) right[j] = load(b.data + at * b.row + static_cast<size_t>(j) * b.vector);
        for (int i = 0; i < kRows; ++i) {
            const f32x16 left(a.data[static_cast<size_t>(i) * a.row + at * a.column]);
            for (int j = 0; j < kVectors; ++j) sums[i][j] = fma(left, right[j], sums[i][j]);
        }
    }
    for (int i = 0; i < kRows; ++i) {
        for (int j = 0; j < kVectors; ++j) {
            float* to = c.data + static_cast<size_t>(i) * c.row + static_cast<size_t>(j) * c.vector;
            store(to, add ? fma(f32x16(scale), sums[i][j], load(to)) : f32x16(scale) * sums[i][j]);
        }
    }
}

// c (m, vectors) = scale a (m, k) b (k, vectors), or += if `add`.
__attribute__((noinline)) void multiply(Left a, Rows<const float> b, size_t m, size_t vectors, size_t k, float scale,
                                        bool add, Rows<float> c) {
    constexpr int kRows = 4, kVectors = 4 / kParts;  // as registers allow
    const auto column = [&]<int kN>(size_t j) WHET_INLINE_LAMBDA {
        const Rows<const float> right{b.data + j * b.vector, b.row, b.vector};
        size_t i = 0;
        const auto tile = [&]<int kM>() WHET_INLINE_LAMBDA {
            multiply_tile<kM, kN>({a.data + i * a.row, a.row, a.column}, right, k, scale, add,
                                  {c.data + i * c.row + j * c.vector, c.row, c.vector});
        };
        for (; i + kRows <= m; i += kRows) tile.template operator()<kRows>();
        for (; i < m; ++i) tile.template operator()<1>();
    };
    size_t j = 0;
    if constexpr (kVectors > 1) {
        for (; j + kVectors <= vectors; j += kVectors) column.template operator()<kVectors>(j);
    }
    for (; j < vectors; ++j) column.template operator()<1>(j);
}

// to (16 vectors, m padded with zeros to 16) = the transpose of x (m, vectors).
void transpose_rows(Rows<const float> x, size_t m, size_t vectors, Rows<float> to) {
    for (size_t j = 0; j < vectors; ++j) {
        for (size_t i = 0; i < m; i += 16) {
            f32x16 tile[16];
            for (size_t row = 0; row < 16; ++row) {
                tile[row] = i + row < m ? load(x.data + (i + row) * x.row + j * x.vector) : f32x16(0.0f);
            }
            transpose(tile);
            for (size_t lane = 0; lane < 16; ++lane) store(to.data + (16 * j + lane) * to.row + i, tile[lane]);
        }
    }
}

constexpr size_t pad(size_t n) { return (n + 15) / 16 * 16; }

template <class F>
WHET_INLINE void each_vector(size_t width, F&& f) {
    for (size_t at = 0; at < width; at += 16) f(at);
}

// out = factor x.
WHET_SHARED void scale_row(const float* x, float factor, size_t width, float* out) {
    each_vector(width, [&](size_t at) WHET_INLINE_LAMBDA { store(out + at, f32x16(factor) * load(x + at)); });
}

WHET_SHARED float dot(const float* x, const float* y, size_t width) {
    f32x16 sum(0.0f);
    each_vector(width, [&](size_t at) WHET_INLINE_LAMBDA { sum = fma(load(x + at), load(y + at), sum); });
    return sum_lanes(sum);
}

// Copies rows of `width` numbers, padded with zeros.
WHET_SHARED void copy_rows(const float* x, size_t stride, size_t n, size_t width, float* out) {
    for (size_t i = 0; i < n; ++i, x += stride, out += pad(width)) {
        rows::each(0, width,
                   [&](size_t at, int count) WHET_INLINE_LAMBDA { store(out + at, rows::read(x + at, count)); });
    }
}

}  // namespace delta

size_t delta_backward_scratch(size_t n, size_t key_dim, size_t value_dim) {
    const size_t keys = delta::pad(key_dim), values = delta::pad(value_dim), tokens = delta::pad(n);
    return 2 * tokens + n * (5 * keys + 6 * values + 5 * tokens) + tokens * (keys + values) + 2 * values * keys;
}

void delta_rule_backward_f32(const DeltaBackwardTask& task) {
    using namespace delta;
    const DeltaTask& f = task.forward;
    const size_t n = f.n, dk = f.key_dim, dv = f.value_dim, keys = pad(dk), values = pad(dv), tokens = pad(n);
    float* next = task.scratch;
    const auto take = [&](size_t size) {
        float* taken = next;
        next += size;
        return taken;
    };
    const auto decay = [&](size_t i) { return f.decay[i * f.gate_stride]; };
    const auto beta = [&](size_t i) { return f.beta[i * f.gate_stride]; };
    float *q = take(n * keys), *k = take(n * keys), *w = take(n * values), *grad = take(n * values);
    copy_rows(f.q, f.stride, n, dk, q), copy_rows(f.k, f.stride, n, dk, k), copy_rows(f.v, f.stride, n, dv, w);
    copy_rows(task.grad_out, task.grad_out_stride, n, dv, grad);
    float *from_start = take(tokens), *to_end = take(tokens), *decays = take(n * tokens);  // G, E and D
    for (size_t i = 0; i < n; ++i) {
        from_start[i] = decay(i) * (i == 0 ? 1.0f : from_start[i - 1]);
        to_end[n - 1 - i] = i == 0 ? 1.0f : to_end[n - i] * decay(n - i);
        float* row = decays + i * tokens;
        each_vector(tokens, [&](size_t at) WHET_INLINE_LAMBDA {
            store(row + at, i == 0 ? f32x16(0.0f) : f32x16(decay(i)) * load(row + at - tokens));
        });
        row[i] = 1.0f;
    }
    const Rows<const float> state{f.from, kDeltaSlice, dk * kDeltaSlice};
    const Rows<float> grad_state{task.grad_state, kDeltaSlice, dk * kDeltaSlice};
    const Rows<const float> grad_after{task.grad_state, kDeltaSlice, dk * kDeltaSlice};

    // c (n, n) = scale a b D, without the diagonal if it is `strict`.
    const auto multiply_decayed = [&](const float* a, size_t width, const float* b, size_t depth, float scale,
                                      bool is_strict, float* c) {
        multiply({a, width, 1}, {b, tokens}, n, tokens / 16, depth, scale, false, {c, tokens});
        each_vector(n * tokens, [&](size_t at) WHET_INLINE_LAMBDA { store(c + at, load(c + at) * load(decays + at)); });
        for (size_t i = 0; is_strict && i < n; ++i) c[i * tokens + i] = 0.0f;
    };
    float *k_columns = take(keys * tokens), *l = take(n * tokens), *a = take(n * tokens);
    transpose_rows({k, keys}, n, keys / 16, {k_columns, tokens});
    if (f.corrects) multiply_decayed(k, keys, k_columns, dk, 1.0f, true, l);
    multiply_decayed(q, keys, k_columns, dk, 1.0f, false, a);

    float *u = take(n * values), *read = take(n * values);  // read: K S
    if (f.corrects) multiply({k, keys, 1}, state, n, values / 16, dk, 1.0f, false, {read, values});
    for (size_t i = 0; i < n; ++i) {
        float* row = w + i * values;
        if (f.corrects) {
            each_vector(values, [&](size_t at) WHET_INLINE_LAMBDA {
                store(row + at, fma(f32x16(-from_start[i]), load(read + i * values + at), load(row + at)));
            });
            multiply({l + i * tokens, 0, 1}, {u, values}, 1, values / 16, i, -1.0f, true, {row, values});
        }
        scale_row(row, beta(i), values, u + i * values);
    }

    float *grad_w = take(n * values), *grad_v = take(n * values);
    multiply({k, keys, 1}, grad_after, n, values / 16, dk, 1.0f, false, {grad_w, values});
    for (size_t i = 0; i < n; ++i) scale_row(grad_w + i * values, to_end[i], values, grad_w + i * values);
    multiply({a, 1, tokens}, {grad, values}, n, values / 16, n, 1.0f, true, {grad_w, values});
    for (size_t i = n; i-- > 0;) {
        float *row = grad_w + i * values, *of_v = grad_v + i * values;
        if (f.corrects) {
            multiply({l + (i + 1) * tokens + i, 0, tokens}, {of_v + values, values}, 1, values / 16, n - 1 - i, -1.0f,
                     true, {row, values});
        }
        scale_row(row, beta(i), values, of_v);
        task.grad_beta[i * f.gate_stride] = dot(row, w + i * values, values);
        rows::each(0, dv, [&](size_t at, int count) WHET_INLINE_LAMBDA {
            const f32x16 skipped = f.corrects ? f32x16(0.0f) : f32x16(f.skip) * load(grad + i * values + at);
            rows::put(task.grad_v + i * task.grad_v_stride + at, load(of_v + at) + skipped, count);
        });
    }

    float *u_columns = take(values * tokens), *x = take(n * tokens), *y = take(n * tokens);
    transpose_rows({u, values}, n, values / 16, {u_columns, tokens});
    multiply_decayed(grad, values, u_columns, dv, 1.0f, false, x);
    if (f.corrects) multiply_decayed(grad_v, values, u_columns, dv, -1.0f, true, y);

    for (size_t i = 0; i < n; ++i) {  // from here on G dO, G dV and E U
        scale_row(grad + i * values, from_start[i], values, grad + i * values);
        scale_row(grad_v + i * values, from_start[i], values, grad_v + i * values);
        scale_row(u + i * values, to_end[i], values, u + i * values);
    }
    float *state_columns = take(values * keys), *grad_columns = take(values * keys);
    transpose_rows(state, dk, values / 16, {state_columns, keys});
    transpose_rows(grad_after, dk, values / 16, {grad_columns, keys});
    float *grad_q = take(n * keys), *grad_read = take(n * keys), *grad_write = take(n * keys);
    const auto to_keys = [&](Left left, const float* right, size_t depth, float scale, bool add, float* to) {
        multiply(left, {right, keys}, n, keys / 16, depth, scale, add, {to, keys});
    };
    to_keys({grad, values, 1}, state_columns, dv, 1.0f, false, grad_q);
    to_keys({x, tokens, 1}, k, n, 1.0f, true, grad_q);
    if (f.corrects) {
        to_keys({grad_v, values, 1}, state_columns, dv, -1.0f, false, grad_read);
        to_keys({y, tokens, 1}, k, n, 1.0f, true, grad_read);
    } else {
        each_vector(n * keys, [&](size_t at) WHET_INLINE_LAMBDA { store(grad_read + at, f32x16(0.0f)); });
    }
    to_keys({u, values, 1}, grad_columns, dv, 1.0f, false, grad_write);
    double by_decay = dot(k, grad_write, n * keys);  // <S', dS'>
    by_decay += double{from_start[n - 1]} * dot(f.from, task.grad_state, dk * values);
    to_keys({x, 1, tokens}, q, n, 1.0f, true, grad_write);
    if (f.corrects) to_keys({y, 1, tokens}, k, n, 1.0f, true, grad_write);
    for (size_t i = n; i-- > 0;) {
        const size_t row = i * keys;
        by_decay += double{dot(q + row, grad_q + row, keys)} + double{dot(k + row, grad_read + row, keys)} -
                    double{dot(k + row, grad_write + row, keys)};
        task.grad_decay[i * f.gate_stride] = static_cast<float>(by_decay);
        rows::each(0, dk, [&](size_t at, int count) WHET_INLINE_LAMBDA {
            float *to_q = task.grad_q + i * dk + at, *to_k = task.grad_k + i * dk + at;
            rows::put(to_q, rows::read(to_q, count) + load(grad_q + row + at), count);
            rows::put(to_k, rows::read(to_k, count) + load(grad_read + row + at) + load(grad_write + row + at), count);
        });
    }

    scale_row(task.grad_state, from_start[n - 1], dk * values, task.grad_state);
    multiply({q, 1, keys}, {grad, values}, dk, values / 16, n, 1.0f, true, grad_state);
    if (f.corrects) multiply({k, 1, keys}, {grad_v, values}, dk, values / 16, n, -1.0f, true, grad_state);
}

}  // namespace
}  // namespace whet::WHET_ISA
