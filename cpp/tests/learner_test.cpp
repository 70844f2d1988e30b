// Gradients of the learner against differences of its log-probs, for random shapes and batches; run under sanitizers
// too. tests/learner compares with autograd in float64.
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "learner/learner.h"
#include "learner/divergence_head.h"
#include "learner/token_logprobs_head.h"
#include "runtime/thread_pool.h"
#include "small_model.h"
#include "tests/checks.h"

namespace whet {
namespace {

struct Factor {
    std::vector<float> a, b, grad_a, grad_b;
};

// Groups of one to three sequences with a common prompt; every token of a completion is predicted.
struct Batch {
    TrainingBatch batch;
    std::vector<int64_t> targets;

    explicit Batch(std::mt19937& bits) {
        const auto draw = [&](size_t most) { return 1 + bits() % most; };
        TrainingBatch& t = batch;
        t.group_offsets = t.q_offsets = t.k_offsets = {0};
        const auto add = [&](size_t n, const std::vector<int64_t>& prefix) {
            std::vector<int64_t> own = prefix;
            for (size_t i = 0; i < n; ++i) {
                own.push_back(static_cast<int64_t>(t.tokens.size()));
                t.positions.push_back(static_cast<int64_t>(prefix.size() + i));
                t.tokens.push_back(static_cast<int64_t>(bits() % 97));
            }
            t.key_rows.insert(t.key_rows.end(), own.begin(), own.end());
            t.q_offsets.push_back(static_cast<int64_t>(t.tokens.size()));
            t.k_offsets.push_back(static_cast<int64_t>(t.key_rows.size()));
            return own;
        };
        for (size_t g = draw(3); g > 0; --g) {
            const std::vector<int64_t> prompt = add(draw(20), {});
            for (size_t s = draw(3); s > 0; --s) {
                const size_t n = draw(70);
                const std::vector<int64_t> keys_of_completion = add(n, prompt);
                for (size_t i = 0; i < n; ++i) {
                    t.predictors.push_back(keys_of_completion[prompt.size() - 1 + i]);
                    targets.push_back(static_cast<int64_t>(bits() % 97));
                }
            }
            t.group_offsets.push_back(static_cast<int64_t>(t.tokens.size()));
        }
        std::vector<std::vector<int64_t>> readers(t.tokens.size());
        for (size_t i = 0; i < t.key_rows.size(); ++i) {
            readers[static_cast<size_t>(t.key_rows[i])].push_back(static_cast<int64_t>(i));
        }
        t.reader_offsets = {0};
        for (const auto& of_token : readers) {
            t.readers.insert(t.readers.end(), of_token.begin(), of_token.end());
            t.reader_offsets.push_back(static_cast<int64_t>(t.readers.size()));
        }
    }

    // Gives random experts to all tokens in mixtures: a choice that depends on the parameters has jumps.
    void give_experts(const ModelConfig& c, std::mt19937& bits) {
        std::vector<uint16_t> ids(c.n_experts);
        std::iota(ids.begin(), ids.end(), uint16_t{0});
        for (size_t i = 0; i < batch.n_tokens() * c.n_moe_layers(c.n_layers); ++i) {
            for (size_t j = 0; j < c.n_used_experts; ++j) {
                std::swap(ids[j], ids[j + bits() % (ids.size() - j)]);
                batch.experts.push_back(ids[j]);
            }
        }
    }
};

struct Setup {
    Model model;
    Learner learner;
    TokenLogprobsHead head;
    std::vector<Factor> factors;
    std::vector<std::vector<float>> norms, grad_norms;
    std::normal_distribution<float> normal;
    Dropout dropout;

