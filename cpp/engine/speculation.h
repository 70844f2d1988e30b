// Speculative decoding. The draft of a sequence's next tokens is what followed an earlier occurrence of its last ones
// (prompt lookup, Saxena 2023), or else what a smaller model draws (draft_model.h).
//
// A token is a function of its logits and its uniform (sampler.h), and the logits depend only on the sequence. A step
// therefore computes the tokens of a draft together, draws after each with the uniform of its position, and keeps what
// is drawn up to the first token that differs from the draft: tokens and log-probs are equal to decoding one by one, to
// the bit.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace whet {

constexpr size_t kMaxDraft = 15, kMaxStepDrafts = 64;  // tokens of a draft, and of all drafts of a step

// The time of a step as a line in its rows, fitted to the last steps.
class StepTimes {
public:
    void add(size_t rows, double seconds);
    // The time of a step of `rows` rows; 0: not measured yet.
    double seconds(size_t rows) const;
    // The time of a further row, once a step is measured.
    double row_s() const;

private:
    double weight_ = 0, rows_ = 0, squares_ = 0, seconds_ = 0, products_ = 0;  // weighted sums
};

// The number of tokens, at most `most`, that are all right with a probability above `least`, if a token is right with
// probability `right` after right ones.
size_t draft_length(double right, double least, size_t most);

// A sequence, with the place that its next tokens are read from.
class PromptLookup {
public:
    // `capacity`: tokens of the longest sequence.
    PromptLookup(std::span<const int32_t> prompt, size_t capacity);

    void append(int32_t token);
    // At most `most` next tokens: those that are right with a probability above `least`, by the share of earlier drafts
    // that were right.
    std::span<const int32_t> draft(double least, size_t most) const;

private:
    static constexpr size_t kLongest = 16;  // tokens of a repeated ending that are compared
    std::vector<int32_t> tokens_;
    size_t next_ = 0, length_ = 0;                     // place of the expected token, and tokens that agree before it
    std::array<double, 3> right_ = {0.2, 0.45, 0.75};  // by length: shares of first tokens that were right

    void search();
    size_t length_class() const { return length_ < 3 ? 0 : length_ < 6 ? 1 : 2; }
};

}  // namespace whet
