// Tensors and errors common to the parsers of model files.
//
// A parser takes the first bytes of a file and the file's size; it reads nothing else, copies no tensors and validates
// every count, length, offset and product before use. The caller adds the file's name to errors.
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
    std::string type;             // the container's name: F32, BF16, Q8_0 ...
    std::vector<uint64_t> shape;  // the last axis is contiguous
    uint64_t offset;              // in the file
    uint64_t size_bytes;
};

// Sort order: offset, then size and name.
inline bool precedes(const FileTensor& a, const FileTensor& b) {
    return std::tie(a.offset, a.size_bytes, a.name) < std::tie(b.offset, b.size_bytes, b.name);
}

// The file violates its format, or uses an unsupported feature.
class FileError : public std::invalid_argument {
public:
    using std::invalid_argument::invalid_argument;
};

inline void append_part(std::string& text, std::string_view part) { text += part; }
inline void append_part(std::string& text, uint64_t number) { text += std::to_string(number); }

// Concatenates texts and counts. (A stream would link its locales into a WebAssembly build.)
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    std::string text;
    (append_part(text, parts), ...);
    throw FileError(text);
}

// The parser needs more of the file: pass at least this many bytes.
class MoreBytesNeeded : public std::runtime_error {
public:
    explicit MoreBytesNeeded(uint64_t n)
        : std::runtime_error("the file's first " + std::to_string(n) + " bytes are needed"), n_bytes(n) {}
    uint64_t n_bytes;
};

// Saturating sum and product: no file is as long as the largest number.
constexpr uint64_t kUint64Max = std::numeric_limits<uint64_t>::max();
constexpr uint64_t saturating_add(uint64_t a, uint64_t b) { return a > kUint64Max - b ? kUint64Max : a + b; }
constexpr uint64_t saturating_multiply(uint64_t a, uint64_t b) {
    return b != 0 && a > kUint64Max / b ? kUint64Max : a * b;
}

}  // namespace whet
