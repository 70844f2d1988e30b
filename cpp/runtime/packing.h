// First-fit decreasing bin packing (Johnson 1973) in O(n log n).
#pragma once
#include <cstdint>
#include <vector>

namespace whet {

// Bin b is indices[bin_begin[b] : bin_begin[b + 1]].
struct Packing {
    std::vector<int64_t> indices, bin_begin;
};

// Puts each sequence, longest first and ties in order of index, into the first bin with enough free space: the lengths
// in a bin sum to at most `max_length`. Every length must be in [0, max_length].
Packing pack_sequences(const int64_t* lengths, int64_t n, int64_t max_length);

}  // namespace whet
