// The GGUF container: key-value metadata and tensor offsets. Strict; keys are not interpreted.
//
//     "GGUF", version u32, n_tensors u64, n_keys u64
//     keys     name, type u32, value        (string: length u64, bytes; array: type u32, count u64, values)
//     tensors  name, n_dims u32, sizes u64 (fastest first), type u32, offset u64 from the start of the data
//     data     at the next multiple of general.alignment (32)
//
// All little-endian. Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
#pragma once
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "files/tensors.h"

namespace whet {

// A tensor type: the numbers and the bytes of a block.
struct GgufTensorType {
    uint32_t number;
    const char* name;
    uint64_t block, block_bytes;
};

// Type numbers of the format, 0 to 12.
enum class GgufType : uint32_t {
    kUint8,
    kInt8,
    kUint16,
    kInt16,
    kUint32,
    kInt32,
    kFloat32,
    kBool,
    kString,
    kArray,
    kUint64,
    kInt64,
    kFloat64
};

// A validated value, as a view of the file: a vocabulary of 150,000 strings costs nothing until its items are read.
struct GgufValue {
    GgufType type;
    GgufType item_type;              // array: the type of its items
    uint64_t count;                  // array: the number of items
    std::span<const uint8_t> bytes;  // string: its characters; array: its items

    template <class T>
    T number() const {
        T value;
        std::memcpy(&value, bytes.data(), sizeof value);
        return value;
    }
    std::string_view text() const { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }
    // The items of an array. (Read numbers from `bytes` instead: an item takes 40 bytes.)
    std::vector<GgufValue> items() const;
};

struct GgufFile {
    std::vector<std::pair<std::string_view, GgufValue>> metadata;  // in the file's order
    std::vector<FileTensor> tensors;                               // in the order of their data
};

// `head`: the first bytes of the file; the metadata are views of it. `types`: supported tensor types. Strings in arrays
// may be any bytes; all other names and strings are UTF-8.
//
// Throws FileError; MoreBytesNeeded if metadata and tensor infos extend beyond `head`.
GgufFile parse_gguf(std::span<const uint8_t> head, uint64_t file_bytes, std::span<const GgufTensorType> types);

}  // namespace whet
