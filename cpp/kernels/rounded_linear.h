// y = x bf16(w)^T for a few rows of x over float32 weights as they lie in memory, each rounded to bfloat16 where it is
// loaded: what a product with a bfloat16 copy of w gives, without a copy that could be out of date. x holds bfloat16
// values as float32, so products are exact; sums are float32.
//
// By rows (w is (n, k)), lane l sums the products of the columns l mod 16 in order, and the 16 sums are added as a
// tree; by columns (w is (k, n)) each y sums over k in order.

namespace rounded {

constexpr int kInputs = 4;  // rows of x that one pass over a weight serves; with 2 rows of w, 8 sums stay in registers

template <int n_rows, int n_inputs>
WHET_INLINE void dot_rows(const float* w, size_t ldw, size_t k, const float* x, size_t ldx, float* y, size_t ldy) {
    f32x16 sum[n_rows][n_inputs];
    for (auto& of_row : sum) {
        for (f32x16& one : of_row) one = f32x16(0.0f);
    }
    const auto add = [&](size_t at, int count) WHET_INLINE_LAMBDA {
        f32x16 weights[n_rows];
        for (int r = 0; r < n_rows; ++r) weights[r] = round_bf16(rows::read(w + r * ldw + at, count));
        for (int i = 0; i < n_inputs; ++i) {
            const f32x16 input = rows::read(x + i * ldx + at, count);
            for (int r = 0; r < n_rows; ++r) sum[r][i] = fma(weights[r], input, sum[r][i]);
        }
    };
    size_t at = 0;
    for (; at + 16 <= k; at += 16) add(at, 16);
    if (at < k) add(at, static_cast<int>(k - at));
    for (int i = 0; i < n_inputs; ++i) {
        for (int r = 0; r < n_rows; ++r) y[i * ldy + r] = add_lanes(sum[r][i]);
    }
}

template <int n_inputs>
WHET_INLINE void by_rows(const float* w, size_t ldw, size_t n, size_t k, const float* x, size_t ldx, float* y,
                         size_t ldy) {
    size_t row = 0;
    for (; row + 2 <= n; row += 2) dot_rows<2, n_inputs>(w + row * ldw, ldw, k, x, ldx, y + row, ldy);
    if (row < n) dot_rows<1, n_inputs>(w + row * ldw, ldw, k, x, ldx, y + row, ldy);
}

template <int n_vectors, int n_inputs>
WHET_INLINE void add_columns(const float* w, size_t ldw, size_t k, const float* x, size_t ldx, float* y, size_t ldy,
                             int count) {
    f32x16 sum[n_vectors][n_inputs];
    for (auto& of_vector : sum) {
        for (f32x16& one : of_vector) one = f32x16(0.0f);
    }
    for (size_t j = 0; j < k; ++j) {
        for (int v = 0; v < n_vectors; ++v) {
            const f32x16 weights = round_bf16(rows::read(w + j * ldw + 16 * v, count));
            for (int i = 0; i < n_inputs; ++i) sum[v][i] = fma(weights, f32x16(x[i * ldx + j]), sum[v][i]);
        }
    }
    for (int v = 0; v < n_vectors; ++v) {
        for (int i = 0; i < n_inputs; ++i) rows::put(y + i * ldy + 16 * v, sum[v][i], count);
    }
}

template <int n_inputs>
WHET_INLINE void by_columns(const float* w, size_t ldw, size_t n, size_t k, const float* x, size_t ldx, float* y,
                            size_t ldy) {
    size_t at = 0;
    for (; at + 64 <= n; at += 64) add_columns<4, n_inputs>(w + at, ldw, k, x, ldx, y + at, ldy, 16);
    rows::each(at, n, [&](size_t i, int count) WHET_INLINE_LAMBDA {
        add_columns<1, n_inputs>(w + i, ldw, k, x, ldx, y + i, ldy, count);
    });
}

}  // namespace rounded

void rounded_linear_rows(const float* w, size_t ldw, size_t n, size_t k, const float* x, size_t ldx, size_t m, float* y,
                         size_t ldy) {
    size_t i = 0;
    for (; i + rounded::kInputs <= m; i += rounded::kInputs) {
        rounded::by_rows<rounded::kInputs>(w, ldw, n, k, x + i * ldx, ldx, y + i * ldy, ldy);
    }
    for (; i < m; ++i) rounded::by_rows<1>(w, ldw, n, k, x + i * ldx, ldx, y + i * ldy, ldy);
}

void rounded_linear_columns(const float* w, size_t ldw, size_t n, size_t k, const float* x, size_t ldx, size_t m,
                            float* y, size_t ldy) {
    size_t i = 0;
    for (; i + rounded::kInputs <= m; i += rounded::kInputs) {
        rounded::by_columns<rounded::kInputs>(w, ldw, n, k, x + i * ldx, ldx, y + i * ldy, ldy);
    }
    for (; i < m; ++i) rounded::by_columns<1>(w, ldw, n, k, x + i * ldx, ldx, y + i * ldy, ldy);
}
