// The plan of a GPU and its device for JavaScript (web/src/gpu/program.ts), which computes with WebGPU.
//
// JavaScript reads a GPU's results asynchronously. A step that needs some suspends: it throws, and step() is called
// again when they are there. Its plan is the same again, the commands that it has given are not repeated, and it finds
// the results in their order.
#include "bindings/wasm/gpu.h"

#include <algorithm>
#include <map>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/wasm/exports.h"
#include "bindings/wasm/model.h"
#include "bindings/wasm/result.h"
#include "gpu/inputs.h"
#include "gpu/plan.h"

#define WHET_IMPORT(name) extern "C" __attribute__((import_module("gpu"), import_name(#name)))

namespace whet {
namespace {

// An array for JavaScript: address and number of elements.
struct Array {
    const void* data;
    size_t size;

    template <class T>
    Array(const std::vector<T>& values) : data(values.data()), size(values.size()) {}
};

WHET_IMPORT(write_pages) void host_write_pages(const Array* pages);
WHET_IMPORT(forward) void host_forward(const Array* inputs);  // in the order of gpu::Inputs
WHET_IMPORT(draw) void host_draw(const Array* inputs);        // rows, hidden states, draws
WHET_IMPORT(decode)
void host_decode(size_t n_steps, const Array* inputs);      // as forward(), without runs and embedded; then draws
WHET_IMPORT(logits) void host_logits(const Array* inputs);  // rows, hidden states
WHET_IMPORT(read_hidden) void host_read_hidden(const Array* tokens);
WHET_IMPORT(remove_adapter) void host_remove_adapter(uint32_t number);
WHET_IMPORT(suspend) [[noreturn]] void host_suspend();  // throws

class HostDevice final : public Device {
public:
    HostDevice(gpu::Plan plan, const Weights& weights) : plan_(std::move(plan)), weights_(weights) {}

    const gpu::Plan& plan() const { return plan_; }

    void add_adapter(uint32_t number, Adapter& added) {
        const Adapter* key = &added;
        adapters_[key] = static_cast<int32_t>(number);
        added.device_copy = std::make_shared<Copy>(*this, number, key);
    }

    // A step begins again after it has been suspended.
    void begin_step() { next_result_ = next_command_ = 0; }
    void end_step() { results_.clear(), n_commands_ = 0; }
    uint8_t* add_result(size_t n_bytes) { return results_.emplace_back(n_bytes).data(); }

    void write_pages(std::span<const PageWrite> writes) override {  // not repeated: the plan has them once
        const std::vector<int32_t> pages = gpu::page_copies(writes);
        if (pages.empty()) return;
        const Array array = pages;
        host_write_pages(&array);
    }

    void forward(std::span<const InputToken> tokens, std::span<const StateRun> runs, KvMemory&) override {
        if (!is_new_command()) return;
        gpu::Inputs inputs;
        gpu::set_inputs(weights_, tokens, runs, adapters_, inputs);
        const Array arrays[] = {inputs.tokens,   inputs.page_table,     inputs.runs,
                                inputs.rotation, inputs.local_rotation, inputs.embedded};
        host_forward(arrays);
    }

    void read_hidden(std::span<const HiddenTask> tasks) override {
        if (is_new_command()) {
            std::vector<int32_t> tokens;
            for (const HiddenTask& task : tasks) tokens.push_back(static_cast<int32_t>(task.token));
            const Array array = tokens;
            host_read_hidden(&array);
        }
        const size_t d = weights_.config().hidden_dim;
        const float* row = reinterpret_cast<const float*>(result(tasks.size() * d * sizeof(float)));
        for (const HiddenTask& task : tasks) std::copy_n(row, d, task.hidden), row += d;
    }

    void draw(std::span<const HeadInput> inputs, std::span<const PlainDraw> draws, Drawn* out) override {
        if (is_new_command()) {
            const gpu::HeadRows rows = gpu::head_rows(inputs, weights_.config().hidden_dim);
            const std::vector<float> settings = gpu::draw_settings(draws);
            const Array arrays[] = {rows.tokens, rows.hidden, settings};
            host_draw(arrays);
        }
        copy_result(out, inputs.size() * sizeof(Drawn));
    }

