#include "engine/linear.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "engine/quantize.h"
#include "kernels/dispatch.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

constexpr size_t kPanel = 16;            // outputs
constexpr size_t kTilePanels = 3;        // what the widest tile takes at once
constexpr size_t kTaskRows = 256;        // rows of one task
constexpr double kWorthThreads = 20000;  // multiply-adds

size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

size_t panel_bytes(WeightFormat format, size_t k) {
    const size_t blocks = ceil_div(k, kQuantBlock);
    switch (format) {
        case WeightFormat::kFloat32:
            return k * 64;
        case WeightFormat::kBFloat16:
            return ceil_div(k, 2) * 64;
        case WeightFormat::kInt8:
            return blocks * 512 + 64;
        case WeightFormat::kQ8_0:
            return ceil_div(blocks * 544, 64) * 64;
        case WeightFormat::kQ4_0:
            return ceil_div(blocks * 288, 64) * 64;
        case WeightFormat::kQ4_K:
            return blocks * 256 + blocks / 8 * 256;
    }
    return 0;
}

// Memory of one thread, kept for its next call.
template <class T>
T* scratch(size_t n, int slot) {
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    struct Block {
        std::unique_ptr<void, Free> memory;
        size_t bytes = 0;
    };
    thread_local Block blocks[4];
    Block& block = blocks[slot];
    if (block.bytes < n * sizeof(T)) {
        block.bytes = ceil_div(n * sizeof(T), 4096) * 4096;
        block.memory.reset(std::aligned_alloc(4096, block.bytes));
        if (block.memory == nullptr) block.bytes = 0, throw std::bad_alloc();
    }
    return static_cast<T*>(block.memory.get());
}

// ---------------------------------------------------------------- packing

// Word w of output j goes to words[16 w + j]; what one output's words are, `word(w)` tells.
template <class Word>
void spread(uint8_t* panel, size_t j, size_t n_words, Word&& word) {
    for (size_t w = 0; w < n_words; ++w) {
        const uint32_t value = word(w);
        std::memcpy(panel + 64 * w + 4 * j, &value, 4);
    }
}

