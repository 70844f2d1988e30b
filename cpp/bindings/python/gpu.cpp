// Bindings of the plan of a GPU, and of its host.
#include "gpu.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "gil.h"
#include "gpu/plan.h"

namespace nb = nanobind;

namespace whet {
namespace {

nb::object array_of(const std::vector<float>& values) { return array_of(DType::kFloat32, std::span(values)); }
nb::object array_of(const std::vector<int32_t>& values) { return array_of(DType::kInt32, std::span(values)); }

nb::list dispatches_of(const std::vector<gpu::Dispatch>& dispatches) {
    static const char* const kCounts[] = {"tokens", "experts", "heads", "one"};
    nb::list out;
    for (const gpu::Dispatch& dispatch : dispatches) {
        nb::list variants;
        for (const gpu::Variant& variant : dispatch.variants) {
            nb::list buffers;
            for (const uint32_t buffer : variant.buffers) buffers.append(buffer);
            const bool is_skipped = variant.pipeline == gpu::Variant::kSkip;
            variants.append(nb::make_tuple(variant.rows, variant.groups,
                                           is_skipped ? nb::none() : nb::cast(variant.pipeline), buffers));
        }
        out.append(nb::make_tuple(variants, kCounts[static_cast<int>(dispatch.count)]));
    }
    return out;
}

nb::list buffers_of(const std::vector<gpu::Buffer>& buffers) {
    nb::list out;
    for (const gpu::Buffer& buffer : buffers) out.append(nb::make_tuple(buffer.name, buffer.bytes, buffer.rows));
    return out;
}

// Buffer, offset and contents: memory views that are valid while the weights are.
nb::list uploads_of(const std::vector<gpu::Upload>& uploads) {
    nb::list out;
    for (const gpu::Upload& upload : uploads) {
        auto* data = static_cast<char*>(const_cast<void*>(upload.data()));
        const nb::object view =
            nb::steal(PyMemoryView_FromMemory(data, static_cast<Py_ssize_t>(upload.bytes), PyBUF_READ));
        out.append(nb::make_tuple(upload.buffer, upload.offset, view));
    }
    return out;
}

nb::list pipelines_of(const std::vector<gpu::Pipeline>& pipelines) {
    nb::list out;
    for (const gpu::Pipeline& pipeline : pipelines) {
        nb::list files;
        for (const std::string& file : pipeline.files) files.append(file);
        out.append(nb::make_tuple(pipeline.constants, nb::tuple(files)));
    }
    return out;
}

nb::list points_of(const std::vector<gpu::AdapterPoint>& points) {
    nb::list out;
    for (const gpu::AdapterPoint& point : points) out.append(point.after);
    return out;
}

void make_plan_call(gpu::Plan* self, const Shared<Weights>& weights, KvType kv_type, size_t max_rows, size_t n_pages,
                    size_t n_states, size_t binding_bytes) {
    gpu::Plan plan = gpu::make_plan(*weights.value, kv_type, {max_rows, n_pages, n_states, binding_bytes});
    new (self) gpu::Plan(std::move(plan));
}

nb::tuple pages_call(const Shared<Weights>& weights, KvType kv_type, size_t kv_bytes, size_t binding_bytes) {
    const gpu::CacheSize size = gpu::fit_cache(weights.value->config(), kv_type, kv_bytes, binding_bytes);
    return nb::make_tuple(size.n_pages, size.n_states, size.kv_bytes);
}

// Copies the bytes of an object with a buffer.
void copy_bytes(nb::handle from, void* to, size_t n) {
    const nb::object view = nb::steal(PyMemoryView_FromObject(from.ptr()));
    Py_buffer buffer;
    if (!view.is_valid() || PyObject_GetBuffer(view.ptr(), &buffer, PyBUF_SIMPLE) != 0) throw nb::python_error();
    const bool is_whole = static_cast<size_t>(buffer.len) == n;
    if (is_whole) std::memcpy(to, buffer.buf, n);
    PyBuffer_Release(&buffer);
    if (!is_whole) throw std::logic_error("the GPU returned another number of bytes");
}

}  // namespace

void HostDevice::add_adapter(uint64_t number, Adapter& adapter) {
    const gpu::AdapterPlan plan = gpu::make_adapter_plan(plan_, adapter);
    nb::list points;
    for (const std::vector<gpu::Dispatch>& dispatches : plan.dispatches) points.append(dispatches_of(dispatches));
    program_.attr("add_adapter")(number, buffers_of(plan.buffers), uploads_of(plan.uploads),
                                 pipelines_of(plan.pipelines), points);
    adapter.joined.clear();  // uploaded
    const Adapter* key = &adapter;
    adapters_[key] = static_cast<int32_t>(number);
    adapter.device_copy = std::shared_ptr<void>(nullptr, [this, number, key](void*) {
        adapters_.erase(key);
        const AcquiredGil gil;
        program_.attr("remove_adapter")(number);
    });
}

void HostDevice::write_pages(std::span<const PageWrite> writes) {
    const std::vector<int32_t> pages = gpu::page_copies(writes);
    if (pages.empty()) return;
    const AcquiredGil gil;
    program_.attr("write_pages")(array_of(pages));
}

void HostDevice::forward(std::span<const InputToken> tokens, std::span<const StateRun> runs, KvMemory& memory) {
    gpu::set_inputs(weights_, tokens, runs, adapters_, inputs_);
    const AcquiredGil gil;
    program_.attr("forward")(array_of(inputs_.tokens), array_of(inputs_.page_table), array_of(inputs_.runs),
                             array_of(inputs_.rotation), array_of(inputs_.local_rotation), array_of(inputs_.embedded));
    if (config_.n_token_experts() > 0) record_experts(tokens, memory);
}

// Copies the chosen experts of tokens to their pages.
void HostDevice::record_experts(std::span<const InputToken> tokens, KvMemory& memory) {
    const size_t n = config_.n_token_experts();
    std::vector<uint32_t> experts(tokens.size() * n);
    copy_bytes(program_.attr("read_experts")(tokens.size()), experts.data(), experts.size() * sizeof(uint32_t));
    for (size_t i = 0; i < tokens.size(); ++i) {
        const auto position = static_cast<size_t>(tokens[i].position);
        uint16_t* const recorded = memory.experts(tokens[i].pages[position / kPageTokens], position % kPageTokens);
        std::copy_n(experts.begin() + static_cast<ptrdiff_t>(i * n), n, recorded);
    }
}

void HostDevice::read_hidden(std::span<const HiddenTask> tasks) {
    const size_t bytes = config_.hidden_dim * sizeof(float);
    const AcquiredGil gil;
    for (const HiddenTask& task : tasks) copy_bytes(program_.attr("read_hidden")(task.token), task.hidden, bytes);
}

void HostDevice::draw(std::span<const HeadInput> inputs, std::span<const PlainDraw> draws, Drawn* out) {
    static_assert(sizeof(Drawn) == 8);
    const gpu::HeadRows rows = gpu::head_rows(inputs, config_.hidden_dim);
    const AcquiredGil gil;
    const nb::object drawn =
        program_.attr("draw")(array_of(rows.tokens), array_of(rows.hidden), array_of(gpu::draw_settings(draws)));
    copy_bytes(drawn, out, inputs.size() * sizeof(Drawn));
}

void HostDevice::decode(std::span<const InputToken> tokens, size_t n_steps, std::span<const PlainDraw> draws,
                        Drawn* out) {
    gpu::set_inputs(weights_, tokens, {}, adapters_, inputs_);
    const AcquiredGil gil;
    const nb::object drawn = program_.attr("decode")(n_steps, array_of(inputs_.tokens), array_of(inputs_.page_table),
                                                     array_of(inputs_.rotation), array_of(inputs_.local_rotation),
                                                     array_of(gpu::draw_settings(draws)));
    copy_bytes(drawn, out, draws.size() * sizeof(Drawn));
}

void HostDevice::logits(std::span<const HeadInput> inputs, float* out) {
    const gpu::HeadRows rows = gpu::head_rows(inputs, config_.hidden_dim);
    const AcquiredGil gil;
    copy_bytes(program_.attr("logits")(array_of(rows.tokens), array_of(rows.hidden)), out,
               inputs.size() * config_.vocab_size * sizeof(float));
}

void bind_gpu(nb::module_& m) {
    using nb::arg;
    nb::class_<gpu::Plan>(m, "GpuPlan")
        .def("__init__", &make_plan_call, arg("weights"), nb::kw_only(), arg("kv_type"), arg("max_rows"),
             arg("n_pages"), arg("n_states"), arg("binding_bytes"))
        .def_prop_ro("buffers", [](const gpu::Plan& plan) { return buffers_of(plan.buffers); })
        .def_prop_ro("uploads", [](const gpu::Plan& plan) { return uploads_of(plan.uploads); })
        .def_prop_ro("pipelines", [](const gpu::Plan& plan) { return pipelines_of(plan.pipelines); })
        .def_prop_ro("write_pages", [](const gpu::Plan& plan) { return dispatches_of(plan.write_pages); })
        .def_prop_ro("forward", [](const gpu::Plan& plan) { return dispatches_of(plan.forward); })
        .def_prop_ro("adapter_points", [](const gpu::Plan& plan) { return points_of(plan.adapter_points); })
        .def_prop_ro("draw", [](const gpu::Plan& plan) { return dispatches_of(plan.draw); })
        .def_prop_ro("head", [](const gpu::Plan& plan) { return dispatches_of(plan.head); })
        .def_prop_ro("next_tokens", [](const gpu::Plan& plan) { return dispatches_of(plan.next_tokens); });
    m.def("gpu_pages", &pages_call, arg("weights"), nb::kw_only(), arg("kv_type"), arg("kv_bytes"),
          arg("binding_bytes"));
}

}  // namespace whet
