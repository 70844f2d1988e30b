#include "engine/kv_memory.h"

#include <algorithm>
#include <cstring>

#include "runtime/ceil_div.h"
#include "runtime/split.h"
#include "runtime/system.h"

namespace whet {
namespace {

// Keys and values of one KV head in a page, in the layouts of kernels/cached_attention.h and cached_attention_int8.h.
size_t head_bytes(const ModelConfig& config, KvType type, size_t layer) {
    const size_t d = config.head_dim_of(layer), columns = (d + 15) / 16 * 16;
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

// Sizes of the parts of a layer's state.
void for_state_parts(const ModelConfig& config, size_t layer, const auto& visit) {
    if (!config.is_recurrent(layer)) return;
    visit(round_to_lines(config.conv_length * config.conv_dim(layer) * sizeof(float)));
    if (!config.is_delta(layer)) return;
    for (size_t head = 0; head < config.n_delta_heads; ++head) {
        visit(round_to_lines(config.delta_state_size() * sizeof(float) + sizeof(StateLength)));
    }
}

size_t kv_bytes(const ModelConfig& config, KvType type, size_t layer) {
    return config.attends(layer) ? config.n_own_kv_heads(layer) * head_bytes(config, type, layer) : 0;
}

}  // namespace

size_t KvMemory::page_bytes(const ModelConfig& config, KvType type) {
    size_t bytes = kPageTokens * config.n_token_experts() * sizeof(uint16_t), largest_part = 0;
    for (size_t layer = 0; layer < config.n_layers; ++layer) {
        bytes += kv_bytes(config, type, layer);
        for_state_parts(config, layer, [&](size_t part) { largest_part = std::max(largest_part, part); });
    }
    return largest_part == 0 ? bytes : std::max(round_to_lines(bytes), largest_part);
}

KvMemory::KvMemory(const ModelConfig& config, KvType type, size_t budget_bytes, bool holds_keys)
    : token_experts_(config.n_token_experts()),
      page_bytes_(page_bytes(config, type)),
      memory_(holds_keys || token_experts_ > 0 ? budget_bytes / page_bytes_ * page_bytes_ : 0),
      is_committed_(budget_bytes / page_bytes_) {
    size_t used = 0, used_by_state = page_bytes_;  // of a page, of the last page of a state
    for (size_t layer = 0; layer < config.n_layers; ++layer) {
        const size_t source = config.kv_layer(layer);
        offsets_.push_back(source == layer ? used : offsets_[source]);
        head_bytes_.push_back(head_bytes(config, type, layer));
        used += kv_bytes(config, type, layer);
        first_parts_.push_back(state_parts_.size());
        for_state_parts(config, layer, [&](size_t bytes) {
            if (used_by_state + bytes > page_bytes_) ++n_state_pages_, used_by_state = 0;
            state_parts_.push_back({static_cast<uint32_t>(n_state_pages_ - 1), static_cast<uint32_t>(used_by_state)});
            used_by_state += bytes;
        });
    }
    experts_offset_ = used;
}

void KvMemory::copy_experts(std::span<const PageWrite> writes) {
    for (const PageWrite& write : writes) {
        is_committed_[static_cast<size_t>(write.page)] = true;
        if (write.from == PageIndex::kNone || write.from == write.page) continue;
        std::copy_n(experts(write.from, 0), kPageTokens * token_experts_, experts(write.page, 0));
    }
}

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