template <class T>
T read(const uint8_t* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

constexpr size_t kQ4KBytes = 144, kSuperBlock = 256;  // one block: d, dmin, 12 bytes of scales, 128 of integers

// The 16 bytes of block j (32 inputs) of a super-block: inputs 0-15 in the low halves, 16-31 in the high ones. GGUF has
// one byte hold input i of two neighbouring blocks.
void q4_k_block(const uint8_t* super_block, size_t j, uint8_t out[16]) {
    const uint8_t* q = super_block + 16 + j / 2 * 32;
    const int shift = j % 2 == 0 ? 0 : 4;
    for (size_t i = 0; i < 16; ++i) {
        out[i] = static_cast<uint8_t>((q[i] >> shift & 15) | (q[i + 16] >> shift & 15) << 4);
    }
}

void pack_row(WeightFormat format, size_t k, const uint8_t* row, uint8_t* panel, size_t j) {
    const size_t blocks = ceil_div(k, kQuantBlock);
    constexpr uint32_t offset = 0x80808080;
    switch (format) {
        case WeightFormat::kFloat32:
            spread(panel, j, k, [&](size_t w) { return read<uint32_t>(row + 4 * w); });
            break;
        case WeightFormat::kBFloat16:
            spread(panel, j, k / 2, [&](size_t w) { return read<uint32_t>(row + 4 * w); });
            if (k % 2 != 0) {
                const uint32_t last = read<uint16_t>(row + 2 * (k - 1));
                std::memcpy(panel + 64 * (k / 2) + 4 * j, &last, 4);
            }
            break;
        case WeightFormat::kInt8: {
            spread(panel, j, 8 * blocks, [&](size_t w) {
                uint32_t four = 0;
                if (4 * w < k) std::memcpy(&four, row + 4 * w, std::min<size_t>(4, k - 4 * w));
                return four ^ offset;
            });
            std::memcpy(panel + 512 * blocks + 4 * j, row + k, 4);
            break;
        }
        case WeightFormat::kQ8_0:
            spread(panel, j, 8 * blocks,
                   [&](size_t w) { return read<uint32_t>(row + w / 8 * 34 + 2 + 4 * (w % 8)) ^ offset; });
            for (size_t b = 0; b < blocks; ++b) std::memcpy(panel + 512 * blocks + 32 * b + 2 * j, row + 34 * b, 2);
            break;
        case WeightFormat::kQ4_0:
            spread(panel, j, 4 * blocks, [&](size_t w) { return read<uint32_t>(row + w / 4 * 18 + 2 + 4 * (w % 4)); });
            for (size_t b = 0; b < blocks; ++b) std::memcpy(panel + 256 * blocks + 32 * b + 2 * j, row + 18 * b, 2);
            break;
        case WeightFormat::kQ4_K:
            for (size_t b = 0; b < blocks; ++b) {
                uint8_t integers[16];
                q4_k_block(row + b / 8 * kQ4KBytes, b % 8, integers);
                spread(panel + 256 * b, j, 4, [&](size_t w) { return read<uint32_t>(integers + 4 * w); });
            }
            for (size_t s = 0; s < blocks / 8; ++s) {
                const uint8_t* super_block = row + s * kQ4KBytes;
                uint8_t* scales = panel + 256 * blocks + 256 * s;
                for (size_t i = 0; i < 12; ++i) scales[16 * i + j] = super_block[4 + i];
                std::memcpy(scales + 192 + 2 * j, super_block, 2);
                std::memcpy(scales + 224 + 2 * j, super_block + 2, 2);
            }
            break;
    }
}

// The way back of pack_row.
void unpack_row(WeightFormat format, size_t k, const uint8_t* panel, size_t j, uint8_t* row) {
    const size_t blocks = ceil_div(k, kQuantBlock);
    const auto word = [&](size_t w) { return read<uint32_t>(panel + 64 * w + 4 * j); };
    const auto put = [&](uint8_t* to, uint32_t value, size_t n = 4) { std::memcpy(to, &value, n); };
    constexpr uint32_t offset = 0x80808080;
    switch (format) {
        case WeightFormat::kFloat32:
            for (size_t w = 0; w < k; ++w) put(row + 4 * w, word(w));
            break;
        case WeightFormat::kBFloat16:
            for (size_t w = 0; w < ceil_div(k, 2); ++w) put(row + 4 * w, word(w), std::min<size_t>(4, 2 * k - 4 * w));
            break;
        case WeightFormat::kInt8:
            for (size_t w = 0; 4 * w < k; ++w) put(row + 4 * w, word(w) ^ offset, std::min<size_t>(4, k - 4 * w));
            std::memcpy(row + k, panel + 512 * blocks + 4 * j, 4);
            break;
        case WeightFormat::kQ8_0:
            for (size_t w = 0; w < 8 * blocks; ++w) put(row + w / 8 * 34 + 2 + 4 * (w % 8), word(w) ^ offset);
            for (size_t b = 0; b < blocks; ++b) std::memcpy(row + 34 * b, panel + 512 * blocks + 32 * b + 2 * j, 2);
            break;
        case WeightFormat::kQ4_0:
            for (size_t w = 0; w < 4 * blocks; ++w) put(row + w / 4 * 18 + 2 + 4 * (w % 4), word(w));
            for (size_t b = 0; b < blocks; ++b) std::memcpy(row + 18 * b, panel + 256 * blocks + 32 * b + 2 * j, 2);
            break;
        case WeightFormat::kQ4_K:
            for (size_t s = 0; s < blocks / 8; ++s) {
                uint8_t* super_block = row + s * kQ4KBytes;
                const uint8_t* scales = panel + 256 * blocks + 256 * s;
                for (size_t i = 0; i < 12; ++i) super_block[4 + i] = scales[16 * i + j];
                std::memcpy(super_block, scales + 192 + 2 * j, 2);
                std::memcpy(super_block + 2, scales + 224 + 2 * j, 2);
                for (size_t i = 0; i < 128; ++i) {
                    const size_t at = i % 32, b = 8 * s + i / 32 * 2;  // byte `at` of the two blocks from b on
                    const auto integer = [&](size_t block) {
                        const uint8_t byte = panel[256 * block + at % 16 / 4 * 64 + 4 * j + at % 4];
                        return at < 16 ? byte & 15 : byte >> 4;
                    };
                    super_block[16 + i] = static_cast<uint8_t>(integer(b) | integer(b + 1) << 4);
                }
            }
            break;
    }
}

}  // namespace

