#include "files/safetensors.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>
#include <unordered_set>

#include "files/text.h"

namespace whet {
namespace {

constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr uint64_t kMaxElements = uint64_t{1} << 60;
constexpr size_t kMaxNameBytes = 1 << 10;
constexpr int kMaxDepth = 16;

struct DType {
    std::string_view name;
    uint64_t size_bytes;
};

constexpr DType kDTypes[] = {{"BOOL", 1},        {"U8", 1},          {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1},
                             {"F8_E8M0", 1},     {"F8_E4M3FNUZ", 1}, {"U16", 2}, {"I16", 2},     {"F16", 2},
                             {"F8_E5M2FNUZ", 1}, {"BF16", 2},        {"U32", 4}, {"I32", 4},     {"F32", 4},
                             {"U64", 8},         {"I64", 8},         {"F64", 8}, {"C64", 8}};

void append_utf8(std::string& text, uint32_t character) {
    const auto put = [&](uint32_t byte) { text += static_cast<char>(byte); };
    if (character < 0x80) return put(character);
    if (character >= 0x10000) put(0xf0 | character >> 18), put(0x80 | (character >> 12 & 0x3f));
    if (character >= 0x800 && character < 0x10000) put(0xe0 | character >> 12);
    if (character >= 0x800) put(0x80 | (character >> 6 & 0x3f));
    if (character < 0x800) put(0xc0 | character >> 6);
    put(0x80 | (character & 0x3f));
}

// A sequential JSON reader (RFC 8259) for the header: parses objects, strings and sizes; other values are validated and
// returned as text.
class JsonReader {
public:
    explicit JsonReader(std::string_view text) : text_(text) {}

    // Calls read_member(name) to read the value of each member.
    template <class ReadMember>
    void object(ReadMember&& read_member) {
        std::unordered_set<std::string> seen;
        expect('{');
        for (bool more = !accept('}'); more; more = next_of('}')) {
            std::string name = string();
            expect(':');
            if (!seen.insert(name).second) invalid(quoted(name), " is duplicated");
            read_member(std::move(name));
        }
    }

    std::string string() {
        std::string text;
        expect('"', "a string");
        while (!accept_here('"')) {
            const char c = take();
            if (static_cast<uint8_t>(c) < 0x20) invalid("byte ", at_ - 1, " is a control character within a string");
            if (c == '\\') {
                escape(text);
            } else {
                text += c;
            }
        }
        return text;
    }

    // An array of non-negative integers; nullopt for other values.
    std::optional<std::vector<uint64_t>> sizes() {
        if (peek() != '[') return {};
        std::vector<uint64_t> found;
        expect('[');
        for (bool more = !accept(']'); more; more = next_of(']')) {
            uint64_t size = 0;
            if (peek() < '0' || peek() > '9') return {};
            while (is_digit()) {
                const auto digit = static_cast<uint64_t>(take() - '0');
                if (size > (kUint64Max - digit) / 10) return {};
                size = 10 * size + digit;
            }
            if (peek() != ',' && peek() != ']') return {};
            found.push_back(size);
        }
        return found;
    }

    // Any value, as text.
    std::string_view value(int depth = 0) {
        const char first = peek();
        const size_t begin = at_;
        if (depth > kMaxDepth) invalid("it is nested more than ", kMaxDepth, " levels deep");
        if (first == '{') {
            expect('{');
            for (bool more = !accept('}'); more; more = next_of('}')) string(), expect(':'), value(depth + 1);
        } else if (first == '[') {
            expect('[');
            for (bool more = !accept(']'); more; more = next_of(']')) value(depth + 1);
        } else if (first == '"') {
            string();
        } else if (first == '-' || is_digit()) {
            number();
        } else if (!accept_word("null") && !accept_word("true") && !accept_word("false")) {
            invalid("byte ", at_, " does not begin a value");
        }
        return text_.substr(begin, at_ - begin);
    }

    // The next character that is not whitespace; 0 at the end.
    char peek() {
        while (at_ < text_.size() && kSpaces.find(text_[at_]) != kSpaces.npos) ++at_;
        return at_ < text_.size() ? text_[at_] : '\0';
    }

