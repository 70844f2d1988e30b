// A table whose rows stay where they are stored, such as in a mapped file, and are converted when they are read: of a
// table as large as the rest of a model, a token needs one row.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "engine/stored_rows.h"

namespace whet {

class StoredTable {
public:
    void resize(size_t n, size_t k) { n_ = n, k_ = k; }
    size_t n() const { return n_; }
    size_t k() const { return k_; }
    size_t size_bytes() const {  // of copied rows, and of the memory of hold()
        size_t bytes = (places_.size() + held_.size()) * sizeof(uint32_t);
        for (const Source& source : sources_) bytes += source.copied_bytes;
        return bytes;
    }

    // Reads rows from `first` on from memory that `owner` keeps valid, in place of those before; null: from a copy.
    // Throws std::invalid_argument for rows that do not fit.
    void set(size_t first, StoredRows rows, std::shared_ptr<void> owner) {
        if (rows.k != k_ || first > n_ || rows.n > n_ - first) {
            throw std::invalid_argument("the rows do not fit the shape of the table");
        }
        if (!places_.empty()) places_.clear(), held_.clear(), sources_.clear();
        size_t bytes = 0;
        if (owner == nullptr) {
            const StoredTraits& stored = traits(rows.type);
            const size_t item = stored.gguf.block_bytes, row_bytes = rows.k / stored.gguf.block * item;
            const std::shared_ptr<uint8_t[]> copy(new uint8_t[bytes = rows.n * row_bytes]);
            for (size_t i = 0; i < rows.n; ++i) {
                const auto* from = static_cast<const uint8_t*>(rows.range(i, 1).data);
                const ptrdiff_t step = static_cast<ptrdiff_t>(item) * (stored.is_quantised ? 1 : rows.column_stride);
                uint8_t* to = copy.get() + i * row_bytes;
                for (size_t j = 0; j < row_bytes; j += item, from += step) std::memcpy(to + j, from, item);
            }
            rows.data = copy.get(), rows.column_stride = 1;
            rows.row_stride = static_cast<ptrdiff_t>(stored.is_quantised ? row_bytes : rows.k);
            owner = copy;
        }
        const auto is_replaced = [&](const Source& old) { return old.first >= first && old.end() <= first + rows.n; };
        std::erase_if(sources_, is_replaced);
        sources_.push_back({first, rows, std::move(owner), bytes});
    }

    // Reserves memory for `count` rows in place of all rows: of a table in a file that cannot be mapped. Returns it.
    // Rows are written there and placed before they are read. Throws std::invalid_argument for rows that are not whole
    // blocks.
    uint8_t* hold(StoredType type, size_t count) {
        const StoredTraits& stored = traits(type);
        if (k_ % stored.gguf.block != 0) throw std::invalid_argument("the rows are not a whole number of blocks");
        const size_t row_bytes = k_ / stored.gguf.block * stored.gguf.block_bytes;
        const std::shared_ptr<uint8_t[]> memory(new uint8_t[count * row_bytes]);
        const auto stride = static_cast<ptrdiff_t>(stored.is_quantised ? row_bytes : k_);
        sources_ = {{0, {type, memory.get(), count, k_, stride, 1}, memory, count * row_bytes}};
        places_.assign(n_, 0);
        held_.assign(count, static_cast<uint32_t>(n_));
        return memory.get();
    }
    // The row at `place` of this memory is row i from now on, and no longer another. Throws std::out_of_range.
    void place(size_t i, size_t place) {
        places_.at(i) = static_cast<uint32_t>(place);
        held_.at(place) = static_cast<uint32_t>(i);
    }

    // Rows that a checksum covers, at equal distances: reading all would take as long as reading the rest of the model.
    std::vector<size_t> checked_rows() const {
        std::vector<size_t> rows(std::min<size_t>(n_, 64));
        for (size_t i = 0; i < rows.size(); ++i) rows[i] = i * n_ / rows.size();
        return rows;
    }

    bool is_finite(size_t i) const { return whet::is_finite(row(i)); }
    void read(size_t i, float* out) const { unpack_row(row(i), 0, out); }

private:
    struct Source {
        size_t first;
        StoredRows rows;
        std::shared_ptr<void> owner;
        size_t copied_bytes;

        size_t end() const { return first + rows.n; }
    };
    size_t n_ = 0, k_ = 0;
    std::vector<Source> sources_;
    // With hold(): the last place of each row, and the row at each place; n_: none.
    std::vector<uint32_t> places_, held_;

    // Throws std::out_of_range.
    StoredRows row(size_t i) const {
        if (!places_.empty()) {
            if (i < n_ && held_[places_[i]] == i) return sources_.front().rows.range(places_[i], 1);
            throw std::out_of_range("the row is not in memory");
        }
        for (const Source& source : sources_) {
            if (i >= source.first && i < source.end()) return source.rows.range(i - source.first, 1);
        }
        throw std::out_of_range("the table has no such row");
    }
};

}  // namespace whet