size_t row_bytes(WeightFormat format, size_t k) {
    switch (format) {
        case WeightFormat::kFloat32:
            return 4 * k;
        case WeightFormat::kBFloat16:
            return 2 * k;
        case WeightFormat::kInt8:
            return k + 4;
        case WeightFormat::kQ8_0:
            return k / kQuantBlock * 34;
        case WeightFormat::kQ4_0:
            return k / kQuantBlock * 18;
        case WeightFormat::kQ4_K:
            return k / kSuperBlock * kQ4KBytes;
    }
    return 0;
}

size_t block_length(WeightFormat format) {
    const bool in_blocks = format == WeightFormat::kQ8_0 || format == WeightFormat::kQ4_0;
    return format == WeightFormat::kQ4_K ? kSuperBlock : in_blocks ? kQuantBlock : 1;
}

void PackedWeight::Free::operator()(uint8_t* p) const { std::free(p); }

PackedWeight::PackedWeight(WeightFormat format, size_t n, size_t k, const void* rows, size_t row_stride)
    : format_(format), n_(n), k_(k), n_panels_(ceil_div(n, kPanel)), panel_bytes_(whet::panel_bytes(format, k)) {
    const bool floats = format == WeightFormat::kFloat32 || format == WeightFormat::kBFloat16;
    steps_ = floats ? panel_bytes_ / 64 : ceil_div(k, kQuantBlock);
    bytes_.reset(static_cast<uint8_t*>(std::aligned_alloc(64, std::max<size_t>(64, size_bytes()))));
    if (bytes_ == nullptr) throw std::bad_alloc();
    pack(rows, row_stride);
}

PackedWeight::PackedWeight(WeightFormat format, size_t n, size_t k)
    : format_(format), n_(n), k_(k), n_panels_(ceil_div(n, kPanel)), panel_bytes_(whet::panel_bytes(format, k)) {
    const bool floats = format == WeightFormat::kFloat32 || format == WeightFormat::kBFloat16;
    steps_ = floats ? panel_bytes_ / 64 : ceil_div(k, kQuantBlock);
    bytes_.reset(static_cast<uint8_t*>(std::aligned_alloc(64, std::max<size_t>(64, size_bytes()))));
    std::memset(bytes_.get(), 0, size_bytes());
}
void PackedWeight::pack_rows(size_t first, size_t count, const void* rows, Source source, ptrdiff_t rs, ptrdiff_t cs) {
    std::vector<float> f(k_ + 1);
    std::vector<uint8_t> b(row_bytes(format_, k_) + 16);
    for (size_t i = 0; i < count; ++i) {
        const uint8_t* from = static_cast<const uint8_t*>(rows) + i * rs;
        if (source != Source::kPacked) {
            for (size_t j = 0; j < k_; ++j) {
                const ptrdiff_t at = (ptrdiff_t)i * rs + (ptrdiff_t)j * cs;
                f[j] = source == Source::kFloat32
                           ? static_cast<const float*>(rows)[at]
                           : std::bit_cast<float>((uint32_t)static_cast<const uint16_t*>(rows)[at] << 16);
            }
            from = b.data();
            if (format_ == WeightFormat::kFloat32)
                from = (uint8_t*)f.data();
            else if (format_ == WeightFormat::kBFloat16)
                kernels().bf16_from_f32(f.data(), k_, (uint16_t*)b.data());
            else
                quantize_row(format_, f.data(), k_, b.data());
        }
        pack_row(format_, k_, from, bytes_.get() + (first + i) / 16 * panel_bytes_, (first + i) % 16);
    }
}
void PackedWeight::row(size_t i, float* out) const {
    std::vector<uint8_t> b(row_bytes(format_, k_) + 16);
    unpack_row(format_, k_, bytes_.get() + i / 16 * panel_bytes_, i % 16, b.data());
    if (format_ == WeightFormat::kFloat32)
        std::memcpy(out, b.data(), 4 * k_);
    else if (format_ == WeightFormat::kBFloat16)
        kernels().f32_from_bf16((uint16_t*)b.data(), k_, out);
    else
        dequantize_row(format_, b.data(), k_, out);
}