    Setup(const ModelConfig& config, WeightFormat format, ProductType type, std::mt19937& bits)
        : model(config, format, 8, KvType::kFloat32), learner(model.weights, type), head(*model.weights, type) {
        const ModelConfig& c = model.transformer.config();
        const size_t rank = 1 + bits() % 11;
        const auto add = [&](size_t layer, Target target, size_t first, size_t n) {
            const size_t* shape = learner.shape(learner.add_adapter(layer, target, first, n, rank));
            Factor factor{std::vector<float>(rank * shape[1]), std::vector<float>(rank * n), {}, {}};
            for (float& x : factor.a) x = 0.2f * normal(bits);
            for (float& x : factor.b) x = 0.2f * normal(bits);
            factors.push_back(std::move(factor));
        };
        for (size_t layer = 0; layer < c.n_layers; ++layer) {
            const size_t in = c.mixer_in(layer);
            if (c.mixes(layer)) {
                add(layer, Target::kQkv, 0, in / 2), add(layer, Target::kQkv, in - in / 3, in / 3);
                add(layer, Target::kO, 0, c.hidden_dim);
            }
            if (c.mlp_dim(layer) == 0) continue;
            add(layer, Target::kUp, 3, c.mlp_dim(layer) - 8), add(layer, Target::kDown, 0, c.hidden_dim);
        }
        const auto add_norm = [&](const std::string& slot, size_t n) {
            std::vector<float> values(n);
            for (float& x : values) x = 1.0f + 0.2f * normal(bits);
            learner.add_norm(slot, values);
            norms.push_back(std::move(values));
        };
        add_norm("final_norm.weight", c.hidden_dim);
        add_norm(c.mixes(1) ? "layers.1.norm1.weight" : "layers.1.norm2.weight", c.hidden_dim);
        add_norm(c.has_mlp(0) ? "layers.0.norm2.weight" : "layers.0.norm1.weight", c.hidden_dim);
        if (c.norm == Norm::kLayer) {
            for (const char* slot : {"layers.0.norm1.bias", "layers.1.norm2.bias"}) add_norm(slot, c.hidden_dim);
        }
        if (c.is_delta(1)) {
            add_norm("layers.1.delta_norm.weight", c.mixer(1) == Mixer::kDelta ? c.delta_dim : c.delta_values());
        }
    }

    // sum g logprobs + e entropies, with the factors moved by `step` times a direction.
    double loss(const Batch& batch, const std::vector<float>& g, const std::vector<float>& e, float step, bool keep) {
        std::mt19937 bits(99);
        normal.reset();  // it draws two numbers at once
        for (size_t i = 0; i < factors.size(); ++i) {
            std::vector<float> a = factors[i].a, b = factors[i].b;
            for (float& x : a) x += step * normal(bits);
            for (float& x : b) x += step * normal(bits);
            learner.set_factors(i, a.data(), b.data(), 0.7f);
        }
        for (size_t i = 0; i < norms.size(); ++i) {
            std::vector<float> values = norms[i];
            for (float& x : values) x += step * normal(bits);
            learner.set_norm(i, values.data());
        }
        hidden = learner.forward(batch.batch, true, keep, activation_bytes, dropout);
        std::vector<float> logprobs(g.size()), entropy(g.size());
        head.forward(hidden, batch.targets.data(), g.size(), 1, {}, 1.2, {logprobs.data(), entropy.data()});
        double sum = 0.0;
        for (size_t i = 0; i < g.size(); ++i) sum += double{g[i]} * logprobs[i] + double{e[i]} * entropy[i];
        return sum;
    }

