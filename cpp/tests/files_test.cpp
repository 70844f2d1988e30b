// Malicious model files, without Python: valid files are parsed correctly; truncated at every byte, passed in part, or
// with any bit flipped, they are rejected or parsed within bounds. Sanitizers report every read past the end.
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/stored_rows.h"
#include "files/gguf.h"
#include "files/safetensors.h"
#include "files/text.h"

using namespace whet;
using namespace std::string_literals;

namespace {

int failures = 0;

void expect(const std::string& what, bool ok) {
    if (ok) return;
    std::printf("%s\n", what.c_str());
    ++failures;
}

GgufFile read_gguf(std::span<const uint8_t> head, uint64_t file_bytes) {
    return whet::parse_gguf(head, file_bytes, gguf_types());
}

// A heap copy of exactly this length, so that sanitizers report reads past the end.
template <class File>
File parse_exactly(File (*parse)(std::span<const uint8_t>, uint64_t), std::string_view bytes, uint64_t file_bytes) {
    const std::unique_ptr<uint8_t[]> heap(new uint8_t[bytes.size()]);
    std::memcpy(heap.get(), bytes.data(), bytes.size());
    return parse({heap.get(), bytes.size()}, file_bytes);
}

template <class File>
std::string error_of(File (*parse)(std::span<const uint8_t>, uint64_t), std::string_view bytes) {
    try {
        parse_exactly(parse, bytes, bytes.size());
    } catch (const FileError& error) {
        return error.what();
    }
    return "";
}

void expect_error(const std::string& error, std::string_view expected) {
    expect("got \"" + error + "\", expected \"..." + std::string(expected), error.find(expected) != error.npos);
}

// ---------------------------------------------------------------- the writers

template <class T>
std::string raw(T number) {
    return std::string(reinterpret_cast<const char*>(&number), sizeof number);
}

std::string text(std::string_view value) { return raw<uint64_t>(value.size()) + std::string(value); }

std::string key(std::string_view name, GgufType type, const std::string& value) {
    return text(name) + raw(static_cast<uint32_t>(type)) + value;
}

std::string array(GgufType type, uint64_t count, const std::string& items) {
    return raw(static_cast<uint32_t>(type)) + raw(count) + items;
}

std::string info(std::string_view name, const std::vector<uint64_t>& sizes, uint32_t type, uint64_t offset) {
    std::string out = text(name) + raw(static_cast<uint32_t>(sizes.size()));
    for (const uint64_t size : sizes) out += raw(size);
    return out + raw(type) + raw(offset);
}

std::string head(uint64_t n_tensors, uint64_t n_keys) {
    return "GGUF" + raw<uint32_t>(3) + raw(n_tensors) + raw(n_keys);
}

std::string gguf_file() {
    std::string file = head(3, 7) + key("general.architecture", GgufType::kString, text("llama"));
    file += key("a.negative", GgufType::kInt16, raw<int16_t>(-7));
    file += key("a.flag", GgufType::kBool, "\1"s);
    file += key("a.number", GgufType::kFloat64, raw(2.5));
    file += key("a.numbers", GgufType::kArray,
                array(GgufType::kUint32, 3, raw<uint32_t>(4) + raw<uint32_t>(5) + raw<uint32_t>(6)));
    file += key("a.words", GgufType::kArray, array(GgufType::kString, 3, text("a") + text("") + text("\xff\xfe")));
    const std::string inner = array(GgufType::kUint8, 2, "\1\2") + array(GgufType::kUint8, 0, "");
    file += key("a.nested", GgufType::kArray, array(GgufType::kArray, 2, inner));
    file += info("b", {32}, 8, 64) + info("a", {3, 5}, 0, 0) + info("c", {1}, 30, 128);
    file.resize((file.size() + 31) / 32 * 32);
    return file + std::string(128 + 2, 'x');
}

std::string safetensors_file(const std::string& header, size_t n_bytes) {
    return raw<uint64_t>(header.size()) + header + std::string(n_bytes, 'x');
}

std::string small_safetensors() {
    return safetensors_file(R"({"__metadata__": {"format": "p\u0074\ud83d\ude00"}, "b": {"dtype":"BF16","shape":[2,1],)"
                            R"("data_offsets":[24,28]}, "a" : {"data_offsets":[0,24], "shape":[2,3], "dtype":"F32"},)"
                            R"("none": {"dtype":"U8","shape":[0],"data_offsets":[24,24]}})",
                            28);
}

// ---------------------------------------------------------------- whole files

void test_gguf() {
    const std::string bytes = gguf_file();
    const GgufFile file = read_gguf({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, bytes.size());
    const auto value = [&](std::string_view name) {
        for (const auto& [known, found] : file.metadata) {
            if (known == name) return found;
        }
        throw std::runtime_error("no key " + std::string(name));
    };
    expect("a string", value("general.architecture").text() == "llama");
    expect("an integer", value("a.negative").number<int16_t>() == -7);
    expect("a bool", value("a.flag").number<uint8_t>() == 1);
    expect("a number", value("a.number").number<double>() == 2.5);
    const std::vector<GgufValue> numbers = value("a.numbers").items();
    expect("an array of numbers", numbers.size() == 3 && numbers[2].number<uint32_t>() == 6);
    const std::vector<GgufValue> words = value("a.words").items();
    expect("an array of strings",
           words.size() == 3 && words[0].text() == "a" && words[1].text().empty() && words[2].text() == "\xff\xfe");
    const std::vector<GgufValue> nested = value("a.nested").items();
    expect("an array of arrays",
           nested.size() == 2 && nested[1].items().empty() && nested[0].items()[1].number<uint8_t>() == 2);
    const size_t start = bytes.size() - 130;
    const auto is = [&](size_t i, const char* name, const char* type, std::vector<uint64_t> shape, uint64_t offset,
                        uint64_t size) {
        const FileTensor& t = file.tensors[i];
        return t.name == name && t.type == type && t.shape == shape && t.offset == start + offset &&
               t.size_bytes == size;
    };
    expect("three tensors", file.tensors.size() == 3 && is(0, "a", "F32", {5, 3}, 0, 60) &&
                                is(1, "b", "Q8_0", {32}, 64, 34) && is(2, "c", "BF16", {1}, 128, 2));
}

void test_safetensors() {
    const std::string bytes = small_safetensors();
    const SafetensorsFile file = parse_exactly(parse_safetensors, bytes, bytes.size());
    expect("metadata", file.metadata.size() == 1 && file.metadata[0].second == "pt\xf0\x9f\x98\x80");
    expect("tensors", file.tensors.size() == 3);
    const FileTensor &a = file.tensors[0], &none = file.tensors[1], &b = file.tensors[2];
    expect("b", b.name == "b" && b.type == "BF16" && b.shape == std::vector<uint64_t>{2, 1} &&
                    b.offset == bytes.size() - 4 && b.size_bytes == 4);
    expect("a", a.name == "a" && a.offset == bytes.size() - 28 && a.size_bytes == 24);
    expect("none", none.size_bytes == 0);
}

// ---------------------------------------------------------------- damaged files

// Reads every byte that a value refers to.
size_t sum_of(const GgufValue& value) {
    size_t sum = 0;
    if (value.type == GgufType::kArray) {
        for (const GgufValue& item : value.items()) sum += sum_of(item);
    }
    for (const uint8_t byte : value.bytes) sum += byte;
    return sum;
}

// Tensors of a parsed file are within the file, and its metadata can be read safely.
template <class File>
void use_damaged(File (*parse)(std::span<const uint8_t>, uint64_t), std::string_view bytes, uint64_t file_bytes) {
    const std::unique_ptr<uint8_t[]> heap(new uint8_t[bytes.size()]);
    std::memcpy(heap.get(), bytes.data(), bytes.size());
    try {
        const File file = parse({heap.get(), bytes.size()}, file_bytes);
        for (const FileTensor& tensor : file.tensors) {
            expect(tensor.name + " is within the file",
                   tensor.offset <= file_bytes && tensor.size_bytes <= file_bytes - tensor.offset);
        }
        if constexpr (std::is_same_v<File, GgufFile>) {
            for (const auto& entry : file.metadata) sum_of(entry.second);
        }
    } catch (const FileError& error) {
        expect("an error of printable text: " + std::string(error.what()), is_plain(error.what()));
    }
}

template <class File>
void test_damage(const char* name, File (*parse)(std::span<const uint8_t>, uint64_t), const std::string& bytes) {
    for (size_t n = 0; n < bytes.size(); ++n) {
        const std::string error = error_of(parse, std::string_view(bytes).substr(0, n));
        expect(name + " truncated to "s + std::to_string(n) + " bytes is rejected", !error.empty());
    }
    for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
        std::string damaged = bytes;
        damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ 1 << bit % 8);
        use_damaged(parse, damaged, damaged.size());
    }
    for (size_t at = 0; at + 8 <= bytes.size(); ++at) {
        for (const uint64_t number :
             {uint64_t{0}, uint64_t{1} << 31, uint64_t{1} << 62, uint64_t{1} << 63, kUint64Max - 31, kUint64Max}) {
            std::string damaged = bytes;
            std::memcpy(damaged.data() + at, &number, sizeof number);
            use_damaged(parse, damaged, damaged.size());
        }
    }
}

