#include "engine/tiles.h"

#include <algorithm>

#include "kernels/panel_layout.h"
#include "runtime/ceil_div.h"
#include "runtime/split.h"

namespace whet {

void for_tiles(size_t n_panels, size_t rows, size_t k, void (*body)(void* context, const Tile& tile), void* context) {
    if (n_panels == 0 || rows == 0) return;
    constexpr size_t kTilePanels = 3;       // of the widest tile (kernels/linear.h)
    constexpr size_t kTaskRows = 256;       // rows of one task
    constexpr size_t kTaskWork = 150000;    // minimum multiply-adds of a task
    constexpr size_t kFewTaskWork = 75000;  // with few rows
    const Tile whole{0, n_panels, 0, rows};
    const size_t work = n_panels * kPanel * rows * k;
    if (!is_worth_threads(kMultiplyAddNs * static_cast<double>(work))) return body(context, whole);
    const size_t threads = static_cast<size_t>(num_threads());
    if (rows < kRowBlock) {  // bound by reading the weights
        if (threads == 1) return body(context, whole);
        // Long sequential reads are fastest. Single panels, if tiles are too few to divide evenly.
        const size_t unit = n_panels < 4 * kTilePanels * threads ? 1 : kTilePanels;
        const size_t least = std::max<size_t>(1, kFewTaskWork / (unit * kPanel * rows * k));
        const DecreasingTasks tasks(ceil_div(n_panels, unit), threads, least);
        auto task = [&](size_t i) {
            const auto [begin, end] = tasks[i];
            body(context, {begin * unit, std::min(end * unit, n_panels) - begin * unit, 0, rows});
        };
        return parallel_for(tasks.count(), task);
    }
    // A low-rank product has fewer tiles of panels than there are threads: split its rows across threads.
    const size_t row_threads = ceil_div(threads, ceil_div(n_panels, kTilePanels));
    const size_t task_rows = std::clamp(ceil_div(rows, row_threads * kRowBlock) * kRowBlock, kRowBlock, kTaskRows);
    const size_t row_tasks = ceil_div(rows, task_rows);
    // Whole tiles of panels: tasks large enough to be worth claiming, enough of them to balance the threads, and few
    // enough panels to fit in the L2 cache.
    size_t panels = kTilePanels;
    if (rows <= kTaskRows && row_threads == 1) {
        const size_t per_thread = std::clamp<size_t>(work / kTaskWork / threads, 1, 16);
        panels *= std::max<size_t>(1, n_panels / kTilePanels / (per_thread * threads));
    }
    const size_t panel_tasks = ceil_div(n_panels, panels);
    auto task = [&](size_t i) {
        const size_t panel = i / row_tasks * panels, row = i % row_tasks * task_rows;
        body(context, {panel, std::min(panels, n_panels - panel), row, std::min(task_rows, rows - row)});
    };
    parallel_for(panel_tasks * row_tasks, task);
}

}  // namespace whet
