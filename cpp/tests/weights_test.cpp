// Shared weights of a model: dequantised rows of every format against the scalar reference, on heap buffers of exactly
// their size; and packing with concurrent readers.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "quantize_reference.h"
#include "engine/stored_table.h"
#include "engine/weights.h"
#include "runtime/thread_pool.h"
#include "tests/checks.h"

using namespace whet;

namespace {

const std::string kSlot = "layers.0.qkv";

ModelConfig one_layer() {
    ModelConfig config;
    config.n_layers = 1;
    return config;
}

// Concatenated parts of n rows per format, and their numbers.
struct Packed {
    const size_t n, k;
    Weights weights{one_layer()};
    std::vector<float> numbers;

    Packed(const std::vector<WeightFormat>& formats, size_t n, size_t k) : n(n * formats.size()), k(k) {
        for (const WeightFormat format : formats) weights.add_matrix(kSlot, format, n, k);
        weights.add_vector(kSlot + ".bias", k);
        weights.allocate();
        numbers = normal(this->n * k, 1);
        pack(0, this->n, numbers);
        for (size_t part = 0; part < formats.size(); ++part) {
            for (size_t i = 0; i < n; ++i) define(traits(formats[part]), numbers.data() + (part * n + i) * k);
        }
    }

    void pack(size_t first, size_t count, const std::vector<float>& x) {
        weights.pack(kSlot, first, {StoredType::kFloat32, x.data(), count, k, static_cast<ptrdiff_t>(k), 1});
    }

    // Replaces a row by its dequantised numbers.
    void define(const FormatTraits& format, float* x) const {
        std::vector<uint8_t> row(format.row_bytes(k));
        if (format.source == RowType::kFloat32) {
            std::memcpy(row.data(), x, row.size());
        } else if (format.source == RowType::kBFloat16) {
            kernels().bf16_from_f32(x, k, reinterpret_cast<uint16_t*>(row.data()));
        } else {
            quantize_row(format, x, k, row.data());
        }
        format.dequantize_row(row.data(), k, x);
    }

