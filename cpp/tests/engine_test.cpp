// The engine without Python, on small random models, for sanitizers: batch invariance to the bit, and freed pages after
// any cancellation. Numbers are checked against transformers in tests/engine.
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <string_view>
#include <vector>

#include "runtime/ceil_div.h"
#include "runtime/job_trace.h"
#include "runtime/thread_pool.h"
#include "small_model.h"
#include "tests/checks.h"

using namespace whet;

namespace {

constexpr KvType kKvTypes[] = {KvType::kFloat32, KvType::kBFloat16, KvType::kInt8};
const size_t kLengths[] = {1, 63, 64, 65, 150, 129};

void test_batch_invariance(int kind, WeightFormat format, KvType kv_type) {
    Model model(config_of(kind), format, 64 + 128, kv_type);
    std::vector<Outputs> expected;
    const Limits limits[] = {{model.kv_bytes(200), 64, 128}, {model.kv_bytes(9), 3, 5}, {model.kv_bytes(40), 7, 64}};
    for (const Limits& limit : limits) {
        Engine s(model.transformer, limit);
        std::vector<uint64_t> ids;
        for (size_t i = 0; i < std::size(kLengths); ++i) ids.push_back(s.add(prompt(kLengths[i], 5, 70, i)));
        run(s);
        for (size_t i = 0; i < ids.size(); ++i) {
            expect(s.job(ids[i]).done, "every request is done");
            if (expected.size() <= i) {
                expected.push_back(outputs_of(s, ids[i]));
            } else {
                expect(outputs_of(s, ids[i]) == expected[i], "a completion depends only on its key");
            }
        }
        expect(s.pages().n_free() == s.pages().n_pages(), "all pages are free");
    }
    // Log-probs of the samples, scored with a different chunking.
    Engine s(model.transformer, {model.kv_bytes(40), 7, 33});
    Request score;
    score.tokens = tokens(150, 1);
    score.tokens.insert(score.tokens.end(), expected[4][1].first.begin(), expected[4][1].first.end());
    score.score_from = 150, score.entropy = true;
    const uint64_t id = s.add(score);
    run(s);
    for (size_t i = 0; i < 70; ++i) {
        expect(std::abs(s.job(id).logprobs[i] - expected[4][1].second[i]) < 1e-5, "scored as sampled");
    }
}

// The mixture of a layer against float64: the most probable experts, of equal ones the first; rows of other tokens do
// not matter, to the bit.
void test_experts(Router router, Activation activation) {
    ModelConfig c = config_of(kMixture);
    c.router = router, c.activation = activation;
    Model model(c, WeightFormat::kFloat32, 8, KvType::kFloat32);
    LayerWeights& w = model.weights->layers[1];
    const size_t d = c.hidden_dim, f = c.expert_dim, n_experts = c.n_experts;
    if (router == Router::kSigmoid) {
        for (size_t e = 0; e < n_experts; ++e) w.router_correction.push_back(0.3f * static_cast<float>(e % 3));
    }
    const auto values = [](const Matrix& matrix) {
        std::vector<float> out(matrix.n() * matrix.k());
        matrix.rows(0, matrix.n(), out.data(), false);
        return out;
    };
    const std::vector<float> gates = values(w.router), up = values(w.experts_up), down = values(w.experts_down);
    const std::vector<float>&up_bias = w.experts_up.bias, &down_bias = w.experts_down.bias;
    expect(up_bias.empty() == (activation != Activation::kClampedSwiglu), "biases of experts");
    constexpr size_t n = 50;
    std::vector<float> x = normal(n * d, 3), out(n * d, 0.5f);
    std::fill_n(x.begin(), d, 0.0f);  // equal probabilities
    Experts experts(c, n);
    const std::vector<InputToken> tokens(n, InputToken{0, 0, nullptr, nullptr});
    experts.add(w, tokens.data(), 1, x.data(), n, out.data());
    const auto dot = [&](const float* a, const float* b, size_t size) {
        return std::inner_product(a, a + size, b, 0.0, std::plus<>(), [](double p, double q) { return p * q; });
    };
    for (size_t i = 0; i < n; ++i) {
        const float* row = &x[i * d];
        std::vector<double> p(n_experts), expected(d, 0.5);
        double total = 0.0, sum = 0.0;
        for (size_t e = 0; e < n_experts; ++e) {
            const double logit = dot(row, &gates[e * d], d);
            p[e] = router == Router::kSoftmax ? std::exp(logit) : 1 / (1 + std::exp(-logit));
            total += router == Router::kSoftmax ? p[e] : 0.0;
        }
        std::vector<size_t> order(n_experts);
        std::iota(order.begin(), order.end(), size_t{0});
        if (router == Router::kSoftmax)
            for (double& each : p) each /= total;
        const auto key = [&](size_t e) { return p[e] + (w.router_correction.empty() ? 0.0f : w.router_correction[e]); };
        std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return key(a) > key(b); });
        order.resize(c.n_used_experts);
        for (const size_t e : order) sum += p[e];
        for (const size_t e : order) {
            std::vector<float> inner(f);
            for (size_t j = 0; j < f; ++j) {
                double g = dot(row, &up[(e * 2 * f + j) * d], d), u = dot(row, &up[(e * 2 * f + f + j) * d], d);
                if (activation == Activation::kClampedSwiglu) {
                    g = std::min(7.0, g + double{up_bias[e * 2 * f + j]});
                    u = std::clamp(u + double{up_bias[e * 2 * f + f + j]}, -7.0, 7.0) + 1;
                    inner[j] = static_cast<float>(g / (1 + std::exp(-1.702 * g)) * u);
                } else {
                    inner[j] = static_cast<float>(g / (1 + std::exp(-g)) * u);
                }
            }
            for (size_t j = 0; j < d; ++j) {
                const double bias = down_bias.empty() ? 0.0 : double{down_bias[e * d + j]};
                expected[j] += c.router_scale * p[e] / sum * (dot(inner.data(), &down[(e * d + j) * f], f) + bias);
            }
        }
        for (size_t j = 0; j < d; ++j) {
            expect(std::abs(out[i * d + j] - expected[j]) < 1e-5 * (1 + std::abs(expected[j])),
                   "token %zu of a mixture: %g, expected %g", i, static_cast<double>(out[i * d + j]), expected[j]);
        }
        std::vector<float> separate(d, 0.5f);
        experts.add(w, tokens.data(), 1, row, 1, separate.data());
        expect(std::equal(separate.begin(), separate.end(), &out[i * d]), "token %zu of a mixture, separately", i);
    }
}

