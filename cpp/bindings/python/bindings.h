// Functions that add the bindings of each file to the extension module.
#pragma once
#include <nanobind/nanobind.h>

#include <memory>

#include "engine/sampler.h"
#include "engine/stop_strings.h"

namespace whet {

// A Python object with shared ownership of an object of the engine.
template <class T>
struct Shared {
    std::shared_ptr<T> value;
};

// Reads settings by the names of SamplingParams, with "logit_bias" as a dict. Throws std::invalid_argument for a token
// outside the vocabulary.
Sampling sampling_of(const nanobind::dict& settings, size_t vocab_size);

void bind_attention(nanobind::module_& m);
void bind_engine(nanobind::module_& m);
void bind_files(nanobind::module_& m);
void bind_kv_cache(nanobind::module_& m);
void bind_linear(nanobind::module_& m);
void bind_lora(nanobind::module_& m);
void bind_norm(nanobind::module_& m);
void bind_primitives(nanobind::module_& m);
void bind_probe(nanobind::module_& m);
void bind_rope(nanobind::module_& m);
void bind_sampler(nanobind::module_& m);
void bind_training(nanobind::module_& m);
void bind_weights(nanobind::module_& m);

}  // namespace whet
