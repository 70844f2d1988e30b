#include "gpu/plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <stdexcept>
#include <utility>

#include "engine/delta_inputs.h"
#include "engine/experts.h"
#include "engine/kv_memory.h"
#include "engine/model_runner.h"
#include "kernels/attention_task.h"
#include "runtime/ceil_div.h"

namespace whet::gpu {
namespace {

constexpr size_t kProductRows = 8;                 // rows of a product that share the reading of a panel
constexpr size_t kTileRows = 32, kTilePanels = 4;  // of product_tile.wgsl
constexpr size_t kMaxWrites = 1024;                // of pages at once
constexpr size_t kTeams = 4;                       // of head.wgsl
constexpr size_t kAttentionHeads = 8;              // query heads that share the reading of a page, at most
constexpr size_t kGroupFloats = 4096;              // memory of a workgroup

// Constants of a kernel as WGSL.
class Constants {
public:
    Constants& add(const char* name, size_t value) { return define(name, std::to_string(value) + "u"); }
    Constants& add(const char* name, bool value) { return define(name, value ? "true" : "false"); }
    Constants& add(const char* name, double value) { return define(name, literal(static_cast<float>(value))); }
    const std::string& text() const { return text_; }

private:
    std::string text_;

    // Exact, as hexadecimal mantissa and exponent.
    static std::string literal(float value) {
        if (value == 0) return "0.0f";
        int exponent;
        auto mantissa = static_cast<uint32_t>(std::ldexp(std::frexp(std::fabs(value), &exponent), 24));
        std::string digits;
        for (; mantissa > 0; mantissa /= 16) digits.insert(digits.begin(), "0123456789abcdef"[mantissa % 16]);
        return (value < 0 ? "-0x" : "0x") + digits + "p" + std::to_string(exponent - 24) + "f";
    }
    Constants& define(const char* name, const std::string& value) {
        text_.append("const ").append(name).append(" = ").append(value).append(";\n");
        return *this;
    }
};

// 32-bit words of a token's keys, or values, of a KV head.
size_t kv_words(KvType type, size_t head_dim) { return type == KvType::kFloat32 ? head_dim : ceil_div(head_dim, 2); }

size_t layer_page_bytes(const ModelConfig& c, KvType type, size_t layer) {
    return (c.attends(layer) ? c.n_own_kv_heads(layer) : 0) * 2 * kPageTokens * kv_words(type, c.head_dim_of(layer)) *
           sizeof(uint32_t);
}

// 32-bit words of a layer's state: the inputs of its convolution, then the state of each head and the numbers of
// tokens of its groups of columns.
size_t state_words(const ModelConfig& c, size_t layer) {
    if (!c.is_recurrent(layer)) return 0;
    const size_t convolution = c.conv_length * c.conv_dim(layer);
    if (!c.is_delta(layer)) return convolution;
    return convolution + c.n_delta_heads * (c.delta_key_dim * c.delta_dim + ceil_div(c.delta_dim, size_t{64}));
}

[[noreturn]] void reject(const std::string& part) { throw std::invalid_argument(part); }

void check(const ModelConfig& c, KvType type) {
    if (type == KvType::kInt8) reject("kv_dtype q8");
    if (c.widest_head() > 256) reject("heads of more than 256 elements");
}

// The pipelines of a plan, each once.
class Pipelines {
public:
    explicit Pipelines(std::vector<Pipeline>& all) : all_(all) {}

