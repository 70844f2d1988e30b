// Dropout of the adapters' inputs (Srivastava et al. 2014, inverted as in PyTorch), from counters: element j of a token
// is dropped if word j % 8 of the 32-bit words of Philox's block (j / 8, 0, path, 0) under the key (seed, adapter) is
// below 2^32 p. The path is a hash of the tokens up to this one in its sequence, so that masks do not depend on the
// rest of the batch, and a layer that is computed again has the same.
#include <cmath>
#include <cstring>

#include "kernels/dispatch.h"
#include "learner/learner.h"
#include "runtime/ceil_div.h"
#include "runtime/checksum.h"
#include "runtime/philox.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

constexpr size_t kBlock = 8;        // elements of a block of random words
constexpr size_t kBlockWidth = 64;  // its cost, in elements of a simple loop

}  // namespace

void Learner::hash_paths() {
    paths_.assign(n(), 0);
    for (size_t s = 0; s + 1 < batch_.q_offsets.size(); ++s) {
        const int64_t first = batch_.q_offsets[s], end = batch_.q_offsets[s + 1];
        const int64_t key = batch_.k_offsets[s + 1] - (end - first);  // of the first query
        uint64_t path = key > batch_.k_offsets[s] ? paths_[static_cast<size_t>(batch_.key_rows[key - 1])] : 0;
        for (int64_t i = first; i < end; ++i) {
            path = mix(path, static_cast<uint64_t>(batch_.tokens[i]) + 1);
            paths_[static_cast<size_t>(i)] = path;
        }
    }
}

// Draws the mask of an adapter's inputs (rows of the tile, k): a bit for each element, set if it is kept.
void Learner::draw_mask(size_t adapter, size_t k, const RowTile& tile) {
    const size_t blocks = ceil_div(k, kBlock);
    const auto limit = static_cast<uint64_t>(std::llround(std::ldexp(dropout_.probability, 32)));
    for_rows(tile.n(), blocks * kBlockWidth, [&](size_t i) {
        for (size_t block = 0; block < blocks; ++block) {
            uint64_t words[4] = {block, 0, paths_[tile.begin + i], 0};
            philox(words, dropout_.seed, adapter);
            unsigned kept = 0;
            for (size_t j = 0; j < kBlock; ++j) {
                kept |= static_cast<unsigned>((words[j / 2] >> 32 * (j % 2) & 0xffffffffu) >= limit) << j;
            }
            mask_[i * blocks + block] = static_cast<uint8_t>(kept);
        }
    });
}

// Returns a copy of rows (rows, k) in which the mask's elements are 0.
ProductRows Learner::drop(ProductRows x, size_t rows, size_t k) {
    const size_t blocks = ceil_div(k, kBlock), ld = k + k % 2;
    const auto copy = [&]<class T>(const T* from, T* to) {
        for_rows(rows, k, [&](size_t i) {
            for (size_t j = 0; j < ld; ++j) {
                const bool is_kept = j < k && (mask_[i * blocks + j / kBlock] >> j % kBlock & 1) != 0;
                to[i * ld + j] = is_kept ? from[i * x.ld + j] : T{};
            }
        });
    };
    if (type_ == ProductType::kFloat32) {
        copy(static_cast<const float*>(x.data), reinterpret_cast<float*>(dropped_.get()));
    } else {
        copy(static_cast<const uint16_t*>(x.data), reinterpret_cast<uint16_t*>(dropped_.get()));
    }
    return {dropped_.get(), ld};
}

// x (rows, k) += grad_dropped_ where the mask keeps.
void Learner::add_kept(size_t rows, size_t k, float* x, size_t ldx) const {
    const size_t blocks = ceil_div(k, kBlock);
    for_rows(rows, k, [&](size_t i) {
        const float* from = grad_dropped_.get() + i * k;
        for (size_t j = 0; j < k; ++j) {
            if ((mask_[i * blocks + j / kBlock] >> j % kBlock & 1) != 0) x[i * ldx + j] += from[j];
        }
    });
}

}  // namespace whet
