#include "engine/linear.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "engine/scratch.h"
#include "engine/tiles.h"
#include "kernels/panel_layout.h"
#include "runtime/ceil_div.h"
#include "runtime/split.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

constexpr size_t kMaxPrivateInputs = 65536;  // up to this many inputs, every thread converts all of them

// Inputs of a layer, converted for its kernel: `bytes` of memory, in which write(memory, i) writes row i.
//
// Small inputs are converted redundantly by every thread, in memory in its caches: cheaper than cross-core transfers of
// cache lines. Large inputs are converted once, by all threads.
template <class Write>
class Inputs {
public:
    Inputs(size_t rows, size_t k, size_t bytes, Write write) : rows_(rows), bytes_(bytes), write_(std::move(write)) {
        if (rows * k <= kMaxPrivateInputs) return;
        shared_ = scratch<uint8_t>(bytes, Scratch::kInputs);
        for_rows(rows, k, [this](size_t i) { write_(shared_, i); });
    }

    // The converted inputs, for the calling thread.
    uint8_t* memory() const {
        if (shared_ != nullptr) return shared_;
        thread_local uint64_t converted = 0;  // number of the inputs in this thread's memory
        uint8_t* own = scratch<uint8_t>(bytes_, Scratch::kInputs);
        for (size_t i = 0; converted != number_ && i < rows_; ++i) write_(own, i);
        converted = number_;
        return own;
    }

private:
    inline static std::atomic<uint64_t> count{0};
    const uint64_t number_ = ++count;
    const size_t rows_, bytes_;
    const Write write_;
    uint8_t* shared_ = nullptr;
};

// Calls body(group, tile) for tiles that cover all panels and rows of each group, as one job.
template <class Body>
void for_group_tiles(std::span<const RowGroup> groups, size_t n_panels, size_t k, Body&& body) {
    constexpr size_t kTilePanels = 3, kTaskRows = 256, kTaskWork = 150000;
    size_t rows = 0, n_tasks = 0;
    for (const RowGroup& group : groups) rows += group.rows;
    const double work = kMultiplyAddNs * static_cast<double>(n_panels * kPanel * k * rows);
    const size_t mean_rows = std::min(ceil_div(rows, groups.size()), kTaskRows);
    const size_t panels = ceil_div(kTaskWork, kTilePanels * kPanel * k * mean_rows) * kTilePanels;
    const auto blocks = [&](const RowGroup& group) { return ceil_div(group.rows, kTaskRows); };
    const size_t panel_tasks = ceil_div(n_panels, panels);
    for (const RowGroup& group : groups) n_tasks += blocks(group) * panel_tasks;
    parallel_split(n_tasks, 1, work, [&](size_t begin, size_t end) {
        size_t first = 0;  // of the group
        for (const RowGroup& group : groups) {
            const size_t n_blocks = blocks(group), next = first + n_blocks * panel_tasks;
            for (size_t task = std::max(begin, first); task < std::min(end, next); ++task) {
                const size_t panel = (task - first) / n_blocks * panels, row = (task - first) % n_blocks * kTaskRows;
                body(group, {panel, std::min(panels, n_panels - panel), row, std::min(kTaskRows, group.rows - row)});
            }
            first = next;
        }
    });
}

// Arguments of linear(), for consecutive parts whose kernels take the same inputs.
struct Layer {
    std::span<const PackedWeight> parts;
    const void* x;
    bool x_bf16;
    size_t ldx, rows;
    const float* bias;
    float* y;
    size_t ldy;
    bool add;
    const Epilogue* epilogue;
    std::span<const RowGroup> groups{};  // of the rows; empty: all rows have these parts
    const int32_t* x_rows = nullptr;     // row of x for each row, negative: none; null: the same

    size_t k() const { return parts.front().k(); }
    size_t steps() const { return parts.front().steps(); }
    bool has_row(size_t row) const { return x_rows == nullptr || x_rows[row] >= 0; }
    const float* x_f32(size_t row) const {
        return static_cast<const float*>(x) + (x_rows == nullptr ? row : static_cast<size_t>(x_rows[row])) * ldx;
    }
    const uint16_t* x_bits(size_t row) const { return static_cast<const uint16_t*>(x) + row * ldx; }

