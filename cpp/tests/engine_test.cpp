// The engine without Python, on small random models: what the sanitizers see while it runs; that results do not depend
// on the company a sequence keeps, to the bit; that pages come back, whatever is cancelled; and that decoding allocates
// nothing. Numbers are checked against transformers in tests/engine. Exit code 77: the instruction set in WHET_ISA is
// not on this machine.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/scheduler.h"
#include "kernels/dispatch.h"
#include "runtime/thread_pool.h"

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define WHET_COUNTS_ALLOCATIONS
static std::atomic<size_t> allocations{0};
void* operator new(size_t n) {
    ++allocations;
    if (void* p = std::malloc(n == 0 ? 1 : n)) return p;
    throw std::bad_alloc();
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
#endif

using namespace whet;

namespace {

int failures = 0;

void expect(bool holds, const std::string& what) {
    if (holds) return;
    std::printf("does not hold: %s\n", what.c_str());
    ++failures;
}

// Llama's kind, or with `other` GPT-J's and Mistral's: layer norms, pairs side by side, a serial sum no more, windows.
ModelConfig config_of(bool other) {
    ModelConfig c;
    c.n_layers = 2, c.n_heads = 6, c.n_kv_heads = 2, c.head_dim = 20, c.hidden_dim = 48, c.ffn_dim = 72;
    c.vocab_size = 97, c.max_position = 1024, c.norm_eps = 1e-5;
    c.rotary_dim = 12;
    for (size_t i = 0; i < 6; ++i) c.inv_freq.push_back(std::pow(1000.0, -static_cast<double>(i) / 6));
    c.windows = {0, 0};
    c.attention_scale = 1 / std::sqrt(20.0);
    if (other) {
        c.norm = Norm::kLayer, c.is_neox = false, c.parallel_residual = true, c.gated = false;
        c.activation = Activation::kGeluTanh, c.windows = {0, 50};
    }
    return c;
}

struct Model {
    Transformer transformer;

    Model(bool other, WeightFormat format, size_t max_rows) : transformer(config_of(other), max_rows, other) {
        const ModelConfig& c = transformer.config();
        std::mt19937 bits(7);
        std::normal_distribution<float> normal;
        Weights& w = transformer.weights();
        const auto matrix = [&](const std::string& slot, WeightFormat f, size_t n, size_t k) {
            std::vector<float> x(n * k);
            for (float& one : x) one = normal(bits) / std::sqrt(static_cast<float>(k));
            w.add_matrix(slot, f, n, k);
            w.matrix(slot).pack_rows(0, n, x.data(), Source::kFloat32, static_cast<ptrdiff_t>(k), 1);
        };
        const auto vector = [&](const std::string& slot, size_t n, float value) {
            w.add_vector(slot, n);
            for (float& one : w.vector(slot)) one = value;
        };
        matrix("embedding", WeightFormat::kBFloat16, c.vocab_size, c.hidden_dim);
        for (size_t i = 0; i < c.n_layers; ++i) {
            const std::string layer = "layers." + std::to_string(i) + ".";
            for (const char* norm : {"norm1", "norm2"}) {
                vector(layer + norm + ".weight", c.hidden_dim, 1.0f);
                if (other) vector(layer + norm + ".bias", c.hidden_dim, 0.1f);
            }
            matrix(layer + "qkv", format, c.qkv_dim(), c.hidden_dim);
            matrix(layer + "o", format, c.hidden_dim, c.n_heads * c.head_dim);
            matrix(layer + (other ? "up" : "gate_up"), format, c.up_dim(), c.hidden_dim);
            matrix(layer + "down", format, c.hidden_dim, c.ffn_dim);
            if (other) vector(layer + "down.bias", c.hidden_dim, 0.2f);
        }
        vector("final_norm.weight", c.hidden_dim, 1.0f);
    }
};

std::vector<int32_t> tokens(size_t n, unsigned seed) {
    std::mt19937 bits(seed);
    std::vector<int32_t> out(n);
    for (int32_t& one : out) one = static_cast<int32_t>(bits() % 97);
    return out;
}

Request prompt(size_t length, size_t n, size_t max_new, uint64_t index) {
    Request r;
    r.tokens = tokens(length, 1);  // all prompts begin alike
    r.n = n, r.max_new_tokens = max_new, r.prompt_index = index, r.seed = 3;
    return r;
}

using Said = std::vector<std::pair<std::vector<int32_t>, std::vector<float>>>;

Said said(const Scheduler& s, uint64_t id) {
    Said out;
    for (const Sample& one : s.job(id).samples) out.emplace_back(one.tokens, one.logprobs);
    return out;
}

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
        while (s.step()) {
        }
        for (size_t i = 0; i < ids.size(); ++i) {
            expect(s.job(ids[i]).done, "every request ends");
            if (expected.size() <= i) {
                expected.push_back(said(s, ids[i]));
            } else {
                expect(said(s, ids[i]) == expected[i], "a completion depends on its key alone");
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
    while (s.step()) {
    }
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
    while (s.step()) {
    }
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

void test_adapters() {
    Model model(false, WeightFormat::kBFloat16, 16 + 32);
    const ModelConfig& c = model.transformer.config();
    const size_t page = KvCache::page_bytes(c, false);
    Scheduler s(model.transformer, {60 * page, 16, 32});
    auto adapter = std::make_unique<Adapter>(c.n_layers);
    const auto low = [&](size_t first, size_t n, size_t k) {
        LowRank part{first, std::make_unique<PackedWeight>(WeightFormat::kFloat32, 3, k),
                     std::make_unique<PackedWeight>(WeightFormat::kFloat32, n, 3)};
        const std::vector<float> values(3 * std::max(n, k), 0.05f);
        part.a->pack_rows(0, 3, values.data(), Source::kFloat32, static_cast<ptrdiff_t>(k), 1);
        part.b->pack_rows(0, n, values.data(), Source::kFloat32, 3, 1);
        return part;
    };
    adapter->layers[0][0].push_back(low(20, 40, c.hidden_dim));
    adapter->layers[1][3].push_back(low(0, c.hidden_dim, c.ffn_dim));
    adapter->max_rank = 3;
    const uint64_t number = s.add_adapter(std::move(adapter));
    Request with = prompt(130, 2, 20, 0);
    with.adapter = number;
    const uint64_t a = s.add(prompt(130, 2, 20, 0)), b = s.add(with);
    while (s.step()) {
    }
    const uint64_t alone = s.add(with);
    while (s.step()) {
    }
    expect(said(s, b) == said(s, alone), "with an adapter, alone or beside others");
    expect(said(s, a) != said(s, b), "an adapter changes what is said, and shares no page with the model");
}

#ifdef WHET_COUNTS_ALLOCATIONS
void test_allocations() {
    Model model(false, WeightFormat::kInt8, 8 + 32);
    const size_t page = KvCache::page_bytes(model.transformer.config(), false);
    Scheduler s(model.transformer, {100 * page, 8, 32});
    s.add(prompt(20, 8, 300, 0));
    for (int i = 0; i < 30; ++i) s.step();
    const size_t before = allocations;
    for (int i = 0; i < 200; ++i) s.step();  // over several ends of pages
    const size_t during = allocations - before;
    expect(during == 0, "decoding allocates nothing");
}
#endif

}  // namespace

int main() {
    try {
        kernels();
    } catch (const std::runtime_error& error) {
        std::printf("%s\n", error.what());
        return 77;
    }
    set_num_threads(3);
    for (WeightFormat format : {WeightFormat::kFloat32, WeightFormat::kBFloat16, WeightFormat::kInt8}) {
        test_company(format != WeightFormat::kFloat32, format);
    }
    test_cancelling();
    test_adapters();
#ifdef WHET_COUNTS_ALLOCATIONS
    test_allocations();
#endif
    if (failures == 0) std::printf("%s: the engine holds\n", kernels().isa);
    return failures == 0 ? 0 : 1;
}
