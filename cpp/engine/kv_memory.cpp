#include "engine/kv_memory.h"

#include <algorithm>
#include <cstring>

#include "runtime/split.h"
#include "runtime/system.h"

namespace whet {
namespace {

// Keys and values of one KV head in a page, in the layout of kernels/cached_attention.h.
size_t head_bytes(const ModelConfig& config, bool bf16) {
    const size_t words = bf16 ? (config.head_dim + 1) / 2 : config.head_dim;
    const size_t columns = (config.head_dim + 15) / 16 * 16;
    return kPageTokens * (words * 4 + columns * (bf16 ? 2 : 4));
}

}  // namespace

size_t KvMemory::page_bytes(const ModelConfig& config, bool bf16) {
    return config.n_layers * config.n_kv_heads * head_bytes(config, bf16);
}

KvMemory::KvMemory(const ModelConfig& config, bool bf16, size_t budget_bytes)
    : bf16_(bf16),
      n_kv_heads_(config.n_kv_heads),
      head_bytes_(head_bytes(config, bf16)),
      page_bytes_(page_bytes(config, bf16)),
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
