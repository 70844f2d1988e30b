#include "engine/speculation.h"

#include <algorithm>
#include <cmath>

namespace whet {

void StepTimes::add(size_t rows, double seconds) {
    constexpr double kDecay = 0.95;
    const auto n = static_cast<double>(rows);
    for (double* sum : {&weight_, &rows_, &squares_, &seconds_, &products_}) *sum *= kDecay;
    weight_ += 1, rows_ += n, squares_ += n * n, seconds_ += seconds, products_ += n * seconds;
}

double StepTimes::row_s() const {
    // Before steps of different sizes have been measured: a guess, with the weight of a difference of half a row.
    constexpr double kGuess = 0.2, kGuessOfAll = 0.6, kWeight = 0.25;
    const double mean_rows = rows_ / weight_, mean = seconds_ / weight_;
    const double guess = mean * std::min(kGuess, kGuessOfAll / mean_rows);
    const double variance = squares_ / weight_ - mean_rows * mean_rows;
    const double covariance = products_ / weight_ - mean_rows * mean;
    return std::max(0.0, (covariance + kWeight * guess) / (variance + kWeight));
}

double StepTimes::seconds(size_t rows) const {
    if (weight_ == 0) return 0;
    return std::max(row_s(), seconds_ / weight_ + row_s() * (static_cast<double>(rows) - rows_ / weight_));
}

size_t draft_length(double right, double least, size_t most) {
    if (least >= 1) return 0;
    right = std::min(right, 0.98);
    const double n = least <= 0 ? static_cast<double>(most) : std::floor(std::log(least) / std::log(right));
    most = std::min(most, kMaxDraft);
    return n < static_cast<double>(most) ? static_cast<size_t>(n) : most;
}

PromptLookup::PromptLookup(std::span<const int32_t> prompt, size_t capacity) {
    tokens_.reserve(capacity);
    tokens_.assign(prompt.begin(), prompt.end());
    search();
}

void PromptLookup::append(int32_t token) {
    constexpr double kRate = 0.125;
    const bool is_right = length_ > 0 && tokens_[next_] == token;
    if (length_ > 0) {
        double& right = right_[length_class()];
        right += kRate * ((is_right ? 1.0 : 0.0) - right);
    }
    tokens_.push_back(token);
    if (is_right) {
        ++next_, length_ = std::min(length_ + 1, kLongest);
    } else {
        search();
    }
}

// Finds the longest repeated ending of at least 2 tokens; of several with this length, the last.
void PromptLookup::search() {
    length_ = 0;
    const size_t n = tokens_.size();
    for (size_t end = n - 1; end >= 2; --end) {  // of an earlier occurrence
        if (tokens_[end - 1] != tokens_[n - 1]) continue;
        const size_t most = std::min(end, kLongest);
        size_t length = 1;
        while (length < most && tokens_[end - 1 - length] == tokens_[n - 1 - length]) ++length;
        if (length >= 2 && length > length_) next_ = end, length_ = length;
        if (length_ == kLongest) return;
    }
}

std::span<const int32_t> PromptLookup::draft(double least, size_t most) const {
    if (length_ == 0) return {};
    most = std::min(most, tokens_.size() - next_);
    return std::span(tokens_).subspan(next_, draft_length(right_[length_class()], least, most));
}

}  // namespace whet