    // inputs(row) returns a task with x, ldx and, for quantised inputs, their scales and offsets, starting at this row.
    template <class F>
    void multiply(F&& inputs) const {
        size_t n_panels = 0;
        for (const PackedWeight& part : parts) n_panels += ceil_div(part.n(), kPanel);
        if (groups.empty()) {
            for_tiles(n_panels, rows, k(), [&](const Tile& tile) { multiply_tile(tile, inputs(tile.row)); });
            return;
        }
        for_group_tiles(groups, n_panels, k(), [&](const RowGroup& group, const Tile& tile) {
            Layer of_group = *this;
            of_group.parts = group.w, of_group.y = y + group.first * ldy;
            of_group.multiply_tile(tile, inputs(group.first + tile.row));
        });
    }

private:
    void multiply_tile(const Tile& tile, LinearTask task) const {
        task.rows = tile.n_rows;
        task.ldy = ldy;
        task.add = add;
        size_t first_panel = 0, first_output = 0;  // of the current part
        for (const PackedWeight& part : parts) {
            const size_t part_panels = ceil_div(part.n(), kPanel);
            const size_t begin = std::max(tile.panel, first_panel) - first_panel;
            const size_t end = std::min(tile.panel + tile.n_panels, first_panel + part_panels);
            if (first_panel + begin < end) {
                multiply_panels(part, begin, end - first_panel, first_output, tile.row, task);
            }
            first_panel += part_panels;
            first_output += part.n();
        }
    }

    // Multiplies by panels [begin, end) of a part; first_output is the index of its first output among all parts.
    void multiply_panels(const PackedWeight& part, size_t begin, size_t end, size_t first_output, size_t row,
                         LinearTask task) const {
        const size_t first = begin * kPanel, output = first_output + first;
        task.panels = part.panel(begin);
        task.steps = part.steps();
        task.n = std::min(end * kPanel, part.n()) - first;
        task.bias = bias == nullptr ? nullptr : bias + output;
        task.y = y + row * ldy + output;
        (kernels().*part.format().linear)(task);
        if (epilogue != nullptr) epilogue->count_down(output, output + task.n, row, task.rows);
    }
};

void multiply_float32(const Layer& layer) {
    if (!layer.x_bf16 && layer.x_rows == nullptr)
        return layer.multiply([&](size_t row) { return LinearTask{.x = layer.x_f32(row), .ldx = layer.ldx}; });
    const size_t k = layer.k();
    const Inputs wide(layer.rows, k, layer.rows * k * sizeof(float), [&](uint8_t* memory, size_t i) {
        float* row = reinterpret_cast<float*>(memory) + i * k;
        if (layer.x_bf16) {
            kernels().f32_from_bf16(layer.x_bits(i), k, row);
        } else if (layer.has_row(i)) {
            std::memcpy(row, layer.x_f32(i), k * sizeof *row);
        }
    });
    layer.multiply(
        [&](size_t row) { return LinearTask{.x = reinterpret_cast<const float*>(wide.memory()) + row * k, .ldx = k}; });
}

void multiply_bfloat16(const Layer& layer) {
    const size_t k = layer.k(), even = k + k % 2;
    if (layer.x_bf16 && k == even) {
        return layer.multiply([&](size_t row) { return LinearTask{.x = layer.x_bits(row), .ldx = layer.ldx}; });
    }
    const Inputs narrow(layer.rows, k, layer.rows * even * sizeof(uint16_t), [&](uint8_t* memory, size_t i) {
        uint16_t* row = reinterpret_cast<uint16_t*>(memory) + i * even;
        if (!layer.has_row(i)) return;
        if (layer.x_bf16) {
            std::memcpy(row, layer.x_bits(i), k * sizeof *row);
        } else {
            kernels().bf16_from_f32(layer.x_f32(i), k, row);
        }
        if (k < even) row[k] = 0;
    });
    layer.multiply([&](size_t row) {
        return LinearTask{.x = reinterpret_cast<const uint16_t*>(narrow.memory()) + row * even, .ldx = even};
    });
}

