// Cuts a matrix product into tasks for the thread pool.
#pragma once
#include <cstddef>
#include <type_traits>

namespace whet {

constexpr size_t kRowBlock = 8;         // the rows of a tile begin at a multiple of it
constexpr double kMultiplyAddNs = 0.2;  // rough cost in a memory-bound product

// Panels [panel, panel + n_panels) and rows [row, row + n_rows) of a product.
struct Tile {
    size_t panel, n_panels, row, n_rows;
};

// Calls body(context, tile) for tiles that cover all panels and rows, over the pool if the work is worth threads.
void for_tiles(size_t n_panels, size_t rows, size_t k, void (*body)(void* context, const Tile& tile), void* context);

template <class F>
void for_tiles(size_t n_panels, size_t rows, size_t k, F&& body) {
    using Body = std::remove_reference_t<F>;
    for_tiles(n_panels, rows, k, [](void* context, const Tile& tile) { (*static_cast<Body*>(context))(tile); }, &body);
}

}  // namespace whet
