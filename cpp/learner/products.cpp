#include "learner/products.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "engine/tiles.h"
#include "kernels/dispatch.h"
#include "kernels/panel_layout.h"
#include "runtime/ceil_div.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

constexpr size_t kRangeNumbers = size_t{1} << 20;  // weights of a range: 2 to 4 MiB when unpacked
constexpr double kRepackNs = 0.4;                  // rough cost per number

// The type of products in the terms of packed weights and kernels.
template <class T>
struct Type {
    static constexpr bool kIsWide = sizeof(T) == sizeof(float);
    static constexpr RowType kRow = kIsWide ? RowType::kFloat32 : RowType::kBFloat16;
    static constexpr size_t kPerStep = 4 / sizeof(T);  // numbers of an output in a step of a panel
    static constexpr size_t kStep = 64 / sizeof(T);    // numbers of a step
    static constexpr auto kPack = kIsWide ? &Kernels::pack_panel_f32 : &Kernels::pack_panel_bf16;
    static constexpr auto kLinear = kIsWide ? &Kernels::linear_f32 : &Kernels::linear_bf16;
};

template <class F>
auto with_type(ProductType type, F&& f) {
    return type == ProductType::kFloat32 ? f.template operator()<float>() : f.template operator()<uint16_t>();
}

// Unpacks outputs of panel i of a range to rows of k numbers, in scratch memory of the calling thread.
template <class T>
const T* unpack_rows(const OutputRange& w, size_t i, size_t count) {
    const size_t k = w.part->k();
    T* rows = scratch<T>(kPanel * k, Scratch::kRow);
    (kernels().*
     w.part->format().unpack_panel)({w.part->panel(w.first_panel + i), 0, count, k, rows, !Type<T>::kIsWide});
    return rows;
}

size_t outputs_of_panel(const OutputRange& w, size_t i) { return std::min(kPanel, w.n - i * kPanel); }

// Panels of the range's outputs in the type of products: the stored ones, or a copy.
template <class T>
const T* panels_of(const OutputRange& w) {
    if (w.part->format().source == Type<T>::kRow) return static_cast<const T*>(w.part->panel(w.first_panel));
    const size_t k = w.part->k(), panel_size = ceil_div(k, Type<T>::kPerStep) * Type<T>::kStep;
    T* panels = scratch<T>(w.n_panels * panel_size, Scratch::kPanels);
    for_rows(w.n_panels, kPanel * k, [&](size_t i) {
        const size_t count = outputs_of_panel(w, i);
        T* panel = panels + i * panel_size;
        if (count < kPanel) std::memset(panel, 0, panel_size * sizeof(T));
        (kernels().*Type<T>::kPack)({.x = unpack_rows<T>(w, i, count),
                                     .source = Type<T>::kRow,
                                     .row_stride = static_cast<ptrdiff_t>(k * sizeof(T)),
                                     .column_stride = sizeof(T),
                                     .first = 0,
                                     .count = count,
                                     .k = k,
                                     .panel = panel});
    });
    return panels;
}

// Panels of the transposed weights: their outputs are the range's inputs, and their inputs are its outputs.
template <class T>
const T* transposed_panels_of(const OutputRange& w) {
    const size_t k = w.part->k(), steps = ceil_div(w.n, Type<T>::kPerStep);
    T* panels = scratch<T>(ceil_div(k, kPanel) * steps * Type<T>::kStep, Scratch::kPanels);
    parallel_for(w.n_panels, kRepackNs * static_cast<double>(w.n * k), [&](size_t i) {
        const size_t count = outputs_of_panel(w, i);
        const T* rows = unpack_rows<T>(w, i, count);
        for (size_t first = 0; first < k; first += kPanel) {
            T* panel = panels + (first / kPanel * steps + i * (kPanel / Type<T>::kPerStep)) * Type<T>::kStep;
            (kernels().*Type<T>::kPack)({.x = rows + first,
                                         .source = Type<T>::kRow,
                                         .row_stride = sizeof(T),
                                         .column_stride = static_cast<ptrdiff_t>(k * sizeof(T)),
                                         .first = 0,
                                         .count = std::min(kPanel, k - first),
                                         .k = count,
                                         .panel = panel});
        }
    });
    return panels;
}

