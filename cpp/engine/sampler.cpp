#include "engine/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "engine/config.h"
#include "kernels/dispatch.h"
#include "runtime/ceil_div.h"

namespace whet {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr Drawn kNothingDrawn{0, kNaN};

constexpr size_t kBlock = 1024;  // logits per partial sum
constexpr size_t kSpan = 256;    // logits that lane_maxima_f32 reduces to 16 maxima
constexpr int kDigit = 11;       // bits per digit of the radix select

struct Item {
    uint32_t key;  // 0 for the largest logit, increasing as logits decrease
    float amount;
};

struct Buffers {
    double* sums;
    double* buckets;
    Item* items;
    float* block_max;
    float* lane_max;
    float* values;
    float* weights;
    float* model_logits;
    int32_t* ids;
    size_t bytes = 0;

    Buffers(uintptr_t memory, size_t vocab_size) {
        const size_t n_blocks = ceil_div(vocab_size, kBlock), n_spans = ceil_div(vocab_size, kSpan);
        const auto take = [&](auto*& array, size_t n) {
            array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(memory + bytes);
            bytes += n * sizeof *array;
        };
        take(sums, n_blocks);
        take(buckets, size_t{1} << kDigit);
        take(items, vocab_size);
        take(block_max, n_blocks);
        take(lane_max, 16 * n_spans);
        take(values, vocab_size + 16);
        take(weights, std::max(vocab_size, kBlock));
        take(model_logits, vocab_size);
        take(ids, vocab_size + 16);
    }
};

// A row of logits with its softmax normaliser. The weight of a logit is exp((logit - max_logit) / temperature).
struct LogitRow {
    const float* logits = nullptr;
    size_t size = 0;
    float temperature = 1;
    float max_logit = kNaN;
    double total = 0;

    // log2(e) / temperature, clamped to finite numbers: 0 * scale is 0.
    float scale() const { return static_cast<float>(std::min(0x1.71547652b82fep+0 / temperature, 0x1.fffffep+127)); }
    double factor(float max_of_block) const {
        return std::exp2((static_cast<double>(max_of_block) - max_logit) * scale());
    }
    float logprob(float logit) const {
        return static_cast<float>((static_cast<double>(logit) - max_logit) / temperature - std::log(total));
    }
    bool has_finite_mass() const { return total > 0 && std::isfinite(total); }
};

// Computes the row's maximum and total weight, and the total of each block, relative to the same maximum, in
// buffers.sums.
LogitRow sum_exp(const float* logits, size_t size, float temperature, const Buffers& buffers) {
    LogitRow row{logits, size, temperature};
    const size_t n_blocks = ceil_div(size, kBlock);
    if (n_blocks == 0) return row;
    kernels().exp_sum_blocks_f32(logits, size, kBlock, row.scale(), buffers.sums, buffers.block_max);
    row.max_logit = buffers.block_max[n_blocks - 1];
    float max_of_block = kNaN;
    double factor = 0;
    for (size_t b = 0; b < n_blocks; ++b) {
        if (buffers.block_max[b] != max_of_block) {
            max_of_block = buffers.block_max[b];
            factor = row.factor(max_of_block);
        }
        buffers.sums[b] *= factor;
        row.total += buffers.sums[b];
    }
    return row;
}

double cdf_target(double uniform, double total) { return std::min(uniform * total, std::nextafter(total, 0.0)); }

// The first of n tokens at which `before` plus the cumulative weight times `factor` exceeds the target; the last token
// of non-zero weight if rounding leaves the total below the target.
size_t find_token(const float* weights, size_t n, double factor, double before, double target) {
    size_t last = 0;
    for (size_t i = 0; i < n; ++i) {
        before += weights[i] * factor;
        if (before > target) return i;
        if (weights[i] > 0) last = i;
    }
    return last;
}

Drawn draw_unfiltered(const LogitRow& row, double uniform, const Buffers& buffers) {
    if (!row.has_finite_mass()) return kNothingDrawn;
    const double target = cdf_target(uniform, row.total);
    double before = 0;
    size_t b = 0;
    while (before + buffers.sums[b] <= target) before += buffers.sums[b++];
    const size_t begin = b * kBlock, length = std::min(kBlock, row.size - begin);
    const float max_of_block = buffers.block_max[b];
    kernels().exp_weights_f32(row.logits + begin, length, max_of_block, row.scale(), buffers.weights);
    const size_t token = begin + find_token(buffers.weights, length, row.factor(max_of_block), before, target);
    return {static_cast<int32_t>(token), row.logprob(row.logits[token])};
}

Drawn draw_greedy(const LogitRow& row, const Buffers& buffers) {
    if (!row.has_finite_mass()) return kNothingDrawn;
    size_t b = 0;
    while (buffers.block_max[b] != row.max_logit) ++b;
    const float* begin = row.logits + b * kBlock;
    const float* found = std::find(begin, row.logits + row.size, row.max_logit);
    return {static_cast<int32_t>(found - row.logits), row.logprob(row.max_logit)};
}

// ---------------------------------------------------------------- filters

// Tokens of the row at or above a threshold, by id. The arrays are in Buffers.
struct Candidates {
    float* values;
    int32_t* ids;
    float* weights;
    size_t n = 0;

