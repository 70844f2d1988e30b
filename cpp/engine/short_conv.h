// Short convolutions over the tokens of a step: out = C conv(B x), causal and depthwise, with [B, C, x] of each token.
//
// A token reads the inputs B x of the tokens before it in the step, or in the state that its sequence had before the
// step, and the last token of a sequence, or of a page, leaves a state behind (kv_memory.h). Tokens are processed in
// their order: one that follows a page of another sequence of this step finds the state there.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/config.h"
#include "engine/kv_memory.h"
#include "engine/weights.h"

namespace whet {

struct InputToken;

class ShortConv {
public:
    ShortConv(const ModelConfig& config, size_t max_rows);

    // Finds the states that the tokens of a step follow, and chooses those that they leave. Throws std::logic_error if
    // there is no such state.
    void begin_step(const InputToken* rows, size_t n, const KvMemory& memory);
    // Replaces x by B x in in (n, 3 hidden_dim), and computes out (n, hidden_dim).
    void run(const Matrix& taps, size_t layer, float* in, size_t n, const KvMemory& memory, float* out);

    size_t workspace_bytes() const { return rows_.capacity() * sizeof(Row) + taps_.capacity() * sizeof(float); }

private:
    struct State {
        int32_t page;  // negative: none
        size_t which;
    };
    struct Row {
        size_t n_before;  // tokens of its sequence directly before it in the step, at most conv_length - 1
        State from, to;   // the state before these tokens; the state that it leaves
    };

    const ModelConfig& config_;
    std::vector<Row> rows_;
    std::vector<float> taps_;

    State find_state(const InputToken& row, int32_t length, const KvMemory& memory) const;
};

}  // namespace whet