    // The derivative of loss() along its direction.
    double derivative(const Batch& batch, const std::vector<float>& g, const std::vector<float>& e) {
        loss(batch, g, e, 0.0f, true);
        std::vector<float> grad_hidden(g.size() * learner.hidden_dim());
        head.backward(hidden, {g.data(), e.data()}, grad_hidden.data());
        std::vector<FactorGradients> grads;
        for (Factor& factor : factors) {
            factor.grad_a.assign(factor.a.size(), 0.0f), factor.grad_b.assign(factor.b.size(), 0.0f);
            grads.push_back({factor.grad_a.data(), factor.grad_b.data()});
        }
        std::vector<float*> norm_grads;
        grad_norms.clear();
        for (const auto& values : norms) grad_norms.emplace_back(values.size(), 0.0f);
        for (auto& grad : grad_norms) norm_grads.push_back(grad.data());
        learner.backward(grad_hidden.data(), grads, norm_grads);
        std::mt19937 bits(99);
        normal.reset();
        double sum = 0.0;
        const auto add = [&](const std::vector<float>& grad) {
            for (const float x : grad) sum += double{x} * normal(bits);
        };
        for (const Factor& factor : factors) add(factor.grad_a), add(factor.grad_b);
        for (const auto& grad : grad_norms) add(grad);
        return sum;
    }

