// Primitives and kernels for JavaScript, on contiguous float32 arrays in the module's memory. web/src/ops.ts checks
// shapes and settings.
#include <cstdint>
#include <algorithm>

#include "bindings/wasm/exports.h"
#include "engine/attention.h"
#include "engine/gemm.h"
#include "engine/low_rank.h"
#include "engine/primitives.h"
#include "engine/rope.h"
#include "engine/row_functions.h"
#include "engine/training.h"
#include "runtime/packing.h"

namespace whet {
namespace {

ArrayView array_of(const void* data, DType dtype, size_t rows, size_t columns) {
    ArrayView array{.data = const_cast<void*>(data), .dtype = dtype, .ndim = 2};
    array.shape[0] = static_cast<ptrdiff_t>(rows), array.shape[1] = static_cast<ptrdiff_t>(columns);
    set_contiguous(array);
    return array;
}
ArrayView floats_of(const float* data, size_t rows, size_t columns) {
    return array_of(data, DType::kFloat32, rows, columns);
}
Rows rows_of(const float* data, size_t rows, size_t columns) {
    Rows found;
    if (data != nullptr) rows_of(floats_of(data, rows, columns), found);
    return found;
}
AttentionShape shape_of(size_t n_heads, size_t n_kv_heads, size_t head_dim, double scale) {
    AttentionShape shape;
    shape.n_heads = static_cast<int64_t>(n_heads), shape.n_kv_heads = static_cast<int64_t>(n_kv_heads);
    shape.head_dim = static_cast<int64_t>(head_dim);
    shape.q_head = shape.k_head = shape.v_head = shape.out_head = static_cast<ptrdiff_t>(head_dim);
    shape.q_token = shape.out_token = static_cast<ptrdiff_t>(n_heads * head_dim);
    shape.k_token = shape.v_token = static_cast<ptrdiff_t>(n_kv_heads * head_dim);
    shape.scale = base_2_scale(scale);
    return shape;
}
NormArguments norm_of(const float* x, float* residual, const float* weight, const float* bias, size_t rows, size_t n,
                      double eps, float* out) {
    return {.x = rows_of(x, rows, n),
            .residual = rows_of(residual, rows, n),
            .out = rows_of(out, rows, n),
            .weight = weight,
            .bias = bias,
            .eps = eps};
}

}  // namespace

WHET_EXPORT(op_group_advantages)
void op_group_advantages(const float* rewards, size_t n_groups, size_t group_size, int scale, double ddof, double eps,
                         float* out) {
    group_advantages(floats_of(rewards, n_groups, group_size), n_groups, group_size, static_cast<AdvantageScale>(scale),
                     ddof, eps, out);
}

WHET_EXPORT(op_token_kl)
void op_token_kl(bool schulman, const float* p, const float* q, const uint8_t* mask, size_t rows, size_t columns,
                 double* sums) {
    token_kl(schulman, floats_of(p, rows, columns), floats_of(q, rows, columns), mask, rows, columns, sums);
}

WHET_EXPORT(op_token_logprobs)
void op_token_logprobs(const float* logits, size_t rows, size_t n, const int64_t* tokens, double temperature,
                       float* logprobs, float* entropy) {
    token_logprobs(floats_of(logits, rows, n), tokens, temperature, logprobs, entropy);
}

WHET_EXPORT(op_gae)
void op_gae(const float* rewards, const float* values, const uint8_t* dones, const double* last_values, size_t rows,
            size_t n, double gamma, double lambda, float* advantages, float* returns) {
    gae(floats_of(rewards, rows, n), floats_of(values, rows, n), dones, last_values, gamma, lambda, advantages,
        returns);
}

// Writes indices (n,) and each bin's begin in it (n + 1,). Returns the number of bins.
WHET_EXPORT(op_pack_sequences)
size_t op_pack_sequences(const int64_t* lengths, size_t n, double max_length, int64_t* indices, int64_t* begins) {
    const Packing packing = pack_sequences(lengths, static_cast<int64_t>(n), static_cast<int64_t>(max_length));
    std::copy(packing.indices.begin(), packing.indices.end(), indices);
    std::copy(packing.bin_begin.begin(), packing.bin_begin.end(), begins);
    return packing.bin_begin.size() - 1;
}

WHET_EXPORT(op_rms_norm)
void op_rms_norm(const float* x, float* residual, const float* weight, size_t rows, size_t n, double eps, float* out) {
    rms_norm(norm_of(x, residual, weight, nullptr, rows, n, eps, out));
}
WHET_EXPORT(op_layer_norm)
void op_layer_norm(const float* x, float* residual, const float* weight, const float* bias, size_t rows, size_t n,
                   double eps, float* out) {
    layer_norm(norm_of(x, residual, weight, bias, rows, n, eps, out));
}

WHET_EXPORT(op_softmax)
void op_softmax(const float* x, size_t rows, size_t n, float scale, bool log, float* out) {
    softmax(rows_of(x, rows, n), scale, log, rows_of(out, rows, n));
}
WHET_EXPORT(op_activate) void op_activate(int activation, const float* x, size_t n, float* out) {
    activate(static_cast<Activation>(activation), rows_of(x, 1, n), rows_of(out, 1, n));
}
WHET_EXPORT(op_swiglu) void op_swiglu(const float* gate, const float* up, size_t n, float* out) {
    swiglu(rows_of(gate, 1, n), rows_of(up, 1, n), rows_of(out, 1, n));
}

WHET_EXPORT(op_gemv) void op_gemv(const float* a, size_t m, size_t n, const float* x, float* y) {
    gemv(false, m, n, 1.0f, a, static_cast<ptrdiff_t>(n), 1, x, 0.0f, y);
}

WHET_EXPORT(op_attention)
void op_attention(const float* q, const float* k, const float* v, size_t n_queries, size_t n_keys, size_t n_heads,
                  size_t n_kv_heads, size_t head_dim, bool causal, double window, double scale, float* out) {
    AttentionShape shape = shape_of(n_heads, n_kv_heads, head_dim, scale);
    shape.causal = causal;
    if (window > 0) shape.window = static_cast<int64_t>(window);
    attention(shape, {{.q = q,
                       .k = k,
                       .v = v,
                       .out = out,
                       .n_queries = static_cast<int64_t>(n_queries),
                       .n_keys = static_cast<int64_t>(n_keys)}});
}

// Attention of one query over keys [first, n_keys).
WHET_EXPORT(op_decode_attention)
void op_decode_attention(const float* q, const float* k, const float* v, size_t first, size_t n_keys, size_t n_heads,
                         size_t n_kv_heads, size_t head_dim, double scale, float* out) {
    decode_attention(shape_of(n_heads, n_kv_heads, head_dim, scale),
                     {{q, k, v, out, static_cast<int64_t>(first), static_cast<int64_t>(n_keys)}});
}

// Rotates x (tokens, heads, head_dim) in place by its tokens' positions.
WHET_EXPORT(op_apply_rope)
void op_apply_rope(const int32_t* positions, size_t tokens, float* x, size_t heads, size_t head_dim,
                   const double* inv_freq, size_t rotary_dim, bool is_neox, double scale, bool inverse) {
    Rope rope{.rotary_dim = rotary_dim, .is_neox = is_neox, .inverse = inverse};
    rope.positions = array_of(positions, DType::kInt32, tokens, 1);
    rope.positions.ndim = 1;
    rope.query = {floats_of(x, tokens, heads * head_dim), heads, static_cast<ptrdiff_t>(head_dim)};
    rotate_by_freqs(rope, inv_freq, scale);
}

WHET_EXPORT(op_lora_forward)
void op_lora_forward(const float* x, float* y, size_t rows, size_t in, size_t out, const float* a, const float* b,
                     size_t rank, float scale) {
    lora_forward(rows_of(x, rows, in), rows_of(y, rows, out), a, b, rank, scale);
}
WHET_EXPORT(op_lora_accumulate)
void op_lora_accumulate(const float* x, const float* grad_y, size_t rows, size_t in, size_t out, const float* a,
                        const float* b, size_t rank, float scale, float* grad_a, float* grad_b) {
    lora_accumulate(rows_of(x, rows, in), rows_of(grad_y, rows, out), a, b, rank, scale, grad_a, grad_b);
}
WHET_EXPORT(op_adamw)
void op_adamw(double lr, double beta1, double beta2, double eps, double weight_decay, double t, double grad_scale,
              size_t n, float* p, const float* grad, float* m, float* v) {
    adamw({lr, beta1, beta2, eps, weight_decay, t, grad_scale}, n, p, grad, m, v);
}

}  // namespace whet
