#include "engine/stop_strings.h"

#include <utility>

namespace whet {

std::string_view TokenTexts::of(int32_t token) const {
    const auto i = static_cast<size_t>(token);
    if (i >= ends.size()) return {};
    const int32_t begin = i == 0 ? 0 : ends[i - 1];
    return std::string_view(bytes).substr(static_cast<size_t>(begin), static_cast<size_t>(ends[i] - begin));
}

StopStrings::StopStrings(std::shared_ptr<const TokenTexts> texts, const std::vector<std::string>& strings)
    : texts_(std::move(texts)) {
    for (const std::string& string : strings) insert(string);
    link();
}

StopStrings::Match StopStrings::read(State& state, int32_t token, bool may_end) const {
    std::string_view text = texts_->of(token);
    if (!state.has_text && !text.empty()) {
        state.has_text = true;
        if (texts_->drops_first_space && text.front() == ' ') text.remove_prefix(1);
    }
    for (size_t i = 0; i < text.size(); ++i) {
        state.node = next(state.node, text[i]);
        const Node* node = &nodes_[state.node];
        if (node->complete == 0) continue;
        if (may_end) return {true, node->complete + static_cast<int32_t>(text.size() - 1 - i)};
        while (node->complete != 0 && node->first_child == 0) {  // no longer string can match
            state.node = node->fail;
            node = &nodes_[state.node];
        }
    }
    return {false, nodes_[state.node].depth};
}

uint32_t StopStrings::child(uint32_t node, char byte) const {
    uint32_t found = nodes_[node].first_child;
    while (found != 0 && nodes_[found].byte != byte) found = nodes_[found].next_sibling;
    return found;
}

uint32_t StopStrings::next(uint32_t node, char byte) const {
    for (;; node = nodes_[node].fail) {
        const uint32_t found = child(node, byte);
        if (found != 0 || node == 0) return found;
    }
}

void StopStrings::insert(const std::string& string) {
    uint32_t node = 0;
    for (char byte : string) {
        uint32_t found = child(node, byte);
        if (found == 0) {
            found = static_cast<uint32_t>(nodes_.size());
            nodes_.push_back({.byte = byte, .next_sibling = nodes_[node].first_child, .depth = nodes_[node].depth + 1});
            nodes_[node].first_child = found;
        }
        node = found;
    }
    nodes_[node].complete = nodes_[node].depth;
}

// Sets `fail` and `complete` of every node, breadth first.
void StopStrings::link() {
    std::vector<uint32_t> order{0};
    order.reserve(nodes_.size());
    for (size_t i = 0; i < order.size(); ++i) {
        const uint32_t parent = order[i];
        for (uint32_t at = nodes_[parent].first_child; at != 0; at = nodes_[at].next_sibling) {
            Node& node = nodes_[at];
            if (parent != 0) node.fail = next(nodes_[parent].fail, node.byte);
            if (node.complete == 0) node.complete = nodes_[node.fail].complete;
            order.push_back(at);
        }
    }
}

}  // namespace whet
