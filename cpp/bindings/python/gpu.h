// A GPU behind an object of Python, whet.gpu.program.Program.
#pragma once
#include <nanobind/nanobind.h>

#include <map>
#include <utility>

#include "engine/device.h"
#include "gpu/inputs.h"
#include "gpu/plan.h"

namespace whet {

// Methods throw the exceptions of Python.
class HostDevice final : public Device {
public:
    // `plan` is the program's.
    HostDevice(nanobind::object program, const gpu::Plan& plan, const Weights& weights)
        : program_(std::move(program)), plan_(plan), weights_(weights), config_(weights.config()) {}

    // Copies an adapter to the device, until it is destroyed.
    void add_adapter(uint64_t number, Adapter& adapter);

    void write_pages(std::span<const PageWrite> writes) override;
    void forward(std::span<const InputToken> tokens, std::span<const StateRun> runs, KvMemory& memory) override;
    void read_hidden(std::span<const HiddenTask> tasks) override;
    void draw(std::span<const HeadInput> inputs, std::span<const PlainDraw> draws, Drawn* out) override;
    void decode(std::span<const InputToken> tokens, size_t n_steps, std::span<const PlainDraw> draws,
                Drawn* out) override;
    void logits(std::span<const HeadInput> inputs, float* out) override;

private:
    const nanobind::object program_;
    const gpu::Plan& plan_;
    const Weights& weights_;
    const ModelConfig& config_;
    std::map<const Adapter*, int32_t> adapters_;  // their numbers
    gpu::Inputs inputs_;

    void record_experts(std::span<const InputToken> tokens, KvMemory& memory);
};

}  // namespace whet
