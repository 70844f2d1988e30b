// Names in files: checked UTF-8, and how errors quote what a file says.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace whet {

bool is_utf8(std::string_view text);

// UTF-8 that a terminal shows as it is: no control characters, no invisible or direction-changing ones, none of private
// use. "" is not.
bool is_plain(std::string_view text);

// 'text' with what is not plain as \x1b, \u202e or \U000e0001; cut at `most` bytes.
std::string quoted(std::string_view text, size_t most = 80);

// (2, 3) or (5,).
std::string quoted(std::span<const uint64_t> shape, size_t most = 80);

}  // namespace whet