    const float* hidden = nullptr;
    size_t activation_bytes = 0;
};

ModelConfig random_config(std::mt19937& bits) {
    ModelConfig c = config_of(bits() % 2 == 0);
    constexpr size_t kHeads[] = {16, 14, 13};
    c.head_dim = kHeads[bits() % 3], c.attention_scale = 0.25;
    c.n_heads = 6, c.n_kv_heads = bits() % 2 == 0 ? 2 : 3;
    c.ffn_dim = 40 + bits() % 60;
    c.gated = bits() % 2 == 0;
    c.activation = static_cast<Activation>(bits() % (c.gated ? 5 : 4));
    c.qk_norm = bits() % 2 == 0, c.qk_norm_whole = c.qk_norm && bits() % 3 == 0;
    c.qk_norm_rotated = c.qk_norm && !c.qk_norm_whole && bits() % 2 == 0;
    if (bits() % 2 == 0) c.query_log_scale = 0.3, c.query_scale_length = 3;
    c.sinks = bits() % 2 == 0;
    c.output_gate = bits() % 2 == 0;
    c.windows.assign(c.n_layers, 0);
    c.windows[1] = bits() % 2 * 9;
    if (bits() % 2 == 0) {
        c.mixers.resize(c.n_layers);
        for (Mixer& mixer : c.mixers) mixer = static_cast<Mixer>(bits() % 4);
        constexpr size_t kDims[] = {16, 5, 19};
        c.n_delta_key_heads = 1 + bits() % 2, c.n_delta_heads = c.n_delta_key_heads * (1 + bits() % 2);
        c.delta_dim = kDims[bits() % 3], c.delta_key_dim = kDims[bits() % 3], c.delta_tiled = bits() % 2 == 0;
    }
    if (c.is_recurrent()) c.conv_length = 1 + bits() % 5;
    c.residual_scale = bits() % 2 == 0 ? 1.0f : 0.7f;
    c.logits_softcap = bits() % 2 == 0 ? 0.0f : 20.0f;
    c.attention_softcap = bits() % 2 == 0 ? 0.0 : 15.0;
    c.logits_scale = bits() % 2 == 0 ? 1.0f : 0.5f;
    std::mt19937 more = bits;
    if (more() % 2 == 0) {
        c.n_experts = 3 + more() % 6, c.n_used_experts = 1 + more() % 3, c.expert_dim = 10 + more() % 30;
        c.shared_dim = more() % 2 * 33, c.shared_gate = c.shared_dim > 0 && more() % 2 == 0;
        c.moe_layers.assign(c.n_layers, true), c.moe_layers[0] = more() % 2 == 0;
        c.router = static_cast<Router>(more() % 2), c.router_normalised = more() % 2 == 0;
        c.router_eps = more() % 2 * 0.1, c.router_scale = 1.5;
    }
    return c;
}

void test_gradients() {
    for (unsigned seed = 0; seed < 24; ++seed) {
        std::mt19937 bits(seed);
        constexpr WeightFormat kFormats[] = {WeightFormat::kFloat32, WeightFormat::kBFloat16, WeightFormat::kQ8_0};
        Setup s(seed == 23   ? config_of(kSizes)
                : seed == 22 ? config_of(kBlocks)
                             : random_config(bits),
                kFormats[seed % 3], ProductType::kFloat32, bits);
        Batch batch(bits);
        batch.give_experts(s.model.transformer.config(), bits);
        s.activation_bytes = batch.batch.n_tokens() * (bits() % 5000);  // of no layer, of some or of all
        s.dropout = {bits() % 2 == 0 ? 0.0 : 0.3, seed};
        std::vector<float> g(batch.targets.size()), e(g.size());
        for (float& x : g) x = s.normal(bits);
        for (float& x : e) x = s.normal(bits);
        constexpr float kStep = 5e-4f;
        const double got = s.derivative(batch, g, e);
        const auto difference = [&](float step) {
            return (s.loss(batch, g, e, step, false) - s.loss(batch, g, e, -step, false)) / (2 * step);
        };
        const double right = (4 * difference(kStep / 2) - difference(kStep)) / 3;  // without the error's first term
        double norm = 0.0;
        for (const Factor& factor : s.factors) {
            add_to_hash(factor.grad_a), add_to_hash(factor.grad_b);
            for (const float x : factor.grad_a) norm += double{x} * x;
            for (const float x : factor.grad_b) norm += double{x} * x;
        }
        for (const auto& grad : s.grad_norms) {
            add_to_hash(grad);
            for (const float x : grad) norm += double{x} * x;
        }
        expect(std::abs(got - right) <= 0.01 * std::sqrt(norm) + 1e-3, "seed %u: derivative %g, by differences %g",
               seed, got, right);
    }
}

// The log-probabilities of a row of hidden states, in float64.
std::vector<double> logprobs_of(const HeadLogits& head, const float* hidden, double temperature) {
    std::vector<double> z;
    const ProductRows x = head.convert(hidden, 1);
    for (const OutputRange& range : head.ranges()) {
        const auto logits = head.allocate(1);
        head.compute(range, x, 1, logits.get());
        for (size_t v = 0; v < range.n; ++v) z.push_back(logits[v] / temperature);
    }
    double sum = 0.0;
    for (const double each : z) sum += std::exp(each);
    for (double& each : z) each -= std::log(sum);
    return z;
}

double divergence_of(const std::vector<double>& p, const std::vector<double>& q, double beta) {
    double sum = 0.0;
    for (size_t v = 0; v < p.size(); ++v) {
        const double m = std::log((1 - beta) * std::exp(p[v]) + beta * std::exp(q[v]));
        if (beta == 0 || beta == 1) {
            sum += beta == 0 ? std::exp(q[v]) * (q[v] - p[v]) : std::exp(p[v]) * (p[v] - q[v]);
        } else {
            sum += beta * std::exp(q[v]) * (q[v] - m) + (1 - beta) * std::exp(p[v]) * (p[v] - m);
        }
    }
    return sum;
}

// Values of the heads against float64, and their gradients against differences along a random direction.
void test_heads() {
    constexpr double kTemperature = 1.3;
    constexpr size_t kRows = 5, kTokens = 3;
    for (unsigned seed = 0; seed < 8; ++seed) {
        std::mt19937 bits(seed);
        std::normal_distribution<float> normal;
        ModelConfig wide = random_config(bits), narrow = random_config(bits);
        wide.hidden_dim = 96, wide.logits_softcap = 0.0f;
        Model student(narrow, WeightFormat::kFloat32, 8, KvType::kFloat32),
            teacher(wide, WeightFormat::kQ8_0, 8, KvType::kFloat32);
        const HeadLogits p(*student.weights, ProductType::kFloat32), q(*teacher.weights, ProductType::kFloat32);
        const auto random = [&](size_t n, float size) {
            std::vector<float> x(n);
            for (float& each : x) each = size * normal(bits);
            return x;
        };
        std::vector<float> hidden = random(kRows * p.hidden_dim(), 3.0f),
                           of_teacher = random(kRows * q.hidden_dim(), 3.0f);
        const std::vector<float> direction = random(hidden.size(), 1.0f);
        const auto expect_gradient = [&](const std::vector<float>& grad, const char* name, auto&& loss) {
            constexpr float kStep = 1e-2f;
            double got = 0.0, norm = 0.0, sides[2];
            for (size_t i = 0; i < grad.size(); ++i)
                got += double{grad[i]} * direction[i], norm += double{grad[i]} * grad[i];
            for (const int side : {0, 1}) {
                std::vector<float> moved = hidden;
                for (size_t i = 0; i < moved.size(); ++i) moved[i] += (side == 0 ? -kStep : kStep) * direction[i];
                sides[side] = loss(moved.data());
            }
            const double right = (sides[1] - sides[0]) / (2 * kStep);
            expect(std::abs(got - right) <= 0.01 * std::sqrt(norm) + 2e-3, "%s, seed %u: %g, by differences %g", name,
                   seed, got, right);
        };
        for (const float beta : {0.0f, 0.3f, 0.5f, 1.0f}) {
            DivergenceHead head(*student.weights, *teacher.weights, ProductType::kFloat32);
            const std::vector<float> g = random(kRows, 1.0f);
            std::vector<float> values(kRows), grad(hidden.size());
            const auto loss = [&](const float* at) {
                head.forward(at, of_teacher.data(), kRows, kTemperature, beta, values.data());
                double sum = 0.0;
                for (size_t i = 0; i < kRows; ++i) sum += double{g[i]} * values[i];
                return sum;
            };
            loss(hidden.data());
            for (size_t i = 0; i < kRows; ++i) {
                const double right = divergence_of(logprobs_of(p, &hidden[i * p.hidden_dim()], kTemperature),
                                                   logprobs_of(q, &of_teacher[i * q.hidden_dim()], kTemperature), beta);
                expect(std::abs(values[i] - right) <= 1e-5 * right + 2e-6, "divergence %g, %g is expected", values[i],
                       right);
            }
            head.backward(hidden.data(), of_teacher.data(), g.data(), grad.data());
            add_to_hash(values), add_to_hash(grad);
            expect_gradient(grad, "divergence", loss);
        }
        TokenLogprobsHead head(*student.weights, ProductType::kFloat32);
        std::vector<int64_t> tokens(kRows * kTokens);
        for (int64_t& token : tokens) token = static_cast<int64_t>(bits() % p.vocab_size());
        tokens[1] = tokens[0];  // twice
        std::vector<float> logprobs(tokens.size()), entropy(kRows), mean(kRows), grad(hidden.size());
        const std::vector<float> g = random(tokens.size(), 1.0f), e = random(kRows, 1.0f), h = random(kRows, 1.0f);
        const auto loss = [&](const float* at) {
            head.forward(at, tokens.data(), kRows, kTokens, {}, kTemperature,
                         {logprobs.data(), entropy.data(), mean.data()});
            double sum = 0.0;
            for (size_t i = 0; i < tokens.size(); ++i) sum += double{g[i]} * logprobs[i];
            for (size_t i = 0; i < kRows; ++i) sum += double{e[i]} * entropy[i] + double{h[i]} * mean[i];
            return sum;
        };
        loss(hidden.data());
        for (size_t i = 0; i < kRows; ++i) {
            const auto right = logprobs_of(p, &hidden[i * p.hidden_dim()], kTemperature);
            double sum = 0.0;
            for (const double each : right) sum += each / static_cast<double>(right.size());
            expect(std::abs(mean[i] - sum) <= 1e-5 * std::abs(sum), "mean log-prob %g, %g is expected", mean[i], sum);
            for (size_t j = 0; j < kTokens; ++j) {
                const double expected = right[static_cast<size_t>(tokens[i * kTokens + j])];
                expect(std::abs(logprobs[i * kTokens + j] - expected) <= 2e-5, "log-prob of one of several tokens");
            }
        }
        head.backward(hidden.data(), {g.data(), e.data(), h.data()}, grad.data());
        add_to_hash(logprobs), add_to_hash(grad);
        expect_gradient(grad, "several tokens", loss);
    }
}

// bfloat16 products of a batch, on one to five threads, with the activations of no, some and all layers kept, without
// and with layers of the gated delta rule, and with mixtures of experts.
void test_bits() {
    for (const unsigned seed : {3, 4, 5}) {
        std::vector<double> derivatives;
        for (const int n : {1, 2, 5}) {
            for (const size_t token_bytes : {0, 1500, 100000}) {
                set_num_threads(n, kOversubscribe);
                std::mt19937 bits(seed);
                const ModelConfig config = random_config(bits);
                Setup s(seed == 5 ? config_of(kMixture) : config, WeightFormat::kBFloat16, ProductType::kBFloat16,
                        bits);
                const Batch batch(bits);
                s.activation_bytes = batch.batch.n_tokens() * token_bytes;
                s.dropout = {0.2, 5};
                const std::vector<float> g(batch.targets.size(), 0.5f);
                derivatives.push_back(s.derivative(batch, g, g));
            }
        }
        for (const double derivative : derivatives) {
            expect(derivative == derivatives[0], "bits depend on threads or kept layers: %g, %g", derivative,
                   derivatives[0]);
        }
    }
    set_num_threads(3, kOversubscribe);
}

template <class F>
bool is_refused(F&& f) {
    try {
        f();
    } catch (const std::invalid_argument&) {
        return true;
    }
    return false;
}

void test_bad_batches() {
    std::mt19937 bits(1);
    Setup s(config_of(kMixture), WeightFormat::kFloat32, ProductType::kFloat32, bits);
    Batch good(bits);
    good.give_experts(s.model.transformer.config(), bits);
    const auto refuses = [&](auto&& change) {
        TrainingBatch batch = good.batch;
        change(batch);
        return is_refused([&] { s.learner.forward(batch, true, true, 0); });
    };
    expect(refuses([](TrainingBatch& t) { t.tokens[0] = 97; }), "a token outside the vocabulary");
    expect(refuses([](TrainingBatch& t) { t.positions[0] = -1; }), "a negative position");
    expect(refuses([](TrainingBatch& t) { t.group_offsets.back() += 1; }), "groups beyond the tokens");
    expect(refuses([](TrainingBatch& t) { t.q_offsets[1] = -1; }), "a negative offset");
    expect(refuses([](TrainingBatch& t) { t.k_offsets.pop_back(); }), "a missing offset");
    expect(refuses([](TrainingBatch& t) { t.key_rows[0] = 1 << 20; }), "a key that is not a token");
    expect(refuses([](TrainingBatch& t) { t.readers[0] = -1; }), "a negative reader");
    expect(refuses([](TrainingBatch& t) { t.predictors[0] = 1 << 20; }), "a predictor that is not a token");
    expect(refuses([](TrainingBatch& t) { t.experts.pop_back(); }), "a missing expert");
    expect(refuses([](TrainingBatch& t) { t.experts[0] = 7; }), "an expert beyond the model's");
    expect(refuses([](TrainingBatch& t) { t.experts[1] = t.experts[0]; }), "an expert twice");
    expect(!refuses([](TrainingBatch& t) { t.experts[0] = kOwnChoice; }), "a token without given experts");
    expect(refuses([](TrainingBatch& t) { t = {}; }), "no tokens");
    expect(!refuses([](TrainingBatch&) {}), "a batch that fits");
}

}  // namespace
}  // namespace whet

int main() {
    return run_tests([] {
        whet::set_num_threads(3, kOversubscribe);
        whet::test_gradients();
        whet::test_heads();
        whet::test_bits();
        whet::test_bad_batches();
    });
}