    uint32_t add(std::vector<std::string> files, const Constants& constants) {
        auto key = std::make_pair(constants.text(), std::move(files));
        const auto [at, is_new] = numbers_.try_emplace(std::move(key), static_cast<uint32_t>(all_.size()));
        if (is_new) all_.push_back({at->first.first, at->first.second});
        return at->second;
    }

private:
    std::vector<Pipeline>& all_;
    std::map<std::pair<std::string, std::vector<std::string>>, uint32_t> numbers_;
};

// The files of a format's weights, then `more`; and the constants of a matrix in it.
std::vector<std::string> kernel_files(const PackedWeight& w, const std::vector<std::string>& more) {
    std::vector<std::string> files;
    switch (w.format_id()) {
        case WeightFormat::kFloat32:
        case WeightFormat::kBFloat16:
        case WeightFormat::kMXFP4:
            break;
        case WeightFormat::kInt8:
        case WeightFormat::kQ8_0:
            files = {"bytes"};
            break;
        case WeightFormat::kQ4_1:
        case WeightFormat::kQ5_1:
            files = {"nibbles", "scales_1"};
            break;
        case WeightFormat::kQ4_K:
        case WeightFormat::kQ5_K:
            files = {"nibbles", "scales_k"};
            break;
        default:
            files = {"nibbles"};
    }
    files.push_back(std::string("weights_") + w.format().name);
    files.insert(files.end(), more.begin(), more.end());
    return files;
}

// The file that reads the inputs of a product, in rows of `stride` numbers.
const char* inputs_file(const PackedWeight& w, size_t stride) {
    return w.k() % kQuantBlock == 0 && stride % 4 == 0 ? "inputs_whole" : "inputs_ragged";
}

Constants weight_constants(const PackedWeight& w) {
    return Constants()
        .add("K", w.k())
        .add("PANEL_WORDS", w.panel_bytes() / sizeof(uint32_t))
        .add("PANEL_STEPS", w.steps())
        .add("BYTE_BIAS", static_cast<size_t>(kByteBias));
}

// The settings and buffers that all products of a model share.
struct ProductSettings {
    double eps;
    bool is_gated;
    Activation activation;
    uint32_t params, none;  // buffers
};

// The operands of a product: inputs, and outputs from `first` on.
struct Product {
    uint32_t weights, bias, y;  // buffers
    Operand x;
    size_t y_stride, first, n;
    Count count = Count::kTokens;
    bool has_bias = false, adds = false;
    double scale = 1.0, softcap = 0.0;
    bool has_number = false;          // only for tokens of this adapter:
    uint32_t number = 0, tokens = 0;  // buffers
};

Dispatch make_product(const PackedWeight& w, const Product& of, const ProductSettings& settings, Pipelines& pipelines) {
    Dispatch dispatch{{}, of.count};
    const size_t panels = ceil_div(of.n, kPanel);
    const auto buffer = [&](bool is_read, uint32_t number) { return is_read ? number : settings.none; };
    for (const size_t rows : {size_t{1}, kProductRows, kTileRows}) {
        const bool activates = rows == 1 && of.x.is_activated, norms = rows == 1 && of.x.is_normed;
        const bool is_tile = rows == kTileRows;
        if (is_tile && panels < kTilePanels) break;
        Constants constants = weight_constants(w);
        constants.add("X_STRIDE", of.x.stride).add("Y_STRIDE", of.y_stride);
        constants.add("FIRST", of.first).add("COUNT", of.n);
        constants.add("N_PARAM", size_t{of.count == Count::kHeads ? 1u : 0u});
        constants.add("HAS_BIAS", of.has_bias).add("ADDS", of.adds).add("HAS_NUMBER", of.has_number);
        constants.add("SCALE", of.scale).add("SOFTCAP", of.softcap);
        std::vector<std::string> files = kernel_files(w, {inputs_file(w, of.x.stride), "outputs"});
        std::vector<uint32_t> buffers{
            of.weights,      norms ? of.x.raw : of.x.buffer,   buffer(of.has_bias, of.bias),    of.y,
            settings.params, buffer(of.has_number, of.number), buffer(of.has_number, of.tokens)};
        if (is_tile) {
            files.push_back("product_tile");
        } else {
            constants.add("ROWS", rows);
            constants.add("NORMS", norms).add("EPS", norms ? settings.eps : 0.0).add("ACTIVATES", activates);
            constants.add("IS_GATED", activates && settings.is_gated);
            constants.add("KIND", activates ? static_cast<size_t>(settings.activation) : 0);
            files.insert(files.end(), {"activation", "product"});
            buffers.push_back(buffer(norms, of.x.norm));
        }
        const size_t groups = ceil_div(panels, is_tile ? kTilePanels : 1);
        dispatch.variants.push_back({static_cast<uint32_t>(rows), static_cast<uint32_t>(groups),
                                     pipelines.add(std::move(files), constants), std::move(buffers)});
    }
    return dispatch;
}

class Planner {
public:
    Planner(const Weights& weights, KvType kv_type, const Limits& limits)
        : weights_(weights), c_(weights.config()), kv_type_(kv_type), limits_(limits) {}

    Plan make() {
        check(c_, kv_type_);
        add_inputs();
        embed();
        if (c_.has_layer_inputs()) read_layer_inputs();
        uint32_t delta = none_;  // sublayer output not yet added to the residual stream
        for (size_t i = 0; i < c_.n_layers; ++i) {
            const LayerNorms& norms = weights_.norms.layers[i];
            Operand h{};
            if (c_.mixes(i)) {
                h = add_and_norm(norms.norm1, delta, !c_.parallel_residual);
                delta = c_.attends(i) ? attention(i, h) : recurrence(i, h);
                post_norm(norms.post_norm1);
            }
            if (!c_.has_mlp(i)) continue;
            if (!c_.shared_norm) h = add_and_norm(norms.norm2, c_.parallel_residual ? none_ : delta, !c_.is_moe(i));
            delta = feed_forward(i, h, c_.parallel_residual);
            post_norm(norms.post_norm2);
            if (c_.has_layer_inputs() || c_.layer_scale) {
                end_layer(i);
                delta = none_;
            }
        }
        add_and_norm(weights_.norms.final_norm, delta, false, double{c_.logits_scale});
        head();
        plan_.params = params_, plan_.tokens = tokens_, plan_.none = none_;
        plan_.norm_eps = c_.norm_eps, plan_.is_gated = c_.gated, plan_.activation = c_.activation,
        plan_.max_rows = limits_.max_rows;
        return std::move(plan_);
    }

private:
    const Weights& weights_;
    const ModelConfig& c_;
    const KvType kv_type_;
    const Limits& limits_;
    Plan plan_;
    Pipelines pipelines_{plan_.pipelines};
    std::vector<uint32_t> caches_, states_;  // of the layers
    uint32_t params_, tokens_, page_table_, runs_, mixed_, writes_, rotation_, local_rotation_, head_rows_, hidden_,
        head_in_, logits_, draws_, drawn_, none_, x_, qkv_, attended_, up_, delta_, probabilities_, chosen_,
        chosen_weights_, shared_gates_, recorded_, embedded_, layer_inputs_, expert_up_, expert_out_;

