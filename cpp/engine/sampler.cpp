#include "engine/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>

#include "kernels/dispatch.h"
#include "runtime/ceil_div.h"

namespace whet {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr Drawn kNothingDrawn{0, kNaN};

constexpr size_t kBlock = 1024;  // logits whose weights have one sum
constexpr size_t kSpan = 256;    // logits that lane_maxima_f32 makes 16 maxima of
constexpr int kDigit = 11;       // bits of a digit of the radix select

struct Item {
    uint32_t key;  // 0 for the greatest logit, rising as logits fall
    float amount;
};

struct Scratch {
    double* sums;
    double* buckets;
    Item* items;
    float* block_tops;
    float* lane_tops;
    float* values;
    float* weights;
    float* model_logits;
    int32_t* ids;
    size_t bytes = 0;

    Scratch(uintptr_t memory, size_t vocab_size) {
        const size_t n_blocks = ceil_div(vocab_size, kBlock), n_spans = ceil_div(vocab_size, kSpan);
        const auto take = [&](auto*& array, size_t n) {
            array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(memory + bytes);
            bytes += n * sizeof *array;
        };
        take(sums, n_blocks);
        take(buckets, size_t{1} << kDigit);
        take(items, vocab_size);
        take(block_tops, n_blocks);
        take(lane_tops, 16 * n_spans);
        take(values, vocab_size + 16);
        take(weights, std::max(vocab_size, kBlock));
        take(model_logits, vocab_size);
        take(ids, vocab_size + 16);
    }
};

// A row, and what its weights are relative to.
struct Row {
    const float* logits = nullptr;
    size_t size = 0;
    float temperature = 1;
    float top = kNaN;
    double total = 0;

