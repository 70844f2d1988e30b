// The sampler without Python, on heap buffers of exactly their size, against a naive sampler in double that sorts the
// row; and stop strings, against a search in the full text.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "engine/sampler.h"
#include "engine/stop_strings.h"
#include "runtime/philox.h"
#include "tests/checks.h"

using whet::Drawn;
using whet::History;
using whet::Sampling;

namespace {

// The ids that pass the filters, by decreasing logit, then by id.
std::vector<size_t> kept(const std::vector<double>& z, const Sampling& s) {
    std::vector<size_t> ids(z.size());
    std::iota(ids.begin(), ids.end(), size_t{0});
    std::stable_sort(ids.begin(), ids.end(), [&](size_t a, size_t b) { return z[a] > z[b]; });
    const double top = z[ids[0]];
    if (s.top_k > 0) ids.resize(std::min(ids.size(), static_cast<size_t>(s.top_k)));
    double total = 0, before = 0;
    for (size_t id : ids) total += std::exp(z[id] - top);
    size_t n = 0;
    for (; n < ids.size() && (s.top_p == 1 || n == 0 || before < s.top_p * total); ++n)
        before += std::exp(z[ids[n]] - top);
    ids.resize(n);
    while (z[ids.back()] < top + std::log(static_cast<double>(s.min_p))) ids.pop_back();
    return ids;
}

struct Expected {
    size_t token;
    double logprob, margin;  // margin: distance of the uniform from drawing another token
};

Expected plain_draw(const std::vector<float>& logits, const Sampling& s, const History& history, double uniform) {
    std::vector<double> z(logits.begin(), logits.end());
    for (int32_t token : history.banned) z[token] = -std::numeric_limits<double>::infinity();
    for (const whet::TokenBias& bias : s.logit_bias) z[bias.token] += bias.bias;
    for (size_t i = 0; i < z.size(); ++i) {
        const bool seen = history.seen[i / 64] >> (i % 64) & 1;
        if (seen) z[i] = z[i] > 0 ? z[i] / s.repetition_penalty : z[i] * s.repetition_penalty;
    }
    for (const whet::TokenCount& of : history.generated) {
        z[of.token] -= s.presence_penalty + static_cast<double>(s.frequency_penalty) * of.count;
    }
    for (double& value : z) value /= s.temperature;
    std::vector<size_t> ids = kept(z, s);
    const double top = z[ids[0]];
    std::sort(ids.begin(), ids.end());
    double total = 0, cumulative = 0;
    for (size_t id : ids) total += std::exp(z[id] - top);
    for (size_t id : ids) {
        const double p = std::exp(z[id] - top) / total;
        if (cumulative + p > uniform)
            return {id, std::log(p), std::min(uniform - cumulative, cumulative + p - uniform)};
        cumulative += p;
    }
    return {ids.back(), 0, 0};
}

void test_draws(size_t n, const Sampling& s, std::mt19937_64& bits) {
    std::normal_distribution<float> wide(0.0f, 3.0f);
    std::vector<float> logits(n);
    for (float& logit : logits) logit = wide(bits);
    if (n > 2) logits[n / 2] = -std::numeric_limits<float>::infinity();
    std::vector<uint64_t> seen((n + 63) / 64);
    for (uint64_t& word : seen) word = bits() & bits();
    const double uniform = static_cast<double>(bits() >> 11) * 0x1p-53;
    const auto last = static_cast<int32_t>(n - 1);
    const std::vector<whet::TokenCount> counts{{0, 2}, {last / 3 + 1, 1}};
    const std::vector<int32_t> banned{last};
    History history{.seen = seen.data()};
    if (s.counts_tokens() && n > 2) history.generated = counts;
    if (s.counts_tokens() && n > 4) history.banned = banned;
    const Expected expected = plain_draw(logits, s, history, uniform);

    const std::unique_ptr<float[]> copy(new float[n]);
    std::copy(logits.begin(), logits.end(), copy.get());
    const size_t bytes = whet::sampler_scratch_bytes(n);
    const std::unique_ptr<char[]> scratch(new char[bytes]);
    const std::unique_ptr<Drawn[]> best(new Drawn[s.top_logprobs]);
    const Drawn drawn = whet::draw_token(copy.get(), n, s, history, uniform, scratch.get(), best.get());
    expect(drawn.token >= 0 && static_cast<size_t>(drawn.token) < n, "the token is in range, n = %zu", n);
    for (size_t i = 0; i < s.top_logprobs; ++i) {
        expect(best[i].token >= -1 && best[i].token < static_cast<int32_t>(n), "alternatives are in range");
        expect(i == 0 || best[i].logprob <= best[i - 1].logprob, "alternatives are in decreasing order");
        expect(best[i].token != drawn.token || best[i].logprob == drawn.logprob,
               "the drawn token has the same log-prob among the alternatives");
    }
    if (expected.margin < 1e-5) return;
    expect(static_cast<size_t>(drawn.token) == expected.token, "the same token, n = %zu", n);
    expect(std::abs(drawn.logprob - expected.logprob) < 2e-5, "the same log-prob, n = %zu", n);
}

// Reference, NumPy 2.4: np.random.Generator(np.random.Philox(key=[7, 0], counter=[0, 0, 2, 5])).random(6).
void test_uniforms() {
    const double expected[6] = {0x1.002134ae40be0p-2, 0x1.468f8fccb87c4p-2, 0x1.c41ef0588aba0p-3,
                                0x1.175a998b2043ep-2, 0x1.c507d470fb8c0p-2, 0x1.88046f0cc163ep-2};
    for (uint64_t t = 0; t < 6; ++t)
        expect(whet::token_uniform(7, 2, 5, t) == expected[t], "the same uniform, t = %zu", size_t(t));
}

// Random texts of a few letters, split into random tokens, with strings that occur often.
void test_stop_strings(std::mt19937_64& bits) {
    const auto letters = [&](size_t n) {
        std::string out;
        while (out.size() < n) out += static_cast<char>('a' + bits() % 3);
        return out;
    };
    for (int round = 0; round < 2000; ++round) {
        const std::string text = letters(bits() % 40);
        auto texts = std::make_shared<whet::TokenTexts>();
        texts->bytes = text;
        for (size_t end = 0; end < text.size(); texts->ends.push_back(static_cast<int32_t>(end)))
            end = std::min<size_t>(text.size(), end + bits() % 4);
        std::vector<std::string> strings;
        for (size_t i = 0; i < 1 + bits() % 3; ++i) strings.push_back(letters(1 + bits() % 5));
        size_t first_end = text.size() + 1, cut = text.size();
        for (const std::string& string : strings) {
            const size_t at = text.find(string);
            if (at == std::string::npos || at + string.size() > first_end) continue;
            cut = at + string.size() < first_end ? at : std::min(cut, at);
            first_end = at + string.size();
        }
        const whet::StopStrings stops(texts, strings);
        whet::StopStrings::State state;
        whet::StopStrings::Match match{false, 0};
        size_t n = 0;
        while (n < texts->ends.size() && !match.is_complete) {
            match = stops.read(state, static_cast<int32_t>(n++), true);
        }
        expect(match.is_complete == (first_end <= text.size()), "a match is complete, in %s", text.c_str());
        if (!match.is_complete) continue;
        const auto shown = static_cast<size_t>(texts->ends[n - 1] - match.n_withheld);
        expect(shown == cut, "%s is truncated at %zu", text.c_str(), cut);
    }
}

}  // namespace

