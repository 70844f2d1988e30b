#include "engine/deferred_rows.h"

#include <stdexcept>

#include "runtime/system.h"

namespace whet {
namespace {

std::atomic<uint64_t> uses{0};

}  // namespace

void DeferredRows::prepare() {
    last_use_.store(++uses, std::memory_order_relaxed);
    if (is_packed_.load(std::memory_order_acquire)) return;
    const auto packing = lock_.writing();
    if (!is_packed_.load(std::memory_order_relaxed)) pack();
}

void PackedWeight::prepare_deferred() const { deferred_->prepare(); }

void DeferredRows::pack() {
    for (const auto& [first, rows, owner] : sources_) {
        if (!is_finite(rows)) throw std::runtime_error("the weights of an expert hold NaN or infinity");
        pack_rows(rows, part_, first);
        release_file_pages(rows.data, static_cast<size_t>(rows.row_stride) * rows.n);
    }
    is_packed_.store(true, std::memory_order_release);
}

void DeferredRows::settle() {
    prepare();
    sources_.clear();
}

size_t DeferredRows::drop() {
    const size_t bytes = resident_bytes();
    if (bytes == 0) return 0;
    is_packed_.store(false, std::memory_order_relaxed);
    part_.release_memory();
    return bytes;
}

size_t DeferredRows::resident_bytes() const { return is_packed_ && !sources_.empty() ? part_.size_bytes() : 0; }

}  // namespace whet
