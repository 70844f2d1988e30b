#include "engine/packed_weight.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/ceil_div.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

constexpr double kPackNs = 0.25, kUnpackNs = 0.1;  // rough cost per number

const FormatTraits& checked(WeightFormat format, size_t k) {
    const FormatTraits& f = traits(format);
    if (k % f.block_length == 0) return f;
    throw std::invalid_argument("rows of " + std::to_string(k) + " weights are not whole blocks of " + f.name);
}

ptrdiff_t element_bytes(RowType source) { return source == RowType::kFloat32 ? 4 : source == RowType::kPacked ? 1 : 2; }

}  // namespace

PackedWeight::PackedWeight(WeightFormat format, size_t n, size_t k) : PackedWeight(format, n, k, nullptr) {
    memory_ = Zeroed(size_bytes());
    place(memory_.data());
}

PackedWeight::PackedWeight(WeightFormat format, size_t n, size_t k, std::nullptr_t)
    : format_(&checked(format, k)),
      n_(n),
      k_(k),
      steps_(ceil_div(k, format_->panel.step_inputs)),
      n_panels_(ceil_div(n, kPanel)),
      panel_bytes_(format_->panel.bytes(steps_)) {}

template <class Visit>
void PackedWeight::each_panel(size_t first, size_t count, double number_ns, Visit&& visit) const {
    if (count == 0) return;
    const size_t first_panel = first / kPanel, n_panels = (first + count - 1) / kPanel - first_panel + 1;
    parallel_for(n_panels, number_ns * static_cast<double>(count * k_), [&](size_t i) {
        const size_t panel = first_panel + i;
        visit(data_ + panel * panel_bytes_, std::max(first, panel * kPanel),
              std::min(first + count, (panel + 1) * kPanel));
    });
}

void PackedWeight::pack_rows(size_t first, size_t count, const void* rows, RowType source, ptrdiff_t row_stride,
                             ptrdiff_t column_stride) {
    row_stride *= element_bytes(source);
    if (source == RowType::kPacked) source = format_->source, column_stride = 1;
    column_stride *= element_bytes(source);
    if (source != RowType::kPacked && kernels().*format_->pack_panel == nullptr) {
        return quantize_rows(first, count, rows, source, row_stride, column_stride);
    }
    each_panel(first, count, kPackNs, [&](uint8_t* panel, size_t begin, size_t end) {
        const uint8_t* from = static_cast<const uint8_t*>(rows) + static_cast<ptrdiff_t>(begin - first) * row_stride;
        if (source != RowType::kPacked) {
            return (kernels().*format_->pack_panel)(
                {from, source, row_stride, column_stride, begin % kPanel, end - begin, k_, panel});
        }
        for (size_t row = begin; row < end; ++row, from += row_stride) format_->pack_row(from, k_, panel, row % kPanel);
    });
}

// Fallback for builds without packing kernels, with the same bits. Packs and unpacks float32 panels to widen numbers.
void PackedWeight::quantize_rows(size_t first, size_t count, const void* rows, RowType source, ptrdiff_t row_stride,
                                 ptrdiff_t column_stride) {
    if (format_->quantize_row == nullptr) {
        throw std::invalid_argument(std::string("this build does not quantise weights to ") + format_->name);
    }
    std::vector<float> numbers(kPanel * k_);
    std::vector<uint8_t> packed(format_->row_bytes(k_));
    for (size_t done = 0; done < count; done += kPanel) {
        const size_t n = std::min(count - done, kPanel);
        const auto from = static_cast<const uint8_t*>(rows) + static_cast<ptrdiff_t>(done) * row_stride;
        PackedWeight panel(WeightFormat::kFloat32, n, k_);
        const auto bytes = static_cast<ptrdiff_t>(element_bytes(source));
        panel.pack_rows(0, n, from, source, row_stride / bytes, column_stride / bytes);
        panel.unpack(numbers.data(), k_ * sizeof(float));
        for (size_t i = 0; i < n; ++i) {
            format_->quantize_row(numbers.data() + i * k_, k_, packed.data());
            pack_rows(first + done + i, 1, packed.data(), RowType::kPacked, 0, 1);
        }
    }
}

void PackedWeight::rows(size_t first, size_t count, void* out, bool bf16) const {
    prepare();
    const auto unpack = kernels().*format_->unpack_panel;
    if (unpack == nullptr) return rows_one_by_one(first, count, static_cast<float*>(out));
    const size_t row_bytes = k_ * (bf16 ? sizeof(uint16_t) : sizeof(float));
    each_panel(first, count, kUnpackNs, [&](const uint8_t* panel, size_t begin, size_t end) {
        uint8_t* to = static_cast<uint8_t*>(out) + (begin - first) * row_bytes;
        unpack({panel, begin % kPanel, end - begin, k_, to, bf16});
    });
}

void PackedWeight::rows_one_by_one(size_t first, size_t count, float* out) const {
    std::vector<uint8_t> row(format_->row_bytes(k_));
    for (size_t i = first; i < first + count; ++i, out += k_) {
        format_->unpack_row(data_ + i / kPanel * panel_bytes_, i % kPanel, k_, row.data());
        format_->dequantize_row(row.data(), k_, out);
    }
}

void PackedWeight::unpack(void* rows, size_t row_stride) const {
    prepare();
    parallel_for(n_, kUnpackNs * static_cast<double>(n_ * k_), [&](size_t i) {
        format_->unpack_row(data_ + i / kPanel * panel_bytes_, i % kPanel, k_,
                            static_cast<uint8_t*>(rows) + i * row_stride);
    });
}

}  // namespace whet