// The experts of prompts and samples, which depend on neither chunks nor other requests, and do not change results.
void test_recorded_experts() {
    Model model(kMixture, WeightFormat::kFloat32, 16 + 64);
    const ModelConfig& c = model.transformer.config();
    std::vector<std::vector<uint16_t>> expected;
    Outputs outputs;
    for (const size_t chunk : {64, 13, 1}) {
        Engine s(model.transformer, {model.kv_bytes(40), 16, chunk});
        Request recorded = prompt(130, 2, 20, 7), plain = recorded;
        recorded.records_experts = true;
        s.add(prompt(140, 1, 9, 1));  // computes the first pages
        s.step();
        const uint64_t id = s.add(recorded), right = s.add(plain);
        run(s);
        expect(s.job(id).reused == 128, "pages have the experts of their tokens");
        expect(outputs_of(s, id) == outputs_of(s, right), "recording does not change results");
        std::vector<std::vector<uint16_t>> found;
        for (const Sample& sample : s.job(id).samples) found.push_back(sample.experts);
        if (expected.empty()) expected = found, outputs = outputs_of(s, id);
        expect(found == expected && outputs == outputs_of(s, id), "experts do not depend on chunks");
        expect(found[0].size() == 149 * 2 * 3 && found[1].size() == 149 * 2 * 3, "experts of all computed tokens");
    }
    for (const auto& experts : expected) {
        for (size_t i = 0; i < experts.size(); i += c.n_used_experts) {
            const std::set<uint16_t> different(&experts[i], &experts[i] + c.n_used_experts);
            expect(different.size() == c.n_used_experts && *different.rbegin() < c.n_experts, "different experts");
        }
    }
}

// Hidden states do not depend on chunks and on other requests, and give the logits.
void test_hidden_states() {
    Model model(false, WeightFormat::kFloat32, 7 + 64);
    const ModelConfig& c = model.transformer.config();
    std::vector<float> expected;
    for (const size_t chunk : {64, 13}) {
        for (const size_t score_from : {1, 150}) {
            Engine s(model.transformer, {model.kv_bytes(40), 7, chunk});
            Request request;
            request.tokens = tokens(150, 1), request.score_from = score_from, request.hidden = true;
            const uint64_t other = s.add(prompt(100, 2, 10, 0)), id = s.add(request);
            Request logits = request;
            logits.hidden = false, logits.logits = true;
            const uint64_t scored = s.add(logits);
            run(s);
            const Job& job = s.job(id);
            if (expected.empty()) expected = job.hiddens;
            expect(s.job(other).done && job.done && job.logprobs.empty(), "hidden states only");
            expect(job.hiddens.size() == (151 - score_from) * c.hidden_dim, "a hidden state per token");
            expect(std::equal(job.hiddens.rbegin(), job.hiddens.rend(), expected.rbegin()), "equal hidden states");
            std::vector<float> row(c.vocab_size);
            model.transformer.logits(job.hiddens.data(), 1, row.data());
            expect(std::equal(row.begin(), row.end(), s.job(scored).logits.begin()), "the hidden states of the logits");
            expect(s.pages().n_free() == s.pages().n_pages(), "all pages are free");
        }
    }
}

void test_invalid_requests() {
    Model model(false, WeightFormat::kQ8_0, 16 + 32);
    const ModelConfig& c = model.transformer.config();
    Engine s(model.transformer, {model.kv_bytes(4), 16, 32});
    const auto expect_rejected = [&](const char* what, auto&& change) {
        Request request = prompt(100, 1, 10, 0);
        change(request);
        bool rejected = false;
        try {
            s.add(std::move(request));
        } catch (const std::invalid_argument&) {
            rejected = true;
        }
        expect(rejected, what);
    };
    const auto outside = static_cast<int32_t>(c.vocab_size);
    expect_rejected("no tokens", [](Request& r) { r.tokens.clear(); });
    expect_rejected("more tokens than positions", [&](Request& r) { r.tokens = tokens(c.max_position + 1, 0); });
    expect_rejected("no position for a sampled token", [&](Request& r) { r.tokens = tokens(c.max_position, 0); });
    expect_rejected("a negative token", [](Request& r) { r.tokens[99] = -1; });
    expect_rejected("a token outside the vocabulary", [=](Request& r) { r.tokens[99] = outside; });
    expect_rejected("a stop token outside the vocabulary", [=](Request& r) { r.stop_tokens = {outside}; });
    expect_rejected("a bias outside the vocabulary", [=](Request& r) { r.sampling.logit_bias = {{outside, 1.0f}}; });
    expect_rejected("an unknown adapter", [](Request& r) { r.adapter = 7; });
    expect_rejected("nothing to sample", [](Request& r) { r.max_new_tokens = 0; });
    expect_rejected("a score of the first token", [](Request& r) { r.n = 0, r.score_from = 0; });
    expect_rejected("hidden states of a prompt with samples", [](Request& r) { r.hidden = true; });
    expect_rejected("a score after the last token", [](Request& r) { r.n = 0, r.score_from = 101; });
    expect_rejected("more pages than the cache has", [](Request& r) { r.max_new_tokens = 200; });
    Request last = prompt(200, 1, 1, 0);
    last.n = 0, last.score_from = 200;
    const uint64_t id = s.add(std::move(last));
    run(s);
    expect(s.job(id).done && s.job(id).logprobs.empty(), "a score from the end of the tokens is empty");
}