void PackedWeight::pack(const void* rows, size_t row_stride) {
    auto one = [&](size_t i) {
        uint8_t* panel = bytes_.get() + i * panel_bytes_;
        const size_t first = i * kPanel, count = std::min(kPanel, n_ - first);
        if (count < kPanel) std::memset(panel, 0, panel_bytes_);
        for (size_t j = 0; j < count; ++j) {
            pack_row(format_, k_, static_cast<const uint8_t*>(rows) + (first + j) * row_stride, panel, j);
        }
    };
    parallel_for(n_panels_, one);
}

void PackedWeight::unpack(void* rows, size_t row_stride) const {
    for (size_t i = 0; i < n_; ++i) {
        unpack_row(format_, k_, bytes_.get() + i / kPanel * panel_bytes_, i % kPanel,
                   static_cast<uint8_t*>(rows) + i * row_stride);
    }
}

// ---------------------------------------------------------------- the product

namespace {

// body(first panel, panel count, first row, row count) for all panels and rows, over the pool where the work is worth
// it.
template <class F>
void for_tiles(size_t n_panels, size_t rows, size_t k, F&& body) {
    if (n_panels == 0 || rows == 0) return;
    if (static_cast<double>(n_panels) * kPanel * rows * k < kWorthThreads) return body(0, n_panels, 0, rows);
    const size_t row_tasks = ceil_div(rows, kTaskRows);
    const size_t wanted = ceil_div(4 * static_cast<size_t>(num_threads()), row_tasks);
    // Whole tiles of panels, about four tasks a thread; with many rows, few enough panels to stay in the L2 cache.
    size_t panels = ceil_div(ceil_div(n_panels, wanted), kTilePanels) * kTilePanels;
    if (row_tasks > 1) panels = kTilePanels;
    const size_t panel_tasks = ceil_div(n_panels, panels);
    auto task = [&](size_t i) {
        const size_t panel = i / row_tasks * panels, row = i % row_tasks * kTaskRows;
        body(panel, std::min(panels, n_panels - panel), row, std::min(kTaskRows, rows - row));
    };
    parallel_for(panel_tasks * row_tasks, task);
}

// body(i) for every row, over the pool where there is much to do.
template <class F>
void for_rows(size_t rows, size_t k, F&& body) {
    if (rows < 2 || rows * k < 32768) {
        for (size_t i = 0; i < rows; ++i) body(i);
        return;
    }
    parallel_for(rows, body);
}

const float* as_f32(const void* x, bool x_bf16, size_t& ldx, size_t rows, size_t k) {
    if (!x_bf16) return static_cast<const float*>(x);
    float* wide = scratch<float>(rows * k, 0);
    for_rows(rows, k, [&, from = ldx](size_t i) {
        kernels().f32_from_bf16(static_cast<const uint16_t*>(x) + i * from, k, wide + i * k);
    });
    ldx = k;
    return wide;
}

// Rows of an even number of bfloat16.
const uint16_t* as_bf16(const void* x, bool x_bf16, size_t& ldx, size_t rows, size_t k) {
    if (x_bf16 && k % 2 == 0) return static_cast<const uint16_t*>(x);
    const size_t even = k + k % 2;
    uint16_t* narrow = scratch<uint16_t>(rows * even, 0);
    for_rows(rows, k, [&, from = ldx](size_t i) {
        uint16_t* row = narrow + i * even;
        if (x_bf16) {
            std::memcpy(row, static_cast<const uint16_t*>(x) + i * from, k * sizeof *row);
        } else {
            kernels().bf16_from_f32(static_cast<const float*>(x) + i * from, k, row);
        }
        if (k < even) row[k] = 0;
    });
    ldx = even;
    return narrow;
}

using QuantisedKernel = decltype(Kernels::linear_q8_0);

QuantisedKernel quantised_kernel(WeightFormat format) {
    const Kernels& k = kernels();
    switch (format) {
        case WeightFormat::kInt8:
            return k.linear_int8;
        case WeightFormat::kQ8_0:
            return k.linear_q8_0;
        case WeightFormat::kQ4_0:
            return k.linear_q4_0;
        default:
            return k.linear_q4_k;
    }
}

void linear_quantised(const PackedWeight& w, const float* x, size_t ldx, size_t rows, const float* bias, float* y,
                      size_t ldy) {
    const size_t blocks = w.steps(), width = blocks * kQuantBlock;
    int8_t* q = scratch<int8_t>(rows * width, 1);
    float* scales = scratch<float>(rows * blocks, 2);
    int32_t* sums = scratch<int32_t>(rows * blocks, 3);
    for_rows(rows, w.k(), [&](size_t i) {
        kernels().quantize_row_f32(x + i * ldx, w.k(), q + i * width, scales + i * blocks, sums + i * blocks);
    });
    const QuantisedKernel kernel = quantised_kernel(w.format());
    for_tiles(ceil_div(w.n(), kPanel), rows, w.k(), [&](size_t panel, size_t count, size_t row, size_t n_rows) {
        const size_t first = panel * kPanel, n = std::min(count * kPanel, w.n() - first);
        kernel(q + row * width, scales + row * blocks, sums + row * blocks, n_rows, blocks, w.panel(panel), n,
               bias == nullptr ? nullptr : bias + first, y + row * ldy + first, ldy);
    });
}

}  // namespace

