// An engine: a scheduler plans each step, a model runner computes it, the scheduler completes it.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "engine/draft_model.h"
#include "engine/kv_memory.h"
#include "engine/model_runner.h"
#include "engine/scheduler.h"
#include "runtime/clock.h"

namespace whet {

class Engine {
public:
    // `draft`: drafts for speculation; null: only prompt lookup does. `device`: computes the steps; null: the CPU.
    Engine(Transformer& transformer, const Limits& limits, DraftModel* draft = nullptr, Device* device = nullptr)
        : transformer_(transformer),
          memory_(transformer.config(), transformer.kv_type(), limits.kv_bytes, device == nullptr),
          scheduler_(transformer.config(), transformer.max_rows(), memory_, limits, draft),
          runner_(transformer, limits.max_batch, device),
          draft_(draft) {}

    // Plans the next step and returns its tokens; step() computes them, unless requests are added or removed before.
    std::span<const InputToken> plan() { return scheduler_.plan().tokens; }
    // Returns false if there was nothing to do. After std::bad_alloc the next step continues.
    bool step() {
        if constexpr (kIsComplete) {
            if (draft_ != nullptr) {
                scheduler_.plan_drafts();
                draft_->draft();
            }
        }
        if (kTimesSteps && !scheduler_.is_step_open()) start_s_ = now_s();
        StepPlan& plan = scheduler_.plan();
        if (plan.is_empty()) return false;
        const std::span<const Drawn> drawn = runner_.run(plan, memory_);
        scheduler_.complete(drawn, kTimesSteps ? now_s() - start_s_ : 0.0);
        return true;
    }

    // Requests: see Scheduler.
    uint64_t add(Request request, uint64_t session = 0) { return scheduler_.add(std::move(request), session); }
    const Job& job(uint64_t id) const { return scheduler_.job(id); }
    void allow(uint64_t id, size_t sample, std::vector<uint32_t> tokens) {
        scheduler_.allow(id, sample, std::move(tokens));
    }
    void remove(uint64_t id) { scheduler_.remove(id); }
    void end_session(uint64_t session) { scheduler_.end_session(session); }
    void evict_retained() {
        scheduler_.evict_retained();
        if constexpr (kIsComplete) {
            if (draft_ != nullptr) draft_->evict_retained();
        }
    }

    void add_adapter(uint64_t id, std::unique_ptr<Adapter> adapter) {
        transformer_.reserve_adapters(adapter->max_rank);
        scheduler_.add_adapter(id, std::move(adapter));
    }
    void remove_adapter(uint64_t id) { scheduler_.remove_adapter(id); }
    bool has_adapter(uint64_t id) const { return scheduler_.has_adapter(id); }
    size_t adapters_bytes() const { return scheduler_.adapters_bytes(); }

    const PageIndex& pages() const { return scheduler_.pages(); }
    const KvMemory& kv_memory() const { return memory_; }
    const ModelRunner& runner() const { return runner_; }

    // Releases the memory of free pages and of the workspace to the system; retained pages stay. Returns an upper bound
    // of the bytes released. The next step commits the memory again.
    size_t release_memory() {
        const size_t workspace = runner_.committed_workspace_bytes();
        runner_.write_pages(scheduler_.page_writes(), memory_);  // of a step that threw: they may read free pages
        runner_.release_workspace();
        size_t bytes = workspace + memory_.release(scheduler_.pages()) * memory_.page_bytes();
        if constexpr (kIsComplete) {
            if (draft_ != nullptr) bytes += draft_->release_memory();
        }
        return bytes;
    }

    size_t n_drafted() const { return scheduler_.n_drafted(); }
    size_t n_accepted() const { return scheduler_.n_accepted(); }

private:
    static constexpr bool kTimesSteps = kIsComplete || kHasDevices;  // drafts and lookahead depend on it

    Transformer& transformer_;
    KvMemory memory_;
    Scheduler scheduler_;
    ModelRunner runner_;
    DraftModel* const draft_;
    double start_s_ = 0;  // of the step
};

}  // namespace whet