    std::vector<uint16_t> halves() const {
        std::vector<uint16_t> out(numbers.size());
        kernels().bf16_from_f32(numbers.data(), numbers.size(), out.data());
        return out;
    }
};

template <class T>
bool same_rows(const Packed& packed, const std::vector<T>& all, size_t first, size_t count) {
    std::vector<T> out(count * packed.k);
    packed.weights.rows(kSlot, first, count, out.data(), sizeof(T) == sizeof(uint16_t));
    return std::memcmp(out.data(), all.data() + first * packed.k, out.size() * sizeof(T)) == 0;
}

template <class T>
bool same_gathered(const Packed& packed, const std::vector<T>& all, const std::vector<int64_t>& rows) {
    std::vector<T> out(rows.size() * packed.k);
    packed.weights.gather(kSlot, rows.data(), rows.size(), out.data(), sizeof(T) == sizeof(uint16_t));
    bool same = true;
    for (size_t i = 0; i < rows.size(); ++i) {
        const T* row = all.data() + static_cast<size_t>(rows[i]) * packed.k;
        same = same && std::memcmp(out.data() + i * packed.k, row, packed.k * sizeof(T)) == 0;
    }
    return same;
}

void test_rows(const std::vector<WeightFormat>& formats, size_t n, size_t k) {
    const Packed packed(formats, n, k);
    const std::vector<uint16_t> halves = packed.halves();
    const char* name = traits(formats.front()).name;
    const auto last = static_cast<int64_t>(packed.n - 1);
    for (const auto& [first, count] :
         {std::pair<size_t, size_t>{0, packed.n}, {packed.n / 2, packed.n - packed.n / 2}, {packed.n - 1, 1}}) {
        expect(same_rows(packed, packed.numbers, first, count) && same_rows(packed, halves, first, count),
               "%s and %zu more: rows %zu + %zu of %zu x %zu", name, formats.size() - 1, first, count, packed.n, k);
    }
    const std::vector<int64_t> rows{last, 0, last / 2, last};
    expect(same_gathered(packed, packed.numbers, rows) && same_gathered(packed, halves, rows),
           "%s: gathered rows of %zu x %zu", name, packed.n, k);
}

void test_vectors() {
    Packed packed({WeightFormat::kFloat32}, 3, 20);
    const std::vector<float> bias = normal(20, 2);
    packed.weights.pack(kSlot + ".bias", 0, {StoredType::kFloat32, bias.data(), 1, 20, 0, 1});
    std::vector<float> out(7);
    packed.weights.rows(kSlot + ".bias", 5, 7, out.data(), false);
    expect(std::equal(out.begin(), out.end(), bias.begin() + 5), "numbers of a vector");
}

template <class Error, class Call>
void expect_rejected(const char* what, Call&& call) {
    try {
        call();
    } catch (const Error&) {
        return;
    }
    expect(false, "%s is rejected", what);
}

void test_errors() {
    const Packed packed({WeightFormat::kBFloat16, WeightFormat::kInt8}, 17, 6);
    std::vector<float> out(40 * 6);
    const std::vector<int64_t> outside{34}, below{-1};
    const Weights& w = packed.weights;
    expect_rejected<std::out_of_range>("a row too many", [&] { w.rows(kSlot, 10, 25, out.data(), false); });
    expect_rejected<std::out_of_range>("a row beyond", [&] { w.rows(kSlot, 35, 0, out.data(), false); });
    expect_rejected<std::out_of_range>("a number too many", [&] { w.rows(kSlot + ".bias", 1, 6, out.data(), false); });
    expect_rejected<std::out_of_range>("the row after the last",
                                       [&] { w.gather(kSlot, outside.data(), 1, out.data(), false); });
    expect_rejected<std::out_of_range>("a row below 0", [&] { w.gather(kSlot, below.data(), 1, out.data(), false); });
    expect_rejected<std::invalid_argument>("an unknown slot", [&] { w.rows("head", 0, 1, out.data(), false); });
    expect_rejected<std::invalid_argument>("its checksum", [&] { w.checksum("head"); });
}

void test_checksums() {
    Packed a({WeightFormat::kQ8_0, WeightFormat::kFloat32}, 20, 64),
        b({WeightFormat::kQ8_0, WeightFormat::kFloat32}, 20, 64);
    expect(a.weights.checksum(kSlot) == b.weights.checksum(kSlot), "the same weights have the same checksum");
    for (const size_t row : {size_t{3}, size_t{39}}) {
        const uint64_t before = b.weights.checksum(kSlot);
        b.pack(row, 1, std::vector<float>(64, 0.5f));
        expect(b.weights.checksum(kSlot) != before, "the checksum depends on row %zu", row);
    }
}

// Rows that are packed at their first use, dropped, the least recently used first, and packed again; on several
// threads.
template <class Error, class Run>
bool throws(Run&& run) {
    try {
        run();
    } catch (const Error&) {
        return true;
    }
    return false;
}

// Rows in memory of a few places, in float32 and in blocks: a place holds the row that was placed last.
void test_held_rows() {
    constexpr size_t n = 7, k = 64, n_places = 3;
    const std::vector<float> numbers = normal(n * k, 3);
    const FormatTraits& q8 = traits(WeightFormat::kQ8_0);
    std::vector<uint8_t> blocks(n * q8.row_bytes(k));
    for (size_t i = 0; i < n; ++i) quantize_row(q8, numbers.data() + i * k, k, blocks.data() + i * q8.row_bytes(k));
    const auto* floats = reinterpret_cast<const uint8_t*>(numbers.data());
    for (const auto& [type, data, bytes] :
         {std::tuple(StoredType::kFloat32, floats, k * sizeof(float)),
          std::tuple(StoredType::kQ8_0, std::as_const(blocks).data(), q8.row_bytes(k))}) {
        StoredTable whole, held;
        whole.resize(n, k), held.resize(n, k);
        const auto stride = static_cast<ptrdiff_t>(type == StoredType::kFloat32 ? k : bytes);
        whole.set(0, {type, data, n, k, stride, 1}, nullptr);
        uint8_t* memory = held.hold(type, n_places);
        expect(held.size_bytes() == n_places * bytes + (n + n_places) * 4, "%zu bytes", held.size_bytes());
        std::vector<float> row(k), expected(k);
        const auto is_missing = [&](size_t i) { return throws<std::out_of_range>([&] { held.read(i, row.data()); }); };
        for (size_t i = 0; i < n; ++i) expect(is_missing(i), "row %zu is not in memory", i);
        for (const size_t i : {size_t{6}, size_t{0}, size_t{3}, size_t{5}}) {  // 6, 0 and 3 have the same place
            const size_t place = i % n_places;
            std::memcpy(memory + place * bytes, data + i * bytes, bytes);
            held.place(i, place);
            held.read(i, row.data()), whole.read(i, expected.data());
            expect(row == expected && held.is_finite(i), "row %zu", i);
        }
        expect(is_missing(6) && is_missing(0) && is_missing(n), "rows that were replaced are not read");
        expect(throws<std::out_of_range>([&] { held.place(n, 0); }) &&
                   throws<std::out_of_range>([&] { held.place(0, n_places); }),
               "there are no such rows and places");
        if (type == StoredType::kQ8_0) continue;
        const float infinity = INFINITY;
        std::memcpy(memory + 2 * bytes + 8, &infinity, sizeof infinity);
        expect(!held.is_finite(5), "infinity is found");
        held.set(0, {type, data, n, k, stride, 1}, nullptr);
        held.read(6, row.data()), whole.read(6, expected.data());
        expect(row == expected && held.size_bytes() == n * bytes, "rows are set in place of the held ones");
    }
    StoredTable odd;
    odd.resize(n, 31);
    expect(throws<std::invalid_argument>([&] { odd.hold(StoredType::kQ8_0, 1); }), "31 numbers are not whole blocks");
}

void test_deferred_rows() {
    constexpr size_t n_experts = 6, dim = 8, k = 16;
    ModelConfig c;
    c.n_layers = 1, c.n_experts = n_experts, c.n_used_experts = 1, c.expert_dim = dim / 2, c.hidden_dim = k;
    Weights packed(c), deferred(c);
    const std::string slot = "layers.0.experts_gate_up";
    for (Weights* w : {&packed, &deferred})
        w->add_matrix(slot, WeightFormat::kFloat32, n_experts * dim, k), w->allocate();
    const std::vector<float> numbers = normal(n_experts * dim * k, 5);  // of less than a page: none is released
    const auto rows = [&](size_t first, size_t n) {
        return StoredRows{StoredType::kFloat32, &numbers[first * k], n, k, static_cast<ptrdiff_t>(k), 1};
    };
    const auto owner = std::make_shared<int>(1);
    packed.pack(slot, 0, rows(0, n_experts * dim));
    for (size_t first = 0; first < n_experts * dim; first += 3 * dim)
        deferred.defer(slot, first, rows(first, 3 * dim), owner);
    expect(deferred.deferred_bytes() == 0 && owner.use_count() == 1 + n_experts, "deferred rows are not packed");
    const auto read = [&](const Weights& w, size_t expert) {
        std::vector<float> out(dim * k);
        w.rows(slot, expert * dim, dim, out.data(), false);
        return out;
    };
    const auto expect_same = [&](size_t expert) {
        expect(read(deferred, expert) == read(packed, expert), "expert %zu", expert);
    };
    const size_t bytes = packed.size_bytes() / n_experts;
    for (const size_t expert : {4, 2, 4, 0}) expect_same(expert);
    expect(deferred.deferred_bytes() == 3 * bytes, "%zu bytes are packed", deferred.deferred_bytes());
    deferred.drop_deferred(2 * bytes);
    expect(deferred.deferred_bytes() == 2 * bytes, "%zu bytes stay packed", deferred.deferred_bytes());
    expect_same(4), expect_same(0);
    expect(deferred.deferred_bytes() == 2 * bytes, "the least recently used expert was dropped");
    std::vector<std::thread> readers;
    for (size_t t = 0; t < 4; ++t) {
        readers.emplace_back([&, t] {
            for (size_t i = 0; i < 40; ++i) expect_same((i * 5 + t) % n_experts);
        });
    }
    for (int i = 0; i < 20; ++i) deferred.drop_deferred(bytes);
    for (std::thread& reader : readers) reader.join();
    expect(deferred.checksum(slot) == packed.checksum(slot), "all rows are packed");
    deferred.release();
    expect(deferred.deferred_bytes() == 0 && deferred.checksum(slot) == packed.checksum(slot),
           "released and packed again");
    const std::vector<float> other(dim * k, 2.0f);
    deferred.pack(slot, dim, {StoredType::kFloat32, other.data(), dim, k, static_cast<ptrdiff_t>(k), 1});
    deferred.drop_deferred(0);
    expect(read(deferred, 1) == other && deferred.deferred_bytes() == 0, "packed rows are not dropped");
    std::vector<float> bad(dim * k, INFINITY);
    Weights broken(c);
    broken.add_matrix(slot, WeightFormat::kFloat32, n_experts * dim, k), broken.allocate();
    broken.defer(slot, 0, {StoredType::kFloat32, bad.data(), dim, k, static_cast<ptrdiff_t>(k), 1}, owner);
    expect_rejected<std::runtime_error>("an infinite weight", [&] { read(broken, 0); });
}

// A reader sees all old rows or all new rows.
void test_packing_while_others_read() {
    Packed packed({WeightFormat::kBFloat16}, 64, 64);
    const std::vector<float> ones(64 * 64, 1.0f), twos(64 * 64, 2.0f);
    packed.pack(0, 64, ones);
    std::thread packer([&] {
        for (int i = 0; i < 50; ++i) packed.pack(0, 64, i % 2 == 0 ? twos : ones);
    });
    std::vector<float> out(64 * 64);
    bool whole = true;
    for (int i = 0; i < 50; ++i) {
        packed.weights.rows(kSlot, 0, 64, out.data(), false);
        whole = whole && std::equal(out.begin() + 1, out.end(), out.begin());
    }
    packer.join();
    expect(whole, "readers see all old rows or all new rows");
}

}  // namespace

int main() {
    return run_tests([] {
        for (const int n_threads : {1, 3}) {
            set_num_threads(n_threads, kOversubscribe);
            for (size_t i = 0; i < format_table().size(); ++i) {
                const auto format = static_cast<WeightFormat>(i);
                const size_t block = traits(format).block_length;
                for (const size_t n : {1, 16, 37}) {
                    for (const size_t k : {size_t{1}, size_t{2}, size_t{3}}) test_rows({format}, n, k * block);
                    if (block == 1) test_rows({format}, n, 95);
                    if (block == 1) test_rows({format}, n, 64);
                }
            }
            test_rows({WeightFormat::kQ4_K, WeightFormat::kQ6_K, WeightFormat::kBFloat16}, 35, 512);
        }
        test_vectors();
        test_errors();
        test_checksums();
        test_held_rows();
        test_deferred_rows();
        test_packing_while_others_read();
    });
}
