// The container safetensors: the length of a JSON header as u64, little-endian; the header; the tensors without a gap.
//
//     {"__metadata__": {"key": "text"}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
//
// Source of the format: https://github.com/huggingface/safetensors (README, "Format"). As strict as its library.
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
    std::vector<FileTensor> tensors;  // in the order of their data
};

// `head`: the first bytes of the file. Throws FileError; MoreBytesNeeded where the header goes on behind `head`.
SafetensorsFile parse_safetensors(std::span<const uint8_t> head, uint64_t file_bytes);

}  // namespace whet