void linear(const PackedWeight& w, const void* x, bool x_bf16, size_t ldx, size_t rows, const float* bias, float* y,
            size_t ldy) {
    const bool is_f32 = w.format() == WeightFormat::kFloat32;
    if (!is_f32 && w.format() != WeightFormat::kBFloat16) {
        const float* wide = as_f32(x, x_bf16, ldx, rows, w.k());
        return linear_quantised(w, wide, ldx, rows, bias, y, ldy);
    }
    const float* wide = is_f32 ? as_f32(x, x_bf16, ldx, rows, w.k()) : nullptr;
    const uint16_t* narrow = is_f32 ? nullptr : as_bf16(x, x_bf16, ldx, rows, w.k());
    for_tiles(ceil_div(w.n(), kPanel), rows, w.k(), [&](size_t panel, size_t count, size_t row, size_t n_rows) {
        const size_t first = panel * kPanel, n = std::min(count * kPanel, w.n() - first);
        const float* b = bias == nullptr ? nullptr : bias + first;
        float* out = y + row * ldy + first;
        if (is_f32) {
            kernels().linear_f32(wide + row * ldx, ldx, n_rows, w.panel(panel), w.steps(), n, b, out, ldy);
        } else {
            kernels().linear_bf16(narrow + row * ldx, ldx, n_rows, w.panel(panel), w.steps(), n, b, out, ldy);
        }
    });
}

// ---------------------------------------------------------------- gemm