void multiply_quantised(const Layer& layer) {
    const size_t rows = layer.rows, k = layer.k(), blocks = layer.steps(), width = blocks * kQuantBlock;
    const size_t integers = (rows + rows % 2) * width;  // of an even number of rows
    const auto row_at = [=](uint8_t* memory, size_t row) {
        auto* scales = reinterpret_cast<float*>(memory + integers) + row * blocks;
        auto* offsets = reinterpret_cast<int32_t*>(scales + 2 * rows * blocks);
        auto* q = reinterpret_cast<int8_t*>(memory) + kernels().quantised_row_offset(row, width);
        return QuantisedInputs{q, scales, scales + rows * blocks, offsets, offsets + rows * blocks};
    };
    const Inputs quantised(rows, k, integers + 16 * rows * blocks, [&](uint8_t* memory, size_t i) {
        if (!layer.has_row(i)) return;
        float* wide = layer.x_bf16 ? scratch<float>(k, Scratch::kRow) : nullptr;
        if (layer.x_bf16) kernels().f32_from_bf16(layer.x_bits(i), k, wide);
        kernels().quantize_row_f32(layer.x_bf16 ? wide : layer.x_f32(i), k, row_at(memory, i));
    });
    layer.multiply([&](size_t row) { return LinearTask{.quantised = row_at(quantised.memory(), row)}; });
}

auto product_of(RowType source) {
    return source == RowType::kFloat32    ? multiply_float32
           : source == RowType::kBFloat16 ? multiply_bfloat16
                                          : multiply_quantised;
}

void multiply(std::span<const PackedWeight> w, const void* x, bool x_bf16, size_t ldx, size_t rows, const float* bias,
              float* y, size_t ldy, bool add, const Epilogue* epilogue) {
    for (const PackedWeight& part : w) part.prepare();
    for (size_t end = 0, first = 0; !w.empty(); w = w.subspan(end), end = 0) {
        const RowType source = w.front().format().source;
        size_t n = 0;
        while (end < w.size() && w[end].format().source == source) n += w[end++].n();
        product_of(source)({w.first(end), x, x_bf16, ldx, rows, bias == nullptr ? nullptr : bias + first, y + first,
                            ldy, add, epilogue});
        first += n;
    }
}

}  // namespace

bool Epilogue::is_supported(std::span<const PackedWeight> w) {
    const auto has_other_source = [&](const PackedWeight& part) {
        return part.format().source != w.front().format().source;
    };
    return std::none_of(w.begin(), w.end(), has_other_source);  // one job
}

size_t Epilogue::n_counters(size_t units, size_t rows) { return ceil_div(rows, kRowBlock) * units; }

void Epilogue::begin(size_t n, size_t rows) const {
    const size_t n_runs = ceil_div(n, width);
    for (size_t block = 0; block < ceil_div(rows, kRowBlock); ++block) {
        for (size_t unit = 0; unit < units; ++unit) {
            const bool is_folded = unit + fold >= units && unit + fold < n_runs;
            missing[block * units + unit].store(static_cast<uint32_t>(width * (is_folded ? 2 : 1)),
                                                std::memory_order_relaxed);
        }
    }
}

void Epilogue::count_down(size_t begin, size_t end, size_t row, size_t n_rows) const {
    for (size_t next = begin; begin < end; begin = next) {
        const size_t unit = unit_of(begin / width);
        next = std::min(end, (begin / width + 1) * width);
        const auto n = static_cast<uint32_t>(next - begin);
        if (missing[row / kRowBlock * units + unit].fetch_sub(n, std::memory_order_acq_rel) == n) {
            run(context, unit, row, n_rows);
        }
    }
}

void linear(std::span<const PackedWeight> w, const void* x, bool x_bf16, size_t ldx, size_t rows, const float* bias,
            float* y, size_t ldy, const Epilogue* epilogue) {
    size_t n = 0;
    for (const PackedWeight& part : w) n += part.n();
    if (epilogue != nullptr) epilogue->begin(n, rows);
    multiply(w, x, x_bf16, ldx, rows, bias, y, ldy, false, epilogue);
}

void linear_groups(std::span<const RowGroup> groups, const int32_t* x_rows, const float* x, size_t ldx, float* y,
                   size_t ldy) {
    if (groups.empty()) return;
    for (const RowGroup& group : groups) {
        for (const PackedWeight& part : group.w) part.prepare();
    }
    const size_t rows = groups.back().first + groups.back().rows;
    const std::span<const PackedWeight> w = groups.front().w;
    product_of(w.front().format().source)({w, x, false, ldx, rows, nullptr, y, ldy, false, nullptr, groups, x_rows});
}

void add_linear(const PackedWeight& w, const float* x, size_t ldx, size_t rows, float* y, size_t ldy) {
    multiply({&w, 1}, x, false, ldx, rows, nullptr, y, ldy, true, nullptr);
}

}  // namespace whet
