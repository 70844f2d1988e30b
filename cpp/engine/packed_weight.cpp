#include "engine/packed_weight.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <new>

#include "engine/quantize.h"
#include "engine/scratch.h"
#include "kernels/dispatch.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

constexpr size_t kPanel = 16;            // outputs
constexpr size_t kWorthThreads = 16384;  // numbers

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
        default:  // numbers: a kernel packs them
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

using PackPanel = decltype(Kernels::pack_panel_f32);

PackPanel pack_panel(WeightFormat format) {
    const Kernels& k = kernels();
    switch (format) {
        case WeightFormat::kFloat32:
            return k.pack_panel_f32;
        case WeightFormat::kBFloat16:
            return k.pack_panel_bf16;
        case WeightFormat::kInt8:
            return k.pack_panel_int8;
        case WeightFormat::kQ8_0:
            return k.pack_panel_q8_0;
        case WeightFormat::kQ4_0:
            return k.pack_panel_q4_0;
        default:
            return k.pack_panel_q4_k;
    }
}

ptrdiff_t element_bytes(Source source) { return source == Source::kFloat32 ? 4 : source == Source::kPacked ? 1 : 2; }

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

PackedWeight::PackedWeight(WeightFormat format, size_t n, size_t k)
    : format_(format), n_(n), k_(k), n_panels_(ceil_div(n, kPanel)), panel_bytes_(whet::panel_bytes(format, k)) {
    const bool floats = format == WeightFormat::kFloat32 || format == WeightFormat::kBFloat16;
    steps_ = floats ? panel_bytes_ / 64 : ceil_div(k, kQuantBlock);
    memory_ = Zeroed(size_bytes());
}

void PackedWeight::pack_rows(size_t first, size_t count, const void* rows, Source source, ptrdiff_t row_stride,
                             ptrdiff_t column_stride) {
    if (count == 0) return;
    row_stride *= element_bytes(source);
    if (source == Source::kPacked && format_ == WeightFormat::kFloat32) source = Source::kFloat32, column_stride = 1;
    if (source == Source::kPacked && format_ == WeightFormat::kBFloat16) source = Source::kBFloat16, column_stride = 1;
    column_stride *= element_bytes(source);
    const PackPanel pack = pack_panel(format_);
    const size_t first_panel = first / kPanel, n_panels = (first + count - 1) / kPanel - first_panel + 1;
    auto one = [&](size_t i) {
        uint8_t* panel = memory_.data() + (first_panel + i) * panel_bytes_;
        const size_t begin = std::max(first, (first_panel + i) * kPanel);
        const size_t end = std::min(first + count, (first_panel + i + 1) * kPanel);
        const uint8_t* from = static_cast<const uint8_t*>(rows) + static_cast<ptrdiff_t>(begin - first) * row_stride;
        if (source != Source::kPacked) {
            return pack({from, source, row_stride, column_stride, begin % kPanel, end - begin, k_, panel});
        }
        for (size_t row = begin; row < end; ++row, from += row_stride) pack_row(format_, k_, from, panel, row % kPanel);
    };
    if (count * k_ < kWorthThreads) {
        for (size_t i = 0; i < n_panels; ++i) one(i);
    } else {
        parallel_for(n_panels, one);
    }
}

void PackedWeight::row(size_t i, float* out) const {
    const uint8_t* panel = memory_.data() + i / kPanel * panel_bytes_;
    const size_t j = i % kPanel;
    if (format_ == WeightFormat::kFloat32) {
        unpack_row(format_, k_, panel, j, reinterpret_cast<uint8_t*>(out));
    } else if (format_ == WeightFormat::kBFloat16) {
        for (size_t w = 0; w < steps_; ++w) {
            const auto pair = read<uint32_t>(panel + 64 * w + 4 * j);
            out[2 * w] = std::bit_cast<float>(pair << 16);
            if (2 * w + 1 < k_) out[2 * w + 1] = std::bit_cast<float>(pair & 0xffff0000);
        }
    } else {
        uint8_t* own = scratch<uint8_t>(row_bytes(format_, k_), 1);
        unpack_row(format_, k_, panel, j, own);
        dequantize_row(format_, own, k_, out);
    }
}

void PackedWeight::unpack(void* rows, size_t row_stride) const {
    for (size_t i = 0; i < n_; ++i) {
        unpack_row(format_, k_, memory_.data() + i / kPanel * panel_bytes_, i % kPanel,
                   static_cast<uint8_t*>(rows) + i * row_stride);
    }
}

}  // namespace whet