    // log2(e) / temperature, finite: 0 times it stays 0.
    float scale() const { return static_cast<float>(std::min(0x1.71547652b82fep+0 / temperature, 0x1.fffffep+127)); }
    double factor(float block_top) const { return std::exp2((static_cast<double>(block_top) - top) * scale()); }
    float logprob(float logit) const {
        return static_cast<float>((static_cast<double>(logit) - top) / temperature - std::log(total));
    }
    bool is_proper() const { return total > 0 && std::isfinite(total); }
};

// The row with the sum of its weights; scratch.sums are those of its blocks, all relative to the row's top.
Row sum_weights(const float* logits, size_t size, float temperature, const Scratch& scratch) {
    Row row{logits, size, temperature};
    const size_t n_blocks = ceil_div(size, kBlock);
    if (n_blocks == 0) return row;
    kernels().exp_sum_blocks_f32(logits, size, kBlock, row.scale(), scratch.sums, scratch.block_tops);
    row.top = scratch.block_tops[n_blocks - 1];
    float block_top = kNaN;
    double factor = 0;
    for (size_t b = 0; b < n_blocks; ++b) {
        if (scratch.block_tops[b] != block_top) {
            block_top = scratch.block_tops[b];
            factor = row.factor(block_top);
        }
        scratch.sums[b] *= factor;
        row.total += scratch.sums[b];
    }
    return row;
}

double target_of(double uniform, double total) { return std::min(uniform * total, std::nextafter(total, 0.0)); }

// The first of n whose cumulative weight, times `factor` and added to `before`, exceeds the target. Where rounding
// keeps the total below the target, the last of non-zero weight.
size_t find_token(const float* weights, size_t n, double factor, double before, double target) {
    size_t last = 0;
    for (size_t i = 0; i < n; ++i) {
        before += weights[i] * factor;
        if (before > target) return i;
        if (weights[i] > 0) last = i;
    }
    return last;
}

Drawn draw_plain(const Row& row, double uniform, const Scratch& scratch) {
    if (!row.is_proper()) return kNothingDrawn;
    const double target = target_of(uniform, row.total);
    double before = 0;
    size_t b = 0;
    while (before + scratch.sums[b] <= target) before += scratch.sums[b++];
    const size_t begin = b * kBlock, length = std::min(kBlock, row.size - begin);
    const float block_top = scratch.block_tops[b];
    kernels().exp_weights_f32(row.logits + begin, length, block_top, row.scale(), scratch.weights);
    const size_t token = begin + find_token(scratch.weights, length, row.factor(block_top), before, target);
    return {static_cast<int32_t>(token), row.logprob(row.logits[token])};
}

Drawn draw_greedy(const Row& row, const Scratch& scratch) {
    if (!row.is_proper()) return kNothingDrawn;
    size_t b = 0;
    while (scratch.block_tops[b] != row.top) ++b;
    const float* begin = row.logits + b * kBlock;
    const float* found = std::find(begin, row.logits + row.size, row.top);
    return {static_cast<int32_t>(found - row.logits), row.logprob(row.top)};
}

// ---------------------------------------------------------------- filters

// Tokens that may be drawn, in order of id: all of the row at or above some cut. Arrays in the scratch.
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

// Monotonic in z; -0 and +0 are equal.
uint32_t order_of(float z) {
    const auto bits = std::bit_cast<uint32_t>(z + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000;
}

// The cutoff of the best items: those with a smaller key are kept, and the first n_equal with this key.
struct Edge {
    uint32_t key;
    size_t n_equal;
};

// In rising order of key an item is kept where the amounts before it sum to less than `limit`; the first is always
// kept. A radix select: sum the amounts by digit, go on with the items of the digit in which the limit falls. Linear in
// n; the items are overwritten.
Edge edge_of(Item* items, size_t n, double limit, double* buckets) {
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
    Edge edge{items[0].key, 0};
    do before += items[0].amount;
    while (++edge.n_equal < n && before < limit);
    return edge;
}

// Keeps the candidates, in falling order, before which the weights (or numbers, where by_weight is false) sum to less
// than `limit`; of equal ones those of lower id.
void keep_best(Candidates& candidates, bool by_weight, double limit, float top, const Scratch& scratch) {
    const uint32_t first = order_of(top);
    for (size_t i = 0; i < candidates.n; ++i) {
        scratch.items[i] = {first - order_of(candidates.values[i]), by_weight ? candidates.weights[i] : 1.0f};
    }
    Edge edge = edge_of(scratch.items, candidates.n, limit, scratch.buckets);
    candidates.keep(by_weight, [&](float value) {
        const uint32_t key = first - order_of(value);
        const bool at_edge = key == edge.key && edge.n_equal > 0;
        edge.n_equal -= at_edge;
        return key < edge.key || at_edge;
    });
}

// A cut that keeps at least k logits of the row, and few more: the k-th greatest maximum of disjoint sets.
float cut_for(size_t k, float* maxima, size_t n) {
    if (k > n) return kLowest;
    while (n >= 8 * k) {
        const size_t half = (n + 1) / 2;
        for (size_t i = half; i < n; ++i) maxima[i - half] = std::max(maxima[i - half], maxima[i]);
        n = half;
    }
    std::nth_element(maxima, maxima + (k - 1), maxima + n, std::greater<>());
    return std::max(maxima[k - 1], kLowest);
}

float min_p_cut(const Row& row, float min_p) {
    if (min_p == 0) return kLowest;
    return std::max(kLowest, row.top + static_cast<float>(row.temperature * std::log(static_cast<double>(min_p))));
}

void gather(Candidates& candidates, const Row& row, float cut) {
    candidates.n = kernels().gather_above_f32(row.logits, row.size, cut, candidates.values, candidates.ids);
}

double weigh(Candidates& candidates, const Row& row) {
    return kernels().exp_weights_f32(candidates.values, candidates.n, row.top, row.scale(), candidates.weights);
}

// Top-k leaves row.top and row.total those of what it keeps; total 0 or NaN where the logits are not proper.
void apply_top_k(Candidates& candidates, Row& row, size_t k, const Scratch& scratch) {
    row.top = kernels().lane_maxima_f32(row.logits, row.size, scratch.lane_tops);
    if (!std::isfinite(row.top)) return;
    gather(candidates, row, cut_for(k, scratch.lane_tops, ceil_div(row.size, kSpan) * 16));
    if (candidates.n > k) keep_best(candidates, false, static_cast<double>(k), row.top, scratch);
    row.total = weigh(candidates, row);
}

// Top-p of the whole row. The tokens below a cut have together less than its weight times their number; the bound is
// loose, so a higher cut is tried first. min-p's cut only shortens what top-p keeps.
void apply_top_p(Candidates& candidates, const Row& row, const Sampling& sampling, const Scratch& scratch) {
    const double limit = sampling.top_p * row.total, dropped = row.total - limit, n = static_cast<double>(row.size);
    const float least = min_p_cut(row, sampling.min_p);
    for (const double weight : {4 * dropped / n, dropped / (2 * n), 0.0}) {
        const double cut = row.top + row.temperature * std::log(weight);
        gather(candidates, row, std::max(least, static_cast<float>(std::min<double>(cut, row.top))));
        if (weigh(candidates, row) >= limit || cut <= least) break;
    }
    keep_best(candidates, true, limit, row.top, scratch);
}

// Leaves the row's top and total those of the candidates that are left.
Drawn draw_filtered(Row& row, Candidates& candidates, const Sampling& sampling, double uniform,
                    const Scratch& scratch) {
    const bool by_k = sampling.top_k > 0 && static_cast<size_t>(sampling.top_k) < row.size;
    if (by_k) {
        apply_top_k(candidates, row, static_cast<size_t>(sampling.top_k), scratch);
    } else {
        row = sum_weights(row.logits, row.size, row.temperature, scratch);
    }
    if (!row.is_proper()) return kNothingDrawn;
    const float least = min_p_cut(row, sampling.min_p);
    if (!by_k && sampling.top_p < 1) {
        apply_top_p(candidates, row, sampling, scratch);
    } else if (!by_k) {
        gather(candidates, row, least);
        weigh(candidates, row);
    } else if (sampling.top_p < 1) {
        keep_best(candidates, true, sampling.top_p * row.total, row.top, scratch);
    }
    if (sampling.min_p > 0) candidates.keep(true, [&](float value) { return value >= least; });
    row.total = 0;
    for (size_t i = 0; i < candidates.n; ++i) row.total += candidates.weights[i];
    const size_t i = find_token(candidates.weights, candidates.n, 1.0, 0.0, target_of(uniform, row.total));
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
    for (int32_t token : history.banned) logits[token] = -std::numeric_limits<float>::infinity();
    for (const TokenBias& bias : sampling.logit_bias) logits[bias.token] += bias.bias;
    if (history.seen != nullptr && sampling.repetition_penalty != 1) {
        penalise(logits, size, history.seen, sampling.repetition_penalty);
    }
    for (const TokenCount& of : history.generated) {
        const float frequency = sampling.frequency_penalty * static_cast<float>(of.count);
        logits[of.token] = logits[of.token] - frequency - sampling.presence_penalty;
    }
}

bool adjusts(const Sampling& sampling, const History& history) {
    return (history.seen != nullptr && sampling.repetition_penalty != 1) || !history.generated.empty() ||
           !history.banned.empty() || !sampling.logit_bias.empty();
}

// The n greatest of `size` values, in falling order, as tokens with their log-probs in the row. Values are in rising
// order of their tokens' ids, which are their places where `ids` is null.
void list_best(const Row& row, const float* values, const int32_t* ids, size_t size, Drawn* best, size_t n) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    std::fill_n(best, n, Drawn{-1, -kInfinity});
    for (size_t i = 0; i < size; ++i) {
        if (!(values[i] > best[n - 1].logprob)) continue;
        size_t at = n - 1;
        for (; at > 0 && best[at - 1].logprob < values[i]; --at) best[at] = best[at - 1];
        best[at] = {ids == nullptr ? static_cast<int32_t>(i) : ids[i], values[i]};
    }
    for (size_t i = 0; i < n; ++i) {
        if (best[i].token < 0) break;
        best[i].logprob = row.logprob(best[i].logprob);
        if (best[i].logprob == -kInfinity) best[i].token = -1;
    }
}

}  // namespace

