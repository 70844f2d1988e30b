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

// [name, type, [sizes], offset, bytes], ...
void append_tensors(const std::vector<FileTensor>& tensors) {
    result += '[';
    for (size_t i = 0; i < tensors.size(); ++i) {
        const FileTensor& tensor = tensors[i];
        result += i == 0 ? "[" : ",[";
        append_json(tensor.name);
        result += ',';
        append_json(tensor.type);
        for (size_t axis = 0; axis < tensor.shape.size(); ++axis) {
            result += axis == 0 ? ",[" : ",";
            append_number(tensor.shape[axis]);
        }
        result += tensor.shape.empty() ? ",[]," : "],";
        append_number(tensor.offset);
        result += ',';
        append_number(tensor.size_bytes);
        result += ']';
    }
    result += ']';
}

}  // namespace

WHET_EXPORT(result_data) const char* result_data() { return result.data(); }
WHET_EXPORT(result_size) size_t result_size() { return result.size(); }

// {"metadata": [[key, type, item type, count, offset in the head, bytes], ...], "tensors": [...]}: JavaScript reads the
// values in place.
WHET_EXPORT(parse_gguf) void parse_gguf_head(const uint8_t* head, size_t n_bytes, double file_bytes) {
    const GgufFile file = parse_gguf({head, n_bytes}, static_cast<uint64_t>(file_bytes), gguf_types());
    result = "{\"metadata\":[";
    bool is_first = true;
    for (const auto& [key, value] : file.metadata) {
        result += is_first ? "[" : ",[";
        is_first = false;
        append_json(key);
        const bool is_array = value.type == GgufType::kArray;
        for (const uint64_t number :
             {static_cast<uint64_t>(value.type), is_array ? static_cast<uint64_t>(value.item_type) : 0,
              is_array ? value.count : 0, static_cast<uint64_t>(value.bytes.data() - head),
              static_cast<uint64_t>(value.bytes.size())}) {
            result += ',';
            append_number(number);
        }
        result += ']';
    }
    result += "],\"tensors\":";
    append_tensors(file.tensors);
    result += '}';
}

// [[name, type, [sizes], offset, bytes], ...]
WHET_EXPORT(parse_safetensors) void parse_safetensors_head(const uint8_t* head, size_t n_bytes, double file_bytes) {
    result.clear();
    append_tensors(parse_safetensors({head, n_bytes}, static_cast<uint64_t>(file_bytes)).tensors);
}

// [[name, GGUF name, block length, block bytes, packed format], ...] in the order of StoredType
WHET_EXPORT(stored_types) void stored_types() {
    result = "[";
    for (int i = 0; i < static_cast<int>(StoredType::kCount); ++i) {
        const StoredTraits& stored = traits(static_cast<StoredType>(i));
        result += i == 0 ? "[" : ",[";
        append_json(stored.name);
        result += ',';
        append_json(stored.gguf.name);
        result += ',';
        append_number(stored.gguf.block);
        result += ',';
        append_number(stored.gguf.block_bytes);
        result += ',';
        append_json(traits(stored.packed_as).name);
        result += ']';
    }
    result += ']';
}

// [[name, block length, block bytes, bytes after a row's blocks, whether this build can quantise to it], ...] in the
// order of WeightFormat
WHET_EXPORT(weight_formats) void weight_formats() {
    result = "[";
    for (const FormatTraits& format : format_table()) {
        result += result.size() == 1 ? "[" : ",[";
        append_json(format.name);
        result += ',';
        append_number(format.block_length);
        result += ',';
        append_number(format.block_bytes);
        result += ',';
        append_number(format.row_scale_bytes);
        result += kernels().*format.pack_panel != nullptr || format.quantize_row != nullptr ? ",1]" : ",0]";
    }
    result += ']';
}

}  // namespace whet
