// Weights that are packed when they are first used, from rows that stay where they are, such as in a mapped file.
//
// They may be dropped, and are packed again at the next use: experts that no token is given to take no memory.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "engine/stored_rows.h"
#include "runtime/read_write_lock.h"

namespace whet {

class DeferredRows {
public:
    explicit DeferredRows(PackedWeight& part) : part_(part) {}

    // The rows are blocks or contiguous numbers in a mapped file, which `owner` keeps mapped.
    void add(size_t first, const StoredRows& rows, std::shared_ptr<void> owner) {
        sources_.push_back({first, rows, std::move(owner)});
    }
    // Packs the rows, unless they are packed. Thread-safe; not within a job of the pool. Throws std::runtime_error for
    // rows with NaN or infinity.
    void prepare();
    // Packs the rows and forgets where they are.
    void settle();
    // Releases the memory of packed rows; returns its size. No thread may read them.
    size_t drop();

    size_t resident_bytes() const;
    uint64_t last_use() const { return last_use_.load(std::memory_order_relaxed); }

private:
    struct Source {
        size_t first;  // row of the part
        StoredRows rows;
        std::shared_ptr<void> owner;
    };
    PackedWeight& part_;
    std::vector<Source> sources_;
    ReadWriteLock lock_;
    std::atomic<bool> is_packed_{false};
    std::atomic<uint64_t> last_use_{0};

    void pack();
};

}  // namespace whet