size_t sampler_scratch_bytes(size_t vocab_size) { return Scratch(0, vocab_size).bytes; }

Drawn draw_token(float* logits, size_t vocab_size, const Sampling& sampling, const History& history, double uniform,
                 void* memory, Drawn* alternatives) {
    const Scratch scratch(reinterpret_cast<uintptr_t>(memory), vocab_size);
    const bool greedy = sampling.temperature == 0;
    const bool adjusted = adjusts(sampling, history);
    const bool filtered = !greedy && (sampling.top_k > 0 || sampling.top_p < 1 || sampling.min_p > 0);
    const float temperature = greedy ? 1.0f : sampling.temperature;
    const bool reports_model = sampling.model_logprobs && (adjusted || filtered || temperature != 1);

    Row model;
    if (reports_model) {
        model = sum_weights(logits, vocab_size, 1.0f, scratch);
        if (adjusted) {
            std::memcpy(scratch.model_logits, logits, vocab_size * sizeof *logits);
            model.logits = scratch.model_logits;
        }
    }
    if (adjusted) adjust(logits, vocab_size, sampling, history);

    Row row{logits, vocab_size, temperature};
    Candidates candidates{scratch.values, scratch.ids, scratch.weights};
    Drawn drawn;
    if (filtered) {
        drawn = draw_filtered(row, candidates, sampling, uniform, scratch);
    } else {
        row = sum_weights(logits, vocab_size, temperature, scratch);
        drawn = greedy ? draw_greedy(row, scratch) : draw_plain(row, uniform, scratch);
    }
    if (std::isnan(drawn.logprob)) return drawn;
    if (reports_model) drawn.logprob = model.logprob(model.logits[drawn.token]);
    if (sampling.top_logprobs > 0) {
        const Row& reported = reports_model ? model : row;
        if (filtered && !reports_model) {
            list_best(row, candidates.values, candidates.ids, candidates.n, alternatives, sampling.top_logprobs);
        } else {
            list_best(reported, reported.logits, nullptr, vocab_size, alternatives, sampling.top_logprobs);
        }
    }
    return drawn;
}

}  // namespace whet
