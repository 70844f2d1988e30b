// Drafts by a smaller model of the same vocabulary (Leviathan et al. 2023, "Fast Inference from Transformers via
// Speculative Decoding"). It draws a sequence's next tokens with the settings and the uniforms of their positions, so
// that a draft is right wherever both models draw the same token. Drafts never change a sequence (speculation.h).
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/model_runner.h"
#include "engine/speculation.h"
#include "engine/step_plan.h"

namespace whet {

struct Request;
class DraftModel;

// A sample: its keys and values in the draft model, and the tokens that this model expects next.
class DraftSequence {
public:
    DraftSequence(DraftModel& model, const Request& request, size_t sample);
    DraftSequence(const DraftSequence&) = delete;
    ~DraftSequence();  // keys and values stay for sequences with the same prefix, until their memory is needed

    void append(int32_t token);
    std::span<const int32_t> expected() const { return expected_; }
    // The number of next tokens that are all right with a probability above `least`, by the share of earlier ones that
    // were, at most `most`; 0 once it has a token that the draft model lacks.
    size_t n_worth_drafting(double least, size_t most) const {
        return is_known_ ? draft_length(right_, least, most) : 0;
    }

private:
    friend class DraftModel;
    static constexpr double kFirstRight = 0.6;
    DraftModel& model_;
    std::vector<int32_t> tokens_, expected_, pages_, banned_;
    size_t n_prompt_, computed_ = 0;  // computed_: tokens with keys and values, of tokens_ and then of expected_
    Sampling sampling_;
    size_t min_new_tokens_;
    uint64_t seed_, prompt_index_, sample_;
    double right_ = kFirstRight;  // share of drafted tokens that were right
    bool is_known_;               // the draft model has all tokens

    bool is_known(int32_t token) const;
    int32_t token(size_t i) const { return i < tokens_.size() ? tokens_[i] : expected_[i - tokens_.size()]; }
    size_t n_tokens() const { return tokens_.size() + expected_.size(); }
};

class DraftModel {
public:
    // n_pages: of its KV cache. vocab_size: of the engine's model; a draft ends before a token that it lacks.
    DraftModel(Transformer& transformer, size_t n_pages, size_t max_batch, size_t vocab_size);

    void clear() { tasks_.clear(); }
    // Adds a task: to draft n > 0 tokens of a sequence that has no expected ones.
    void add(DraftSequence& sequence, size_t n) { tasks_.push_back({&sequence, n}); }
    // Drafts the tokens of all tasks, one of each per step. Long texts are computed in chunks, one per call, and
    // drafted when they are complete. A call that throws std::bad_alloc can be repeated.
    void draft();
    // Measured time of a drafted token in steps of n sequences; 0: not measured yet.
    double token_s(size_t n) const { return times_.seconds(n) / static_cast<double>(n); }

    size_t committed_bytes() const;
    size_t release_memory();  // as Engine::release_memory
    void evict_retained() { pages_.evict_retained(); }
    size_t n_free_pages() const { return pages_.n_free(); }

private:
    friend class DraftSequence;
    static constexpr size_t kPage = kPageTokens;
    struct Task {
        DraftSequence* sequence;
        size_t n;
    };
    Transformer& transformer_;
    KvMemory memory_;
    PageIndex pages_;
    ModelRunner runner_;
    const size_t vocab_size_;
    StepPlan plan_;
    std::vector<Task> tasks_, advances_;  // advances_: of the step, with the numbers of computed tokens
    StepTimes times_;
    bool is_warm_ = false;  // memory is committed: before, steps take longer, and their times would stop all drafts

    void plan_step(bool is_first);
    bool allocate_pages(DraftSequence& sequence, size_t n_tokens);
};

// The drafts of a sample: by prompt lookup, else by a draft model.
class SampleDrafts {
public:
    // `model`: null: none.
    SampleDrafts(const Request& request, size_t sample, DraftModel* model);

    void append(int32_t token);
    // At most `most` next tokens: from the text, right with a probability above `least`, or else drafted ones.
    std::span<const int32_t> draft(double least, size_t most) const;
    DraftSequence* sequence() { return sequence_ ? &*sequence_ : nullptr; }

private:
    PromptLookup lookup_;
    std::optional<DraftSequence> sequence_;
};

}  // namespace whet
