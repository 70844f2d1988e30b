// Incremental search for stop strings in bytes, independent of token boundaries.
//
// A text is cut before the first stop string to complete; of strings that complete at the same byte, before the
// longest. Bytes that could begin a stop string are withheld until it is decided. Aho-Corasick automaton (1975): the
// state is the longest suffix of the text that is a prefix of a string.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace whet {

// The text of every token, as bytes.
struct TokenTexts {
    std::string bytes;
    std::vector<int32_t> ends;       // end offset of each token, by id; tokens beyond the last have no text
    bool drops_first_space = false;  // the decoder removes a leading space

    std::string_view of(int32_t token) const;
};

class StopStrings {
public:
    struct State {
        uint32_t node = 0;
        bool has_text = false;
    };
    struct Match {
        bool is_complete;    // a stop string has matched; the text ends before it
        int32_t n_withheld;  // bytes at the end of the text to withhold: for good if complete, else for now
    };

    // `strings` must not be empty strings.
    StopStrings(std::shared_ptr<const TokenTexts> texts, const std::vector<std::string>& strings);

    // Advances by the text of a token. Strings that complete while `may_end` is false are ignored. Does not allocate.
    Match read(State& state, int32_t token, bool may_end) const;

private:
    struct Node {
        char byte = 0;
        uint32_t first_child = 0, next_sibling = 0;  // 0: none
        uint32_t fail = 0;                           // the longest proper suffix that is a node
        int32_t depth = 0;                           // length of its string
        int32_t complete = 0;                        // length of the longest stop string that is a suffix; 0: none
    };

    std::shared_ptr<const TokenTexts> texts_;
    std::vector<Node> nodes_{1};

    uint32_t child(uint32_t node, char byte) const;
    uint32_t next(uint32_t node, char byte) const;
    void insert(const std::string& string);
    void link();
};

}  // namespace whet