    uint32_t add_buffer(std::string name, size_t bytes) {
        if (bytes > limits_.binding_bytes) reject("a buffer of " + std::to_string(bytes) + " bytes (" + name + ")");
        plan_.buffers.push_back({.name = std::move(name), .bytes = std::max<size_t>(bytes, 16)});
        return static_cast<uint32_t>(plan_.buffers.size() - 1);
    }
    uint32_t add_filled(std::string name, size_t bytes, const void* data) {
        const uint32_t number = add_buffer(std::move(name), bytes);
        plan_.uploads.push_back({number, 0, bytes, nullptr, 0, data});
        return number;
    }
    uint32_t add_panels(std::string name, const PackedWeight& w, size_t first, size_t n) {
        const uint32_t number = add_buffer(std::move(name), n * w.panel_bytes());
        plan_.uploads.push_back({number, 0, n * w.panel_bytes(), &w, first, nullptr});
        return number;
    }
    uint32_t add_number(size_t number) {
        static constexpr auto kNumbers = [] {
            std::array<uint32_t, 1024> numbers{};
            for (uint32_t i = 0; i < numbers.size(); ++i) numbers[i] = i;
            return numbers;
        }();
        return add_filled("number", sizeof(uint32_t), &kNumbers.at(number));
    }
    uint32_t add_floats(std::string name, size_t n) { return add_buffer(std::move(name), n * sizeof(float)); }
    // With a buffer for all steps of a submission.
    uint32_t add_step_input(const std::string& name, size_t n) {
        add_floats("next_" + name, n);
        return add_floats(name, n);
    }
    uint32_t add_rows(std::string name, size_t rows, size_t width) {
        const uint32_t number = add_floats(std::move(name), rows * width);
        plan_.buffers.back().rows = rows;
        return number;
    }
    // Vectors of the weights, one after the other.
    uint32_t add_vectors(std::initializer_list<const std::vector<float>*> all) {
        size_t bytes = 0;
        for (const std::vector<float>* values : all) bytes += values->size() * sizeof(float);
        const uint32_t number = add_buffer("vectors", bytes);
        size_t offset = 0;
        for (const std::vector<float>* values : all) {
            const size_t size = values->size() * sizeof(float);
            if (size > 0) plan_.uploads.push_back({number, offset, size, nullptr, 0, values->data()});
            offset += size;
        }
        return number;
    }
    // A vector of the weights; `none_` if it is empty.
    uint32_t add_vector(const std::vector<float>& values) {
        return values.empty() ? none_ : add_filled("vector", values.size() * sizeof(float), values.data());
    }

    void add(std::vector<Dispatch>& to, std::vector<std::string> files, const Constants& constants,
             std::vector<uint32_t> buffers, size_t groups, Count count) {
        const uint32_t id = pipelines_.add(std::move(files), constants);
        to.push_back({{{1, static_cast<uint32_t>(groups), id, std::move(buffers)}}, count});
    }

    // The last dispatch is skipped for a single row.
    void skip_for_one_row() {
        std::vector<Variant>& variants = plan_.forward.back().variants;
        variants.insert(variants.begin(), {1, 0, Variant::kSkip, {}});
    }

    void add_inputs() {
        const size_t rows = limits_.max_rows, d = c_.hidden_dim;
        const size_t pages = ceil_div(c_.max_position, size_t{kPageTokens});
        params_ = add_floats("params", 4);
        tokens_ = add_step_input("tokens", 4 * rows);
        page_table_ = add_floats("page_table", rows * pages);
        runs_ = add_floats("runs", c_.is_recurrent() ? 5 * rows : 0);
        writes_ = add_rows("writes", kMaxWrites, 2);
        rotation_ = add_step_input("rotation", rows * (c_.rotary_dim + 1));
        const size_t local = c_.local_inv_freq.size();
        local_rotation_ = add_step_input("local_rotation", local == 0 ? 0 : rows * (2 * local + 1));
        head_rows_ = add_floats("head_rows", kHeadTile);
        hidden_ = add_rows("hidden", rows, d);
        head_in_ = add_rows("head_in", kHeadTile, d);
        logits_ = add_rows("logits", kHeadTile, c_.vocab_size);
        draws_ = add_rows("draws", kHeadTile, 4);
        add_floats("next_draws", 4 * rows);
        drawn_ = add_rows("drawn", kHeadTile, 2);
        add_rows("all_drawn", rows, 2);
        none_ = add_floats("none", 0);
        x_ = add_floats("x", rows * d);
        qkv_ = add_floats("qkv", rows * c_.widest_mixer_in());
        attended_ = add_floats("attended", rows * c_.widest_mixer_out());
        up_ = add_floats("up", rows * std::max(c_.widest_up(), c_.layer_input_dim));
        size_t channels = 0;
        for (size_t layer = 0; layer < c_.n_layers; ++layer) {
            channels = std::max(channels, c_.is_delta(layer) ? c_.conv_dim(layer) : 0);
        }
        mixed_ = add_floats("mixed", rows * channels);
        delta_ = add_floats("delta", rows * d);
        const size_t chosen = rows * c_.n_used_experts;
        probabilities_ = add_floats("probabilities", rows * c_.n_experts);
        chosen_ = add_floats("chosen", chosen);
        chosen_weights_ = add_floats("chosen_weights", chosen);
        shared_gates_ = add_floats("shared_gates", c_.shared_gate ? rows : 0);
        recorded_ = add_rows("recorded", rows, c_.n_token_experts());
        embedded_ = add_floats("embedded", rows * c_.layer_inputs());
        layer_inputs_ = add_floats("layer_inputs", rows * c_.layer_inputs());
        expert_up_ = add_floats("expert_up", chosen * c_.expert_up_dim());
        expert_out_ = add_floats("expert_out", chosen * c_.hidden_dim);
        for (size_t layer = 0; layer < c_.n_layers; ++layer) {
            states_.push_back(add_floats("states", limits_.n_states * state_words(c_, layer)));
            if (!c_.attends(layer)) {
                caches_.push_back(none_);
                continue;
            }
            const size_t source = c_.kv_layer(layer), bytes = layer_page_bytes(c_, kv_type_, layer);
            caches_.push_back(source == layer ? add_buffer("kv", limits_.n_pages * bytes) : caches_[source]);
            if (source != layer) continue;
            const size_t words = bytes / sizeof(uint32_t);
            add(plan_.write_pages, {"copy_pages"}, Constants().add("WORDS", words), {params_, writes_, caches_.back()},
                ceil_div(words, size_t{64}), Count::kOne);
        }
    }