void test_cancelling(int kind) {
    Model model(kind, WeightFormat::kQ8_0, 16 + 32);
    std::mt19937 bits(5);
    Engine s(model.transformer, {model.kv_bytes(30), 16, 32, true});
    std::vector<uint64_t> ids;
    for (int round = 0; round < 400; ++round) {
        if (bits() % 3 == 0) ids.push_back(s.add(prompt(1 + bits() % 200, 1 + bits() % 4, 1 + bits() % 100, bits())));
        s.step();
        if (!ids.empty() && bits() % 4 == 0) {
            const size_t i = bits() % ids.size();
            s.remove(ids[i]);
            ids.erase(ids.begin() + static_cast<ptrdiff_t>(i));
        }
    }
    run(s);
    for (uint64_t id : ids) expect(s.job(id).done, "other requests finish");
    expect(s.pages().n_free() == s.pages().n_pages(), "all pages are free after cancellation");
}

// The same samples with and without drafts, which are right where greedy text repeats itself.
void test_speculation(int kind, KvType type) {
    Model model(config_of(kind), WeightFormat::kQ8_0, 12 + 40, type);
    std::vector<Request> requests;
    for (const float temperature : {0.0f, 0.05f, 1.0f}) {
        for (size_t i = 0; i < 4; ++i) {
            Request r = prompt(30 + 17 * i, 1 + i % 2, 150, i);
            r.sampling.temperature = temperature;
            r.sampling.top_logprobs = i == 1 ? 3 : 0;
            r.sampling.repetition_penalty = i == 2 ? 1.1f : 1.0f;
            r.sampling.logit_bias = {{5, 0.5f}};
            if (i == 3) r.stop_tokens = {1, 17, 40}, r.min_new_tokens = 60;
            r.keep = i == 1;
            requests.push_back(r);
        }
    }
    std::vector<Outputs> expected;
    for (const auto& [speculation, n_together] :
         {std::pair<bool, size_t>{false, 12}, {true, 1}, {true, 5}, {true, 12}}) {
        Engine s(model.transformer, {model.kv_bytes(90), 12, 40, speculation});
        std::vector<Outputs> found;
        std::vector<std::vector<Drawn>> alternatives;
        for (size_t begin = 0; begin < requests.size(); begin += n_together) {
            std::vector<uint64_t> ids;
            for (size_t i = begin; i < std::min(begin + n_together, requests.size()); ++i) {
                ids.push_back(s.add(requests[i]));
            }
            run(s);
            for (const uint64_t id : ids) {
                found.push_back(outputs_of(s, id));
                for (const Sample& sample : s.job(id).samples) {
                    const size_t n_top = s.job(id).request.sampling.top_logprobs;
                    for (size_t i = 0; i < sample.tokens.size() * n_top; ++i) {
                        found.back()[0].first.push_back(sample.alternatives.at(i).token);
                        found.back()[0].second.push_back(sample.alternatives.at(i).logprob);
                    }
                }
            }
        }
        if (expected.empty()) expected = found;
        expect(found == expected, "drafts change a sample of %d, %zu together", kind, n_together);
        expect(s.n_accepted() <= s.n_drafted(), "accepted drafts");
        if (!speculation || kind == kDelta) {
            expect(s.n_drafted() == 0, "no drafts");
        } else if (n_together == 1 && kind != kSizes) {  // its text does not repeat itself
            expect(s.n_accepted() > 20, "%zu of %zu tokens of drafts are right", s.n_accepted(), s.n_drafted());
        }
        s.evict_retained();
        expect(s.pages().n_free() == s.pages().n_pages(), "all pages are free");
    }
}

// A draft model with the engine's weights draws the engine's tokens, after right and wrong drafts.
void test_draft_sequence() {
    Model model(config_of(kLlama), WeightFormat::kQ8_0, 12 + 40, KvType::kFloat32);
    const size_t vocab_size = model.transformer.config().vocab_size;
    for (const float temperature : {0.0f, 1.0f}) {
        Request request = prompt(100, 2, 90, 3);
        request.sampling.temperature = temperature;
        request.stop_tokens = {1, 17}, request.min_new_tokens = 90;
        Engine s(model.transformer, {model.kv_bytes(30), 12, 40});
        const uint64_t id = s.add(request);
        run(s);
        const std::vector<int32_t>& tokens = s.job(id).samples[1].tokens;
        DraftModel drafts(model.transformer, 4, 12, vocab_size);
        const auto expect_next = [&](DraftSequence& sequence, size_t at, size_t n) {
            drafts.clear();
            drafts.add(sequence, n);
            for (int chunk = 0; chunk < 3; ++chunk) drafts.draft();
            const auto expected = sequence.expected();
            expect(std::equal(expected.begin(), expected.end(), tokens.begin() + at) && expected.size() == n,
                   "the engine's tokens from %zu on, %zu of %zu", at, expected.size(), n);
        };
        {
            DraftSequence sequence(drafts, request, 1);
            expect_next(sequence, 0, 5);
            for (size_t i = 0; i < 6; ++i) sequence.append(tokens[i]);
            expect_next(sequence, 6, 3);
            sequence.append(tokens[6]);
            expect(sequence.expected().size() == 2, "the rest of a draft");
            sequence.append(tokens[7]), sequence.append(tokens[8]);
            for (size_t i = 9; i < 60; ++i) sequence.append(tokens[i]);
            expect_next(sequence, 60, 2);
        }
        {
            DraftSequence wrong(drafts, request, 1), sequence(drafts, request, 1);
            expect_next(wrong, 0, 4);
            wrong.append((tokens[0] + 1) % static_cast<int32_t>(vocab_size));
            expect(wrong.expected().empty(), "no draft after a wrong token");
            expect(wrong.n_worth_drafting(0.2, 9) < sequence.n_worth_drafting(0.2, 9), "shorter drafts");
            wrong.append(static_cast<int32_t>(vocab_size));
            expect(wrong.n_worth_drafting(0.0, 9) == 0, "no drafts after a token that the model lacks");
            drafts.clear();
            drafts.add(sequence, 1);
            for (int chunk = 0; chunk < 3; ++chunk) drafts.draft();
            expect(sequence.expected().size() == 1 && sequence.expected()[0] == tokens[0],
                   "a page of another sequence");
        }
        drafts.evict_retained();
        expect(drafts.n_free_pages() == 4, "all pages are free");
    }
}

