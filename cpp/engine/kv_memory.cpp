#include "engine/kv_memory.h"

#include <algorithm>
#include <cstring>

#include "runtime/ceil_div.h"
#include "runtime/split.h"
#include "runtime/system.h"

namespace whet {
namespace {

// Keys and values of one KV head in a page, in the layouts of kernels/cached_attention.h and cached_attention_int8.h.
size_t head_bytes(const ModelConfig& config, KvType type) {
    const size_t d = config.head_dim, columns = (d + 15) / 16 * 16;
    switch (type) {
        case KvType::kFloat32:
            return kPageTokens * (4 * d + 4 * columns);
        case KvType::kBFloat16:
            return kPageTokens * (ceil_div(d, 2) * 4 + 2 * columns);
        case KvType::kInt8:
            return kPageTokens * (ceil_div(d, 4) * 4 + ceil_div(d, 32) * 4 + columns + 2 * sizeof(uint16_t));
    }
    __builtin_unreachable();
}

constexpr size_t kLine = 64;

size_t round_to_lines(size_t bytes) { return ceil_div(bytes, kLine) * kLine; }

// A layer's part of a state, if it is a short convolution.
size_t state_bytes(const ModelConfig& config) {
    return config.conv_length < 2 ? 0 : round_to_lines((config.conv_length - 1) * config.hidden_dim * sizeof(float));
}

// Offsets of the layers in a page, then of the lengths of its states, then the size of the page.
std::vector<size_t> lay_out(const ModelConfig& config, KvType type) {
    std::vector<size_t> offsets;
    size_t used = 0;
    for (size_t layer = 0; layer < config.n_layers; ++layer) {
        offsets.push_back(used);
        used += config.mixer(layer) != Mixer::kAttention ? 2 * state_bytes(config)
                                                         : config.n_kv_heads * head_bytes(config, type);
        if (config.is_recurrent()) used = round_to_lines(used);
    }
    offsets.push_back(used);
    offsets.push_back(used + (config.is_recurrent() ? kLine : 0));
    return offsets;
}

}  // namespace

size_t KvMemory::page_bytes(const ModelConfig& config, KvType type) { return lay_out(config, type).back(); }

KvMemory::KvMemory(const ModelConfig& config, KvType type, size_t budget_bytes)
    : offsets_(lay_out(config, type)),
      head_bytes_(head_bytes(config, type)),
      state_bytes_(state_bytes(config)),
      states_(offsets_[config.n_layers]),
      page_bytes_(offsets_.back()),
      memory_(budget_bytes / page_bytes_ * page_bytes_),
      is_committed_(budget_bytes / page_bytes_) {}

void KvMemory::apply(std::span<const PageWrite> writes) {
    constexpr size_t kTaskBytes = size_t{64} << 10;
    constexpr double kByteNs = 0.1;  // rough: more if the system commits the memory
    for (const PageWrite& write : writes) is_committed_[static_cast<size_t>(write.page)] = true;
    const double work = kByteNs * static_cast<double>(page_bytes_ * writes.size());
    // A task is the same part of all pages: a page may be copied, and then cleared for another sequence.
    parallel_split(page_bytes_, kTaskBytes, work, [&](size_t begin, size_t end) {
        for (const PageWrite& write : writes) {
            uint8_t* to = page(write.page) + begin;
            if (write.from == write.page) continue;
            // Masked keys have weight 0, but 0 * inf and 0 * NaN are NaN: new pages are cleared.
            write.from < 0 ? std::memset(to, 0, end - begin) : std::memcpy(to, page(write.from) + begin, end - begin);
        }
    });
}

size_t KvMemory::n_committed() const {
    return static_cast<size_t>(std::count(is_committed_.begin(), is_committed_.end(), true));
}

size_t KvMemory::release(const PageIndex& index) {
    const auto is_releasable = [&](size_t i) { return is_committed_[i] && index.is_unused(static_cast<int32_t>(i)); };
    size_t n = 0;
    for (size_t begin = 0, end; begin < n_pages(); begin = end + 1) {
        for (end = begin; end < n_pages() && is_releasable(end); ++end) is_committed_[end] = false;
        if (end > begin) release_pages(memory_.data() + begin * page_bytes_, (end - begin) * page_bytes_);
        n += end - begin;
    }
    return n;
}

}  // namespace whet
