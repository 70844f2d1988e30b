// Functions that add the bindings of each file to the extension module.
#pragma once
#include <nanobind/nanobind.h>

#include <memory>
#include <span>
#include <utility>

#include "engine/sampler.h"
#include "engine/stop_strings.h"

namespace whet {

// A Python object with shared ownership of an object of the engine.
template <class T>
struct Shared {
    std::shared_ptr<T> value;
};

// Reads settings by the names of SamplingParams, with "logit_bias" as a dict.
Sampling sampling_of(const nanobind::dict& settings);

// Ids and log-probs as two arrays.
std::pair<nanobind::object, nanobind::object> arrays_of(std::span<const Drawn> drawn);

void bind_attention(nanobind::module_& m);
void bind_engine(nanobind::module_& m);
void bind_files(nanobind::module_& m);
void bind_gpu(nanobind::module_& m);
void bind_kv_cache(nanobind::module_& m);
void bind_learner(nanobind::module_& m);
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
