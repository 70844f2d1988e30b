// Model file parsers and format tables for JavaScript, as JSON in `result`.
#include <cstdint>
#include <span>

#include "bindings/wasm/exports.h"
#include "bindings/wasm/result.h"
#include "engine/formats.h"
#include "engine/stored_rows.h"
#include "files/gguf.h"
#include "files/safetensors.h"
#include "kernels/dispatch.h"

namespace whet {
namespace {

void append_number(uint64_t number) { result += std::to_string(number); }

void begin_object() {
    if (result.back() == '}') result += ',';
    result += '{';
}
void append_name(std::string_view name) {
    if (result.back() != '{') result += ',';
    append_json(name);
    result += ':';
}
void append_field(std::string_view name, uint64_t number) {
    append_name(name);
    append_number(number);
}
void append_field(std::string_view name, std::string_view text) {
    append_name(name);
    append_json(text);
}

// [{name, type, shape, offset, sizeBytes}, ...]
void append_tensors(const std::vector<FileTensor>& tensors) {
    result += '[';
    for (const FileTensor& tensor : tensors) {
        begin_object();
        append_field("name", tensor.name);
        append_field("type", tensor.type);
        append_name("shape");
        for (size_t axis = 0; axis < tensor.shape.size(); ++axis) {
            result += axis == 0 ? '[' : ',';
            append_number(tensor.shape[axis]);
        }
        result += tensor.shape.empty() ? "[]" : "]";
        append_field("offset", tensor.offset);
        append_field("sizeBytes", tensor.size_bytes);
        result += '}';
    }
    result += ']';
}

}  // namespace

WHET_EXPORT(result_data) const char* result_data() { return result.data(); }
WHET_EXPORT(result_size) size_t result_size() { return result.size(); }

// {metadata: [{key, type, itemType, count, offset, sizeBytes}, ...], tensors: [...]}: JavaScript reads the values in
// place, at their offset in the header.
WHET_EXPORT(parse_gguf) void parse_gguf_head(const uint8_t* head, size_t n_bytes, double file_bytes) {
    const GgufFile file = parse_gguf({head, n_bytes}, static_cast<uint64_t>(file_bytes), gguf_types());
    result = "{\"metadata\":[";
    for (const auto& [key, value] : file.metadata) {
        const bool is_array = value.type == GgufType::kArray;
        begin_object();
        append_field("key", key);
        append_field("type", static_cast<uint64_t>(value.type));
        append_field("itemType", is_array ? static_cast<uint64_t>(value.item_type) : 0);
        append_field("count", is_array ? value.count : 0);
        append_field("offset", static_cast<uint64_t>(value.bytes.data() - head));
        append_field("sizeBytes", value.bytes.size());
        result += '}';
    }
    result += "],\"tensors\":";
    append_tensors(file.tensors);
    result += '}';
}

// [{name, type, shape, offset, sizeBytes}, ...]
WHET_EXPORT(parse_safetensors) void parse_safetensors_head(const uint8_t* head, size_t n_bytes, double file_bytes) {
    result.clear();
    append_tensors(parse_safetensors({head, n_bytes}, static_cast<uint64_t>(file_bytes)).tensors);
}

// [{index, gguf, block, blockBytes, packedAs}, ...]: index is the StoredType, gguf its name in files, packedAs the
// format that it is packed as.
WHET_EXPORT(stored_types) void stored_types() {
    result = "[";
    for (int i = 0; i < static_cast<int>(StoredType::kCount); ++i) {
        const StoredTraits& stored = traits(static_cast<StoredType>(i));
        begin_object();
        append_field("index", i);
        append_field("gguf", stored.gguf.name);
        append_field("block", stored.gguf.block);
        append_field("blockBytes", stored.gguf.block_bytes);
        append_field("packedAs", traits(stored.packed_as).name);
        result += '}';
    }
    result += ']';
}

// [{index, name, block, blockBytes, rowScaleBytes, canPack}, ...]: index is the WeightFormat; canPack: this build can
// quantise to it.
WHET_EXPORT(weight_formats) void weight_formats() {
    result = "[";
    uint64_t index = 0;
    for (const FormatTraits& format : format_table()) {
        begin_object();
        append_field("index", index++);
        append_field("name", format.name);
        append_field("block", format.block_length);
        append_field("blockBytes", format.block_bytes);
        append_field("rowScaleBytes", format.row_scale_bytes);
        append_name("canPack");
        result += kernels().*format.pack_panel != nullptr || format.quantize_row != nullptr ? "true" : "false";
        result += '}';
    }
    result += ']';
}

}  // namespace whet