    // Calls visit(buffer, first row, rows) for the parts of a weight that fit into a binding, in order.
    template <class Visit>
    void each_part(const PackedWeight& w, Visit&& visit) {
        const size_t panels = std::max<size_t>(1, limits_.binding_bytes / w.panel_bytes());
        for (size_t first = 0; first < w.n_panels(); first += panels) {
            const size_t n = std::min(panels, w.n_panels() - first), row = first * kPanel;
            auto [at, is_new] = parts_.try_emplace({&w, first}, 0);
            if (is_new) at->second = add_panels("weights", w, first, n);
            visit(at->second, row, std::min(n * kPanel, w.n() - row));
        }
    }
    // Their buffers, which a tied head shares with the embedding, by the weight and its first panel.
    std::map<std::pair<const PackedWeight*, size_t>, uint32_t> parts_;

    void embed() {
        embed(weights_.embedding, false);
        if (c_.learned_positions > 0) embed(weights_.positions, true);
    }
    void embed(const Matrix& rows, bool is_position) {
        size_t first = 0;
        for (const PackedWeight& w : rows.parts) {
            each_part(w, [&](uint32_t buffer, size_t row, size_t n) {
                Constants constants = weight_constants(w);
                constants.add("FIRST", first + row).add("COUNT", n).add("SCALE", double{c_.embedding_scale});
                constants.add("IS_POSITION", is_position);
                add(plan_.forward, kernel_files(w, {"embed"}), constants, {buffer, tokens_, x_}, 1, Count::kTokens);
            });
            first += w.n();
        }
    }

    ProductSettings settings() const { return {c_.norm_eps, c_.gated, c_.activation, params_, none_}; }

    // y (rows, w.n()) = scale (x w^T + bias), or with `adds` y += it, of the tokens or of the logits.
    void product(std::vector<Dispatch>& to, const Matrix& w, const std::vector<float>& bias, const Operand& x,
                 uint32_t y, Count count, bool adds = false, double scale = 1.0, double softcap = 0.0) {
        size_t first = 0;
        const uint32_t bias_buffer = add_vector(bias);
        for (const PackedWeight& part : w.parts) {
            each_part(part, [&](uint32_t buffer, size_t row, size_t n) {
                Product of{buffer, bias_buffer, y, x, w.n(), first + row, n, count};
                of.has_bias = !bias.empty(), of.adds = adds, of.scale = scale, of.softcap = softcap;
                to.push_back(make_product(part, of, settings(), pipelines_));
            });
            first += part.n();
        }
    }
    // The same with what adapters add.
    void project(size_t layer, Target target, const Operand& x, uint32_t y, bool adds = false, double scale = 1.0) {
        const Matrix& w = matrix_of(weights_, layer, target);
        product(plan_.forward, w, w.bias, x, y, Count::kTokens, adds, scale);
        plan_.adapter_points.push_back({layer, target, plan_.forward.size(), x, y, w.n(), scale});
    }

    // Whether the outputs of mixers and MLPs are added to the residual stream by their last product.
    bool adds_at_once() const {
        const bool reads_twice = c_.parallel_residual && !c_.shared_norm;  // the MLP's norm reads x before attention
        return !c_.post_norm && !c_.has_layer_inputs() && !c_.layer_scale && !reads_twice;
    }
    // delta = W x, which is added to the residual stream: at once, or by what returns it.
    uint32_t project_back(size_t layer, Target target, const Operand& x, bool adds) {
        if (adds_at_once()) {
            project(layer, target, x, x_, true, double{c_.residual_scale});
            return none_;
        }
        project(layer, target, x, delta_, adds);
        return delta_;
    }

    Constants norm_constants(const NormWeight& w, size_t n, bool is_layer_norm) const {
        Constants constants;
        constants.add("D", n).add("EPS", c_.norm_eps).add("IS_LAYER_NORM", is_layer_norm);
        return constants.add("HAS_NORM", !w.weight.empty()).add("HAS_BIAS", !w.bias.empty());
    }
    // x += residual_scale delta; hidden = out_scale norm(x), or x without this norm. `for_products`: only products read
    // hidden, before x changes.
    Operand add_and_norm(const NormWeight& w, uint32_t delta, bool for_products = false, double out_scale = 1.0) {
        const uint32_t weight = add_vector(w.weight);
        Constants constants = norm_constants(w, c_.hidden_dim, c_.norm == Norm::kLayer);
        constants.add("ADDS", delta != none_).add("DELTA_SCALE", double{c_.residual_scale}).add("OUT_SCALE", out_scale);
        add(plan_.forward, {"norm", "add_norm"}, constants, {weight, add_vector(w.bias), x_, delta, hidden_}, 1,
            Count::kTokens);
        Operand inputs{hidden_, c_.hidden_dim};
        inputs.is_normed = for_products && delta == none_ && c_.norm == Norm::kRms && weight != none_ && w.bias.empty();
        inputs.raw = x_, inputs.norm = weight;
        if (inputs.is_normed) skip_for_one_row();
        return inputs;
    }
    // Norms elements [offset, offset + n) of rows of `stride` elements in place.
    void norm_in_place(const NormWeight& w, bool is_layer_norm, uint32_t x, size_t stride, size_t offset, size_t n) {
        Constants constants = norm_constants(w, n, is_layer_norm);
        constants.add("STRIDE", stride).add("OFFSET", offset);
        add(plan_.forward, {"norm", "norm_in_place"}, constants, {add_vector(w.weight), add_vector(w.bias), x}, 1,
            Count::kTokens);
    }
    void post_norm(const NormWeight& w) {
        if (c_.post_norm) norm_in_place(w, c_.norm == Norm::kLayer, delta_, c_.hidden_dim, 0, c_.hidden_dim);
    }