// The same samples with a draft model: the model itself, whose drafts are right, the model in another format, whose
// mostly are, and another one with a smaller vocabulary, whose are not.
void test_draft_models(KvType type) {
    Model model(config_of(kLlama), WeightFormat::kQ8_0, 12 + 40, type);
    Model rounded(config_of(kLlama), WeightFormat::kQ4_0, 12 + 40, type);
    ModelConfig other_config = config_of(kMixture);
    other_config.vocab_size = model.transformer.config().vocab_size - 7;
    Model other(other_config, WeightFormat::kQ8_0, 12 + 40, type);
    std::vector<Request> requests;
    for (size_t i = 0; i < 8; ++i) {
        Request r = prompt(30 + 41 * i, 1 + i % 2, 120, i);
        r.sampling.temperature = i % 3 == 0 ? 0.0f : 1.0f;
        r.sampling.top_logprobs = i == 1 ? 3 : 0;
        r.sampling.repetition_penalty = i == 2 ? 1.1f : 1.0f;
        const auto last = static_cast<int32_t>(model.transformer.config().vocab_size) - 1;  // the other model lacks it
        r.sampling.logit_bias = {{last, 2.0f}};
        if (i == 3) r.stop_tokens = {1, 17, last}, r.min_new_tokens = 60;
        r.keep = i == 1;
        requests.push_back(r);
    }
    std::vector<Outputs> expected;
    for (Transformer* draft :
         {static_cast<Transformer*>(nullptr), &model.transformer, &rounded.transformer, &other.transformer}) {
        for (const size_t n_together : {1, 8}) {
            std::optional<DraftModel> drafts;
            if (draft != nullptr) drafts.emplace(*draft, 40, 12, model.transformer.config().vocab_size);
            Engine s(model.transformer, {model.kv_bytes(90), 12, 40, draft != nullptr}, drafts ? &*drafts : nullptr);
            std::vector<Outputs> found;
            for (size_t begin = 0; begin < requests.size(); begin += n_together) {
                std::vector<uint64_t> ids;
                for (size_t i = begin; i < begin + n_together; ++i) ids.push_back(s.add(requests[i]));
                if (begin == n_together) s.remove(s.add(requests[0]));
                run(s);
                for (const uint64_t id : ids) found.push_back(outputs_of(s, id));
            }
            if (expected.empty()) expected = found;
            expect(found == expected, "a draft model changes a sample, %zu together", n_together);
            if (!drafts) continue;
            s.evict_retained();
            expect(drafts->n_free_pages() == 40, "all pages of the draft model are free");
        }
    }
}

// An ending that repeats, and the tokens that are expected after it.
void test_prompt_lookup() {
    const std::vector<int32_t> text = {1, 2, 3, 4, 5, 6, 9, 1, 2, 3};
    PromptLookup lookup(text, 40);
    const auto draft = [&](double least, size_t most) {
        const auto tokens = lookup.draft(least, most);
        return std::vector<int32_t>(tokens.begin(), tokens.end());
    };
    using Tokens = std::vector<int32_t>;
    expect(draft(0.0, 3) == Tokens{4, 5, 6}, "the tokens after the earlier occurrence");
    expect(draft(0.0, 99) == Tokens{4, 5, 6, 9, 1, 2, 3}, "up to the end of the sequence");
    expect(draft(0.3, 99) == Tokens{4}, "0.45 is above 0.3, 0.45 squared is not");
    expect(draft(1.0, 99).empty(), "a draft that cannot pay");
    for (const int32_t token : {4, 5, 6, 9}) lookup.append(token);
    expect(draft(0.3, 99).size() > 3, "right drafts raise the expected share");
    for (int i = 0; i < 3; ++i) lookup.append(50 + i);
    expect(draft(0.0, 99).empty(), "no repeated ending");
    PromptLookup last(Tokens{7, 8, 1, 5, 7, 8, 2, 7, 8}, 20);
    expect(last.draft(0.0, 1)[0] == 2, "the last occurrence of the same length");
    PromptLookup longest(Tokens{4, 7, 8, 1, 5, 7, 8, 2, 4, 7, 8}, 20);
    expect(longest.draft(0.0, 1)[0] == 1, "the longest repeated ending");
    for (const size_t n : {1, 2, 3}) expect(PromptLookup(std::span(text).first(n), 9).draft(0, 9).empty(), "short");
}

// The share of a row in the time of a step.
void test_step_times() {
    StepTimes times;
    const auto share = [&] { return times.row_s() / times.seconds(1); };
    expect(times.seconds(1) == 0, "not measured");
    for (int i = 0; i < 5; ++i) times.add(1, 0.010);
    expect(share() > 0.05 && share() < 0.3, "a guess: %g", share());
    for (int i = 0; i < 60; ++i) times.add(static_cast<size_t>(1 + i % 9), 0.010 + 0.0005 * (i % 9));
    expect(std::abs(share() - 0.05) < 0.015, "memory-bound: %g", share());
    for (int i = 0; i < 90; ++i) times.add(static_cast<size_t>(1 + i % 9), 0.001 + 0.010 * (1 + i % 9));
    expect(share() > 0.85 && share() <= 1, "compute-bound: %g", share());
}

Request sample_of(const std::vector<int32_t>& tokens, size_t n, size_t max_new, uint64_t index) {
    Request r = prompt(1, n, max_new, index);
    r.tokens = tokens;
    return r;
}

Request score_of(const std::vector<int32_t>& tokens, size_t from, size_t n_top, bool keep) {
    Request r;
    r.tokens = tokens, r.score_from = from, r.keep = keep;
    r.scoring.top_logprobs = n_top;
    return r;
}

