// Text result of the last call, for JavaScript.
#pragma once
#include <string>
#include <string_view>

namespace whet {

inline std::string result;

// Appends text as a JSON string. The core's names are UTF-8 without control characters.
inline void append_json(std::string_view text) {
    result += '"';
    for (const char c : text) {
        if (c == '"' || c == '\\') result += '\\';
        result += c;
    }
    result += '"';
}

}  // namespace whet