    // delta = W_o attention(W_qkv h).
    uint32_t attention(size_t layer, const Operand& h) {
        const LayerWeights& w = weights_.layers[layer];
        const LayerNorms& norms = weights_.norms.layers[layer];
        project(layer, Target::kQkv, h, qkv_);
        const size_t d = c_.head_dim_of(layer), own = c_.n_own_kv_heads(layer), dim = c_.qkv_dim(layer);
        const size_t n_q = c_.n_heads * c_.query_stride(layer);
        if (c_.qk_norm_whole) {
            norm_in_place(norms.q_norm, false, qkv_, dim, 0, n_q);
            if (own > 0) norm_in_place(norms.k_norm, false, qkv_, dim, n_q, own * d);
        }
        const bool has_norm = c_.qk_norm && !c_.qk_norm_whole, is_local = c_.is_local(layer);
        const size_t words = kv_words(kv_type_, d), elements = kv_type_ == KvType::kBFloat16 ? 2 : 1;
        Constants shape;
        shape.add("D", d).add("KV_WORDS", words).add("KV_BF16", kv_type_ == KvType::kBFloat16);
        shape.add("ELEMENTS", elements).add("N_HEADS", c_.n_heads).add("N_KV_HEADS", c_.n_kv_heads).add("N_OWN", own);
        shape.add("QKV_DIM", dim).add("QUERY_STRIDE", c_.query_stride(layer)).add("EPS", c_.norm_eps);
        shape.add("ROTARY_DIM", c_.rotates(layer) ? c_.rotary_dim_of(layer) : 0).add("IS_NEOX", c_.is_neox);
        shape.add("ROTATION_STRIDE", 1 + (is_local ? 2 * c_.local_inv_freq.size() : c_.rotary_dim));
        shape.add("NORM_BEFORE", has_norm && !c_.qk_norm_rotated).add("NORM_AFTER", has_norm && c_.qk_norm_rotated);
        shape.add("NORM_VALUES", c_.v_norm);
        std::vector<uint32_t> buffers{
            tokens_,
            page_table_,
            qkv_,
            caches_[layer],
            is_local ? local_rotation_ : rotation_,
            has_norm ? add_vectors({&norms.q_norm.weight, &norms.k_norm.weight, &w.sinks}) : add_vector(w.sinks)};
        add(plan_.forward, {"kv_page", "head", "heads"}, shape, buffers, ceil_div(c_.n_heads + own, kTeams),
            Count::kTokens);
        size_t at_once =
            std::min({c_.kv_group(), kAttentionHeads, (kGroupFloats - kTeams * d) / (elements * words + 64 * kTeams)});
        while (c_.kv_group() % at_once != 0) --at_once;
        shape.add("HEADS", at_once).add("WINDOW", c_.windows[layer]).add("SCALE", c_.attention_scale);
        shape.add("SOFTCAP", c_.attention_softcap).add("HAS_SINKS", c_.sinks).add("SINKS", has_norm ? 2 * d : 0);
        shape.add("IS_GATED", c_.output_gate);
        buffers.push_back(attended_);
        // One workgroup per head of the keys can prepare the heads of a single token.
        const bool can_prepare = at_once == c_.kv_group() || own == 0;
        if (can_prepare) skip_for_one_row();
        Dispatch& attend = plan_.forward.emplace_back(Dispatch{{}, Count::kTokens});
        for (const bool prepares : {true, false}) {
            if (prepares && !can_prepare) continue;
            Constants constants = shape;
            const uint32_t id = pipelines_.add({"kv_page", "head", "attention"}, constants.add("PREPARES", prepares));
            attend.variants.push_back({1, static_cast<uint32_t>(c_.n_heads / at_once), id, buffers});
        }
        return project_back(layer, Target::kO, {attended_, c_.n_heads * d}, false);
    }

    // delta = W_out mix(W_in h) of a recurrent mixer.
    uint32_t recurrence(size_t layer, const Operand& h) {
        const LayerWeights& w = weights_.layers[layer];
        const bool is_delta = c_.is_delta(layer);
        const size_t channels = c_.conv_dim(layer);
        const DeltaPlaces at(c_, layer);
        const PackedWeight& taps = w.conv.parts.front();
        project(layer, Target::kQkv, h, qkv_);
        Constants convolution;
        convolution.add("LENGTH", c_.conv_length).add("CHANNELS", channels).add("STATE_WORDS", state_words(c_, layer));
        convolution.add("IN_STRIDE", c_.mixer_in(layer)).add("IN_FIRST", is_delta ? at.channels : 0);
        convolution.add("IS_GATED", !is_delta).add("HAS_BIAS", !w.conv_bias.empty());
        add(plan_.forward, {"runs", "short_conv"}, convolution,
            {add_panels("taps", taps, 0, taps.n_panels()), runs_, qkv_, states_[layer], add_vector(w.conv_bias),
             is_delta ? mixed_ : attended_},
            ceil_div(channels, size_t{64}), Count::kTokens);
        if (is_delta) delta_rule(layer, at);
        return project_back(layer, Target::kO, {attended_, c_.mixer_out(layer)}, false);
    }