// Passing the requested number of bytes, repeatedly, gives the result of the whole file.
template <class File>
void test_ranges(const char* name, File (*parse)(std::span<const uint8_t>, uint64_t), const std::string& bytes) {
    const auto n_tensors = parse_exactly(parse, bytes, bytes.size()).tensors.size();
    size_t n = 0;
    for (size_t requests = 0;;) {
        try {
            const File file = parse_exactly(parse, std::string_view(bytes).substr(0, n), bytes.size());
            expect(name + " in ranges"s, file.tensors.size() == n_tensors && n + 28 <= bytes.size());
            return;
        } catch (const MoreBytesNeeded& more) {
            expect(name + ": it requests more bytes, but not more than the file has"s,
                   more.n_bytes > n && more.n_bytes <= bytes.size());
            n = more.n_bytes;
            if (++requests > bytes.size()) return expect(name + " does not terminate"s, false);
        }
    }
}

void test_errors() {
    expect_error(error_of(read_gguf, "GGML" + std::string(99, '\0')), "does not begin with GGUF");
    expect_error(error_of(read_gguf, head(0, 1) + key("k", static_cast<GgufType>(13), raw<uint64_t>(0))),
                 "k has type 13, which GGUF does not define");
    expect_error(error_of(read_gguf, head(0, 1) + key("k", GgufType::kBool, std::string(9, '\2'))),
                 "k is 2, expected 0 or 1");
    std::string deep = array(GgufType::kUint8, 0, "");
    for (int i = 0; i < 4; ++i) deep = array(GgufType::kArray, 1, deep);
    expect_error(error_of(read_gguf, head(0, 1) + key("k", GgufType::kArray, deep)),
                 "k is an array of type 9, expected");
    const std::string alignment = key("general.alignment", GgufType::kInt8, raw<int8_t>(-8));
    expect_error(error_of(read_gguf, head(0, 1) + alignment), "general.alignment is -8, expected a multiple of 8");
    expect_error(error_of(read_gguf,
                          head(1, 0) + info("t", {uint64_t{1} << 63, uint64_t{1} << 63}, 0, 0) + std::string(99, 'x')),
                 "t of shape (9223372036854775808, 9223372036854775808) ends at byte 18446744073709551615");
    expect_error(error_of(read_gguf, head(0, 1) + key("a\x1b[0m\xe2\x80\xae", GgufType::kBool, "\1"s)),
                 "a key is 'a\\x1b[0m\\u202e', expected plain text");
    const auto error = [](const std::string& header) {
        return error_of(parse_safetensors, safetensors_file(header, 4));
    };
    const auto entry = [](const std::string& shape) {
        return R"({"a":{"dtype":"F32","shape":)" + shape + R"(,"data_offsets":[0,4]}})";
    };
    expect("a number", error(entry("[1]")).empty());
    for (const char* shape :
         {"[-1]", "[1.0]", "[1e0]", "[true]", "1", "\"1\"", "[[1]]", "[18446744073709551616]", "null"}) {
        expect_error(error(entry(shape)), "a has shape ");
    }
    expect_error(error(entry("[4611686018427387904,4611686018427387904,0]")),
                 "expected sizes of at least 0 that do not");
    expect_error(error(entry("[1],\"shape\":[1]")), "'shape' is duplicated");
    expect_error(error(entry("[1],\"x\":1")), "expected dtype, shape and data_offsets");
    for (const char* header : {"{]", "{\"a\"}", "{\"a\":{\"dtype\":01}}", "{\"a\":1.}", "{\"a\":tru}",
                               "{\"a\":\"\\x\"}", "{\"a\":\"\\ud800\"}", "{\"a\":\"\n\"}", "{\"__metadata__\":{},}",
                               "{\"a\":\xff}", "{}x", "{\"a\":", "{\"\\u12g4\":1}"}) {
        expect_error(error(header), "header is not valid JSON");
    }
    expect_error(error("{\"a\":" + std::string(100'000, '[')), "it is nested more than 16 levels deep");
    expect_error(error("{}"), "the file has 4 bytes of tensors, but its header lists 0");
}

void test_text() {
    for (const char* good : {"a", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80"})
        expect("UTF-8: "s + good, is_utf8(good) && is_plain(good));
    for (const char* bad : {"\x80", "\xc0\x80", "\xc3", "\xed\xa0\x80", "\xe0\x80\x80", "\xf4\x90\x80\x80",
                            "\xf8\x88\x80\x80\x80", "\xe2\x82"}) {
        expect("invalid UTF-8", !is_utf8(bad) && !is_plain(bad));
    }
    expect("control characters", !is_plain("a\n") && !is_plain("\x7f") && !is_plain("\xc2\x85") && !is_plain(""));
    expect("quoted", quoted("it's\t\xff") == "'it\\'s\\x09\\xff'");
    expect("quoted and cut", quoted(std::string(100, 'a'), 10) == "'aaaaaaaaa...");
    const uint64_t shape[] = {2, 3};
    expect("a shape", quoted(std::span(shape)) == "(2, 3)" && quoted(std::span(shape, 1)) == "(2,)");
}

}  // namespace

int main() {
    test_gguf();
    test_safetensors();
    test_damage("a GGUF file", read_gguf, gguf_file());
    test_damage("a safetensors file", parse_safetensors, small_safetensors());
    test_ranges("a GGUF file", read_gguf, gguf_file());
    test_ranges("a safetensors file", parse_safetensors, small_safetensors());
    test_errors();
    test_text();
    std::printf("%d failures\n", failures);
    return failures == 0 ? 0 : 1;
}
