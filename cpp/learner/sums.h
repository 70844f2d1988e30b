// Gradients of vectors: sums over the rows of groups.
#pragma once
#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "runtime/thread_pool.h"

namespace whet {

constexpr size_t kSumRows = 32;  // rows of a group whose terms are added to a gradient together

// Sums terms of rows in blocks of up to kSumRows rows of one group: add(row, sums) adds the terms of a row to the
// `width` sums of its block. `sums`, (blocks, width), may hold other terms of the same rows, or be empty.
template <class F>
void sum_blocks(std::span<const std::pair<size_t, size_t>> groups, size_t width, std::vector<float>& sums, F&& add) {
    std::vector<std::pair<size_t, size_t>> blocks;
    for (const auto& [first, end] : groups) {
        for (size_t i = first; i < end; i += kSumRows) blocks.emplace_back(i, std::min(end, i + kSumRows));
    }
    sums.resize(blocks.size() * width);
    const double work = 0.5 * static_cast<double>(blocks.size() * kSumRows * width);
    parallel_for(blocks.size(), work, [&](size_t block) {
        for (size_t row = blocks[block].first; row < blocks[block].second; ++row) add(row, &sums[block * width]);
    });
}

// total (n,) += elements [first, first + n) of each block's sums, block by block; `total` may be null.
inline void add_sums(const std::vector<float>& sums, size_t width, size_t first, size_t n, float* total) {
    if (total == nullptr) return;
    for (size_t at = first; at < sums.size(); at += width) {
        for (size_t i = 0; i < n; ++i) total[i] += sums[at + i];
    }
}

}  // namespace whet
