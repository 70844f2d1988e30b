// Names in files: UTF-8 validation, and quoting for error messages.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace whet {

bool is_utf8(std::string_view text);

// Whether the text is UTF-8 without control, invisible, bidirectional or private-use characters. False for "".
bool is_plain(std::string_view text);

// 'text' with other characters escaped as \x1b, \u202e or \U000e0001; truncated to `most` bytes.
std::string quoted(std::string_view text, size_t most = 80);

// (2, 3) or (5,).
std::string quoted(std::span<const uint64_t> shape, size_t most = 80);

}  // namespace whet