    // attended = the gated delta rule, or Mamba-2, of q, k and v after their convolution, normed and gated.
    void delta_rule(size_t layer, const DeltaPlaces& at) {
        const LayerWeights& w = weights_.layers[layer];
        const bool is_mamba = c_.mixer(layer) == Mixer::kMamba;
        const size_t in = c_.mixer_in(layer), channels = c_.conv_dim(layer), values = c_.delta_values();
        Constants rule;
        rule.add("IN_STRIDE", in).add("CHANNELS", channels).add("STATE_WORDS", state_words(c_, layer));
        rule.add("FIRST_HEAD", c_.conv_length * channels).add("N_HEADS", c_.n_delta_heads);
        rule.add("N_KEY_HEADS", c_.n_delta_key_heads).add("KEY_DIM", c_.delta_key_dim).add("VALUE_DIM", c_.delta_dim);
        rule.add("QUERY", at.q - at.channels).add("KEY", at.k - at.channels).add("VALUE", at.v - at.channels);
        rule.add("A", at.a).add("B", at.b).add("IS_TILED", c_.delta_tiled).add("IS_MAMBA", is_mamba);
        rule.add("STEP_MIN", c_.delta_step_min);
        add(plan_.forward, {"runs", "delta_rule"}, rule,
            {qkv_, mixed_, runs_, states_[layer], add_vector(w.decay), add_vector(w.dt_bias), add_vector(w.skip),
             attended_},
            c_.n_delta_heads * ceil_div(c_.delta_dim, size_t{64}), Count::kTokens);
        const size_t group = is_mamba ? values / c_.n_delta_key_heads : c_.delta_dim;
        Constants gate;
        gate.add("GROUP", group).add("VALUES", values).add("IN_STRIDE", in).add("Z", at.z);
        gate.add("EPS", c_.norm_eps).add("IS_MAMBA", is_mamba);
        add(plan_.forward, {"norm", "delta_gate"}, gate,
            {add_vector(weights_.norms.layers[layer].delta_norm.weight), qkv_, attended_}, values / group,
            Count::kTokens);
    }

    // The inputs of all layers, from x and the second embedding.
    void read_layer_inputs() {
        project(0, Target::kLayerInputs, {x_, c_.hidden_dim}, layer_inputs_);
        Constants constants;
        constants.add("D", c_.layer_input_dim).add("N_LAYERS", c_.n_layers).add("HIDDEN_DIM", c_.hidden_dim);
        constants.add("EPS", c_.norm_eps);
        add(plan_.forward, {"norm", "layer_inputs"}, constants,
            {add_vector(weights_.norms.layer_inputs_norm.weight), embedded_, layer_inputs_}, c_.n_layers,
            Count::kTokens);
    }

    // x = scale (x + residual_scale delta), plus what the layer makes of its input before that product.
    void end_layer(size_t layer) {
        const LayerWeights& w = weights_.layers[layer];
        double delta_scale = c_.residual_scale;
        if (c_.has_layer_inputs()) {
            project(layer, Target::kInputGate, add_and_norm({}, delta_), up_);
            Constants gate;
            gate.add("DIM", c_.layer_input_dim).add("N_LAYERS", c_.n_layers).add("IS_GATED", true);
            gate.add("KIND", static_cast<size_t>(c_.activation));
            add(plan_.forward, {"activation", "gate_inputs"}, gate, {layer_inputs_, add_number(layer), up_},
                ceil_div(c_.layer_input_dim, size_t{64}), Count::kTokens);
            project(layer, Target::kInputOut, {up_, c_.layer_input_dim}, delta_);
            const NormWeight& norm = weights_.norms.layers[layer].input_norm;
            norm_in_place(norm, c_.norm == Norm::kLayer, delta_, c_.hidden_dim, 0, c_.hidden_dim);
            delta_scale = 1.0;
        }
        Constants constants;
        constants.add("D", c_.hidden_dim).add("DELTA_SCALE", delta_scale).add("HAS_SCALE", c_.layer_scale);
        add(plan_.forward, {"end_layer"}, constants, {delta_, c_.layer_scale ? add_vector(w.scale) : none_, x_},
            ceil_div(c_.hidden_dim, size_t{64}), Count::kTokens);
    }