    void end() {
        peek();
        if (at_ != text_.size()) invalid("extra data after byte ", at_);
    }

private:
    static constexpr std::string_view kSpaces = " \t\n\r";
    std::string_view text_;
    size_t at_ = 0;

    template <class... Parts>
    [[noreturn]] static void invalid(const Parts&... parts) {
        fail("the header is not valid JSON: ", parts..., ". Copy or download it again.");
    }

    char take() {
        if (at_ == text_.size()) invalid("it ends at byte ", at_, ", within a value");
        return text_[at_++];
    }
    bool is_digit() const { return at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; }
    bool accept_here(char c) {
        const bool is_there = at_ < text_.size() && text_[at_] == c;
        at_ += is_there;
        return is_there;
    }
    bool accept(char c) { return peek() == c && accept_here(c); }
    bool accept_word(std::string_view word) {
        const bool is_there = text_.substr(at_, word.size()) == word;
        at_ += is_there ? word.size() : 0;
        return is_there;
    }
    void expect(char c, std::string_view what = {}) {
        if (accept(c)) return;
        const std::string one(1, c);
        invalid("byte ", at_, " is not ", what.empty() ? one : what);
    }
    // Reads a comma or the end; returns whether another member or item follows.
    bool next_of(char end) {
        if (accept(end)) return false;
        expect(',');
        return true;
    }

    void digits() {
        if (!is_digit()) invalid("byte ", at_, " is not a digit");
        while (is_digit()) ++at_;
    }
    void number() {
        accept_here('-');
        if (!accept_here('0')) digits();
        if (accept_here('.')) digits();
        if (accept_here('e') || accept_here('E')) {
            if (!accept_here('+')) accept_here('-');
            digits();
        }
    }

    uint32_t hex4() {
        uint32_t value = 0;
        for (int i = 0; i < 4; ++i) {
            const char c = take();
            const int lower = c | 0x20;
            const bool is_hex = (c >= '0' && c <= '9') || (lower >= 'a' && lower <= 'f');
            if (!is_hex) invalid("byte ", at_ - 1, " is not a hexadecimal digit");
            value = value << 4 | static_cast<uint32_t>(c <= '9' ? c - '0' : lower - 'a' + 10);
        }
        return value;
    }
    void escape(std::string& text) {
        constexpr std::string_view kLetters = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
        const char c = take();
        if (const size_t i = kLetters.find(c); i != kLetters.npos) return text.push_back(kMeanings[i]);
        if (c != 'u') invalid("byte ", at_ - 1, " is not an escape");
        uint32_t character = hex4();
        if (character >= 0xd800 && character < 0xdc00 && accept_word("\\u")) {
            const uint32_t low = hex4();
            const bool is_pair = low >= 0xdc00 && low < 0xe000;
            character = is_pair ? 0x10000 + ((character - 0xd800) << 10) + (low - 0xdc00) : 0xd800;
        }
        if (character >= 0xd800 && character < 0xe000) invalid("unpaired surrogate before byte ", at_);
        append_utf8(text, character);
    }
};

// JSON for an error message: truncated and escaped for a terminal.
std::string shown(std::string_view json) {
    const std::string all = quoted(json, 82);
    return all.substr(1, all.size() - (all.back() == '\'' ? 2 : 1));
}

FileTensor read_tensor(std::string name, std::string_view json, uint64_t begin, uint64_t n_bytes) {
    if (name.size() > kMaxNameBytes || !is_plain(name)) {
        fail("the name of a tensor is ", quoted(name), ", expected plain text. The file is damaged.");
    }
    std::string_view dtype, shape, offsets;
    bool is_entry = json.front() == '{';
    if (is_entry) {
        JsonReader reader(json);
        reader.object([&](const std::string& key) {
            std::string_view other;
            (key == "dtype"          ? dtype
             : key == "shape"        ? shape
             : key == "data_offsets" ? offsets
                                     : other) = reader.value();
            is_entry = is_entry && other.empty();
        });
    }
    if (!is_entry || dtype.empty() || shape.empty() || offsets.empty()) {
        fail(name, " is ", shown(json), ", expected dtype, shape and data_offsets.");
    }
    const std::string type = dtype.front() == '"' ? JsonReader(dtype).string() : "";
    const auto* known = std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](DType d) { return d.name == type; });
    if (known == std::end(kDTypes)) {
        fail(name, " has dtype ", dtype.front() == '"' ? quoted(type, 40) : shown(dtype),
             "; this engine reads F32, F16, BF16, F64.");
    }
    const auto sizes = JsonReader(shape).sizes(), ends = JsonReader(offsets).sizes();
    uint64_t most = 1,
             count = 1;  // most: the count with sizes of 0 replaced by 1, so that overflow is independent of order
    for (const uint64_t size : sizes.value_or(std::vector<uint64_t>{})) {
        most = saturating_multiply(most, std::max<uint64_t>(size, 1));
        count = saturating_multiply(count, size);
    }
    if (!sizes || most > kMaxElements) {
        fail(name, " has shape ", shown(shape), ", expected sizes of at least 0 that do not overflow.");
    }
    if (!ends || ends->size() != 2 || (*ends)[0] > (*ends)[1] || (*ends)[1] > n_bytes) {
        fail(name, " has data_offsets ", shown(offsets), ", expected two within ", n_bytes, " bytes.");
    }
    const uint64_t size_bytes = (*ends)[1] - (*ends)[0];
    if (count * known->size_bytes != size_bytes) {
        fail(name, " has ", size_bytes, " bytes, and ", type, " of shape ", quoted(*sizes), " has ",
             count * known->size_bytes, ".");
    }
    return {std::move(name), type, *sizes, begin + (*ends)[0], size_bytes};
}

