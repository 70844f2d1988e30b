// A 64-bit checksum at memory bandwidth: four lanes of xxHash64's round (Collet 2012). A round is a bijection, so every
// change of a single word changes the checksum. Not cryptographic.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "runtime/split.h"

namespace whet {

inline uint64_t mix(uint64_t sum, uint64_t word) {
    return std::rotl(sum + word * 0xc2b2ae3d27d4eb4full, 31) * 0x9e3779b185ebca87ull;
}

inline uint64_t checksum(const void* data, size_t n_bytes) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    uint64_t lanes[4] = {1, 2, 3, 4};
    size_t at = 0;
    for (; at + 32 <= n_bytes; at += 32) {
        uint64_t words[4];
        std::memcpy(words, bytes + at, 32);
        for (int i = 0; i < 4; ++i) lanes[i] = mix(lanes[i], words[i]);
    }
    uint64_t sum = n_bytes;
    for (; at < n_bytes; ++at) sum = mix(sum, bytes[at]);
    for (uint64_t lane : lanes) sum = mix(sum, lane);
    return sum;
}

// Checksum over the checksums of rows `stride` bytes apart; rows are split over the pool.
inline uint64_t checksum_rows(const char* data, size_t rows, size_t row_bytes, ptrdiff_t stride) {
    constexpr size_t kTaskBytes = size_t{1} << 18;
    const size_t per_task = std::max<size_t>(1, kTaskBytes / std::max<size_t>(1, row_bytes));
    std::vector<uint64_t> sums(rows);
    parallel_split(rows, per_task, static_cast<double>(rows * row_bytes) * 0.1, [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) {
            sums[i] = checksum(data + static_cast<ptrdiff_t>(i) * stride, row_bytes);
        }
    });
    return checksum(sums.data(), sums.size() * sizeof(uint64_t));
}

}  // namespace whet