    // delta = the MLP of h, or the shared expert and those that the router chooses; with `adds`, delta += it.
    uint32_t feed_forward(size_t layer, const Operand& h, bool adds) {
        if (!c_.is_moe(layer)) return mlp(layer, h, adds);
        if (adds) reject("mixtures of experts with parallel residuals");
        const LayerWeights& w = weights_.layers[layer];
        if (c_.mlp_dim(layer) > 0) project(layer, Target::kDown, hidden_mlp(layer, h), delta_);
        route(layer, w);
        experts(w.experts_up, hidden_, c_.hidden_dim, true, expert_up_);
        activate(expert_up_, c_.expert_dim, c_.expert_up_dim(), Count::kExperts);
        experts(w.experts_down, expert_up_, c_.expert_up_dim(), false, expert_out_);
        if (c_.shared_gate) product(plan_.forward, w.shared_router, {}, h, shared_gates_, Count::kTokens);
        Constants constants;
        constants.add("D", c_.hidden_dim).add("N_USED", c_.n_used_experts);
        constants.add("HAS_SHARED", c_.mlp_dim(layer) > 0).add("HAS_SHARED_GATE", c_.shared_gate);
        add(plan_.forward, {"combine_experts"}, constants, {expert_out_, chosen_weights_, shared_gates_, delta_},
            ceil_div(c_.hidden_dim, size_t{64}), Count::kTokens);
        return delta_;
    }

    void route(size_t layer, const LayerWeights& w) {
        product(plan_.forward, w.router, w.router_bias, {hidden_, c_.hidden_dim}, probabilities_, Count::kTokens);
        Constants constants;
        constants.add("N_EXPERTS", c_.n_experts).add("N_USED", c_.n_used_experts);
        constants.add("N_MOE_LAYERS", c_.n_moe_layers(c_.n_layers)).add("IS_SOFTMAX", c_.router == Router::kSoftmax);
        constants.add("HAS_CORRECTION", !w.router_correction.empty()).add("IS_NORMALISED", c_.router_normalised);
        constants.add("ROUTER_EPS", c_.router_eps).add("ROUTER_SCALE", c_.router_scale);
        const uint32_t number = add_number(c_.n_moe_layers(layer));
        add(plan_.forward, {"route"}, constants,
            {probabilities_, add_vector(w.router_correction), number, chosen_, chosen_weights_, recorded_}, 1,
            Count::kTokens);
    }

    // y of each chosen expert = x w^T + bias: x of its token, or of its row.
    void experts(const Matrix& w, uint32_t x, size_t x_stride, bool is_by_token, uint32_t y) {
        const size_t n_parts = w.parts.size() / c_.n_experts, n = w.n() / c_.n_experts;
        const uint32_t bias = add_vector(w.bias);
        size_t first = 0;
        for (size_t i = 0; i < n_parts; first += w.parts[i++].n()) {
            const PackedWeight& part = w.parts[i];
            const size_t at_once = std::min(c_.n_experts, limits_.binding_bytes / part.size_bytes());
            if (at_once == 0) reject("an expert of " + std::to_string(part.size_bytes()) + " bytes");
            for (size_t expert = 0; expert < c_.n_experts; expert += at_once) {
                const size_t count = std::min(at_once, c_.n_experts - expert);
                const uint32_t buffer = add_buffer("weights", count * part.size_bytes());
                for (size_t e = 0; e < count; ++e) {
                    const PackedWeight& own = parts_of(w, expert + e, c_.n_experts)[i];
                    if (own.format_id() != part.format_id()) reject("experts in different formats");
                    plan_.uploads.push_back({buffer, e * part.size_bytes(), part.size_bytes(), &own, 0, nullptr});
                }
                Constants constants = weight_constants(part);
                constants.add("X_STRIDE", x_stride).add("Y_STRIDE", n).add("FIRST", first).add("COUNT", part.n());
                constants.add("FIRST_EXPERT", expert).add("EXPERTS", count).add("N_USED", c_.n_used_experts);
                constants.add("IS_BY_TOKEN", is_by_token).add("HAS_BIAS", !w.bias.empty());
                add(plan_.forward, kernel_files(part, {inputs_file(part, x_stride), "expert_product"}), constants,
                    {buffer, x, bias, y, chosen_}, part.n_panels(), Count::kExperts);
            }
        }
    }

    // delta = W_down (act(gate) * up), or W_down act(up), of h; or it is added to delta.
    uint32_t mlp(size_t layer, const Operand& h, bool adds) {
        return project_back(layer, Target::kDown, hidden_mlp(layer, h), adds);
    }
    // act(gate) * up, or act(up), of h.
    Operand hidden_mlp(size_t layer, const Operand& h) {
        project(layer, Target::kUp, h, up_);
        activate(up_, c_.mlp_dim(layer), c_.up_dim(layer), Count::kTokens);
        skip_for_one_row();
        Operand inputs{up_, c_.up_dim(layer)};
        inputs.is_activated = true;
        return inputs;
    }

    void activate(uint32_t x, size_t dim, size_t stride, Count count) {
        Constants constants;
        constants.add("DIM", dim).add("STRIDE", stride).add("IS_GATED", c_.gated);
        constants.add("KIND", static_cast<size_t>(c_.activation));
        add(plan_.forward, {"activation", "activate"}, constants, {x}, ceil_div(dim, size_t{64}), count);
    }

