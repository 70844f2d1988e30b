// The safetensors container: the length of a JSON header as little-endian u64; the header; the tensors, without gaps.
//
//     {"__metadata__": {"key": "text"}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
//
// Source of the format: https://github.com/huggingface/safetensors (README, "Format"). As strict as that library.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "files/tensors.h"

namespace whet {

struct SafetensorsFile {
    std::vector<std::pair<std::string, std::string>> metadata;
    std::vector<FileTensor> tensors;  // sorted by offset
};

// `head`: the first bytes of the file. Throws FileError; MoreBytesNeeded if the header extends beyond `head`.
SafetensorsFile parse_safetensors(std::span<const uint8_t> head, uint64_t file_bytes);

}  // namespace whet
