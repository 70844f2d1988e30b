// The sampler without Python, on heap buffers of exactly their size, against a plain one in double that sorts the row.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "engine/sampler.h"
#include "runtime/philox.h"
#include "tests/checks.h"

using whet::Drawn;
using whet::Sampling;

namespace {

// The ids that the filters leave, in falling order of logit, then of id.
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
    double logprob, margin;  // how far the uniform is from choosing another token
};

Expected plain_draw(const std::vector<float>& logits, const Sampling& s, const std::vector<uint64_t>& seen,
                    double uniform) {
    std::vector<double> z(logits.begin(), logits.end());
    for (size_t i = 0; i < z.size(); ++i) {
        if (seen[i / 64] >> (i % 64) & 1) z[i] = z[i] > 0 ? z[i] / s.repetition_penalty : z[i] * s.repetition_penalty;
        z[i] /= s.temperature;
    }
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
    const Expected expected = plain_draw(logits, s, seen, uniform);

    const std::unique_ptr<float[]> copy(new float[n]);
    std::copy(logits.begin(), logits.end(), copy.get());
    const size_t bytes = whet::sampler_scratch_bytes(n);
    const std::unique_ptr<char[]> scratch(new char[bytes]);
    const Drawn drawn = whet::draw_token(copy.get(), n, s, seen.data(), uniform, scratch.get());
    expect(drawn.token >= 0 && static_cast<size_t>(drawn.token) < n, "the token is in range, n = %zu", n);
    if (expected.margin < 1e-5) return;
    expect(static_cast<size_t>(drawn.token) == expected.token, "the same token, n = %zu", n);
    expect(std::abs(drawn.logprob - expected.logprob) < 2e-5, "the same log-prob, n = %zu", n);
}

// Numbers of NumPy 2.4: np.random.Generator(np.random.Philox(key=[7, 0], counter=[0, 0, 2, 5])).random(6).
void test_uniforms() {
    const double expected[6] = {0x1.002134ae40be0p-2, 0x1.468f8fccb87c4p-2, 0x1.c41ef0588aba0p-3,
                                0x1.175a998b2043ep-2, 0x1.c507d470fb8c0p-2, 0x1.88046f0cc163ep-2};
    for (uint64_t t = 0; t < 6; ++t)
        expect(whet::token_uniform(7, 2, 5, t) == expected[t], "the same uniform, t = %zu", size_t(t));
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
    });
}