template <class T>
void multiply_panels(const T* panels, size_t n, size_t k, const T* x, size_t ldx, size_t rows, const float* bias,
                     float* y, size_t ldy, bool add) {
    const size_t steps = ceil_div(k, Type<T>::kPerStep);
    for_tiles(ceil_div(n, kPanel), rows, k, [&](const Tile& tile) {
        const size_t first = tile.panel * kPanel;
        (kernels().*Type<T>::kLinear)({.x = x + tile.row * ldx,
                                       .ldx = ldx,
                                       .rows = tile.n_rows,
                                       .panels = panels + tile.panel * steps * Type<T>::kStep,
                                       .steps = steps,
                                       .n = std::min(tile.n_panels * kPanel, n - first),
                                       .bias = bias == nullptr ? nullptr : bias + first,
                                       .y = y + tile.row * ldy + first,
                                       .ldy = ldy,
                                       .add = add});
    });
}

}  // namespace

ProductRows convert_rows(ProductType type, const float* x, size_t ldx, size_t rows, size_t k, Scratch use) {
    if (type == ProductType::kFloat32) return {x, ldx};
    const size_t ld = k + k % 2;
    uint16_t* copy = scratch<uint16_t>(rows * ld, use);
    for_rows(rows, k, [&](size_t i) {
        kernels().bf16_from_f32(x + i * ldx, k, copy + i * ld);
        if (k < ld) copy[i * ld + k] = 0;
    });
    return {copy, ld};
}

size_t outputs_in_caches(size_t k) { return std::max<size_t>(1, kRangeNumbers / (kPanel * k)) * kPanel; }

std::vector<OutputRange> split_outputs(std::span<const PackedWeight> w, size_t most) {
    std::vector<OutputRange> ranges;
    size_t output = 0;
    for (const PackedWeight& part : w) {
        const size_t most_panels = (most == 0 ? outputs_in_caches(part.k()) : most) / kPanel;
        for (size_t panel = 0; panel < part.n_panels(); panel += most_panels) {
            const size_t n_panels = std::min(most_panels, part.n_panels() - panel), first = panel * kPanel;
            ranges.push_back({&part, panel, n_panels, output + first, std::min(n_panels * kPanel, part.n() - first)});
        }
        output += part.n();
    }
    return ranges;
}

void multiply(ProductType type, const OutputRange& w, ProductRows x, size_t rows, const float* bias, float* y,
              size_t ldy, bool add) {
    w.part->prepare();
    with_type(type, [&]<class T>() {
        multiply_panels<T>(panels_of<T>(w), w.n, w.part->k(), static_cast<const T*>(x.data), x.ld, rows, bias, y, ldy,
                           add);
    });
}

void multiply(ProductType type, std::span<const PackedWeight> w, ProductRows x, size_t rows, const float* bias,
              float* y, size_t ldy, bool add) {
    for (const OutputRange& range : split_outputs(w)) {
        multiply(type, range, x, rows, bias == nullptr ? nullptr : bias + range.first, y + range.first, ldy, add);
    }
}

void multiply_transposed(ProductType type, const OutputRange& w, const float* y, size_t ldy, size_t rows, float* x,
                         size_t ldx, bool add) {
    w.part->prepare();
    const ProductRows from = convert_rows(type, y, ldy, rows, w.n, Scratch::kCopy);
    with_type(type, [&]<class T>() {
        multiply_panels<T>(transposed_panels_of<T>(w), w.part->k(), w.n, static_cast<const T*>(from.data), from.ld,
                           rows, nullptr, x, ldx, add);
    });
}

void multiply_transposed(ProductType type, std::span<const PackedWeight> w, const float* y, size_t ldy, size_t rows,
                         float* x, size_t ldx, bool add) {
    for (const OutputRange& range : split_outputs(w)) {
        multiply_transposed(type, range, y + range.first, ldy, rows, x, ldx, add);
        add = true;
    }
}

}  // namespace whet
