// Bindings of the sampler, its uniforms and stop strings. draw_tokens, token_uniforms and StopStrings.read are for
// tests: the engine calls the C++ functions directly.
//
// Functions return NotImplemented for an array that is not contiguous, or of the wrong dtype or shape.
#include "engine/sampler.h"

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "gil.h"
#include "engine/stop_strings.h"
#include "runtime/ceil_div.h"
#include "runtime/philox.h"
#include "runtime/thread_pool.h"

namespace nb = nanobind;

namespace whet {
namespace {

// Memory of a thread for a draw: a copy of the row, seen and counted tokens, scratch of the sampler.
struct DrawScratch {
    std::vector<float> logits;
    std::vector<uint64_t> seen;
    std::vector<TokenCount> counts;
    std::vector<double> memory;

    Drawn draw(const float* row, const bool* row_seen, const int32_t* row_counts, std::span<const int32_t> banned,
               size_t size, const Sampling& sampling, double uniform, Drawn* alternatives) {
        logits.assign(row, row + size);
        memory.resize(ceil_div(sampler_scratch_bytes(size), sizeof(double)));
        if (row_seen != nullptr) {
            seen.assign(ceil_div(size, 64), 0);
            for (size_t i = 0; i < size; ++i) seen[i / 64] |= static_cast<uint64_t>(row_seen[i]) << (i % 64);
        }
        counts.clear();
        for (size_t i = 0; row_counts != nullptr && i < size; ++i) {
            if (row_counts[i] > 0) counts.push_back({static_cast<int32_t>(i), static_cast<uint32_t>(row_counts[i])});
        }
        const History history{row_seen == nullptr ? nullptr : seen.data(), counts, banned};
        return draw_token(logits.data(), size, sampling, history, uniform, memory.data(), alternatives);
    }
};

// Returns (ids (R,), log-probs (R,), ids and log-probs of the alternatives, (R * top_logprobs,) each).
nb::object draw_tokens(nb::handle logits_object, nb::handle uniforms_object, const nb::dict& settings,
                       nb::handle seen_object, nb::handle counts_object, nb::handle banned_object) {
    Array logits, uniforms, seen, counts, banned;
    if (!view(logits_object.ptr(), logits) || logits.dtype != DType::kFloat32 || logits.ndim != 2 ||
        !view_vector(uniforms_object, DType::kFloat64, uniforms) || uniforms.shape[0] != logits.shape[0] ||
        !view_vector(banned_object, DType::kInt32, banned)) {
        return not_implemented();
    }
    const auto is_like_logits = [&](nb::handle object, DType dtype, Array& array) {
        return view(object.ptr(), array) && array.dtype == dtype && equal_shapes(array, logits);
    };
    const bool has_seen = !seen_object.is_none(), has_counts = !counts_object.is_none();
    if ((has_seen && !is_like_logits(seen_object, DType::kBool, seen)) ||
        (has_counts && !is_like_logits(counts_object, DType::kInt32, counts))) {
        return not_implemented();
    }
    const auto rows = static_cast<size_t>(logits.shape[0]), size = static_cast<size_t>(logits.shape[1]);
    const Sampling sampling = sampling_of(settings);
    for (const TokenBias& bias : sampling.logit_bias) check_token(bias.token, size);
    const std::span<const int32_t> banned_tokens(banned.as<int32_t>(), static_cast<size_t>(banned.size()));
    for (int32_t token : banned_tokens) check_token(token, size);
    const size_t n_top = sampling.top_logprobs;
    std::vector<Drawn> drawn(rows), alternatives(rows * n_top);
    auto draw_row = [&](size_t r) {
        thread_local DrawScratch scratch;
        const bool* row_seen = has_seen ? seen.as<bool>() + r * size : nullptr;
        const int32_t* row_counts = has_counts ? counts.as<int32_t>() + r * size : nullptr;
        drawn[r] = scratch.draw(logits.as<float>() + r * size, row_seen, row_counts, banned_tokens, size, sampling,
                                uniforms.as<double>()[r], alternatives.data() + r * n_top);
    };
    {
        const ReleasedGil released;
        parallel_for(rows, draw_row);
    }
    const auto [ids, logprobs] = arrays_of(drawn);
    const auto [top_ids, top_logprobs] = arrays_of(alternatives);
    return nb::make_tuple(ids, logprobs, top_ids, top_logprobs);
}

nb::object token_uniforms(uint64_t seed, uint64_t prompt, uint64_t sample, size_t n) {
    double* data = nullptr;
    nb::object array = new_vector(DType::kFloat64, n, data);
    for (size_t t = 0; t < n; ++t) data[t] = token_uniform(seed, prompt, sample, t);
    return array;
}

// ---------------------------------------------------------------- stop strings

using Texts = Shared<const TokenTexts>;
using Stops = Shared<const StopStrings>;

std::string string_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

void make_texts(Texts* self, const nb::bytes& bytes, nb::handle ends_object, bool drops_first_space) {
    Array ends;
    if (!view_vector(ends_object, DType::kInt32, ends)) throw std::invalid_argument("ends: not an int32 array");
    TokenTexts texts{string_of(bytes), {ends.as<int32_t>(), ends.as<int32_t>() + ends.size()}, drops_first_space};
    int32_t last = 0;
    for (int32_t end : texts.ends) {
        if (end < last) throw std::invalid_argument("ends: not in increasing order");
        last = end;
    }
    if (static_cast<size_t>(last) != texts.bytes.size())
        throw std::invalid_argument("ends: the last is not len(bytes)");
    new (self) Texts{std::make_shared<const TokenTexts>(std::move(texts))};
}

void make_stops(Stops* self, const Texts& texts, const nb::sequence& strings) {
    std::vector<std::string> all;
    for (nb::handle string : strings) {
        all.push_back(string_of(nb::cast<nb::bytes>(string)));
        if (all.back().empty()) throw std::invalid_argument("an empty stop string");
    }
    new (self) Stops{std::make_shared<const StopStrings>(texts.value, all)};
}

// Returns the withheld bytes after each token, up to the first that completes a stop string, and whether one does.
nb::tuple read_tokens(const Stops& self, nb::handle tokens_object, size_t min_new_tokens) {
    Array tokens;
    if (!view_vector(tokens_object, DType::kInt32, tokens)) throw std::invalid_argument("tokens: not an int32 array");
    nb::list withheld;
    StopStrings::State state;
    for (int32_t token : std::span(tokens.as<int32_t>(), static_cast<size_t>(tokens.size()))) {
        const auto match = self.value->read(state, token, withheld.size() >= min_new_tokens);
        withheld.append(match.n_withheld);
        if (match.is_complete) return nb::make_tuple(withheld, true);
    }
    return nb::make_tuple(withheld, false);
}

}  // namespace

std::pair<nb::object, nb::object> arrays_of(std::span<const Drawn> drawn) {
    int32_t* ids = nullptr;
    float* logprobs = nullptr;
    nb::object ids_array = new_vector(DType::kInt32, drawn.size(), ids);
    nb::object logprobs_array = new_vector(DType::kFloat32, drawn.size(), logprobs);
    for (const auto& [token, logprob] : drawn) *ids++ = token, *logprobs++ = logprob;
    return {ids_array, logprobs_array};
}

Sampling sampling_of(const nb::dict& settings) {
    const auto number = [&](const char* name) { return static_cast<float>(nb::cast<double>(settings[name])); };
    Sampling sampling;
    sampling.temperature = number("temperature");
    sampling.top_p = number("top_p");
    sampling.min_p = number("min_p");
    sampling.repetition_penalty = number("repetition_penalty");
    sampling.presence_penalty = number("presence_penalty");
    sampling.frequency_penalty = number("frequency_penalty");
    sampling.top_k = nb::cast<int32_t>(settings["top_k"]);
    sampling.model_logprobs = nb::cast<bool>(settings["model_logprobs"]);
    sampling.top_logprobs = nb::cast<size_t>(settings["top_logprobs"]);
    for (auto [token, bias] : nb::cast<nb::dict>(settings["logit_bias"])) {
        sampling.logit_bias.push_back({nb::cast<int32_t>(token), static_cast<float>(nb::cast<double>(bias))});
    }
    return sampling;
}

void bind_sampler(nb::module_& m) {
    using nb::arg;
    m.def("draw_tokens", &draw_tokens, arg("logits"), arg("uniforms"), nb::kw_only(), arg("sampling"),
          arg("seen").none(), arg("counts").none(), arg("banned"));
    m.def("token_uniforms", &token_uniforms, arg("seed"), arg("prompt"), arg("sample"), arg("n"));
    nb::class_<Texts>(m, "TokenTexts")
        .def("__init__", &make_texts, arg("bytes"), nb::kw_only(), arg("ends"), arg("drops_first_space"));
    nb::class_<Stops>(m, "StopStrings")
        .def("__init__", &make_stops, arg("texts"), arg("strings"))
        .def("read", &read_tokens, arg("tokens"), nb::kw_only(), arg("min_new_tokens"));
}

}  // namespace whet
