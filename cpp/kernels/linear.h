// y[i][j] = bias[j] + sum_k x[i][k] w[j][k], for weights in panels of 16 outputs.
//
// A panel holds the weights of 16 outputs in steps along k: a step is one 64-byte vector, with one k of float32 or two
// of bfloat16 for each output. One row (decode) and many (a batch) stream the same memory. A tile of rows x panels
// keeps its sums in registers; an output is summed over the steps in order, in one lane, for every tile size, so that
// a row's results do not depend on the other rows. bfloat16 products are exact and summed in float32.
#pragma once
#include "kernels/panel_task.h"
#include "simd/dot.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

// Sums, weights and inputs of a tile of rows of T fit into the registers.
#if defined(__AVX512F__)
template <class T>
constexpr int kTileRows = 8;
constexpr int kTilePanels = 3;
#elif defined(__AVX2__)
template <class T>
constexpr int kTileRows = sizeof(T) == 4 ? 6 : 4;
constexpr int kTilePanels = 1;
#elif defined(__aarch64__)
template <class T>
constexpr int kTileRows = 4;
constexpr int kTilePanels = 1;
#else
template <class T>
constexpr int kTileRows = 2;
constexpr int kTilePanels = 1;
#endif

// sum + the weights of one step times one row's inputs of that step.
WHET_INLINE f32x16 add_products(f32x16 sum, const float* x, f32x16 w) { return fma(f32x16(*x), w, sum); }
WHET_INLINE f32x16 add_products(f32x16 sum, const uint16_t* x, u16x32 w) {
    int32_t pair;
    __builtin_memcpy(&pair, x, sizeof pair);
    return dot_bf16(sum, bit_cast<u16x32>(i32x16(pair)), w);
}

template <class T>
struct InputRows {  // `rows` rows of whole steps, with stride ld
    const T* x;
    size_t ld, rows;
};

struct Outputs {  // n outputs; the last panel may be partial
    float* y;
    size_t ld, n;
    const float* bias;  // may be null
    bool add;           // accumulate
};

template <int n_rows, int n_panels>
WHET_INLINE void store_tile(const f32x16 (&sum)[n_rows][n_panels], const Outputs& out, size_t row, size_t panel) {
#pragma GCC unroll 4
    for (int p = 0; p < n_panels; ++p) {
        const size_t at = 16 * (panel + p);
        const bool whole = at + 16 <= out.n;
        const int n = whole ? 16 : static_cast<int>(out.n - at);
        f32x16 bias(0.0f);
        if (out.bias != nullptr) bias = load_first(out.bias + at, n, 0.0f);
#pragma GCC unroll 8
        for (int r = 0; r < n_rows; ++r) {
            float* y = out.y + (row + r) * out.ld + at;
            f32x16 sums = out.bias == nullptr ? sum[r][p] : sum[r][p] + bias;
            if (out.add) sums += whole ? load(y) : load_first(y, n, 0.0f);
            whole ? store(y, sums) : store_first(y, sums, n);
        }
    }
}

// Cache lines of the next panels to prefetch, spread evenly over the work on the current ones: memory is then busy all
// the time, instead of only while the first rows read new panels.
struct Prefetch {
    const char* from;
    size_t lines;
};

template <class T, int n_rows, int n_panels>
__attribute__((noinline)) void linear_tile(InputRows<T> in, size_t row, const T* panels, size_t steps, size_t panel,
                                           const Outputs& out, Prefetch prefetch) {
    constexpr int per_step = 4 / sizeof(T), lanes = 64 / sizeof(T);
    f32x16 sum[n_rows][n_panels];
#pragma GCC unroll 8
    for (int r = 0; r < n_rows; ++r) {
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) sum[r][p] = f32x16(0.0f);
    }
    const T* x = in.x + row * in.ld;
    const T* w = panels + panel * steps * lanes;
    size_t fetched = 0;
    for (size_t s = 0; s < steps; ++s) {
        for (; fetched < prefetch.lines && fetched * steps < (s + 1) * prefetch.lines; ++fetched) {
            __builtin_prefetch(prefetch.from + 64 * fetched, 0, 2);
        }
        Vec<T> weights[n_panels];
#pragma GCC unroll 4
        for (int p = 0; p < n_panels; ++p) weights[p] = load(w + (p * steps + s) * lanes);
#pragma GCC unroll 8
        for (int r = 0; r < n_rows; ++r) {
#pragma GCC unroll 4
            for (int p = 0; p < n_panels; ++p) {
                sum[r][p] = add_products(sum[r][p], x + r * in.ld + s * per_step, weights[p]);
            }
            end_row(sum[r]);
        }
    }
    store_tile(sum, out, row, panel);
}

// All rows against n_panels panels, which fit in the cache; prefetches the `next` panels that follow.
template <class T, int n_panels>
WHET_INLINE void linear_panels(InputRows<T> in, const T* panels, size_t steps, size_t panel, size_t next,
                               const Outputs& out) {
    constexpr int most = kTileRows<T>;
    const size_t n_tiles = in.rows / most + (in.rows % most != 0);
    Prefetch prefetch{reinterpret_cast<const char*>(panels) + (panel + n_panels) * steps * 64, next * steps / n_tiles};
    size_t row = 0;
    for (; row + most <= in.rows; row += most) {
        linear_tile<T, most, n_panels>(in, row, panels, steps, panel, out, prefetch);
        prefetch.from += 64 * prefetch.lines;
    }
    if (most > 4 && row + 4 <= in.rows) {
        linear_tile<T, 4, n_panels>(in, row, panels, steps, panel, out, prefetch);
        row += 4, prefetch.lines = 0;
    }
    if (most > 2 && row + 2 <= in.rows) {
        linear_tile<T, 2, n_panels>(in, row, panels, steps, panel, out, prefetch);
        row += 2, prefetch.lines = 0;
    }
    if (row < in.rows) linear_tile<T, 1, n_panels>(in, row, panels, steps, panel, out, prefetch);
}

template <class T>
WHET_INLINE void linear(const LinearTask& t) {
    const InputRows<T> in{static_cast<const T*>(t.x), t.ldx, t.rows};
    const Outputs out{t.y, t.ldy, t.n, t.bias, t.add};
    const auto* panels = static_cast<const T*>(t.panels);
    const size_t n_panels = (t.n + 15) / 16;
    size_t panel = 0;
    for (; panel + kTilePanels <= n_panels; panel += kTilePanels) {
        const size_t left = n_panels - panel - kTilePanels;
        linear_panels<T, kTilePanels>(in, panels, t.steps, panel, left < kTilePanels ? left : kTilePanels, out);
    }
    for (; panel < n_panels; ++panel) linear_panels<T, 1>(in, panels, t.steps, panel, panel + 1 < n_panels, out);
}

constexpr auto linear_f32 = linear<float>;
constexpr auto linear_bf16 = linear<uint16_t>;

}  // namespace
}  // namespace whet::WHET_ISA
