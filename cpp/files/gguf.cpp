#include "files/gguf.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <unordered_set>

#include "files/text.h"

namespace whet {
namespace {

constexpr uint64_t kMaxNameBytes = 1 << 10;
constexpr uint32_t kMaxDims = 4;
constexpr int kMaxArrayDepth = 4;
constexpr const char* kDamaged = "The file is damaged.";
constexpr const char* kTruncated = "It is truncated or damaged. Copy or download it again.";

// Types that the engine does not read, so that errors can name them.
struct OtherType {
    uint32_t number;
    const char* name;
};

constexpr OtherType kOtherTypes[] = {
    {9, "Q8_1"},   {15, "Q8_K"},  {16, "IQ2_XXS"}, {17, "IQ2_XS"}, {18, "IQ3_XXS"}, {19, "IQ1_S"},
    {21, "IQ3_S"}, {22, "IQ2_S"}, {24, "I8"},      {25, "I16"},    {26, "I32"},     {27, "I64"},
    {28, "F64"},   {29, "IQ1_M"}, {40, "NVFP4"},   {41, "Q1_0"},   {42, "Q2_0"},
};

// "F32, F16 and Q4_K".
std::string names_of(std::span<const GgufTensorType> types) {
    std::string names;
    for (const GgufTensorType& type : types) {
        names += (names.empty() ? "" : &type == &types.back() ? " and " : ", ") + std::string(type.name);
    }
    return names;
}

const GgufTensorType& find_type(std::span<const GgufTensorType> types, uint32_t number, std::string_view tensor) {
    for (const GgufTensorType& type : types) {
        if (type.number == number) return type;
    }
    std::string name = "of type " + std::to_string(number) + ", which llama.cpp does not write";
    for (const OtherType& other : kOtherTypes) {
        if (other.number == number) name = other.name;
    }
    fail(tensor, " is ", name, "; this engine reads ", names_of(types),
         ". Quantize the model to one of these, with llama-quantize.");
}

// Bytes of a number or bool, by GgufType; 0 for strings and arrays.
constexpr uint64_t kFixedBytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

uint64_t fixed_size(GgufType type) { return kFixedBytes[static_cast<uint32_t>(type)]; }

// Reads the head of a file sequentially, with bounds checks.
class Cursor {
public:
    Cursor(std::span<const uint8_t> head, uint64_t file_bytes) : head_(head), file_bytes_(file_bytes) {}

    uint64_t at() const { return at_; }

    std::span<const uint8_t> bytes(uint64_t n, std::string_view what) {
        if (n > file_bytes_ - at_) {
            fail("the file ends at byte ", file_bytes_, ", within ", what, " (", n, " bytes from ", at_, " on). ",
                 kTruncated);
        }
        if (at_ + n > head_.size()) throw MoreBytesNeeded(at_ + n);
        at_ += n;
        return head_.subspan(at_ - n, n);
    }

    template <class T>
    T number(std::string_view what) {
        T value;
        std::memcpy(&value, bytes(sizeof value, what).data(), sizeof value);
        return value;
    }

    // A count of items of at least `each` bytes; fails at once if they exceed the file.
    uint64_t count(std::string_view what, uint64_t each) {
        const auto n = number<uint64_t>(what);
        if (n > (file_bytes_ - at_) / each) {
            fail(what, " is ", n, ", more than the ", file_bytes_ - at_,
                 " remaining bytes allow. The file is truncated or damaged. Copy or download it again.");
        }
        return n;
    }

    std::string_view string(std::string_view what) {
        const std::string_view text = any_string(what);
        if (!is_utf8(text)) fail(what, " is not UTF-8: ", quoted(text), ". ", kDamaged);
        return text;
    }

    std::string_view name(std::string_view what) {
        const std::string_view text = string(what);
        if (text.size() > kMaxNameBytes || !is_plain(text)) {
            fail(what, " is ", quoted(text), ", expected plain text. ", kDamaged);
        }
        return text;
    }

    GgufValue value(std::string_view key) {
        const auto type = number<uint32_t>(key);
        if (type >= std::size(kFixedBytes)) {
            fail(key, " has type ", type, ", which GGUF does not define. ", kDamaged);
        }
        return value_of(static_cast<GgufType>(type), key, 0);
    }