// Log-probs and alternatives.
std::pair<std::vector<float>, std::vector<int32_t>> scores_of(const Engine& s, uint64_t id) {
    const Job& job = s.job(id);
    std::pair<std::vector<float>, std::vector<int32_t>> out{job.logprobs, {}};
    for (const Drawn& drawn : job.alternatives) {
        out.first.push_back(drawn.logprob);
        out.second.push_back(drawn.token);
    }
    return out;
}

std::vector<int32_t> concat(std::vector<int32_t> a, const std::vector<int32_t>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

// Continuations of a scored context take its scores from the cache, also those that are queued together with it.
void test_cached_scores() {
    Model model(false, WeightFormat::kBFloat16, 16 + 64);
    Engine s(model.transformer, {model.kv_bytes(60), 16, 64, true}),
        fresh(model.transformer, {model.kv_bytes(60), 16, 64});
    const auto context = tokens(200, 5);
    std::vector<uint64_t> ids;
    std::vector<std::vector<int32_t>> rows;
    for (unsigned i = 0; i < 4; ++i) rows.push_back(concat(context, tokens(10 + 30 * i, 20 + i)));
    rows.push_back(rows[3]), rows.push_back(tokens(128, 5)), rows.push_back(tokens(129, 5)),
        rows.push_back(tokens(64, 5));
    for (const auto& row : rows) ids.push_back(s.add(score_of(row, 1, 1, true)));
    run(s);
    const size_t reused[] = {0, 199, 199, 199, 298, 126, 128, 62};  // the last common token is computed again
    for (size_t i = 0; i < rows.size(); ++i) {
        const uint64_t right = fresh.add(score_of(rows[i], 1, 1, false));
        run(fresh);
        expect(s.job(ids[i]).reused == reused[i], "%zu reuses %zu tokens", i, s.job(ids[i]).reused);
        expect(scores_of(s, ids[i]) == scores_of(fresh, right), "cached scores are the model's");
    }
    expect(s.pages().n_free() == s.pages().n_pages() && s.pages().n_evictable() > 0, "scored pages are retained");
    // Prompts whose pages were retained without scores; a sample of a scored prompt.
    const auto chat = tokens(150, 40);
    Request plain = sample_of(chat, 1, 3, 1), scored = plain;
    plain.keep = scored.keep = true;
    scored.score_from = 1;
    const auto expect_reused = [&](const Request& request, size_t n) {
        const uint64_t id = s.add(request), right = fresh.add(request);
        run(s), run(fresh);
        expect(s.job(id).reused == n, "%zu tokens of a chat are reused, and %zu are expected", s.job(id).reused, n);
        expect(outputs_of(s, id) == outputs_of(fresh, right), "the sample of a scored prompt");
        expect(scores_of(s, id) == scores_of(fresh, right), "the scores of a sampled prompt");
        fresh.evict_retained();
    };
    expect_reused(plain, 0), expect_reused(scored, 0), expect_reused(scored, 148), expect_reused(plain, 149);
    // Requests for other values compute them.
    Request other = score_of(rows[0], 1, 0, true);
    other.scoring.temperature = 0.5f;
    const uint64_t cooler = s.add(other), several = s.add(score_of(rows[0], 1, 3, true));
    run(s);
    expect(s.job(cooler).reused == 0 && s.job(several).reused == 0, "scores of other distributions are computed");
}

// Prompts queued together share the computation of their common beginning: with states, up to its last whole page,
// where the first of them leaves its state.
void test_waiting_prompts(int kind) {
    Model model(kind, WeightFormat::kFloat32, 16 + 48);
    Engine s(model.transformer, {model.kv_bytes(80), 16, 48, true}),
        fresh(model.transformer, {model.kv_bytes(80), 16, 48});
    std::vector<Request> requests;
    for (unsigned i = 0; i < 5; ++i) requests.push_back(sample_of(concat(tokens(200, 1), tokens(i, 9)), 2, 3, i));
    requests.push_back(sample_of(concat(tokens(150, 1), tokens(20, 7)), 1, 3, 5));
    std::vector<uint64_t> ids;
    for (const Request& request : requests) ids.push_back(s.add(request));
    run(s);
    const size_t reused[] = {0, 192, 192, 192, 192, 128};
    for (size_t i = 0; i < requests.size(); ++i) {
        expect(s.job(ids[i]).reused == reused[i], "prompt %zu of model %d reuses %zu tokens", i, kind,
               s.job(ids[i]).reused);
        const uint64_t right = fresh.add(requests[i]);
        run(fresh);
        expect(outputs_of(s, ids[i]) == outputs_of(fresh, right), "the tokens of a separate prompt");
    }
    expect(s.pages().n_free() == s.pages().n_pages(), "all pages are free");
}

// Scores and samples with common prefixes, cancelled at any step, in a cache that evicts, or that has room for all.
void test_random_scores(int kind, size_t n_pages) {
    Model model(kind, WeightFormat::kFloat32, 8 + 32);
    std::mt19937 bits(11);
    Engine s(model.transformer, {model.kv_bytes(n_pages), 8, 32}),
        right(model.transformer, {model.kv_bytes(n_pages), 8, 32});
    for (int round = 0; round < 100; ++round) {
        std::vector<std::pair<uint64_t, Request>> open;
        for (size_t i = 0, n = 1 + bits() % 5; i < n; ++i) {
            const auto row = concat(tokens(30 + bits() % 170, 1), tokens(1 + bits() % 60, bits() % 3));
            Request request = bits() % 3 != 0 ? score_of(row, bits() % 3 != 0 ? 1 : 1 + bits() % row.size(), bits() % 3,
                                                         bits() % 5 != 0)
                                              : sample_of(row, 1 + bits() % 2, 5, bits() % 3);
            if (request.n > 0 && bits() % 2 == 0) request.score_from = 1, request.scoring.top_logprobs = bits() % 3;
            request.keep = bits() % 5 != 0;
            open.emplace_back(s.add(request), request);
        }
        for (size_t steps = bits() % 6; steps > 0; --steps) s.step();
        if (bits() % 2 == 0) {
            const size_t i = bits() % open.size();
            s.remove(open[i].first);
            open.erase(open.begin() + static_cast<ptrdiff_t>(i));
        }
        run(s);
        for (const auto& [id, request] : open) {
            Request separate = request;
            separate.keep = false;
            const uint64_t expected = right.add(separate);
            run(right);
            expect(outputs_of(s, id) == outputs_of(right, expected), "round %d: the samples of a separate request",
                   round);
            expect(scores_of(s, id) == scores_of(right, expected), "round %d: the scores of a separate request", round);
            s.remove(id), right.remove(expected);
        }
        expect(s.pages().n_free() == s.pages().n_pages(), "all pages are free or retained");
    }
}

// Sessions end during the prefill of prompts whose pages others share: the others give the results of a separate run.
void test_sessions(int kind) {
    Model model(kind, WeightFormat::kBFloat16, 16 + 32);
    const Limits limits{model.kv_bytes(60), 16, 32};
    const size_t lengths[] = {200, 150, 230, 70, 200, 131};
    std::vector<Outputs> expected;
    for (size_t i = 0; i < std::size(lengths); ++i) {
        Engine separate(model.transformer, limits);
        const uint64_t id = separate.add(prompt(lengths[i], 2, 9, i));
        run(separate);
        expected.push_back(outputs_of(separate, id));
    }
    for (size_t steps = 0; steps < 24; steps += 3) {
        for (size_t ended = 1; ended < 1u << std::size(lengths); ended += 11) {  // bitmap of sessions that end early
            Engine s(model.transformer, limits);
            std::vector<uint64_t> ids;
            for (size_t i = 0; i < std::size(lengths); ++i) ids.push_back(s.add(prompt(lengths[i], 2, 9, i), i + 1));
            for (size_t i = 0; i < steps; ++i) s.step();
            for (size_t i = 0; i < std::size(lengths); ++i) {
                if (ended >> i & 1) s.end_session(i + 1), s.step();
            }
            run(s);
            for (size_t i = 0; i < std::size(lengths); ++i) {
                if (!(ended >> i & 1)) expect(outputs_of(s, ids[i]) == expected[i], "other sessions are not affected");
            }
            expect(s.pages().n_free() == s.pages().n_pages(), "ended sessions free all pages");
        }
    }
}

// A turn of a conversation: the previous tokens and new ones.
Request turn_of(std::vector<int32_t> history, size_t n_new, size_t max_new, unsigned seed) {
    Request r;
    const std::vector<int32_t> more = tokens(n_new, seed);
    r.tokens = std::move(history);
    r.tokens.insert(r.tokens.end(), more.begin(), more.end());
    r.n = 1, r.max_new_tokens = max_new, r.keep = true, r.seed = seed;
    return r;
}

std::vector<int32_t> sequence_of(const Engine& s, uint64_t id) {
    std::vector<int32_t> out = s.job(id).request.tokens;
    const std::vector<int32_t>& drawn = s.job(id).samples[0].tokens;
    out.insert(out.end(), drawn.begin(), drawn.end());
    return out;
}

// A turn computes only its new tokens and the last token of the previous turn, which was drawn and not computed, and
// gives the results of a run without retained pages.
void test_turns(int kind, KvType kv_type) {
    Model model(config_of(kind), WeightFormat::kFloat32, 16 + 32, kv_type);
    const Limits limits{model.kv_bytes(60), 16, 32};
    for (const size_t first : {64, 100}) {
        for (const size_t reply : {1, 65}) {
            Engine s(model.transformer, limits);
            std::vector<int32_t> so_far;
            size_t in_cache = 0;
            for (unsigned i = 0; i < 3; ++i) {
                const Request turn = turn_of(so_far, i == 0 ? first : 1 + 21 * i, reply, i);
                const uint64_t id = s.add(turn);
                run(s);
                expect(s.job(id).reused == in_cache, "turn %u of %zu + %zu reuses %zu tokens of %zu", i, first, reply,
                       s.job(id).reused, in_cache);
                Engine fresh(model.transformer, limits);
                expect(outputs_of(s, id) == outputs_of(fresh, (fresh.add(turn), run(fresh), uint64_t{1})),
                       "as without reuse");
                so_far = sequence_of(s, id);
                in_cache = so_far.size() - 1;
                s.remove(id);
            }
            expect(s.pages().n_free() == s.pages().n_pages(), "retained pages are free for others");
            expect(s.pages().n_evictable() >= ceil_div(in_cache, kPageTokens), "retained pages are evictable");
            s.evict_retained();
            expect(s.pages().n_evictable() == 0 && s.pages().n_free() == s.pages().n_pages(),
                   "evicts all retained pages");
            const uint64_t id = s.add(turn_of(so_far, 5, 3, 9));
            run(s);
            expect(s.job(id).reused == 0, "evicted pages are not reused");
        }
    }
}

// The order of eviction, and a page that is evicted for its own copy.
void test_eviction() {
    Model model(false, WeightFormat::kFloat32, 16 + 32);
    const auto expect_reused = [&](Engine& s, const Request& turn, size_t n) {
        Engine fresh(model.transformer, {model.kv_bytes(20), 16, 32});
        const uint64_t id = s.add(turn), right = fresh.add(turn);
        run(s), run(fresh);
        expect(s.job(id).reused == n, "%zu tokens are reused, and %zu are expected", s.job(id).reused, n);
        expect(outputs_of(s, id) == outputs_of(fresh, right), "the same tokens");
    };
    const Request first = turn_of(tokens(128, 1), 64, 1, 2), second = turn_of(tokens(128, 3), 64, 1, 4);
    Engine s(model.transformer, {model.kv_bytes(7), 16, 32});
    expect_reused(s, first, 0), expect_reused(s, second, 0);  // three pages each
    Request other = turn_of(tokens(128, 5), 0, 1, 6);
    other.keep = false;
    expect_reused(s, other, 0);  // two pages: the free page, and the last page of the first
    expect_reused(s, second, 191), expect_reused(s, first, 128);
    Engine tight(model.transformer, {model.kv_bytes(1), 16, 32});
    expect_reused(tight, turn_of(tokens(40, 1), 24, 1, 2), 0);
    expect_reused(tight, turn_of(tokens(40, 1), 24, 1, 3), 40);
    Engine again(model.transformer, {model.kv_bytes(20), 16, 32});
    const Request prompt = turn_of(tokens(100, 1), 28, 30, 2);
    expect_reused(again, prompt, 0), expect_reused(again, prompt, 127);
    const uint64_t id = again.add(prompt);
    run(again);
    expect_reused(again, turn_of(sequence_of(again, id), 5, 3, 3), 128 + 29);
}

// A page that another prompt has not computed yet is not copied.
void test_uncomputed_pages() {
    Model model(false, WeightFormat::kFloat32, 16 + 32);
    const Limits limits{model.kv_bytes(60), 16, 32};
    const Request turn = turn_of(tokens(40, 1), 30, 5, 8);
    Engine s(model.transformer, limits), fresh(model.transformer, limits);
    s.add(prompt(200, 1, 5, 0));
    const uint64_t id = s.add(turn), right = fresh.add(turn);
    run(s), run(fresh);
    expect(s.job(id).reused == 0 && outputs_of(s, id) == outputs_of(fresh, right), "as without the other prompt");
}

// A prompt that is scored computes its own copies of pages that others share. If it is cancelled, no other prompt
// depends on the pages that it has not computed.
void test_cancelling_a_score() {
    for (const int kind : {kLlama, kOther, kDelta}) {
        Model model(kind, WeightFormat::kFloat32, 16 + 32);
        const Limits limits{model.kv_bytes(60), 16, 32};
        Engine s(model.transformer, limits), fresh(model.transformer, limits);
        Request first = prompt(100, 0, 0, 0), second = prompt(260, 0, 0, 1);
        first.score_from = second.score_from = 1;
        const Request third = prompt(251, 1, 5, 2);
        s.add(first);
        const uint64_t cancelled = s.add(second), id = s.add(third), right = fresh.add(third);
        s.step();
        s.remove(cancelled);
        run(s), run(fresh);
        expect(outputs_of(s, id) == outputs_of(fresh, right), "cancelling a score leaves no page uncomputed");
    }
}

// Conversations that continue, diverge at any token, are cancelled at any step, and evict each other's pages.
void test_conversations(int kind) {
    Model model(kind, WeightFormat::kFloat32, 8 + 32);
    for (const size_t n_pages : {kind == kDelta ? 30 : 7, 60}) {
        std::mt19937 bits(static_cast<unsigned>(n_pages));
        Engine s(model.transformer, {model.kv_bytes(n_pages), 8, 32, true});
        Engine right(model.transformer, {model.kv_bytes(60), 8, 32});
        for (Engine* each : {&s, &right}) each->add_adapter(5, adapter_of(*model.weights));
        std::vector<std::vector<int32_t>> histories{{}};
        std::vector<std::pair<uint64_t, Request>> open;
        size_t n_reused = 0;
        for (unsigned i = 0; i < 120; ++i) {
            if (open.size() < 4 && bits() % 2 == 0) {
                std::vector<int32_t> before = histories[bits() % histories.size()];
                if (bits() % 3 == 0) before.resize(bits() % (before.size() + 1));
                if (before.size() > 200) before.clear();
                Request turn = turn_of(std::move(before), 1 + bits() % 60, 1 + bits() % 60, i);
                turn.adapter = bits() % 4 == 0 ? 5 : 0;
                turn.keep = bits() % 5 != 0;
                open.emplace_back(s.add(turn), std::move(turn));
            }
            for (unsigned steps = bits() % 40; steps > 0; --steps) s.step();
            if (open.empty() || bits() % 2 == 0) continue;
            const size_t at = bits() % open.size();
            auto& [id, turn] = open[at];
            if (s.job(id).done) {
                const uint64_t other = right.add(turn);
                run(right);
                expect(outputs_of(s, id) == outputs_of(right, other),
                       "retention, reuse and eviction do not change tokens");
                right.remove(other);
                right.evict_retained();
            }
            n_reused += s.job(id).reused;
            histories.push_back(sequence_of(s, id));
            s.remove(id);
            open.erase(open.begin() + static_cast<ptrdiff_t>(at));
            if (open.empty()) {
                expect(s.pages().n_free() == s.pages().n_pages(), "ended conversations free all pages");
                if (bits() % 8 == 0) s.evict_retained();
            }
        }
        expect(n_reused > 100, "pages are reused: %zu tokens, model %d, %zu pages", n_reused, kind, n_pages);
    }
}

void test_released_memory() {
    Model model(false, WeightFormat::kBFloat16, 16 + 32);
    Engine s(model.transformer, {model.kv_bytes(60), 16, 32});
    expect(s.release_memory() == 0, "memory is committed lazily");
    Request retained = prompt(130, 1, 20, 0);
    retained.keep = true;
    const uint64_t first = s.add(retained);
    run(s);
    const auto expected = outputs_of(s, first);
    s.release_memory();
    const uint64_t other = s.add(prompt(200, 3, 40, 1));
    for (int i = 0; i < 12; ++i) s.step();
    const size_t workspace = s.runner().workspace_bytes();
    expect(s.runner().committed_workspace_bytes() == workspace, "a step commits the workspace");
    expect(s.release_memory() == workspace, "referenced and retained pages are not released");
    run(s);
    const auto others = outputs_of(s, other);
    expect(s.release_memory() > workspace, "pages of ended requests are released");
    expect(s.kv_memory().n_committed() == s.pages().n_evictable(), "retained pages stay committed");
    Request next = prompt(130, 1, 20, 0);
    next.keep = true;
    const uint64_t again = s.add(next), later = s.add(prompt(200, 3, 40, 1));
    run(s);
    expect(s.job(again).reused == 129, "retained pages are found: %zu tokens", s.job(again).reused);
    expect(outputs_of(s, again) == expected && outputs_of(s, later) == others,
           "releasing memory does not change tokens");
}

void test_adapters() {
    Model model(false, WeightFormat::kBFloat16, 16 + 32);
    Engine s(model.transformer, {model.kv_bytes(60), 16, 32});
    const uint64_t number = 5;
    s.add_adapter(number, adapter_of(*model.weights));
    Request with = prompt(130, 2, 20, 0);
    with.adapter = number;
    const uint64_t a = s.add(prompt(130, 2, 20, 0)), b = s.add(with);
    run(s);
    const uint64_t separate = s.add(with);
    run(s);
    expect(outputs_of(s, b) == outputs_of(s, separate), "the tokens of an adapter do not depend on the batch");
    expect(outputs_of(s, a) != outputs_of(s, b),
           "an adapter changes the tokens, and does not share pages with the model");
    const uint64_t running = s.add(with), other = s.add(prompt(130, 2, 20, 0));
    for (int i = 0; i < 8; ++i) s.step();
    s.remove_adapter(number);
    expect(!s.has_adapter(number), "an adapter is removed");
    run(s);
    expect(outputs_of(s, running) == outputs_of(s, separate) && outputs_of(s, other) == outputs_of(s, a),
           "running requests keep their adapter");
}

// ---------------------------------------------------------------- division of work

// A model whose products are worth threads.
ModelConfig wide_config() {
    ModelConfig c = config_of(false);
    c.n_heads = 8, c.n_kv_heads = 2, c.head_dim = 64, c.hidden_dim = 512, c.ffn_dim = 2048;
    c.rotary_dim = 64;
    c.inv_freq.assign(32, 0.1);
    return c;
}

// Time of two threads, the second at half speed, that claim the tasks in order.
double time_with_slow_thread(const TracedJob& job) {
    double fast = 0.0, slow = 0.0;
    for (const double task : job) fast <= slow ? fast += task : slow += 2 * task;
    return std::max(fast, slow);
}

std::vector<TracedJob> trace_step(Engine& s) {
    begin_job_trace(2);
    s.step();
    return end_job_trace().jobs;
}

// The time of a step with a slow thread, divided by its time if all work were divided ideally.
double loss_by_slow_thread(const std::vector<TracedJob>& jobs) {
    double time = 0.0, work = 0.0;
    for (const TracedJob& job : jobs) {
        time += time_with_slow_thread(job);
        for (const double task : job) work += task;
    }
    return time / (work / 1.5);
}

void test_division_of_work() {
    Model model(wide_config(), WeightFormat::kBFloat16, 8 + 256, KvType::kFloat32);
    Engine s(model.transformer, {model.kv_bytes(20), 8, 256});
    double prefill = 10.0, token = 10.0;  // the minimum of several: other load disturbs single tasks
    size_t barriers = 0;                  // of a token
    for (uint64_t round = 0; round < 5; ++round) {
        const uint64_t id = s.add(prompt(256, 1, 4, round));
        prefill = std::min(prefill, loss_by_slow_thread(trace_step(s)));
        for (int i = 0; i < 3; ++i) {
            const std::vector<TracedJob> jobs = trace_step(s);
            token = std::min(token, loss_by_slow_thread(jobs));
            barriers = jobs.size();
        }
        s.remove(id);
        s.evict_retained();
    }
    const size_t n_layers = model.transformer.config().n_layers;
    expect(barriers <= 5 * n_layers + 2, "%zu barriers of a token in %zu layers, head and sampling", barriers,
           n_layers);
    expect(prefill <= 1.15, "a slow thread delays a prefill by a factor of %g", prefill);
    expect(token <= 1.3, "a slow thread delays a token by a factor of %g", token);
}

}  // namespace

