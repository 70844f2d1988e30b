#include "engine/model_runner.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "engine/speculation.h"
#include "kernels/dispatch.h"
#include "runtime/ceil_div.h"
#include "runtime/system.h"
#include "runtime/thread_pool.h"

namespace whet {
namespace {

HeadInput head_input(const StepPlan& plan, size_t head) {
    const size_t n_draws = plan.draws.size();
    if (head < n_draws) return {plan.draws[head].token, plan.draws[head].hidden};
    return {plan.scores[head - n_draws].token, plan.scores[head - n_draws].hidden};
}

std::vector<HeadInput> head_inputs(const StepPlan& plan, std::span<const size_t> heads) {
    std::vector<HeadInput> inputs;
    for (const size_t head : heads) inputs.push_back(head_input(plan, head));
    return inputs;
}

PlainDraw plain_draw(const DrawTask& draw) {
    return {draw.sampling->temperature, draw.uniform, draw.sampling->model_logprobs};
}

}  // namespace

ModelRunner::ModelRunner(Transformer& transformer, size_t max_batch, Device* device)
    : transformer_(transformer), device_(device), head_tile_(std::min(kHeadTile, std::max(max_batch, size_t{16}))) {
    drawn_.resize(max_batch + kMaxStepDrafts);
    head_in_.resize(head_tile_ * transformer.config().hidden_dim);
    logits_.resize(head_tile_ * transformer.config().vocab_size);
}

std::span<const Drawn> ModelRunner::run(StepPlan& plan, KvMemory& memory) {
    has_workspace_ = true;
    write_pages(plan.page_writes, memory);
    if (kHasDevices && plan.n_steps > 1) {
        std::vector<PlainDraw> draws;
        for (const DrawTask& draw : plan.draws) draws.push_back(plain_draw(draw));
        device_->decode(plan.tokens, plan.n_steps, draws, drawn_.data());
        return {drawn_.data(), plan.draws.size()};
    }
    run_heads(plan, plan.tokens.empty() ? nullptr : forward(plan, memory));
    return {drawn_.data(), plan.draws.size()};
}

void ModelRunner::write_pages(std::vector<PageWrite>& writes, KvMemory& memory) {
    if (kHasDevices && device_ != nullptr) {
        if (!writes.empty()) device_->write_pages(writes);
        if (memory.token_experts() > 0) memory.copy_experts(writes);
    } else {
        memory.apply(writes);
    }
    writes.clear();
}

// Computes the hidden states of the tokens and copies those that are asked for. Returns all of them; null if they are
// on a device.
const float* ModelRunner::forward(const StepPlan& plan, KvMemory& memory) {
    if (kHasDevices && device_ != nullptr) {
        device_->forward(plan.tokens, plan.runs, memory);
        if (!plan.hiddens.empty()) device_->read_hidden(plan.hiddens);
        return nullptr;
    }
    const size_t d = transformer_.config().hidden_dim;
    const float* hidden = transformer_.forward(plan.tokens.data(), plan.tokens.size(), plan.runs, memory);
    for (const HiddenTask& task : plan.hiddens) std::copy_n(hidden + task.token * d, d, task.hidden);
    return hidden;
}

// Computes a tile of logits: of heads [begin, begin + n) of those that are computed here.
void ModelRunner::logits(const StepPlan& plan, size_t begin, size_t n, const float* hidden) {
    if (kHasDevices && device_ != nullptr) {
        return device_->logits(head_inputs(plan, std::span(heads_).subspan(begin, n)), logits_.data());
    }
    const size_t d = transformer_.config().hidden_dim;
    float* row = head_in_.data();
    for (size_t i = 0; i < n; ++i) {
        const HeadInput input = head_input(plan, begin + i);
        row = std::copy_n(input.hidden != nullptr ? input.hidden : hidden + input.token * d, d, row);
    }
    transformer_.logits(head_in_.data(), n, logits_.data());
}

void ModelRunner::run_heads(const StepPlan& plan, const float* hidden) {
    const size_t vocab_size = transformer_.config().vocab_size;
    const auto threads = static_cast<size_t>(num_threads());
    const size_t scratch = ceil_div(sampler_scratch_bytes(vocab_size), 64) * 64;
    if (scratch_.size() < threads * scratch + 64) scratch_.resize(threads * scratch + 64);
    auto* aligned = scratch_.data() + (64 - reinterpret_cast<uintptr_t>(scratch_.data()) % 64) % 64;
    const size_t n_draws = plan.draws.size();
    size_t n_heads = n_draws + plan.scores.size();
    const bool is_on_device = kHasDevices && device_ != nullptr;
    if (is_on_device) {
        draw_on_device(plan);
        n_heads = heads_.size();
    }
    for (size_t begin = 0; begin < n_heads; begin += head_tile_) {
        const size_t n = std::min(head_tile_, n_heads - begin);
        logits(plan, begin, n, hidden);
        std::atomic<size_t> next{0};
        auto task = [&](size_t t) {  // one per thread, with its scratch memory
            for (size_t i = next++; i < n; i = next++) {
                const size_t head = is_on_device ? heads_[begin + i] : begin + i;
                float* logits = logits_.data() + i * vocab_size;
                if (head >= n_draws) {
                    score(plan.scores[head - n_draws], logits, aligned + t * scratch);
                    continue;
                }
                const DrawTask& draw = plan.draws[head];
                drawn_[head] = draw_token(logits, vocab_size, *draw.sampling, draw.history, draw.uniform,
                                          aligned + t * scratch, draw.alternatives, draw.kept);
            }
        };
        parallel_for(std::min(threads, n), task);
    }
}

// Makes the draws that the device can make, and lists the other heads.
void ModelRunner::draw_on_device(const StepPlan& plan) {
    std::vector<size_t> plain;
    heads_.clear();
    for (size_t head = 0; head < plan.draws.size() + plan.scores.size(); ++head) {
        const bool is_drawn_there =
            head < plan.draws.size() && is_plain(plan.draws[head], transformer_.config().vocab_size);
        (is_drawn_there ? plain : heads_).push_back(head);
    }
    std::vector<Drawn> found(head_tile_);
    for (size_t begin = 0; begin < plain.size(); begin += head_tile_) {
        const auto tile = std::span(plain).subspan(begin, std::min(head_tile_, plain.size() - begin));
        std::vector<PlainDraw> draws;
        for (const size_t head : tile) draws.push_back(plain_draw(plan.draws[head]));
        device_->draw(head_inputs(plan, tile), draws, found.data());
        for (size_t i = 0; i < tile.size(); ++i) drawn_[tile[i]] = found[i];
    }
}

// May overwrite the logits.
void ModelRunner::score(const ScoreTask& task, float* logits, void* scratch) const {
    const size_t vocab_size = transformer_.config().vocab_size;
    if (task.logits != nullptr) std::copy_n(logits, vocab_size, task.logits);
    if (task.logprob == nullptr) return;
    kernels().token_logprobs_f32(logits, vocab_size, static_cast<size_t>(task.target), task.sampling->temperature,
                                 task.logprob, task.entropy);
    if (task.sampling->top_logprobs > 0)
        draw_token(logits, vocab_size, *task.sampling, {}, 0.5, scratch, task.alternatives);
}

size_t ModelRunner::workspace_bytes() const {
    return transformer_.workspace_bytes() + (head_in_.size() + logits_.size()) * sizeof(float) + scratch_.size();
}

void ModelRunner::release_workspace() {
    transformer_.release_workspace();
    release_pages(logits_.data(), logits_.size() * sizeof(float));
    release_pages(scratch_.data(), scratch_.size());
    has_workspace_ = false;
}

}  // namespace whet