    void decode(std::span<const InputToken> tokens, size_t n_steps, std::span<const PlainDraw> draws,
                Drawn* out) override {
        if (is_new_command()) {
            gpu::Inputs inputs;
            gpu::set_inputs(weights_, tokens, {}, adapters_, inputs);
            const std::vector<float> settings = gpu::draw_settings(draws);
            const Array arrays[] = {inputs.tokens, inputs.page_table, inputs.rotation, inputs.local_rotation, settings};
            host_decode(n_steps, arrays);
        }
        copy_result(out, draws.size() * sizeof(Drawn));
    }

    void logits(std::span<const HeadInput> inputs, float* out) override {
        if (is_new_command()) {
            const gpu::HeadRows rows = gpu::head_rows(inputs, weights_.config().hidden_dim);
            const Array arrays[] = {rows.tokens, rows.hidden};
            host_logits(arrays);
        }
        copy_result(out, inputs.size() * weights_.config().vocab_size * sizeof(float));
    }

private:
    // An adapter on the GPU.
    struct Copy {
        HostDevice& device;
        uint32_t number;
        const Adapter* key;

        Copy(HostDevice& on, uint32_t of, const Adapter* adapter) : device(on), number(of), key(adapter) {}
        ~Copy() {
            device.adapters_.erase(key);
            host_remove_adapter(number);
        }
    };

    const gpu::Plan plan_;
    const Weights& weights_;
    std::map<const Adapter*, int32_t> adapters_;  // their numbers
    std::vector<std::vector<uint8_t>> results_;   // of the step
    size_t n_commands_ = 0, next_command_ = 0, next_result_ = 0;