namespace {

// b (k, n) with any strides in panels of 16 columns; T is float, or uint16_t whose steps hold two k each.
template <class T>
void pack_columns(const T* b, ptrdiff_t b_row, ptrdiff_t b_column, size_t k, size_t n, T* panels) {
    constexpr size_t per_step = 4 / sizeof(T);
    const size_t steps = ceil_div(k, per_step), panel_size = steps * kPanel * per_step;
    auto one = [&](size_t p) {
        T* panel = panels + p * panel_size;
        const size_t first = p * kPanel, count = std::min(kPanel, n - first);
        if (count < kPanel || k % per_step != 0) std::memset(panel, 0, panel_size * sizeof(T));
        const T* from = b + static_cast<ptrdiff_t>(first) * b_column;
        const auto at = [&](size_t i, size_t j) {
            return from[static_cast<ptrdiff_t>(i) * b_row + static_cast<ptrdiff_t>(j) * b_column];
        };
        const size_t whole = k / per_step;
        if (b_row == 1) {  // a column's words go to the panel as they are; a few lines of it at a time
            for (size_t begin = 0; begin < whole; begin += 64) {
                const size_t end = std::min(whole, begin + 64);
                for (size_t j = 0; j < count; ++j) {
                    const T* column = from + static_cast<ptrdiff_t>(j) * b_column;
                    for (size_t w = begin; w < end; ++w) {
                        std::memcpy(panel + (w * kPanel + j) * per_step, column + w * per_step, 4);
                    }
                }
            }
        } else {
            for (size_t w = 0; w < whole; ++w) {
                uint32_t words[kPanel];
                for (size_t j = 0; j < count; ++j) {
                    if constexpr (per_step == 1) {
                        words[j] = std::bit_cast<uint32_t>(at(w, j));
                    } else {
                        words[j] = at(2 * w, j) | static_cast<uint32_t>(at(2 * w + 1, j)) << 16;
                    }
                }
                std::memcpy(panel + w * kPanel * per_step, words, 4 * count);
            }
        }
        for (size_t j = 0; whole < steps && j < count; ++j) panel[(whole * kPanel + j) * per_step] = at(k - 1, j);
    };
    if (k * n < 32768) {
        for (size_t p = 0; p < ceil_div(n, kPanel); ++p) one(p);
    } else {
        parallel_for(ceil_div(n, kPanel), one);
    }
}

template <class T>
void gemm_of(size_t m, size_t n, size_t k, float alpha, const T* a, ptrdiff_t a_row, ptrdiff_t a_column, const T* b,
             ptrdiff_t b_row, ptrdiff_t b_column, float beta, T* c, ptrdiff_t ldc) {
    constexpr bool is_f32 = sizeof(T) == 4;
    constexpr size_t per_step = 4 / sizeof(T), row_chunk = 1024;
    const size_t steps = ceil_div(k, per_step), width = steps * per_step;
    T* panels = scratch<T>(ceil_div(n, kPanel) * kPanel * width, 0);
    pack_columns(b, b_row, b_column, k, n, panels);
    const bool in_place = is_f32 && alpha == 1.0f && beta == 0.0f;
    float* sums = in_place ? nullptr : scratch<float>(std::min(m, row_chunk) * n, 1);
    for (size_t begin = 0; begin < m; begin += row_chunk) {
        const size_t rows = std::min(row_chunk, m - begin);
        const T* x = a + static_cast<ptrdiff_t>(begin) * a_row;
        auto ldx = static_cast<size_t>(a_row);
        if (a_column != 1 || width != k || a_row < 0) {
            T* copy = scratch<T>(rows * width, 2);
            for_rows(rows, k, [&, x](size_t i) {
                const T* from = x + static_cast<ptrdiff_t>(i) * a_row;
                for (size_t j = 0; j < k; ++j) copy[i * width + j] = from[static_cast<ptrdiff_t>(j) * a_column];
                for (size_t j = k; j < width; ++j) copy[i * width + j] = T(0);
            });
            x = copy, ldx = width;
        }
        T* out = c + static_cast<ptrdiff_t>(begin) * ldc;
        float* y = sums;
        size_t ldy = n;
        if constexpr (is_f32) {
            if (in_place) y = out, ldy = static_cast<size_t>(ldc);
        }
        for_tiles(ceil_div(n, kPanel), rows, k, [&](size_t panel, size_t count, size_t row, size_t n_rows) {
            const size_t first = panel * kPanel, columns = std::min(count * kPanel, n - first);
            const T* from = panels + panel * kPanel * width;
            const auto kernel = [] {
                if constexpr (is_f32) {
                    return kernels().linear_f32;
                } else {
                    return kernels().linear_bf16;
                }
            }();
            kernel(x + row * ldx, ldx, n_rows, from, steps, columns, nullptr, y + row * ldy + first, ldy);
        });
        if (in_place) continue;
        for_rows(rows, n, [&](size_t i) {
            if constexpr (is_f32) {
                kernels().blend_f32(sums + i * n, n, alpha, beta, out + static_cast<ptrdiff_t>(i) * ldc);
            } else {
                kernels().blend_bf16(sums + i * n, n, alpha, beta, out + static_cast<ptrdiff_t>(i) * ldc);
            }
        });
    }
}

}  // namespace

