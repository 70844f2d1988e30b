// libFuzzer target of the model file parsers: every file is rejected, or all of its metadata is within bounds.
#include <cstdlib>

#include "files/gguf.h"
#include "files/safetensors.h"

namespace {

void read(const whet::GgufValue& value) {
    if (value.type != whet::GgufType::kArray || value.item_type < whet::GgufType::kString) return;
    for (const whet::GgufValue& item : value.items()) read(item);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    std::vector<whet::FileTensor> tensors;
    try {
        if (size >= 4 && std::string_view(reinterpret_cast<const char*>(data), 4) == "GGUF") {
            whet::GgufFile file = whet::parse_gguf({data, size}, size);
            for (const auto& entry : file.metadata) read(entry.second);
            tensors = std::move(file.tensors);
        } else {
            tensors = whet::parse_safetensors({data, size}, size).tensors;
        }
    } catch (const whet::FileError&) {
    }
    for (const whet::FileTensor& tensor : tensors) {
        if (tensor.offset > size || tensor.size_bytes > size - tensor.offset) std::abort();
    }
    return 0;
}
