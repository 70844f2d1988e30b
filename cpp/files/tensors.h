// Tensors and errors common to the parsers of model files.
//
// A parser gets the first bytes of a file and the file's size; it reads nothing else, copies no tensor and trusts no
// number: every count, length, offset and product is checked before it is used. Errors do not name the file: the caller
// does.
#pragma once
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace whet {

struct FileTensor {
    std::string name;
    std::string type;             // as the container calls it: F32, BF16, Q8_0 ...
    std::vector<uint64_t> shape;  // the last axis is contiguous
    uint64_t offset;              // of its first byte in the file
    uint64_t size_bytes;
};

// In the order of their data, of any names.
inline bool lies_before(const FileTensor& a, const FileTensor& b) {
    return std::tie(a.offset, a.size_bytes, a.name) < std::tie(b.offset, b.size_bytes, b.name);
}

// The file is not what its format allows, or has what is not read.
class FileError : public std::invalid_argument {
public:
    using std::invalid_argument::invalid_argument;
};

inline void append_part(std::string& text, std::string_view part) { text += part; }
inline void append_part(std::string& text, uint64_t number) { text += std::to_string(number); }

// Texts and counts side by side. (A stream would bring its locales into a WebAssembly build.)
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    std::string text;
    (append_part(text, parts), ...);
    throw FileError(text);
}

// The file goes on behind the bytes that were given, and so does what the parser needs: give it at least so many.
class MoreBytesNeeded : public std::runtime_error {
public:
    explicit MoreBytesNeeded(uint64_t n)
        : std::runtime_error("the file's first " + std::to_string(n) + " bytes are needed"), n_bytes(n) {}
    uint64_t n_bytes;
};

// Sums and products that stay at the largest number: no file is as long.
constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();
constexpr uint64_t saturating_add(uint64_t a, uint64_t b) { return a > kMost - b ? kMost : a + b; }
constexpr uint64_t saturating_multiply(uint64_t a, uint64_t b) { return b != 0 && a > kMost / b ? kMost : a * b; }

}  // namespace whet
