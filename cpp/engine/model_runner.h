// Runs the steps that a scheduler plans: the transformer, the head over the hidden states that need logits, and
// sampling.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/device.h"
#include "engine/step_plan.h"

namespace whet {

constexpr size_t kHeadTile = 64;  // rows of logits that are computed at once

class ModelRunner {
public:
    // `device`: computes the forward pass and the logits; null: the transformer does.
    ModelRunner(Transformer& transformer, size_t max_batch, Device* device = nullptr);

    // Computes a plan and writes its outputs. Returns the drawn tokens, in the order of plan.draws, valid until the
    // next call. A run that throws std::bad_alloc can be repeated.
    std::span<const Drawn> run(StepPlan& plan, KvMemory& memory);

    // Applies page writes and removes them.
    void write_pages(std::vector<PageWrite>& writes, KvMemory& memory);

    // Workspace: memory that only a running step uses.
    size_t workspace_bytes() const;
    size_t committed_workspace_bytes() const { return has_workspace_ ? workspace_bytes() : 0; }
    void release_workspace();  // to the system; the next step commits it again

private:
    Transformer& transformer_;
    Device* const device_;       // null: none
    std::vector<size_t> heads_;  // with a device, the draws, then the scores, whose logits come here
    std::vector<Drawn> drawn_;
    std::vector<float> head_in_, logits_;
    std::vector<uint8_t> scratch_;
    size_t head_tile_;
    bool has_workspace_ = false;  // a step has used the workspace since it was created or released

    const float* forward(const StepPlan& plan, KvMemory& memory);
    void run_heads(const StepPlan& plan, const float* hidden);
    void draw_on_device(const StepPlan& plan);
    void logits(const StepPlan& plan, size_t begin, size_t n, const float* hidden);
    void score(const ScoreTask& task, float* logits, void* scratch) const;
};

}  // namespace whet