    template <class Keep>
    void keep(bool with_weights, Keep keep_value) {
        size_t kept = 0;
        for (size_t i = 0; i < n; ++i) {
            const float value = values[i];
            values[kept] = value;
            ids[kept] = ids[i];
            if (with_weights) weights[kept] = weights[i];
            kept += keep_value(value);
        }
        n = kept;
    }
};

// Monotonic in z, with -0 equal to +0.
uint32_t order_of(float z) {
    const auto bits = std::bit_cast<uint32_t>(z + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000;
}

// Keeps items with a smaller key, and the first n_equal with this key.
struct Cutoff {
    uint32_t key;
    size_t n_equal;
};

// Finds the cutoff that keeps items, in increasing order of key, while the amounts before them sum to less than
// `limit`, and always the first. Radix select: sums the amounts by digit and descends into the digit that contains the
// limit. Linear in n; overwrites the items.
Cutoff select_cutoff(Item* items, size_t n, double limit, double* buckets) {
    uint32_t all_bits = 0;
    for (size_t i = 0; i < n; ++i) all_bits |= items[i].key;
    double before = 0;
    for (int bits = std::bit_width(all_bits);;) {
        const int shift = std::max(0, bits - kDigit);
        const uint32_t n_digits = uint32_t{1} << (bits - shift), mask = n_digits - 1;
        std::fill_n(buckets, n_digits, 0.0);
        for (size_t i = 0; i < n; ++i) buckets[items[i].key >> shift & mask] += items[i].amount;
        uint32_t chosen = 0;
        double in_chosen = 0;
        for (uint32_t digit = 0; digit < n_digits && before + in_chosen < limit; ++digit) {
            if (buckets[digit] == 0) continue;
            before += in_chosen;
            in_chosen = buckets[digit];
            chosen = digit;
        }
        size_t left = 0;
        for (size_t i = 0; i < n; ++i) {
            const Item item = items[i];
            items[left] = item;
            left += (item.key >> shift & mask) == chosen;
        }
        n = left;
        bits = shift;
        if (bits == 0) break;
    }
    Cutoff cutoff{items[0].key, 0};
    do before += items[0].amount;
    while (++cutoff.n_equal < n && before < limit);
    return cutoff;
}

// Keeps candidates, in decreasing order of logit, while the weights before them (or their number, if not by_weight) sum
// to less than `limit`; ties by lower id.
void keep_best(Candidates& candidates, bool by_weight, double limit, float max_logit, const Buffers& buffers) {
    const uint32_t first = order_of(max_logit);
    for (size_t i = 0; i < candidates.n; ++i) {
        buffers.items[i] = {first - order_of(candidates.values[i]), by_weight ? candidates.weights[i] : 1.0f};
    }
    Cutoff cutoff = select_cutoff(buffers.items, candidates.n, limit, buffers.buckets);
    candidates.keep(by_weight, [&](float value) {
        const uint32_t key = first - order_of(value);
        const bool at_cutoff = key == cutoff.key && cutoff.n_equal > 0;
        cutoff.n_equal -= at_cutoff;
        return key < cutoff.key || at_cutoff;
    });
}

// A threshold with at least k, and few more, logits at or above it: the k-th largest maximum of disjoint sets.
float top_k_threshold(size_t k, float* maxima, size_t n) {
    if (k > n) return kLowest;
    while (n >= 8 * k) {
        const size_t half = (n + 1) / 2;
        for (size_t i = half; i < n; ++i) maxima[i - half] = std::max(maxima[i - half], maxima[i]);
        n = half;
    }
    std::nth_element(maxima, maxima + (k - 1), maxima + n, std::greater<>());
    return std::max(maxima[k - 1], kLowest);
}

float min_p_threshold(const LogitRow& row, float min_p) {
    if (min_p == 0) return kLowest;
    return std::max(kLowest,
                    row.max_logit + static_cast<float>(row.temperature * std::log(static_cast<double>(min_p))));
}

void gather(Candidates& candidates, const LogitRow& row, float threshold) {
    candidates.n = kernels().gather_above_f32(row.logits, row.size, threshold, candidates.values, candidates.ids);
}

double exp_weights(Candidates& candidates, const LogitRow& row) {
    return kernels().exp_weights_f32(candidates.values, candidates.n, row.max_logit, row.scale(), candidates.weights);
}

// Sets row.max_logit and row.total of the kept candidates; the total is 0 or NaN if the logits are not valid.
void apply_top_k(Candidates& candidates, LogitRow& row, size_t k, const Buffers& buffers) {
    row.max_logit = kernels().lane_maxima_f32(row.logits, row.size, buffers.lane_max);
    if (!std::isfinite(row.max_logit)) return;
    gather(candidates, row, top_k_threshold(k, buffers.lane_max, ceil_div(row.size, kSpan) * 16));
    if (candidates.n > k) keep_best(candidates, false, static_cast<double>(k), row.max_logit, buffers);
    row.total = exp_weights(candidates, row);
}

// Top-p over the whole row. Tokens below a threshold weigh less than its weight times their number, a loose bound, so
// higher thresholds are tried first. The threshold of min-p only removes candidates that top-p keeps.
void apply_top_p(Candidates& candidates, const LogitRow& row, const Sampling& sampling, const Buffers& buffers) {
    const double limit = sampling.top_p * row.total, dropped = row.total - limit, n = static_cast<double>(row.size);
    const float least = min_p_threshold(row, sampling.min_p);
    for (const double weight : {4 * dropped / n, dropped / (2 * n), 0.0}) {
        const double threshold = row.max_logit + row.temperature * std::log(weight);
        gather(candidates, row, std::max(least, static_cast<float>(std::min<double>(threshold, row.max_logit))));
        if (exp_weights(candidates, row) >= limit || threshold <= least) break;
    }
    keep_best(candidates, true, limit, row.max_logit, buffers);
}

// Sets the row's max_logit and total of the remaining candidates.
Drawn draw_filtered(LogitRow& row, Candidates& candidates, const Sampling& sampling, double uniform,
                    const Buffers& buffers) {
    const bool by_k = sampling.top_k > 0 && static_cast<size_t>(sampling.top_k) < row.size;
    if (by_k) {
        apply_top_k(candidates, row, static_cast<size_t>(sampling.top_k), buffers);
    } else {
        row = sum_exp(row.logits, row.size, row.temperature, buffers);
    }
    if (!row.has_finite_mass()) return kNothingDrawn;
    const float least = min_p_threshold(row, sampling.min_p);
    if (!by_k && sampling.top_p < 1) {
        apply_top_p(candidates, row, sampling, buffers);
    } else if (!by_k) {
        gather(candidates, row, least);
        exp_weights(candidates, row);
    } else if (sampling.top_p < 1) {
        keep_best(candidates, true, sampling.top_p * row.total, row.max_logit, buffers);
    }
    if (sampling.min_p > 0) candidates.keep(true, [&](float value) { return value >= least; });
    row.total = 0;
    for (size_t i = 0; i < candidates.n; ++i) row.total += candidates.weights[i];
    const size_t i = find_token(candidates.weights, candidates.n, 1.0, 0.0, cdf_target(uniform, row.total));
    return {candidates.ids[i], row.logprob(candidates.values[i])};
}

void penalise(float* logits, size_t size, const uint64_t* seen, float penalty) {
    for (size_t begin = 0; begin < size; begin += 64) {
        for (uint64_t bits = seen[begin / 64]; bits != 0; bits &= bits - 1) {
            const size_t token = begin + static_cast<size_t>(std::countr_zero(bits));
            if (token >= size) break;
            logits[token] = logits[token] > 0 ? logits[token] / penalty : logits[token] * penalty;
        }
    }
}

void adjust(float* logits, size_t size, const Sampling& sampling, const History& history) {
    constexpr float kNever = -std::numeric_limits<float>::infinity();
    for (size_t token = 0; history.allowed != nullptr && token < size; ++token) {
        if ((history.allowed[token / 32] >> token % 32 & 1) == 0) logits[token] = kNever;
    }
    for (int32_t token : history.banned) logits[token] = kNever;
    for (const TokenBias& bias : sampling.logit_bias) logits[bias.token] += bias.bias;
    if (history.seen != nullptr && sampling.repetition_penalty != 1) {
        penalise(logits, size, history.seen, sampling.repetition_penalty);
    }
    for (const TokenCount& of : history.generated) {
        const float frequency = sampling.frequency_penalty * static_cast<float>(of.count);
        logits[of.token] = logits[of.token] - frequency - sampling.presence_penalty;
    }
}

// Lists the n largest of `size` values, in decreasing order, with log-probs in the row. Values are in order of token
// id; null `ids` are the indices.
void list_top_logprobs(const LogitRow& row, const float* values, const int32_t* ids, size_t size, Drawn* best,
                       size_t n) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    std::fill_n(best, n, Drawn{-1, -kInfinity});
    const auto insert = [&](size_t i) {
        if (!(values[i] > best[n - 1].logprob)) return;
        size_t at = n - 1;
        for (; at > 0 && best[at - 1].logprob < values[i]; --at) best[at] = best[at - 1];
        best[at] = {ids == nullptr ? static_cast<int32_t>(i) : ids[i], values[i]};
    };
    constexpr size_t kBlock = 64;  // compared at once: hardly any has one of the best
    for (size_t begin = 0; begin < size; begin += kBlock) {
        const size_t end = std::min(begin + kBlock, size);
        const float least = best[n - 1].logprob;
        int above = 0;
        for (size_t i = begin; i < end; ++i) above |= values[i] > least ? 1 : 0;
        for (size_t i = begin; above != 0 && i < end; ++i) insert(i);
    }
    for (size_t i = 0; i < n; ++i) {
        if (best[i].token < 0) break;
        best[i].logprob = row.logprob(best[i].logprob);
        if (best[i].logprob == -kInfinity) best[i].token = -1;
    }
}

}  // namespace

