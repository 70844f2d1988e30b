#include "runtime/packing.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace whet {
namespace {

// The free space of each bin, as leaves of a max segment tree: one descent from the root finds the first bin that fits.
// Unopened bins are leaves with all space free, so the descent opens the next bin if no open bin fits.
class FirstFit {
public:
    explicit FirstFit(int64_t max_length) : max_length_(max_length) { grow(64); }

    size_t place(int64_t length) {
        if (room_[1] < length) grow(2 * n_leaves_);
        size_t node = 1;
        while (node < n_leaves_) {
            node *= 2;
            if (room_[node] < length) ++node;
        }
        const size_t bin = node - n_leaves_;
        room_[node] -= length;
        while (node /= 2) room_[node] = std::max(room_[2 * node], room_[2 * node + 1]);
        return bin;
    }

private:
    void grow(size_t n_leaves) {
        std::vector<int64_t> room(2 * n_leaves, max_length_);
        std::copy(room_.begin() + static_cast<ptrdiff_t>(n_leaves_), room_.end(),
                  room.begin() + static_cast<ptrdiff_t>(n_leaves));
        for (size_t node = n_leaves - 1; node > 0; --node) room[node] = std::max(room[2 * node], room[2 * node + 1]);
        room_ = std::move(room);
        n_leaves_ = n_leaves;
    }

    int64_t max_length_;
    size_t n_leaves_ = 0;
    std::vector<int64_t> room_;
};

// Indices of lengths, longest first, ties in order of index. Counting sort if max_length is at most the number of
// sequences.
std::vector<int64_t> longest_first(const int64_t* lengths, int64_t n, int64_t max_length) {
    std::vector<int64_t> order(static_cast<size_t>(n));
    if (max_length > n) {
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return lengths[a] > lengths[b]; });
        return order;
    }
    std::vector<int64_t> next(static_cast<size_t>(max_length) + 2, 0);  // by max_length - length
    for (int64_t i = 0; i < n; ++i) ++next[static_cast<size_t>(max_length - lengths[i]) + 1];
    std::partial_sum(next.begin(), next.end(), next.begin());
    for (int64_t i = 0; i < n; ++i) {
        order[static_cast<size_t>(next[static_cast<size_t>(max_length - lengths[i])]++)] = i;
    }
    return order;
}

}  // namespace

Packing pack_sequences(const int64_t* lengths, int64_t n, int64_t max_length) {
    const std::vector<int64_t> order = longest_first(lengths, n, max_length);
    FirstFit bins(max_length);
    std::vector<int64_t> bin_of(order.size());
    Packing packed;
    packed.bin_begin.push_back(0);
    for (size_t k = 0; k < order.size(); ++k) {
        const size_t bin = bins.place(lengths[order[k]]);
        bin_of[k] = static_cast<int64_t>(bin);
        if (bin + 1 == packed.bin_begin.size()) packed.bin_begin.push_back(0);
        ++packed.bin_begin[bin + 1];
    }
    std::partial_sum(packed.bin_begin.begin(), packed.bin_begin.end(), packed.bin_begin.begin());
    packed.indices.resize(order.size());
    std::vector<int64_t> next(packed.bin_begin.begin(), packed.bin_begin.end() - 1);
    for (size_t k = 0; k < order.size(); ++k) {
        packed.indices[static_cast<size_t>(next[static_cast<size_t>(bin_of[k])]++)] = order[k];
    }
    return packed;
}

}  // namespace whet
