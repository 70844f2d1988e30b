// Sets of tokens: those that filters, bans and a grammar leave of a vocabulary, from which a token is drawn.
//
// A set is a span of numbers: none for the whole vocabulary, ceil(V / 32) for a bitmap (bit v % 32 of number v / 32),
// or fewer for the ids of its tokens in increasing order.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace whet {

using TokenSet = std::span<const int32_t>;

// T sets end to end: set t is words[offsets[t], offsets[t + 1]). No offsets: every set is the whole vocabulary.
struct TokenSets {
    std::span<const int64_t> offsets{};
    std::span<const int32_t> words{};

    bool is_empty() const { return offsets.empty(); }
    TokenSet operator[](size_t t) const {
        return words.subspan(static_cast<size_t>(offsets[t]), static_cast<size_t>(offsets[t + 1] - offsets[t]));
    }
};

constexpr size_t bitmap_words(size_t vocab_size) { return (vocab_size + 31) / 32; }

bool contains(TokenSet set, size_t vocab_size, int64_t token);

// Throws std::invalid_argument unless there are as many sets as tokens, each valid for the vocabulary and with its
// token.
void check_token_sets(const TokenSets& sets, std::span<const int64_t> tokens, size_t vocab_size);

// Logit of a token that is not in a set. Its probability is 0, and all products with that are finite.
inline constexpr float kDroppedLogit = -1e15f;

// Sets the logits of the tokens [first, first + n) that are not in the set to kDroppedLogit.
void drop_logits(TokenSet set, size_t vocab_size, size_t first, size_t n, float* logits);

// A set in memory for any set of the vocabulary.
class TokenSetBuffer {
public:
    void reserve(size_t vocab_size) { words_.resize(2 * bitmap_words(vocab_size)); }
    TokenSet set() const { return {words_.data() + first_, n_}; }

    void keep_all() { n_ = 0; }
    // Ids in increasing order.
    void keep(std::span<const int32_t> ids, size_t vocab_size);
    // All tokens, or the tokens of a bitmap, except banned ones.
    void keep_allowed(const uint32_t* allowed, std::span<const int32_t> banned, size_t vocab_size);

private:
    std::vector<int32_t> words_;  // a bitmap, and behind it ids
    size_t first_ = 0, n_ = 0;

    void keep_bitmap(size_t n_words) { first_ = 0, n_ = n_words; }
};

}  // namespace whet
