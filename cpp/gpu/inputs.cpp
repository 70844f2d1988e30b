#include "gpu/inputs.h"

#include <algorithm>

#include "engine/activation.h"
#include "kernels/dispatch.h"

namespace whet::gpu {
namespace {

void add_rotation(int32_t position, const std::vector<double>& inv_freq, double factor, float query_scale,
                  std::vector<float>& to) {
    const size_t at = to.size();
    to.resize(at + 2 * inv_freq.size());
    if (!inv_freq.empty()) {
        kernels().rope_cos_sin(position, inv_freq.data(), inv_freq.size(), factor, to.data() + at);
    }
    to.push_back(query_scale);
}

}  // namespace

void set_inputs(const Weights& weights, std::span<const InputToken> tokens, std::span<const StateRun> runs,
                const std::map<const Adapter*, int32_t>& adapters, Inputs& inputs) {
    const ModelConfig& config = weights.config();
    for (auto* ids : {&inputs.tokens, &inputs.page_table, &inputs.runs}) ids->clear();
    for (auto* numbers : {&inputs.rotation, &inputs.local_rotation, &inputs.embedded}) numbers->clear();
    const int32_t* pages = nullptr;
    size_t offset = 0;
    for (const InputToken& token : tokens) {
        const size_t n_pages = static_cast<size_t>(token.position) / kPageTokens + 1;
        if (token.pages != pages) pages = token.pages, offset = inputs.page_table.size();
        for (size_t i = inputs.page_table.size() - offset; i < n_pages; ++i) inputs.page_table.push_back(pages[i]);
        const auto at = static_cast<int32_t>(offset);
        const int32_t adapter = token.adapter == nullptr ? 0 : adapters.at(token.adapter);
        inputs.tokens.insert(inputs.tokens.end(), {token.token, token.position, at, adapter});
        const float scale =
            config.query_log_scale != 0.0 ? config.query_scale(static_cast<size_t>(token.position)) : 1.0f;
        add_rotation(token.position, config.inv_freq, config.attention_factor, scale, inputs.rotation);
        if (!config.local_inv_freq.empty()) {
            add_rotation(token.position, config.local_inv_freq, 1.0, scale, inputs.local_rotation);
        }
    }
    inputs.embedded.resize(tokens.size() * config.layer_inputs());
    for (size_t i = 0; config.has_layer_inputs() && i < tokens.size(); ++i) {
        check_layer_embedding(weights, tokens[i].token);
        weights.layer_embedding.read(static_cast<size_t>(tokens[i].token),
                                     inputs.embedded.data() + i * config.layer_inputs());
    }
    for (const StateRun& run : runs) {
        const auto first = static_cast<int32_t>(run.first), n = static_cast<int32_t>(run.n);
        for (size_t i = 0; i < run.n; ++i) {
            inputs.runs.insert(inputs.runs.end(), {first, n, run.from_state, run.to_state, tokens[run.first].position});
        }
    }
}

std::vector<int32_t> page_copies(std::span<const PageWrite> writes) {
    std::vector<int32_t> pages;
    for (const PageWrite& write : writes) {
        if (write.from != PageIndex::kNone && write.from != write.page)
            pages.insert(pages.end(), {write.page, write.from});
    }
    return pages;
}

HeadRows head_rows(std::span<const HeadInput> inputs, size_t hidden_dim) {
    HeadRows rows;
    for (size_t i = 0; i < inputs.size(); ++i) {
        const float* stored = inputs[i].hidden;
        rows.tokens.push_back(stored != nullptr ? -1 : static_cast<int32_t>(inputs[i].token));
        if (stored == nullptr) continue;
        rows.hidden.resize(inputs.size() * hidden_dim);
        std::copy_n(stored, hidden_dim, rows.hidden.begin() + static_cast<ptrdiff_t>(i * hidden_dim));
    }
    return rows;
}

std::vector<float> draw_settings(std::span<const PlainDraw> draws) {
    std::vector<float> settings;
    for (const PlainDraw& draw : draws) {
        const float scale = draw.temperature > 0 ? 1 / draw.temperature : 0.0f;
        const float reported = draw.model_logprobs || scale == 0 ? 1.0f : scale;
        settings.insert(settings.end(), {scale, static_cast<float>(draw.uniform), reported, 0.0f});
    }
    return settings;
}

}  // namespace whet::gpu