    void head() {
        add(plan_.head, {"gather"}, Constants().add("D", c_.hidden_dim), {head_rows_, hidden_, head_in_}, 1,
            Count::kHeads);
        product(plan_.head, weights_.output(), weights_.head.bias, {head_in_, c_.hidden_dim}, logits_, Count::kHeads,
                false, 1.0, double{c_.logits_softcap});
        add(plan_.draw, {"draw"}, Constants().add("N", c_.vocab_size), {logits_, draws_, drawn_}, 1, Count::kHeads);
        add(plan_.next_tokens, {"next_tokens"}, Constants(), {drawn_, tokens_}, 1, Count::kTokens);
    }
};

struct Factors {
    const PackedWeight *a, *b;
    size_t first_row;
};

// The factors of a matrix as one pair, of two dispatches: A below each other, B as blocks on a diagonal, whose zeros
// take less time to read than further dispatches to start. New ones are added to `joined`.
Factors join_factors(const LowRank& low, std::vector<std::unique_ptr<PackedWeight>>& joined) {
    if (low.a.size() == 1) return {&low.a[0], &low.b[0], low.first_rows[0]};
    const size_t ranks = low.ranks(), k = low.a[0].k();
    const size_t first = *std::min_element(low.first_rows.begin(), low.first_rows.end());
    size_t end = first, rank = 0;
    for (size_t i = 0; i < low.b.size(); ++i) end = std::max(end, low.first_rows[i] + low.b[i].n());
    std::vector<float> a(ranks * k), b((end - first) * ranks), block;
    for (size_t i = 0; i < low.a.size(); rank += low.a[i++].n()) {
        const size_t own = low.a[i].n(), n = low.b[i].n();
        low.a[i].rows(0, own, &a[rank * k], false);
        block.resize(n * own);
        low.b[i].rows(0, n, block.data(), false);
        for (size_t j = 0; j < n; ++j) {
            std::copy_n(&block[j * own], own, &b[(low.first_rows[i] - first + j) * ranks + rank]);
        }
    }
    const bool is_wide = low.a[0].format().source == RowType::kFloat32;
    const auto pack = [&](const std::vector<float>& values, size_t n, size_t width) {
        const WeightFormat format = is_wide ? WeightFormat::kFloat32 : WeightFormat::kBFloat16;
        PackedWeight& w = *joined.emplace_back(std::make_unique<PackedWeight>(format, n, width));
        w.pack_rows(0, n, values.data(), RowType::kFloat32, static_cast<ptrdiff_t>(width), 1);
        return &w;
    };
    const PackedWeight* down = pack(a, ranks, k);
    return {down, pack(b, end - first, ranks), first};
}

}  // namespace

Plan make_plan(const Weights& weights, KvType kv_type, const Limits& limits) {
    return Planner(weights, kv_type, limits).make();
}

AdapterPlan make_adapter_plan(const Plan& plan, Adapter& adapter) {
    if (adapter.norms) reject("norms of an adapter");
    for (const auto& targets : adapter.layers) {
        for (const Target target : {Target::kExpertsUp, Target::kExpertsDown}) {
            if (!targets[static_cast<size_t>(target)].empty()) reject("adapters of experts");
        }
        for (const std::vector<LowRank>& matrices : targets) {
            for (const LowRank& low : matrices) {
                for (const RowScale& scale : low.scales) {
                    if (scale.size_bytes() > 0) reject("DoRA");
                }
            }
        }
    }
    const ProductSettings settings{plan.norm_eps, plan.is_gated, plan.activation, plan.params, plan.none};
    AdapterPlan out;
    Pipelines pipelines(out.pipelines);
    const auto add_buffer = [&](std::string name, size_t bytes, const PackedWeight* w) {
        out.buffers.push_back({.name = std::move(name), .bytes = std::max<size_t>(bytes, 16)});
        const auto number = static_cast<uint32_t>(plan.buffers.size() + out.buffers.size() - 1);
        if (w != nullptr) out.uploads.push_back({number, 0, bytes, w, 0, nullptr});
        return number;
    };
    const auto add_weight = [&](const PackedWeight& w) { return add_buffer("weights", w.size_bytes(), &w); };
    const uint32_t number = add_buffer("number", 0, nullptr);
    const uint32_t low_rank = add_buffer("low_rank", plan.max_rows * adapter.max_rank * sizeof(float), nullptr);
    for (const AdapterPoint& at : plan.adapter_points) {
        std::vector<Dispatch>& dispatches = out.dispatches.emplace_back();
        const LowRank* low = adapter.find(at.layer, at.target);
        if (low == nullptr) continue;
        const auto [a, b, first_row] = join_factors(*low, adapter.joined);
        Product down{add_weight(*a), plan.none, low_rank, at.x, a->n(), 0, a->n()};
        Product up{add_weight(*b), plan.none, at.y, {low_rank, a->n()}, at.y_stride, first_row, b->n()};
        up.adds = up.has_number = true, up.scale = at.scale, up.number = number, up.tokens = plan.tokens;
        dispatches.push_back(make_product(*a, down, settings, pipelines));
        dispatches.push_back(make_product(*b, up, settings, pipelines));
    }
    return out;
}

CacheSize fit_cache(const ModelConfig& config, KvType kv_type, size_t kv_bytes, size_t binding_bytes) {
    size_t largest_page = 1, largest_state = 1;  // in the buffer of a layer
    for (size_t layer = 0; layer < config.n_layers; ++layer) {
        largest_page = std::max(largest_page, layer_page_bytes(config, kv_type, layer));
        largest_state = std::max(largest_state, state_words(config, layer) * sizeof(uint32_t));
    }
    const KvMemory page(config, kv_type, 0);
    const size_t n_state_pages = page.n_state_pages();
    CacheSize size{std::min(kv_bytes / page.page_bytes(), binding_bytes / largest_page), 0, 0};
    if (n_state_pages > 0) {
        size.n_states = std::min(size.n_pages / n_state_pages, binding_bytes / largest_state);
        size.n_pages = std::min(size.n_pages, size.n_states * n_state_pages + n_state_pages - 1);
    }
    size.kv_bytes = size.n_pages * page.page_bytes();
    return size;
}

}  // namespace whet::gpu
