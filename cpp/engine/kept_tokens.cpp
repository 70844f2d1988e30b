#include "engine/kept_tokens.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <stdexcept>
#include <string>

namespace whet {
namespace {

bool is_set(TokenSet bitmap, size_t token) {
    return (static_cast<uint32_t>(bitmap[token / 32]) >> token % 32 & 1) != 0;
}

bool is_bitmap(TokenSet set, size_t vocab_size) { return set.size() == bitmap_words(vocab_size); }

// Whether every token of the set is in the vocabulary, and ids are in increasing order.
bool is_valid(TokenSet set, size_t vocab_size) {
    if (is_bitmap(set, vocab_size)) {
        return vocab_size % 32 == 0 || static_cast<uint32_t>(set.back()) >> vocab_size % 32 == 0;
    }
    if (set.empty()) return true;
    return set.size() < bitmap_words(vocab_size) && set.front() >= 0 && static_cast<size_t>(set.back()) < vocab_size &&
           std::adjacent_find(set.begin(), set.end(), std::greater_equal<>()) == set.end();
}

}  // namespace

bool contains(TokenSet set, size_t vocab_size, int64_t token) {
    if (token < 0 || static_cast<size_t>(token) >= vocab_size) return false;
    if (set.empty()) return true;
    if (is_bitmap(set, vocab_size)) return is_set(set, static_cast<size_t>(token));
    return std::binary_search(set.begin(), set.end(), static_cast<int32_t>(token));
}

void check_token_sets(const TokenSets& sets, std::span<const int64_t> tokens, size_t vocab_size) {
    const auto& offsets = sets.offsets;
    if (offsets.size() != tokens.size() + 1 || offsets.front() != 0 ||
        static_cast<size_t>(offsets.back()) != sets.words.size() || !std::is_sorted(offsets.begin(), offsets.end())) {
        throw std::invalid_argument("the offsets of the kept tokens do not fit the tokens and the sets");
    }
    for (size_t t = 0; t < tokens.size(); ++t) {
        if (!is_valid(sets[t], vocab_size)) {
            throw std::invalid_argument("the kept tokens of token " + std::to_string(t) + " are not a set of the " +
                                        std::to_string(vocab_size) + " tokens of the vocabulary");
        }
        if (!contains(sets[t], vocab_size, tokens[t])) {
            throw std::invalid_argument("token id " + std::to_string(tokens[t]) + " at " + std::to_string(t) +
                                        " is not among its kept tokens");
        }
    }
}

void drop_logits(TokenSet set, size_t vocab_size, size_t first, size_t n, float* logits) {
    if (set.empty()) return;
    if (is_bitmap(set, vocab_size)) {
        for (size_t i = 0; i < n; ++i) logits[i] = is_set(set, first + i) ? logits[i] : kDroppedLogit;
        return;
    }
    size_t done = 0;
    for (auto id = std::lower_bound(set.begin(), set.end(), static_cast<int32_t>(first));
         id != set.end() && static_cast<size_t>(*id) < first + n; ++id) {
        const size_t at = static_cast<size_t>(*id) - first;
        std::fill(logits + done, logits + at, kDroppedLogit);
        done = at + 1;
    }
    std::fill(logits + done, logits + n, kDroppedLogit);
}

void TokenSetBuffer::keep(std::span<const int32_t> ids, size_t vocab_size) {
    if (ids.size() == vocab_size) return keep_all();
    const size_t n_words = bitmap_words(vocab_size);
    if (ids.size() < n_words) {
        std::copy(ids.begin(), ids.end(), words_.begin() + static_cast<ptrdiff_t>(n_words));
        first_ = n_words, n_ = ids.size();
        return;
    }
    std::fill_n(words_.begin(), n_words, 0);
    for (const int32_t id : ids) words_[static_cast<size_t>(id) / 32] |= static_cast<int32_t>(uint32_t{1} << id % 32);
    keep_bitmap(n_words);
}

void TokenSetBuffer::keep_allowed(const uint32_t* allowed, std::span<const int32_t> banned, size_t vocab_size) {
    const size_t n_words = bitmap_words(vocab_size);
    for (size_t w = 0; w < n_words; ++w) words_[w] = allowed == nullptr ? -1 : static_cast<int32_t>(allowed[w]);
    if (vocab_size % 32 != 0) words_[n_words - 1] &= static_cast<int32_t>((uint32_t{1} << vocab_size % 32) - 1);
    for (const int32_t id : banned) {
        words_[static_cast<size_t>(id) / 32] &= static_cast<int32_t>(~(uint32_t{1} << id % 32));
    }
    size_t count = 0;
    for (size_t w = 0; w < n_words; ++w) count += static_cast<size_t>(std::popcount(static_cast<uint32_t>(words_[w])));
    if (count == vocab_size) return keep_all();
    keep_bitmap(n_words);
    if (count >= n_words) return;
    int32_t* ids = words_.data() + n_words;
    for (size_t w = 0; w < n_words; ++w) {
        for (auto bits = static_cast<uint32_t>(words_[w]); bits != 0; bits &= bits - 1) {
            *ids++ = static_cast<int32_t>(32 * w) + std::countr_zero(bits);
        }
    }
    first_ = n_words, n_ = count;
}

}  // namespace whet