int main() {
    return run_tests([] {
        std::mt19937_64 bits(7);
        const Sampling settings[] = {
            {},
            {.temperature = 0.6f},
            {.top_k = 1},
            {.top_k = 9},
            {.temperature = 1.4f, .top_k = 200},
            {.top_p = 0.8f},
            {.temperature = 0.8f, .top_p = 0.999f, .repetition_penalty = 1.5f},
            {.min_p = 0.02f, .repetition_penalty = 0.7f},
            {.temperature = 2.0f, .top_p = 0.6f, .min_p = 0.3f, .top_k = 30},
            {.presence_penalty = 0.5f, .frequency_penalty = -1.5f, .top_logprobs = 7},
            {.top_p = 0.8f, .presence_penalty = 1, .top_k = 20, .top_logprobs = 20, .logit_bias = {{0, 2.5f}}},
        };
        std::vector<size_t> lengths(70);
        std::iota(lengths.begin(), lengths.end(), size_t{1});
        for (size_t n : {127, 128, 129, 255, 257, 1000, 1023, 1024, 1025, 1040, 2500, 5003}) lengths.push_back(n);
        for (size_t n : lengths) {
            for (Sampling s : settings) {
                test_draws(n, s, bits);
                test_draws(n, s, bits);
            }
        }
        test_uniforms();
        test_stop_strings(bits);
    });
}
