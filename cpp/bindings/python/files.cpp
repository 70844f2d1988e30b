// Bindings of the parsers of model files. Files are passed as bytes; errors are ValueErrors that do not name the file.
#include <nanobind/ndarray.h>

#include <cstring>
#include <stdexcept>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "gil.h"
#include "engine/stored_rows.h"
#include "files/gguf.h"
#include "files/safetensors.h"
#include "files/text.h"

namespace nb = nanobind;

namespace whet {
namespace {

std::span<const uint8_t> bytes_of(nb::handle object) {
    Array a;
    if (!view(object.ptr(), a) || a.dtype != DType::kUInt8 || a.ndim != 1) {
        throw nb::type_error("not a contiguous uint8 array");
    }
    return {a.as<uint8_t>(), static_cast<size_t>(a.size())};
}

nb::object own(PyObject* object) {
    if (object == nullptr) nb::raise_python_error();
    return nb::steal(object);
}

nb::object text_of(std::string_view text) {
    return own(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr));
}

// (name, type, shape, offset, size_bytes) of each tensor.
nb::list list_of(const std::vector<FileTensor>& tensors) {
    nb::list list;
    for (const FileTensor& tensor : tensors) {
        nb::list shape;
        for (const uint64_t size : tensor.shape) shape.append(size);
        list.append(nb::make_tuple(text_of(tensor.name), text_of(tensor.type), nb::tuple(shape), tensor.offset,
                                   tensor.size_bytes));
    }
    return list;
}

// A number, or a list of an array's numbers.
template <class T>
nb::object numbers_of(const GgufValue& value) {
    if (value.type != GgufType::kArray) return nb::cast(value.number<T>());
    nb::object list = own(PyList_New(static_cast<Py_ssize_t>(value.count)));
    for (uint64_t i = 0; i < value.count; ++i) {
        T item;
        std::memcpy(&item, value.bytes.data() + i * sizeof item, sizeof item);
        PyList_SetItem(list.ptr(), static_cast<Py_ssize_t>(i), nb::cast(item).release().ptr());
    }
    return list;
}

// A lazily decoded array of strings: most readers do not need the vocabulary.
class GgufTexts {
public:
    GgufTexts(nb::object data, const GgufValue& value) : data_(std::move(data)), value_(value) {}

    uint64_t size() const { return value_.count; }
    nb::list to_list() const {
        nb::list texts;
        for (const GgufValue& item : value_.items()) {
            if (!is_utf8(item.text())) fail("has a text that is not UTF-8: ", quoted(item.text()), ".");
            texts.append(text_of(item.text()));
        }
        return texts;
    }

private:
    nb::object data_;  // owner of the bytes that the value views
    GgufValue value_;
};

// Converts a value to a number, str, list of numbers or, for an array of strings, GgufTexts. `data`: the file's bytes.
nb::object object_of(nb::handle data, const GgufValue& value) {
    const bool is_array = value.type == GgufType::kArray;
    switch (is_array ? value.item_type : value.type) {
        case GgufType::kUint8:
            return numbers_of<uint8_t>(value);
        case GgufType::kInt8:
            return numbers_of<int8_t>(value);
        case GgufType::kUint16:
            return numbers_of<uint16_t>(value);
        case GgufType::kInt16:
            return numbers_of<int16_t>(value);
        case GgufType::kUint32:
            return numbers_of<uint32_t>(value);
        case GgufType::kInt32:
            return numbers_of<int32_t>(value);
        case GgufType::kUint64:
            return numbers_of<uint64_t>(value);
        case GgufType::kInt64:
            return numbers_of<int64_t>(value);
        case GgufType::kFloat32:
            return numbers_of<float>(value);
        case GgufType::kFloat64:
            return numbers_of<double>(value);
        case GgufType::kBool:
            return numbers_of<bool>(value);
        case GgufType::kString:
            return is_array ? nb::cast(GgufTexts(nb::borrow(data), value)) : text_of(value.text());
        case GgufType::kArray:
            break;
    }
    nb::list list;
    for (const GgufValue& item : value.items()) list.append(object_of(data, item));
    return list;
}

nb::tuple parse_gguf_file(nb::handle data) {
    const std::span<const uint8_t> bytes = bytes_of(data);
    const GgufFile file = [&] {
        const ReleasedGil released;
        return parse_gguf(bytes, bytes.size(), gguf_types());
    }();
    nb::dict metadata;
    for (const auto& [key, value] : file.metadata) metadata[text_of(key)] = object_of(data, value);
    return nb::make_tuple(metadata, list_of(file.tensors));
}

nb::list parse_safetensors_file(nb::handle data) {
    const std::span<const uint8_t> bytes = bytes_of(data);
    const SafetensorsFile file = [&] {
        const ReleasedGil released;
        return parse_safetensors(bytes, bytes.size());
    }();
    return list_of(file.tensors);
}

void dequantize_rows(const StoredRows& rows,
                     const nb::ndarray<nb::numpy, float, nb::ndim<2>, nb::c_contig, nb::device::cpu>& out) {
    if (out.shape(0) != rows.n || out.shape(1) != rows.k) throw std::invalid_argument("out has the wrong shape");
    const ReleasedGil released;
    unpack_rows(rows, out.data());
}

// (name, GGUF name, GGUF number or None, block length, block bytes, packed_as) of each type.
nb::list stored_types() {
    nb::list rows;
    for (int i = 0; i < static_cast<int>(StoredType::kCount); ++i) {
        const StoredTraits& stored = traits(static_cast<StoredType>(i));
        const nb::object number = stored.is_in_gguf ? nb::cast(stored.gguf.number) : nb::none();
        rows.append(nb::make_tuple(stored.name, stored.gguf.name, number, stored.gguf.block, stored.gguf.block_bytes,
                                   traits(stored.packed_as).name));
    }
    return rows;
}

}  // namespace

void bind_files(nb::module_& m) {
    nb::enum_<StoredType> stored_type(m, "StoredType");
    for (int i = 0; i < static_cast<int>(StoredType::kCount); ++i) {
        const auto type = static_cast<StoredType>(i);
        stored_type.value(traits(type).name, type);
    }
    m.def("stored_types", &stored_types);
    m.def("dequantize_rows", &dequantize_rows);
    nb::class_<GgufTexts>(m, "GGUFTexts").def("__len__", &GgufTexts::size).def("to_list", &GgufTexts::to_list);
    m.def("parse_gguf", &parse_gguf_file);
    m.def("parse_safetensors", &parse_safetensors_file);
}

}  // namespace whet