void check_token(int64_t token, size_t vocab_size) {
    if (token >= 0 && static_cast<size_t>(token) < vocab_size) return;
    throw std::invalid_argument("token id " + std::to_string(token) + " is outside the vocabulary");
}

size_t sampler_scratch_bytes(size_t vocab_size) { return Buffers(0, vocab_size).bytes; }

Drawn draw_token(float* logits, size_t vocab_size, const Sampling& sampling, const History& history, double uniform,
                 void* memory, Drawn* alternatives, TokenSetBuffer* kept) {
    const Buffers buffers(reinterpret_cast<uintptr_t>(memory), vocab_size);
    const bool greedy = sampling.temperature == 0;
    const bool adjusted = adjusts(sampling, history);
    const bool filtered = !greedy && (sampling.top_k > 0 || sampling.top_p < 1 || sampling.min_p > 0);
    const float temperature = greedy ? 1.0f : sampling.temperature;
    const bool reports_model = sampling.model_logprobs && (adjusted || filtered || temperature != 1);

    LogitRow model;
    if (reports_model) {
        model = sum_exp(logits, vocab_size, 1.0f, buffers);
        if (adjusted) {
            std::memcpy(buffers.model_logits, logits, vocab_size * sizeof *logits);
            model.logits = buffers.model_logits;
        }
    }
    if (adjusted) adjust(logits, vocab_size, sampling, history);

    LogitRow row{logits, vocab_size, temperature};
    Candidates candidates{buffers.values, buffers.ids, buffers.weights};
    Drawn drawn;
    if (filtered) {
        drawn = draw_filtered(row, candidates, sampling, uniform, buffers);
    } else {
        row = sum_exp(logits, vocab_size, temperature, buffers);
        drawn = greedy ? draw_greedy(row, buffers) : draw_unfiltered(row, uniform, buffers);
    }
    if (std::isnan(drawn.logprob)) return drawn;
    if (kIsComplete && kept != nullptr) {
        if (filtered) {
            kept->keep({candidates.ids, candidates.n}, vocab_size);
        } else {
            kept->keep_allowed(history.allowed, history.banned, vocab_size);
        }
    }
    if (reports_model) drawn.logprob = model.logprob(model.logits[drawn.token]);
    if (sampling.top_logprobs > 0) {
        const LogitRow& reported = reports_model ? model : row;
        if (filtered && !reports_model) {
            list_top_logprobs(row, candidates.values, candidates.ids, candidates.n, alternatives,
                              sampling.top_logprobs);
        } else {
            list_top_logprobs(reported, reported.logits, nullptr, vocab_size, alternatives, sampling.top_logprobs);
        }
    }
    return drawn;
}

}  // namespace whet