    GgufValue value_of(GgufType type, std::string_view key, int depth) {
        GgufValue value{type, type, 0, {}};
        if (type == GgufType::kArray) {
            read_array(value, key, depth + 1);
        } else if (type == GgufType::kString) {
            const std::string_view text = depth == 0 ? string(key) : any_string(key);
            value.bytes = {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
        } else {
            value.bytes = bytes(fixed_size(type), key);
            if (type == GgufType::kBool) check_flags(value.bytes, key);
        }
        return value;
    }

private:
    std::span<const uint8_t> head_;
    uint64_t file_bytes_, at_ = 0;

    std::string_view any_string(std::string_view what) {
        const auto n = number<uint64_t>(what);
        const std::span<const uint8_t> found = bytes(n, what);
        return {reinterpret_cast<const char*>(found.data()), found.size()};
    }

    static void check_flags(std::span<const uint8_t> flags, std::string_view key) {
        for (const int flag : flags) {
            if (flag > 1) fail(key, " is ", flag, ", expected 0 or 1 for a bool.");
        }
    }

    void read_array(GgufValue& array, std::string_view key, int depth) {
        const auto type = number<uint32_t>(key);
        array.item_type = static_cast<GgufType>(type);
        const bool too_deep = array.item_type == GgufType::kArray && depth == kMaxArrayDepth;
        if (type >= std::size(kFixedBytes) || too_deep) {
            fail(key, " is an array of type ", type, ", expected numbers, strings, or arrays up to ", kMaxArrayDepth,
                 " deep.");
        }
        const uint64_t size = fixed_size(array.item_type);
        const uint64_t least = size != 0 ? size : array.item_type == GgufType::kString ? 8 : 4 + 8;
        array.count = count("the length of " + std::string(key), least);
        const uint64_t begin = at_;
        if (size != 0) {
            const std::span<const uint8_t> items = bytes(array.count * size, key);
            if (array.item_type == GgufType::kBool) check_flags(items, key);
        } else {
            for (uint64_t i = 0; i < array.count; ++i) value_of(array.item_type, key, depth);
        }
        array.bytes = head_.subspan(begin, at_ - begin);
    }
};

FileTensor read_info(Cursor& cursor, std::string_view name, std::span<const GgufTensorType> types) {
    const auto n_dims = cursor.number<uint32_t>("the axes of " + std::string(name));
    if (n_dims < 1 || n_dims > kMaxDims) {
        fail(name, " has ", n_dims, " axes, expected 1 to ", kMaxDims, ".");
    }
    FileTensor tensor{std::string(name), "", std::vector<uint64_t>(n_dims), 0, 0};
    for (uint32_t i = n_dims; i > 0; --i) {
        tensor.shape[i - 1] = cursor.number<uint64_t>("the shape of " + std::string(name));
    }
    const auto number = cursor.number<uint32_t>("the type of " + std::string(name));
    tensor.offset = cursor.number<uint64_t>("the offset of " + std::string(name));
    const GgufTensorType& type = find_type(types, number, name);
    tensor.type = type.name;
    const uint64_t k = tensor.shape.back();
    if (k % type.block != 0) {
        fail(name, " has rows of ", k, ", not a multiple of the block length ", type.block, ".");
    }
    tensor.size_bytes = saturating_multiply(k / type.block, type.block_bytes);
    for (uint32_t i = 0; i + 1 < n_dims; ++i) {
        tensor.size_bytes = saturating_multiply(tensor.size_bytes, tensor.shape[i]);
    }
    return tensor;
}

std::string quoted_value(const GgufValue& value) {
    switch (value.type) {
        case GgufType::kString:
            return quoted(value.text(), 40);
        case GgufType::kFloat32:
        case GgufType::kFloat64:
            return "a floating-point number";
        case GgufType::kBool:
            return value.bytes[0] != 0 ? "true" : "false";
        default:
            return "an array";
    }
}

// The value of an integer of any width; returns false for other types.
bool read_integer(const GgufValue& value, uint64_t& integer, bool& is_negative) {
    const bool is_signed = value.type == GgufType::kInt8 || value.type == GgufType::kInt16 ||
                           value.type == GgufType::kInt32 || value.type == GgufType::kInt64;
    const bool is_unsigned = value.type == GgufType::kUint8 || value.type == GgufType::kUint16 ||
                             value.type == GgufType::kUint32 || value.type == GgufType::kUint64;
    if (!is_signed && !is_unsigned) return false;
    is_negative = is_signed && value.bytes.back() >> 7 != 0;
    integer = is_negative ? kUint64Max : 0;
    std::memcpy(&integer, value.bytes.data(), value.bytes.size());
    return true;
}

uint64_t read_alignment(const GgufFile& file) {
    const auto at = std::find_if(file.metadata.begin(), file.metadata.end(),
                                 [](const auto& entry) { return entry.first == "general.alignment"; });
    if (at == file.metadata.end()) return 32;
    uint64_t alignment = 0;
    bool is_negative = false;
    const bool is_integer = read_integer(at->second, alignment, is_negative);
    if (!is_integer || is_negative || alignment < 8 || alignment > 1 << 20 || alignment % 8 != 0) {
        const std::string shown = !is_integer   ? quoted_value(at->second)
                                  : is_negative ? std::to_string(static_cast<int64_t>(alignment))
                                                : std::to_string(alignment);
        fail("general.alignment is ", shown, ", expected a multiple of 8.");
    }
    return alignment;
}

// Converts offsets in the data to offsets in the file.
void place_tensors(std::vector<FileTensor>& tensors, uint64_t start, uint64_t alignment, uint64_t file_bytes) {
    std::sort(tensors.begin(), tensors.end(), precedes);
    uint64_t end = 0;
    for (FileTensor& tensor : tensors) {
        if (tensor.offset % alignment != 0 || tensor.offset < end) {
            fail(tensor.name, " begins at byte ", tensor.offset, " of the data, expected a multiple of ", alignment,
                 ", at least ", end, ". ", kDamaged);
        }
        end = saturating_add(tensor.offset, tensor.size_bytes);
        const uint64_t file_end = saturating_add(start, end);
        if (file_end > file_bytes || std::count(tensor.shape.begin(), tensor.shape.end(), 0) != 0) {
            fail(tensor.name, " of shape ", quoted(tensor.shape), " ends at byte ", file_end, ", and the file has ",
                 file_bytes, ". ", kTruncated);
        }
        tensor.offset += start;
    }
}

}  // namespace

std::vector<GgufValue> GgufValue::items() const {
    std::vector<GgufValue> found;
    Cursor cursor(bytes, bytes.size());
    found.reserve(count);
    // Depth 1: strings in arrays may be any bytes. The depth of arrays has been checked.
    for (uint64_t i = 0; i < count; ++i) found.push_back(cursor.value_of(item_type, "an array", 1));
    return found;
}

GgufFile parse_gguf(std::span<const uint8_t> head, uint64_t file_bytes, std::span<const GgufTensorType> types) {
    Cursor cursor(head, file_bytes);
    const std::span<const uint8_t> magic = cursor.bytes(4, "the magic");
    if (std::memcmp(magic.data(), "GGUF", 4) != 0) {
        fail("the file does not begin with GGUF. It is not a GGUF file.");
    }
    const auto version = cursor.number<uint32_t>("the version");
    if (version != 2 && version != 3) {
        const bool is_big_endian = version == 2 << 24 || version == 3 << 24;
        fail("GGUF version ", version, "; this engine reads 2 and 3: ",
             is_big_endian ? "it is big-endian." : "convert it with a current llama.cpp.");
    }
    const uint64_t n_tensors = cursor.count("the number of tensors", 8 + 4 + 4 + 8);
    const uint64_t n_keys = cursor.count("the number of keys", 8 + 4 + 1);
    GgufFile file;
    std::unordered_set<std::string_view> seen;
    for (uint64_t i = 0; i < n_keys; ++i) {
        const std::string_view key = cursor.name("a key");
        if (!seen.insert(key).second) {
            fail("the key ", key, " is duplicated. Convert the model again.");
        }
        file.metadata.emplace_back(key, cursor.value(key));
    }
    seen.clear();
    for (uint64_t i = 0; i < n_tensors; ++i) {
        const std::string_view name = cursor.name("a tensor's name");
        if (!seen.insert(name).second) {
            fail("the tensor ", name, " is duplicated. Convert the model again.");
        }
        file.tensors.push_back(read_info(cursor, name, types));
    }
    const uint64_t alignment = read_alignment(file);
    place_tensors(file.tensors, (cursor.at() + alignment - 1) / alignment * alignment, alignment, file_bytes);
    return file;
}

}  // namespace whet