int main() {
    return run_tests([] {
        set_num_threads(3, kOversubscribe);
        const bool is_slow = std::string_view(kernels().isa) == "scalar";  // all pairs would take minutes
        size_t pair = 0;
        const auto is_tested = [&] { return !is_slow || pair++ % 3 == 0; };
        for (WeightFormat format : {WeightFormat::kFloat32, WeightFormat::kBFloat16, WeightFormat::kInt8}) {
            const bool other = format != WeightFormat::kFloat32;
            for (KvType type : kKvTypes) {
                if (is_tested()) test_batch_invariance(other, format, type);
            }
            for (const int kind : {kDelta, kMixture, kSizes, kBlocks}) {
                if (is_tested()) test_batch_invariance(kind, format, KvType::kBFloat16);
            }
        }
        for (const Router router : {Router::kSoftmax, Router::kSigmoid}) {
            for (const Activation each : {Activation::kSilu, Activation::kClampedSwiglu}) test_experts(router, each);
        }
        test_recorded_experts();
        test_hidden_states();
        if (is_slow) return;  // the rest is the scheduler's
        test_invalid_requests();
        test_prompt_lookup();
        test_step_times();
        for (KvType type : kKvTypes) test_speculation(kLlama, type);
        for (const int kind : {kDelta, kMixture, kSizes}) test_speculation(kind, KvType::kBFloat16);
        test_draft_sequence();
        for (KvType type : kKvTypes) test_draft_models(type);
        for (const int kind : {kLlama, kOther, kMixture, kDelta}) test_cancelling(kind);
        test_cancelling_a_score();
        for (const int kind : {kOther, kDelta, kSizes, kBlocks}) test_sessions(kind);
        for (KvType type : kKvTypes) test_turns(type != KvType::kFloat32, type);
        test_turns(kDelta, KvType::kFloat32);
        test_eviction();
        test_uncomputed_pages();
        test_cached_scores();
        for (const int kind : {kLlama, kOther, kDelta}) {
            test_waiting_prompts(kind);
            for (const size_t n_pages : {14, 60}) test_random_scores(kind, n_pages);
            test_conversations(kind);
        }
        test_released_memory();
        test_adapters();
        test_division_of_work();
    });
}