// `tensors` are sorted by offset.
void check_no_gap(const std::vector<FileTensor>& tensors, uint64_t begin, uint64_t n_bytes) {
    uint64_t end = 0;
    for (const FileTensor& tensor : tensors) {
        if (tensor.offset - begin != end) {
            fail(tensor.name, " begins at byte ", tensor.offset - begin, ", expected ", end,
                 ": tensors overlap or leave a gap. Save the file again.");
        }
        end += tensor.size_bytes;
    }
    if (end != n_bytes) fail("the file has ", n_bytes, " bytes of tensors, but its header lists ", end, ".");
}

}  // namespace

SafetensorsFile parse_safetensors(std::span<const uint8_t> head, uint64_t file_bytes) {
    constexpr uint64_t kLengthBytes = 8;
    uint64_t length = 0;
    if (file_bytes >= kLengthBytes) {
        if (head.size() < kLengthBytes) throw MoreBytesNeeded(kLengthBytes);
        std::memcpy(&length, head.data(), kLengthBytes);
    }
    if (file_bytes < kLengthBytes || length < 2 || length > std::min(kMaxHeaderBytes, file_bytes - kLengthBytes)) {
        fail("the file has ", file_bytes, " bytes and ",
             file_bytes < kLengthBytes ? "no header" : "a header of " + std::to_string(length) + " bytes",
             "; it is truncated, or not a safetensors file. Copy or download it again.");
    }
    const uint64_t begin = kLengthBytes + length, n_bytes = file_bytes - begin;
    if (head.size() < begin) throw MoreBytesNeeded(begin);
    const std::string_view header(reinterpret_cast<const char*>(head.data()) + kLengthBytes, length);
    if (header.front() != '{') fail("the header does not begin with '{'. This is not a safetensors file.");
    if (!is_utf8(header)) fail("the header is not valid JSON: it is not UTF-8. Copy or download it again.");
    SafetensorsFile file;
    JsonReader reader(header);
    reader.object([&](std::string name) {
        if (name == "__metadata__") {
            reader.object([&](std::string key) { file.metadata.emplace_back(std::move(key), reader.string()); });
        } else {
            file.tensors.push_back(read_tensor(std::move(name), reader.value(), begin, n_bytes));
        }
    });
    reader.end();
    std::sort(file.tensors.begin(), file.tensors.end(), precedes);
    check_no_gap(file.tensors, begin, n_bytes);
    return file;
}

}  // namespace whet
