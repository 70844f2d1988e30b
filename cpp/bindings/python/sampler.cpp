// Bindings of the sampler and its uniforms, as the tests call them; the engine calls the C++ functions itself.
//
// NotImplemented says that an array is not contiguous, or not of the dtype and shape that it should be.
#include "engine/sampler.h"

#include <cstdint>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "runtime/ceil_div.h"
#include "runtime/philox.h"
#include "runtime/thread_pool.h"

namespace nb = nanobind;

namespace whet {
namespace {

// A thread's memory for a draw: a copy of the row, the bitmap of the tokens seen, the sampler's scratch.
struct DrawScratch {
    std::vector<float> logits;
    std::vector<uint64_t> seen;
    std::vector<double> memory;

    Drawn draw(const float* row, const bool* row_seen, size_t size, const Sampling& sampling, double uniform) {
        logits.assign(row, row + size);
        memory.resize(ceil_div(sampler_scratch_bytes(size), sizeof(double)));
        if (row_seen != nullptr) {
            seen.assign(ceil_div(size, 64), 0);
            for (size_t i = 0; i < size; ++i) seen[i / 64] |= static_cast<uint64_t>(row_seen[i]) << (i % 64);
        }
        return draw_token(logits.data(), size, sampling, row_seen == nullptr ? nullptr : seen.data(), uniform,
                          memory.data());
    }
};

nb::object draw_tokens(nb::handle logits_object, nb::handle uniforms_object, double temperature, int32_t top_k,
                       double top_p, double min_p, double repetition_penalty, nb::handle seen_object,
                       bool model_logprobs) {
    Array logits, uniforms, seen;
    if (!view(logits_object.ptr(), logits) || logits.dtype != DType::kFloat32 || logits.ndim != 2 ||
        !view_vector(uniforms_object, DType::kFloat64, uniforms) || uniforms.shape[0] != logits.shape[0]) {
        return not_implemented();
    }
    if (!seen_object.is_none() &&
        (!view(seen_object.ptr(), seen) || seen.dtype != DType::kBool || !equal_shapes(seen, logits))) {
        return not_implemented();
    }
    const Sampling sampling{.temperature = static_cast<float>(temperature),
                            .top_p = static_cast<float>(top_p),
                            .min_p = static_cast<float>(min_p),
                            .repetition_penalty = static_cast<float>(repetition_penalty),
                            .top_k = top_k,
                            .model_logprobs = model_logprobs};
    const auto rows = static_cast<size_t>(logits.shape[0]), size = static_cast<size_t>(logits.shape[1]);
    int32_t* ids = nullptr;
    float* logprobs = nullptr;
    nb::object ids_object = new_vector(DType::kInt32, rows, ids);
    nb::object logprobs_object = new_vector(DType::kFloat32, rows, logprobs);
    auto draw_row = [&](size_t r) {
        thread_local DrawScratch scratch;
        const bool* row_seen = seen_object.is_none() ? nullptr : seen.as<bool>() + r * size;
        const Drawn drawn =
            scratch.draw(logits.as<float>() + r * size, row_seen, size, sampling, uniforms.as<double>()[r]);
        ids[r] = drawn.token;
        logprobs[r] = drawn.logprob;
    };
    {
        const nb::gil_scoped_release release;
        parallel_for(rows, draw_row);
    }
    return nb::make_tuple(ids_object, logprobs_object);
}

nb::object token_uniforms(uint64_t seed, uint64_t prompt, uint64_t sample, size_t n) {
    double* data = nullptr;
    nb::object array = new_vector(DType::kFloat64, n, data);
    for (size_t t = 0; t < n; ++t) data[t] = token_uniform(seed, prompt, sample, t);
    return array;
}

}  // namespace

void bind_sampler(nb::module_& m) {
    m.def("draw_tokens", &draw_tokens, nb::arg("logits"), nb::arg("uniforms"), nb::kw_only(), nb::arg("temperature"),
          nb::arg("top_k"), nb::arg("top_p"), nb::arg("min_p"), nb::arg("repetition_penalty"), nb::arg("seen").none(),
          nb::arg("model_logprobs"));
    m.def("token_uniforms", &token_uniforms, nb::arg("seed"), nb::arg("prompt"), nb::arg("sample"), nb::arg("n"));
}

}  // namespace whet
