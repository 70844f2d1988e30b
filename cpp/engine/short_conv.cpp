#include "engine/short_conv.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "engine/transformer.h"
#include "kernels/dispatch.h"
#include "runtime/ceil_div.h"
#include "runtime/split.h"

namespace whet {
namespace {

constexpr int32_t kNoState = -1;
constexpr size_t kChannels = 256;  // of a task

}  // namespace

ShortConv::ShortConv(const ModelConfig& config, size_t max_rows) : config_(config) {
    if (!config_.is_recurrent()) return;
    rows_.reserve(max_rows);
    taps_.resize(config.conv_length * config.hidden_dim);
}

ShortConv::State ShortConv::find_state(const InputToken& row, int32_t length, const KvMemory& memory) const {
    if (length == 0) return {kNoState, 0};
    const int32_t page = row.pages[(length - 1) / kPageTokens];
    const int32_t* lengths = memory.state_lengths(page);
    for (size_t which = 0; which < 2; ++which) {
        if (lengths[which] == length) return {page, which};
    }
    throw std::logic_error("a sequence has no state of its convolutions");
}

void ShortConv::begin_step(const InputToken* rows, size_t n, const KvMemory& memory) {
    if (!config_.is_recurrent()) return;
    const size_t most = config_.conv_length - 1;
    rows_.clear();
    State start{kNoState, 0};  // of the current sequence
    size_t n_before = 0;
    for (size_t i = 0; i < n; ++i) {
        const InputToken& row = rows[i];
        const auto follows = [&](size_t j) {
            return rows[j].pages == rows[j - 1].pages && rows[j].position == rows[j - 1].position + 1;
        };
        if (i > 0 && follows(i)) {
            ++n_before;
        } else {
            start = find_state(row, row.position, memory);
            n_before = 0;
        }
        Row& found = rows_.emplace_back(Row{std::min(n_before, most), start, {kNoState, 0}});
        const bool ends_page = row.position % kPageTokens == kPageTokens - 1;
        if (i + 1 < n && follows(i + 1) && !ends_page) continue;
        const int32_t page = row.pages[row.position / kPageTokens];
        found.to = {page, start.page == page ? 1 - start.which : 0};
        memory.state_lengths(page)[found.to.which] = row.position + 1;
    }
}

void ShortConv::run(const Matrix& taps, size_t layer, float* in, size_t n, const KvMemory& memory, float* out) {
    const size_t d = config_.hidden_dim, length = config_.conv_length, most = length - 1;
    taps.rows(0, length, taps_.data(), false);
    const double work = 0.3 * static_cast<double>(n * d * length);
    parallel_split(ceil_div(d, kChannels), 1, work, [&](size_t begin_task, size_t end_task) {
        const size_t first = begin_task * kChannels, count = std::min(d, end_task * kChannels) - first;
        const float* inputs[kMaxConvLength];
        for (size_t i = 0; i < n; ++i) {
            const Row& row = rows_[i];
            float *b = in + i * 3 * d + first, *c = b + d, *x = c + d;
            for (size_t k = 0; k < count; ++k) x[k] *= b[k];
            // The input of the token `before` tokens ago; null: before the sequence.
            const auto input = [&](size_t before) -> const float* {
                if (before <= row.n_before) return x - before * 3 * d;
                if (row.from.page == kNoState) return nullptr;
                return memory.state(row.from.page, layer, row.from.which) + (most - (before - row.n_before)) * d +
                       first;
            };
            for (size_t j = 0; j < length; ++j) inputs[j] = input(most - j);
            kernels().short_conv_f32(inputs, length, taps_.data() + first, d, c, count, out + i * d + first);
            if (row.to.page == kNoState) continue;
            float* state = memory.state(row.to.page, layer, row.to.which) + first;
            for (size_t j = 0; j < most; ++j, state += d) {
                const float* from = inputs[j + 1];
                from == nullptr ? std::memset(state, 0, count * sizeof(float))
                                : std::memcpy(state, from, count * sizeof(float));
            }
        }
    });
}

}  // namespace whet