    bool is_new_command() {
        if (next_command_++ < n_commands_) return false;
        ++n_commands_;
        return true;
    }
    const uint8_t* result(size_t n_bytes) {
        if (next_result_ == results_.size()) host_suspend();
        const std::vector<uint8_t>& found = results_[next_result_++];
        if (found.size() != n_bytes) throw std::logic_error("the GPU returned another number of bytes");
        return found.data();
    }
    void copy_result(void* out, size_t n_bytes) { std::copy_n(result(n_bytes), n_bytes, static_cast<uint8_t*>(out)); }
};

std::optional<HostDevice> device;
std::map<std::string, std::vector<uint8_t>> packed;  // memory of the matrices that are being packed, by slot

// Numbers and texts as JSON.
void append(size_t number) { result += std::to_string(number); }
void append(uint32_t number) { result += std::to_string(number); }
void append(const std::string& text) {
    result += '"';
    for (const char c : text) c == '\n' ? result += "\\n" : result += c;  // names and WGSL have no other special ones
    result += '"';
}
template <class Each>
void append_list(const auto& items, const Each& each) {
    result += '[';
    for (const auto& item : items) {
        if (result.back() != '[') result += ',';
        each(item);
    }
    result += ']';
}
void append_all(const auto&... parts) {  // in a list
    result += '[';
    const auto append_one = [](const auto& part) {
        if (result.back() != '[') result += ',';
        if constexpr (requires { append(part); }) {
            append(part);
        } else {
            part();
        }
    };
    (append_one(parts), ...);
    result += ']';
}
void append_field(const char* name, const auto& value) {
    if (result.back() != '{') result += ',';
    append(std::string(name));
    result += ':';
    value();
}

void append_dispatch(const gpu::Dispatch& dispatch) {
    append_all(
        [&] {
            append_list(dispatch.variants, [](const gpu::Variant& variant) {
                append_all(variant.rows, variant.groups, variant.pipeline,
                           [&] { append_list(variant.buffers, [](uint32_t buffer) { append(buffer); }); });
            });
        },
        static_cast<uint32_t>(dispatch.count));
}
void append_dispatches(const char* name, const std::vector<gpu::Dispatch>& dispatches) {
    append_field(name, [&] { append_list(dispatches, append_dispatch); });
}

void append_upload(const gpu::Upload& upload) {
    append_all(upload.buffer, upload.offset, reinterpret_cast<size_t>(upload.data()), upload.bytes);
}

// {"buffers": [[name, bytes, rows], ...], "pipelines": [[constants, [file, ...]], ...]
void begin_plan(const std::vector<gpu::Buffer>& buffers, const std::vector<gpu::Pipeline>& pipelines) {
    result = "{";
    append_field("buffers", [&] {
        append_list(buffers, [](const gpu::Buffer& buffer) { append_all(buffer.name, buffer.bytes, buffer.rows); });
    });
    append_field("pipelines", [&] {
        append_list(pipelines, [](const gpu::Pipeline& pipeline) {
            append_all(pipeline.constants,
                       [&] { append_list(pipeline.files, [](const std::string& file) { append(file); }); });
        });
    });
}

bool is_of(const Matrix& matrix, const PackedWeight* part) {
    return !matrix.parts.empty() && part >= matrix.parts.data() && part < matrix.parts.data() + matrix.parts.size();
}

}  // namespace

Device& gpu_device() {
    if (!device) throw std::logic_error("no plan is made");
    return *device;
}
void begin_gpu_step() { device->begin_step(); }
void end_gpu_step() { device->end_step(); }
void add_to_gpu(uint32_t number, Adapter& adapter) { device->add_adapter(number, adapter); }

// Plans the steps of the model, whose matrices have no memory yet. The result has buffers, pipelines, passes of
// dispatches [[[rows, groups, pipeline, [buffer, ...]], ...], count], the number of dispatches before each point of
// adapters, and kvBytes, the part of `kv_bytes` that is used. Throws std::invalid_argument for what has no kernel,
// named.
WHET_EXPORT(gpu_plan)
void gpu_plan(bool bf16_cache, size_t kv_bytes, size_t max_rows, size_t binding_bytes) {
    const KvType kv_type = bf16_cache ? KvType::kBFloat16 : KvType::kFloat32;
    const Weights& weights = *loaded_weights();
    const gpu::CacheSize size = gpu::fit_cache(weights.config(), kv_type, kv_bytes, binding_bytes);
    device.emplace(gpu::make_plan(weights, kv_type, {max_rows, size.n_pages, size.n_states, binding_bytes}), weights);
    const gpu::Plan& plan = device->plan();
    begin_plan(plan.buffers, plan.pipelines);
    append_dispatches("write_pages", plan.write_pages);
    append_dispatches("forward", plan.forward);
    append_dispatches("head", plan.head);
    append_dispatches("draw", plan.draw);
    append_dispatches("next_tokens", plan.next_tokens);
    append_field("points", [&] {
        append_list(plan.adapter_points, [](const gpu::AdapterPoint& point) { append(point.after); });
    });
    append_field("kvBytes", [&] { append(size.kv_bytes); });
    append_field("nUsedExperts", [&] { append(weights.config().n_used_experts); });
    result += '}';
}

// Matrices are packed and uploaded one by one.
WHET_EXPORT(allocate_matrix) void allocate_matrix(const char* slot, size_t size) {
    packed[{slot, size}] = loaded_weights()->allocate({slot, size});
}
WHET_EXPORT(free_matrix) void free_matrix(const char* slot, size_t size) {
    loaded_weights()->free({slot, size});
    packed.erase({slot, size});
}
// [[buffer, offset, address, bytes], ...] of a matrix; without a slot of everything else.
WHET_EXPORT(gpu_uploads) void gpu_uploads(const char* slot, size_t size) {
    const Matrix* matrix = size == 0 ? nullptr : &loaded_weights()->matrix({slot, size});
    std::vector<gpu::Upload> found;
    for (const gpu::Upload& upload : device->plan().uploads) {
        const bool is_asked = matrix == nullptr ? upload.weight == nullptr : is_of(*matrix, upload.weight);
        if (is_asked) found.push_back(upload);
    }
    result.clear();
    append_list(found, append_upload);
}

void describe_for_gpu(Adapter& adapter) {
    const gpu::AdapterPlan plan = gpu::make_adapter_plan(device->plan(), adapter);
    begin_plan(plan.buffers, plan.pipelines);
    append_field("uploads", [&] { append_list(plan.uploads, append_upload); });
    append_field("points", [&] {
        append_list(plan.dispatches,
                    [](const std::vector<gpu::Dispatch>& dispatches) { append_list(dispatches, append_dispatch); });
    });
    result += '}';
}

// Reserves memory for the result that a suspended step waits for.
WHET_EXPORT(gpu_result) uint8_t* gpu_result(size_t n_bytes) { return device->add_result(n_bytes); }
// After an error: the next step gives all commands again.
WHET_EXPORT(gpu_abandon) void gpu_abandon() { end_gpu_step(); }

}  // namespace whet
