// The engine without Python, on small random models: what the sanitizers see while it runs; that results do not depend
// on the company a sequence keeps, to the bit; and that pages come back, whatever is cancelled. Numbers are checked
// against transformers in tests/engine.
#include <cmath>
#include <random>
#include <vector>

#include "runtime/ceil_div.h"
#include "runtime/thread_pool.h"
#include "small_model.h"
#include "tests/checks.h"

using namespace whet;

namespace {

const size_t kLengths[] = {1, 63, 64, 65, 150, 129};

void test_company(bool other, WeightFormat format) {
    Model model(other, format, 64 + 128);
    const size_t page = KvCache::page_bytes(model.transformer.config(), other);
    std::vector<Said> expected;
    const Limits limits[] = {{200 * page, 64, 128}, {9 * page, 3, 5}, {40 * page, 7, 64}};
    for (const Limits& limit : limits) {
        Scheduler s(model.transformer, limit);
        std::vector<uint64_t> ids;
        for (size_t i = 0; i < std::size(kLengths); ++i) ids.push_back(s.add(prompt(kLengths[i], 5, 70, i)));
        run(s);
        for (size_t i = 0; i < ids.size(); ++i) {
            expect(s.job(ids[i]).done, "every request ends");
            if (expected.size() <= i) {
                expected.push_back(said(s, ids[i]));
            } else {
                expect(said(s, ids[i]) == expected[i], "a completion depends only on its key");
            }
        }
        expect(s.cache().n_free() == s.cache().n_pages(), "pages come back");
    }
    // The log-probs of what was sampled, scored in chunks that end elsewhere.
    Scheduler s(model.transformer, {40 * page, 7, 33});
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

void test_cancelling() {
    Model model(false, WeightFormat::kQ8_0, 16 + 32);
    const size_t page = KvCache::page_bytes(model.transformer.config(), false);
    std::mt19937 bits(5);
    Scheduler s(model.transformer, {30 * page, 16, 32});
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
    for (uint64_t id : ids) expect(s.job(id).done, "what is left ends");
    expect(s.cache().n_free() == s.cache().n_pages(), "pages come back after cancelling");
    bool refused = false;
    try {
        s.add(prompt(1000, 1, 1000, 0));
    } catch (const std::invalid_argument&) {
        refused = true;
    }
    expect(refused, "what can never run is refused");
}

// Calls end in the middle of prompts whose pages others share: these go on, and say what they say alone.
void test_sessions() {
    Model model(true, WeightFormat::kBFloat16, 16 + 32);
    const size_t page = KvCache::page_bytes(model.transformer.config(), true);
    const Limits limits{60 * page, 16, 32};
    const size_t lengths[] = {200, 150, 230, 70, 200, 131};
    std::vector<Said> expected;
    for (size_t i = 0; i < std::size(lengths); ++i) {
        Scheduler alone(model.transformer, limits);
        const uint64_t id = alone.add(prompt(lengths[i], 2, 9, i));
        run(alone);
        expected.push_back(said(alone, id));
    }
    for (size_t steps = 0; steps < 24; steps += 3) {
        for (size_t ended = 1; ended < 1u << std::size(lengths); ended += 11) {  // a bit for each that ends early
            Scheduler s(model.transformer, limits);
            std::vector<uint64_t> ids;
            for (size_t i = 0; i < std::size(lengths); ++i) ids.push_back(s.add(prompt(lengths[i], 2, 9, i), i + 1));
            for (size_t i = 0; i < steps; ++i) s.step();
            for (size_t i = 0; i < std::size(lengths); ++i) {
                if (ended >> i & 1) s.end_session(i + 1), s.step();
            }
            run(s);
            for (size_t i = 0; i < std::size(lengths); ++i) {
                if (!(ended >> i & 1)) expect(said(s, ids[i]) == expected[i], "who is left says what he says alone");
            }
            expect(s.cache().n_free() == s.cache().n_pages(), "a call that ended leaves no page");
        }
    }
}

// A turn of a conversation: what was said before, and more.
Request turn_of(std::vector<int32_t> said_before, size_t n_new, size_t max_new, unsigned seed) {
    Request r;
    const std::vector<int32_t> more = tokens(n_new, seed);
    r.tokens = std::move(said_before);
    r.tokens.insert(r.tokens.end(), more.begin(), more.end());
    r.n = 1, r.max_new_tokens = max_new, r.keep = true, r.seed = seed;
    return r;
}

std::vector<int32_t> sequence_of(const Scheduler& s, uint64_t id) {
    std::vector<int32_t> out = s.job(id).request.tokens;
    const std::vector<int32_t>& drawn = s.job(id).samples[0].tokens;
    out.insert(out.end(), drawn.begin(), drawn.end());
    return out;
}

// A turn computes its new tokens and the last one of the turn before, which was drawn and not computed, and says what
// it says without the pages that were kept.
void test_turns(bool other) {
    Model model(other, WeightFormat::kFloat32, 16 + 32);
    const Limits limits{60 * KvCache::page_bytes(model.transformer.config(), other), 16, 32};
    for (const size_t first : {64, 100}) {
        for (const size_t reply : {1, 65}) {
            Scheduler s(model.transformer, limits);
            std::vector<int32_t> so_far;
            size_t in_cache = 0;
            for (unsigned i = 0; i < 3; ++i) {
                const Request turn = turn_of(so_far, i == 0 ? first : 1 + 21 * i, reply, i);
                const uint64_t id = s.add(turn);
                run(s);
                expect(s.job(id).reused == in_cache, "turn %u of %zu + %zu reuses %zu tokens of %zu", i, first, reply,
                       s.job(id).reused, in_cache);
                Scheduler alone(model.transformer, limits);
                expect(said(s, id) == said(alone, (alone.add(turn), run(alone), uint64_t{1})), "as without kept pages");
                so_far = sequence_of(s, id);
                in_cache = so_far.size() - 1;
                s.remove(id);
            }
            expect(s.cache().n_free() == s.cache().n_pages(), "kept pages are free for others");
            expect(s.cache().n_evictable() >= ceil_div(in_cache, kPageTokens), "and stay meanwhile");
            s.forget_kept();
            expect(s.cache().n_evictable() == 0 && s.cache().n_free() == s.cache().n_pages(), "until forgotten");
            const uint64_t id = s.add(turn_of(so_far, 5, 3, 9));
            run(s);
            expect(s.job(id).reused == 0, "what was forgotten is computed again");
        }
    }
}

// Which pages go when memory is needed, and that a page which is evicted for its own copy is still that copy.
void test_eviction() {
    Model model(false, WeightFormat::kFloat32, 16 + 32);
    const size_t page = KvCache::page_bytes(model.transformer.config(), false);
    const auto expect_reused = [&](Scheduler& s, const Request& turn, size_t n) {
        Scheduler alone(model.transformer, {20 * page, 16, 32});
        const uint64_t id = s.add(turn), right = alone.add(turn);
        run(s), run(alone);
        expect(s.job(id).reused == n, "%zu tokens are reused, and %zu are expected", s.job(id).reused, n);
        expect(said(s, id) == said(alone, right), "the same tokens");
    };
    const Request first = turn_of(tokens(128, 1), 64, 1, 2), second = turn_of(tokens(128, 3), 64, 1, 4);
    Scheduler s(model.transformer, {7 * page, 16, 32});
    expect_reused(s, first, 0), expect_reused(s, second, 0);  // three pages each
    Request other = turn_of(tokens(128, 5), 0, 1, 6);
    other.keep = false;
    expect_reused(s, other, 0);  // two pages: the free one, and the last one of the first
    expect_reused(s, second, 191), expect_reused(s, first, 128);
    Scheduler tight(model.transformer, {page, 16, 32});
    expect_reused(tight, turn_of(tokens(40, 1), 24, 1, 2), 0);
    expect_reused(tight, turn_of(tokens(40, 1), 24, 1, 3), 40);
    Scheduler again(model.transformer, {20 * page, 16, 32});
    const Request prompt = turn_of(tokens(100, 1), 28, 30, 2);
    expect_reused(again, prompt, 0), expect_reused(again, prompt, 127);
    const uint64_t id = again.add(prompt);
    run(again);
    expect_reused(again, turn_of(sequence_of(again, id), 5, 3, 3), 128 + 29);
}

// A page that another prompt has yet to compute is not copied.
void test_uncomputed_pages() {
    Model model(false, WeightFormat::kFloat32, 16 + 32);
    const Limits limits{60 * KvCache::page_bytes(model.transformer.config(), false), 16, 32};
    const Request turn = turn_of(tokens(40, 1), 30, 5, 8);
    Scheduler s(model.transformer, limits), alone(model.transformer, limits);
    s.add(prompt(200, 1, 5, 0));
    const uint64_t id = s.add(turn), right = alone.add(turn);
    run(s), run(alone);
    expect(s.job(id).reused == 0 && said(s, id) == said(alone, right), "as without the other prompt");
}

// Conversations that go on, part at any token, are cancelled at any step, and need each other's memory.
void test_conversations() {
    Model model(true, WeightFormat::kFloat32, 8 + 32);
    const ModelConfig& c = model.transformer.config();
    const size_t page = KvCache::page_bytes(c, true);
    for (const size_t n_pages : {7, 60}) {
        std::mt19937 bits(static_cast<unsigned>(n_pages));
        Scheduler s(model.transformer, {n_pages * page, 8, 32});
        Scheduler right(model.transformer, {60 * page, 8, 32});
        for (Scheduler* each : {&s, &right}) each->add_adapter(5, adapter_of(c));
        std::vector<std::vector<int32_t>> told{{}};
        std::vector<std::pair<uint64_t, Request>> open;
        size_t n_reused = 0;
        for (unsigned i = 0; i < 120; ++i) {
            if (open.size() < 4 && bits() % 2 == 0) {
                std::vector<int32_t> before = told[bits() % told.size()];
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
                expect(said(s, id) == said(right, other), "what is kept, found or evicted changes no token");
                right.remove(other);
                right.forget_kept();
            }
            n_reused += s.job(id).reused;
            told.push_back(sequence_of(s, id));
            s.remove(id);
            open.erase(open.begin() + static_cast<ptrdiff_t>(at));
            if (open.empty()) {
                expect(s.cache().n_free() == s.cache().n_pages(), "no page is referenced by what has ended");
                if (bits() % 8 == 0) s.forget_kept();
            }
        }
        expect(n_reused > 300, "pages are reused: %zu tokens", n_reused);
    }
}

void test_released_memory() {
    Model model(false, WeightFormat::kBFloat16, 16 + 32);
    const size_t page = KvCache::page_bytes(model.transformer.config(), false);
    Scheduler s(model.transformer, {60 * page, 16, 32});
    expect(s.release_memory() == 0, "nothing is committed before it is used");
    Request kept = prompt(130, 1, 20, 0);
    kept.keep = true;
    const uint64_t first = s.add(kept);
    run(s);
    const auto expected = said(s, first);
    s.release_memory();
    const uint64_t other = s.add(prompt(200, 3, 40, 1));
    for (int i = 0; i < 12; ++i) s.step();
    const size_t workspace = s.workspace_bytes();
    expect(s.committed_workspace_bytes() == workspace, "a step commits the workspace");
    expect(s.release_memory() == workspace, "what is running or kept has all pages that were used");
    run(s);
    const auto others = said(s, other);
    expect(s.release_memory() > workspace, "pages of what has ended go back");
    expect(s.cache().n_committed() == s.cache().n_evictable(), "and those that are kept stay");
    Request next = prompt(130, 1, 20, 0);
    next.keep = true;
    const uint64_t again = s.add(next), later = s.add(prompt(200, 3, 40, 1));
    run(s);
    expect(s.job(again).reused == 129, "kept pages are found: %zu tokens", s.job(again).reused);
    expect(said(s, again) == expected && said(s, later) == others, "released memory changes no token");
}

void test_adapters() {
    Model model(false, WeightFormat::kBFloat16, 16 + 32);
    const ModelConfig& c = model.transformer.config();
    const size_t page = KvCache::page_bytes(c, false);
    Scheduler s(model.transformer, {60 * page, 16, 32});
    const uint64_t number = 5;
    s.add_adapter(number, adapter_of(c));
    Request with = prompt(130, 2, 20, 0);
    with.adapter = number;
    const uint64_t a = s.add(prompt(130, 2, 20, 0)), b = s.add(with);
    run(s);
    const uint64_t alone = s.add(with);
    run(s);
    expect(said(s, b) == said(s, alone), "with an adapter, alone or beside others");
    expect(said(s, a) != said(s, b), "an adapter changes what is said, and shares no page with the model");
    const uint64_t running = s.add(with), other = s.add(prompt(130, 2, 20, 0));
    for (int i = 0; i < 8; ++i) s.step();
    s.remove_adapter(number);
    expect(!s.has_adapter(number), "an adapter is forgotten");
    run(s);
    expect(said(s, running) == said(s, alone) && said(s, other) == said(s, a), "requests under way keep their adapter");
}

}  // namespace

int main() {
    return run_tests([] {
        set_num_threads(3);
        for (WeightFormat format : {WeightFormat::kFloat32, WeightFormat::kBFloat16, WeightFormat::kInt8}) {
            test_company(format != WeightFormat::kFloat32, format);
        }
        test_cancelling();
        test_sessions();
        for (const bool other : {false, true}) test_turns(other);
        test_eviction();
        test_uncomputed_pages();
        test_conversations();
        test_released_memory();
        test_adapters();
    });
}