void gemm(bool bf16, size_t m, size_t n, size_t k, float alpha, const void* a, ptrdiff_t a_row, ptrdiff_t a_column,
          const void* b, ptrdiff_t b_row, ptrdiff_t b_column, float beta, void* c, ptrdiff_t ldc) {
    if (bf16) {
        gemm_of(m, n, k, alpha, static_cast<const uint16_t*>(a), a_row, a_column, static_cast<const uint16_t*>(b),
                b_row, b_column, beta, static_cast<uint16_t*>(c), ldc);
    } else {
        gemm_of(m, n, k, alpha, static_cast<const float*>(a), a_row, a_column, static_cast<const float*>(b), b_row,
                b_column, beta, static_cast<float*>(c), ldc);
    }
}

// ---------------------------------------------------------------- gemv

namespace {

template <class T, class Rows, class Columns>
void gemv_of(Rows by_rows, Columns by_columns, size_t m, size_t n, const T* a, ptrdiff_t a_row, ptrdiff_t a_column,
             const float* x, float* y) {
    const bool rows_lie = a_column == 1;
    const auto lda = static_cast<size_t>(rows_lie ? a_row : a_column);
    // By columns a task takes whole runs of memory of every row.
    const size_t unit = rows_lie ? 4 : 128, units = ceil_div(m, unit);
    const size_t per_task = std::max<size_t>(1, units / (4 * static_cast<size_t>(num_threads())));
    auto task = [&](size_t i) {
        const size_t first = i * per_task * unit, count = std::min(per_task * unit, m - first);
        if (rows_lie) {
            by_rows(a + first * lda, lda, count, n, x, y + first);
        } else {
            by_columns(a + first, lda, n, count, x, y + first);
        }
    };
    const size_t tasks = ceil_div(units, per_task);
    if (m * n < kWorthThreads) {
        for (size_t i = 0; i < tasks; ++i) task(i);
    } else {
        parallel_for(tasks, task);
    }
}

}  // namespace

void gemv(bool bf16, size_t m, size_t n, float alpha, const void* a, ptrdiff_t a_row, ptrdiff_t a_column,
          const float* x, float beta, float* y) {
    const bool in_place = alpha == 1.0f && beta == 0.0f;
    float* sums = in_place ? y : scratch<float>(m, 1);
    const Kernels& k = kernels();
    if (bf16) {
        gemv_of(k.gemv_rows_bf16, k.gemv_columns_bf16, m, n, static_cast<const uint16_t*>(a), a_row, a_column, x, sums);
    } else {
        gemv_of(k.gemv_rows_f32, k.gemv_columns_f32, m, n, static_cast<const float*>(a), a_row, a_column, x, sums);
    }
    if (!in_place) k.blend_f32(sums, m, alpha, beta, y);
}

}  // namespace whet
