// What each file of bindings adds to the extension module.
#pragma once
#include <nanobind/nanobind.h>

namespace whet {

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

}  // namespace whet
