// First-fit decreasing bin packing (Johnson 1973) in O(n log n).
#pragma once
#include <cstdint>
#include <vector>

namespace whet {

// Bin b holds indices[bin_begin[b]] up to indices[bin_begin[b + 1]].
struct Packing {
    std::vector<int64_t> indices, bin_begin;
};

// Longest first, equal lengths in order of index, each into the first bin with room: a bin's lengths sum to at most
// `max_length`. Every length must lie in [0, max_length].
Packing pack_sequences(const int64_t* lengths, int64_t n, int64_t max_length);

}  // namespace whet
