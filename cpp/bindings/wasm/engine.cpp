// Engine exports for JavaScript: one model and its engine per instance of the module.
//
// web/src validates arguments with explanatory errors; the checks here are for memory safety. Settings are an array of
// doubles, in the order of fields.def.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "bindings/wasm/exports.h"
#include "bindings/wasm/model.h"
#include "bindings/wasm/result.h"
#include "bindings/wasm/settings.h"
#if defined(WHET_GPU)
#include "bindings/wasm/gpu.h"
#include "gpu/plan.h"
#endif
#include "engine/engine.h"
#include "engine/primitives.h"

namespace whet {
namespace {

std::shared_ptr<Weights> weights;
std::optional<Transformer> model;
std::optional<Engine> engine;
std::unique_ptr<Adapter> adapter;               // under construction
std::shared_ptr<const TokenTexts> token_texts;  // null: no stop strings

Engine& running() {
    if (!engine) throw std::logic_error("no model is loaded");
    return *engine;
}

KvType kv_type(bool bf16_cache) { return bf16_cache ? KvType::kBFloat16 : KvType::kFloat32; }

// Stop strings from their concatenated bytes and their lengths.
std::shared_ptr<const StopStrings> stop_strings_of(const char* text, const std::vector<size_t>& lengths) {
    std::vector<std::string> strings;
    for (const size_t length : lengths) {
        strings.emplace_back(text, length);
        text += length;
    }
    if (strings.empty()) return nullptr;
    if (token_texts == nullptr) throw std::logic_error("the token texts are not set");
    return std::make_shared<StopStrings>(token_texts, strings);
}

struct Prompt : Request {
    std::vector<size_t> stop_lengths;
};

// Addresses of a sample's arrays, which JavaScript reads in place.
struct SampleView {
#define SAMPLE(type, field)                          \
    static_assert(sizeof(type) == sizeof(uint32_t)); \
    type field;
#include "bindings/fields.def"
};

struct EnumValue {
    std::string_view list;
    int value;
};
constexpr bool are_enums_in_order() {
    constexpr EnumValue values[] = {
#define VALUE(list, value, name) {#list, static_cast<int>(value)},
#include "bindings/fields.def"
    };
    const EnumValue* last = nullptr;
    for (const EnumValue& each : values) {
        if (each.value != (last != nullptr && last->list == each.list ? last->value + 1 : 0)) return false;
        last = &each;
    }
    return true;
}
static_assert(are_enums_in_order(), "JavaScript sends an enum's value as its index in fields.def");

}  // namespace

std::shared_ptr<Weights> loaded_weights() { return weights; }

WHET_EXPORT(begin_model) void begin_model(const double* numbers, size_t n) {
    Settings from(numbers, n);
    ModelConfig c;
#define MODEL(field) from.read(c.field);
#include "bindings/fields.def"
    from.finish();
    check(c);
    weights = std::make_shared<Weights>(std::move(c));
}

WHET_EXPORT(add_matrix) void add_matrix(const char* slot, size_t size, int format, size_t n, size_t k) {
    weights->add_matrix({slot, size}, static_cast<WeightFormat>(format), n, k);
}
WHET_EXPORT(add_vector) void add_vector(const char* slot, size_t size, size_t n) {
    weights->add_vector({slot, size}, n);
}
WHET_EXPORT(allocate_weights) void allocate_weights() { weights->allocate(); }

// Packs rows of `width` elements, unless one is beyond the range of its format. Returns the PackingLoss as doubles.
WHET_EXPORT(pack)
const double* pack(const char* slot, size_t size, size_t first, int type, const void* data, size_t n, size_t width,
                   ptrdiff_t row_stride, ptrdiff_t column_stride) {
    const auto stored = static_cast<StoredType>(type);
    const StoredRows rows{stored, data, n, traits(stored).row_length(width), row_stride, column_stride};
    const PackingLoss loss = weights->measure_loss({slot, size}, first, rows);
    if (loss.largest <= loss.limit) weights->pack({slot, size}, first, rows);
    static double numbers[] = {
#define LOSS(field) 0.0,
#include "bindings/fields.def"
    };
    size_t i = 0;
#define LOSS(field) numbers[i++] = static_cast<double>(loss.field);
#include "bindings/fields.def"
    return numbers;
}

// Reserves memory for `count` rows of the second embedding, which stays in its file; returns it.
WHET_EXPORT(hold_rows) uint8_t* hold_rows(int type, size_t count) {
    return weights->layer_embedding.hold(static_cast<StoredType>(type), count);
}
// The row at `place` of this memory is a token's from now on. Returns whether its numbers are finite.
WHET_EXPORT(place_row) bool place_row(size_t token, size_t place) {
    weights->layer_embedding.place(token, place);
    return weights->layer_embedding.is_finite(token);
}

WHET_EXPORT(begin_engine) void begin_engine(size_t kv_bytes, size_t max_batch, size_t chunk, bool bf16_cache) {
    model.emplace(weights, max_batch + chunk, kv_type(bf16_cache));
#if defined(WHET_GPU)
    engine.emplace(*model, Limits{kv_bytes, max_batch, chunk, false, gpu::kLookahead}, nullptr, &gpu_device());
#else
    engine.emplace(*model, Limits{kv_bytes, max_batch, chunk});
#endif
}

WHET_EXPORT(kv_page_bytes) size_t kv_page_bytes(bool bf16_cache) {
    return KvMemory::page_bytes(weights->config(), kv_type(bf16_cache));
}
WHET_EXPORT(weights_bytes) size_t weights_bytes() { return weights->size_bytes(); }
WHET_EXPORT(kv_bytes) size_t kv_bytes() { return running().pages().n_pages() * running().kv_memory().page_bytes(); }
WHET_EXPORT(kv_used_bytes) size_t kv_used_bytes() {
    const PageIndex& pages = running().pages();
    return (pages.n_pages() - pages.n_free()) * running().kv_memory().page_bytes();
}

// Concatenated bytes of all tokens, and the end of each.
WHET_EXPORT(set_token_texts)
void set_token_texts(const char* bytes, size_t n_bytes, const int32_t* ends, size_t n, bool drops_first_space) {
    token_texts = std::make_shared<TokenTexts>(TokenTexts{{bytes, n_bytes}, {ends, ends + n}, drops_first_space});
}

WHET_EXPORT(add_prompt)
uint32_t add_prompt(const int32_t* tokens, size_t n_tokens, const int32_t* stops, size_t n_stops, const char* stop_text,
                    const double* numbers, size_t n_numbers) {
    Settings from(numbers, n_numbers);
    Prompt prompt;
#define PROMPT(field) from.read(prompt.field);
#include "bindings/fields.def"
    from.finish();
    if (prompt.n == 0) throw std::invalid_argument("no token to sample");
    prompt.tokens.assign(tokens, tokens + n_tokens);
    prompt.stop_strings = stop_strings_of(stop_text, prompt.stop_lengths);
    prompt.stop_tokens.assign(stops, stops + n_stops);
    return static_cast<uint32_t>(running().add(std::move(prompt)));
}

WHET_EXPORT(add_score)
uint32_t add_score(const int32_t* tokens, size_t n, size_t score_from, float temperature, uint32_t adapter_id) {
    Request request;
    request.tokens.assign(tokens, tokens + n);
    request.adapter = adapter_id;
    request.score_from = score_from;
    request.scoring.temperature = temperature;
    return static_cast<uint32_t>(running().add(std::move(request)));
}

// Plans the next step: the number of its tokens, and the tokens.
WHET_EXPORT(plan_step) const int32_t* plan_step() {
    static std::vector<int32_t> numbers;
    const auto tokens = running().plan();
    numbers = {static_cast<int32_t>(tokens.size())};
    for (const InputToken& each : tokens) numbers.push_back(each.token);
    return numbers.data();
}
#if defined(WHET_GPU)
WHET_EXPORT(step) void step() {
    begin_gpu_step();
    running().step();
    end_gpu_step();
}
#else
WHET_EXPORT(step) bool step() { return running().step(); }
#endif
WHET_EXPORT(is_done) bool is_done(uint32_t id) { return running().job(id).done; }
WHET_EXPORT(job_error) void job_error(uint32_t id) { result = running().job(id).error; }
WHET_EXPORT(remove) void remove_job(uint32_t id) { running().remove(id); }

WHET_EXPORT(sample) const SampleView* sample(uint32_t id, size_t i) {
    static SampleView view;
    const Sample& s = running().job(id).samples.at(i);
    view = {.n = s.tokens.size(),
            .tokens = s.tokens.data(),
            .logprobs = s.logprobs.data(),
            .withheld = s.n_withheld.data(),
            .alternatives = s.alternatives.data(),
            .finish = static_cast<uint32_t>(s.finish)};
    return &view;
}
WHET_EXPORT(scores) const float* scores(uint32_t id) { return running().job(id).logprobs.data(); }

// ---------------------------------------------------------------- adapters

WHET_EXPORT(begin_adapter) void begin_adapter() { adapter = std::make_unique<Adapter>(weights->config().n_layers); }

// A (rank, k) and B (n, rank), contiguous float32; the scaling is folded into B.
WHET_EXPORT(add_adapter_part)
void add_adapter_part(size_t layer, int target, size_t first_row, const float* a, const float* b, size_t rank, size_t k,
                      size_t n) {
    adapter->add(*weights, layer, static_cast<Target>(target), first_row, a, b, rank, k, n);
}
WHET_EXPORT(end_adapter) void end_adapter(uint32_t id) {
#if defined(WHET_GPU)
    add_to_gpu(id, *adapter);
#endif
    running().add_adapter(id, std::move(adapter));
}
WHET_EXPORT(remove_adapter) void remove_adapter(uint32_t id) { running().remove_adapter(id); }

#if defined(WHET_GPU)
WHET_EXPORT(gpu_adapter) void gpu_adapter() { describe_for_gpu(*adapter); }
#endif

// ---------------------------------------------------------------- maths independent of the host's libm

WHET_EXPORT(power) double power(double base, double exponent) { return std::pow(base, exponent); }
WHET_EXPORT(logarithm) double logarithm(double x) { return std::log(x); }

}  // namespace whet
