// Finds the strings at which a text ends, token by token, on bytes: a string is found wherever tokens begin and end.
//
// A text ends before the first string that is complete in it; of those that are complete with the same byte, before the
// longest. What could be the beginning of one is held back until it is decided. Aho and Corasick's automaton (1975):
// its state, a number for each text, is the longest end of the text that begins a string.
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
    std::vector<int32_t> ends;       // in bytes, of each token in order of id; tokens beyond them have no text
    bool drops_first_space = false;  // the decoder leaves out a space that a text begins with

    std::string_view of(int32_t token) const;
};

class StopStrings {
public:
    struct State {
        uint32_t node = 0;
        bool has_text = false;
    };
    struct Reading {
        bool is_complete;  // a stop string is; the text ends there
        int32_t held;      // bytes at the end of the text that are not shown: not yet, or never where it is complete
    };

    // Strings that are not empty.
    StopStrings(std::shared_ptr<const TokenTexts> texts, const std::vector<std::string>& strings);

    // Goes on with a token's text. A string that is complete while the text may not end is passed over. Does not
    // allocate.
    Reading read(State& state, int32_t token, bool may_end) const;

private:
    struct Node {
        char byte = 0;
        uint32_t first_child = 0, next_sibling = 0;  // 0: none
        uint32_t fail = 0;                           // the longest proper end of its string that is a node
        int32_t depth = 0;                           // length of its string
        int32_t complete = 0;                        // length of the longest stop string that it ends with; 0: none
    };

    std::shared_ptr<const TokenTexts> texts_;
    std::vector<Node> nodes_{1};

    uint32_t child(uint32_t node, char byte) const;
    uint32_t next(uint32_t node, char byte) const;
    void insert(const std::string& string);
    void link();
};

}  // namespace whet
