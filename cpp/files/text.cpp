#include "files/text.h"

#include <algorithm>
#include <iterator>

namespace whet {
namespace {

constexpr uint32_t kInvalid = 0xffffffff;

// Decodes the character at `at` and advances `at`; by one byte if it is not UTF-8. RFC 3629: rejects overlong forms,
// surrogates and code points above 10FFFF.
uint32_t next_character(std::string_view text, size_t& at) {
    const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
    const uint8_t first = byte(at++);
    if (first < 0x80) return first;
    const size_t more = first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : 1;
    if (first < 0xc2 || first > 0xf4 || more > text.size() - at) return kInvalid;
    uint32_t character = first & (0x3f >> more);
    for (size_t i = 0; i < more; ++i) {
        if ((byte(at + i) & 0xc0) != 0x80) return kInvalid;
        character = character << 6 | (byte(at + i) & 0x3f);
    }
    const uint32_t least[] = {0x80, 0x800, 0x10000};
    if (character < least[more - 1] || (character >= 0xd800 && character < 0xe000) || character > 0x10ffff) {
        return kInvalid;
    }
    at += more;
    return character;
}

bool is_plain_character(uint32_t character) {
    // Ranges of Unicode's categories Cc, Cf, Zl, Zp, Co, and spaces except U+0020.
    constexpr uint32_t kHidden[][2] = {{0x00, 0x1f},     {0x7f, 0xa0},     {0xad, 0xad},       {0x061c, 0x061c},
                                       {0x1680, 0x1680}, {0x180e, 0x180e}, {0x2000, 0x200f},   {0x2028, 0x202f},
                                       {0x205f, 0x206f}, {0x3000, 0x3000}, {0xe000, 0xf8ff},   {0xfeff, 0xfeff},
                                       {0xfff0, 0xfffb}, {0xfffe, 0xffff}, {0xe0000, kInvalid}};
    return std::none_of(std::begin(kHidden), std::end(kHidden),
                        [&](const auto& range) { return range[0] <= character && character <= range[1]; });
}

}  // namespace

bool is_utf8(std::string_view text) {
    for (size_t at = 0; at < text.size();) {
        if (next_character(text, at) == kInvalid) return false;
    }
    return true;
}

bool is_plain(std::string_view text) {
    for (size_t at = 0; at < text.size();) {
        if (!is_plain_character(next_character(text, at))) return false;
    }
    return !text.empty();
}

std::string quoted(std::string_view text, size_t most) {
    std::string out = "'";
    for (size_t at = 0; at < text.size() && out.size() < most;) {
        const size_t from = at;
        const uint32_t character = next_character(text, at);
        if (character == '\'' || character == '\\') out += '\\';
        if (is_plain_character(character)) {
            out += text.substr(from, at - from);
            continue;
        }
        const uint32_t shown = character == kInvalid ? static_cast<uint8_t>(text[from]) : character;
        out += shown > 0xffff ? "\\U" : shown > 0xff ? "\\u" : "\\x";
        const int n_digits = shown > 0xffff ? 8 : shown > 0xff ? 4 : 2;
        for (int digit = n_digits - 1; digit >= 0; --digit) out += "0123456789abcdef"[shown >> (4 * digit) & 15];
    }
    return out.size() < most ? out + "'" : out + "...";
}

std::string quoted(std::span<const uint64_t> shape, size_t most) {
    std::string out = "(";
    for (size_t i = 0; i < shape.size() && out.size() < most; ++i) {
        out += std::to_string(shape[i]) + (i + 1 < shape.size() ? ", " : "");
    }
    if (out.size() >= most) return out + "...";
    return out + (shape.size() == 1 ? ",)" : ")");
}

}  // namespace whet
