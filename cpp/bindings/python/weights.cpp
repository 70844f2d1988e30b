// Bindings of a model's weights, shared by engines and trainers, and of the checks of tensors before packing.
// whet.models validates arguments and explains errors; the checks here ensure memory safety.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "arrays.h"
#include "bindings.h"
#include "gil.h"
#include "engine/stored_rows.h"
#include "engine/weights.h"
#include "runtime/checksum.h"

namespace nb = nanobind;

namespace whet {
namespace {

template <class T>
T get(const nb::dict& from, const char* name) {
    return nb::cast<T>(from[name]);
}

// The member of a bound enum with this name.
template <class T>
T enum_member(const nb::dict& from, const char* name) {
    return nb::cast<T>(nb::type<T>()[from[name]]);
}

ModelConfig config_of(const nb::dict& from) {
    ModelConfig c;
    c.n_layers = get<size_t>(from, "n_layers");
    c.n_heads = get<size_t>(from, "n_heads");
    c.n_kv_heads = get<size_t>(from, "n_kv_heads");
    c.head_dim = get<size_t>(from, "head_dim");
    c.hidden_dim = get<size_t>(from, "hidden_dim");
    c.ffn_dim = get<size_t>(from, "ffn_dim");
    c.vocab_size = get<size_t>(from, "vocab_size");
    c.max_position = get<size_t>(from, "max_position");
    c.norm = enum_member<Norm>(from, "norm");
    c.norm_eps = get<double>(from, "norm_eps");
    c.rotary_dim = get<size_t>(from, "rotary_dim");
    c.is_neox = get<bool>(from, "is_neox");
    for (nb::handle f : nb::cast<nb::sequence>(from["inv_freq"])) c.inv_freq.push_back(nb::cast<double>(f));
    c.attention_factor = get<double>(from, "attention_factor");
    c.learned_positions = get<size_t>(from, "learned_positions");
    c.parallel_residual = get<bool>(from, "parallel_residual");
    c.shared_norm = get<bool>(from, "shared_norm");
    c.pre_norm = get<bool>(from, "pre_norm");
    c.post_norm = get<bool>(from, "post_norm");
    c.qk_norm = get<bool>(from, "qk_norm");
    c.qk_norm_whole = get<bool>(from, "qk_norm_whole");
    c.activation = enum_member<Activation>(from, "activation");
    c.gated = get<bool>(from, "gated");
    for (nb::handle w : nb::cast<nb::sequence>(from["windows"])) c.windows.push_back(nb::cast<size_t>(w));
    c.attention_scale = get<double>(from, "attention_scale");
    c.attention_softcap = get<double>(from, "attention_softcap");
    for (nb::handle r : nb::cast<nb::sequence>(from["rope_layers"])) c.rope_layers.push_back(nb::cast<bool>(r));
    for (nb::handle r : nb::cast<nb::sequence>(from["local_layers"])) c.local_layers.push_back(nb::cast<bool>(r));
    for (nb::handle f : nb::cast<nb::sequence>(from["local_inv_freq"])) c.local_inv_freq.push_back(nb::cast<double>(f));
    c.embedding_scale = get<float>(from, "embedding_scale");
    c.residual_scale = get<float>(from, "residual_scale");
    c.logits_scale = get<float>(from, "logits_scale");
    c.logits_softcap = get<float>(from, "logits_softcap");
    check(c);
    return c;
}

// A view of rows of `width` elements, with the strides of StoredRows.
StoredRows rows_at(uintptr_t address, StoredType type, size_t n, size_t width, ptrdiff_t row_stride,
                   ptrdiff_t column_stride) {
    const size_t k = traits(type).row_length(width);
    return {type, reinterpret_cast<const void*>(address), n, k, row_stride, column_stride};
}

nb::tuple to_tuple(const PackingLoss& loss) {
    return nb::make_tuple(traits(loss.format).name, loss.largest, loss.limit, loss.squared_norm, loss.squared_lost);
}

nb::tuple packing_loss_call(int format, uintptr_t address, StoredType type, size_t n, size_t width,
                            ptrdiff_t row_stride, ptrdiff_t column_stride) {
    const StoredRows rows = rows_at(address, type, n, width, row_stride, column_stride);
    PackingLoss loss;
    {
        const ReleasedGil released;
        loss = measure_packing_loss(rows, static_cast<WeightFormat>(format));
    }
    return to_tuple(loss);
}

bool is_finite_call(uintptr_t address, StoredType type, size_t n, size_t width, ptrdiff_t row_stride,
                    ptrdiff_t column_stride) {
    const StoredRows rows = rows_at(address, type, n, width, row_stride, column_stride);
    const ReleasedGil released;
    return is_finite(rows);
}

// Checksum of rows; the stride in bytes.
uint64_t checksum_call(uintptr_t address, size_t rows, size_t row_bytes, ptrdiff_t stride) {
    return checksum_rows(reinterpret_cast<const char*>(address), rows, row_bytes, stride);
}

std::shared_ptr<Weights> make_weights(const nb::dict& config, const nb::sequence& slots) {
    auto weights = std::make_shared<Weights>(config_of(config));
    for (nb::handle slot : slots) {
        const auto entry = nb::cast<nb::tuple>(slot);
        const std::string name = nb::cast<const char*>(entry[0]);
        const auto n = nb::cast<size_t>(entry[2]);
        if (entry[1].is_none()) {
            weights->add_vector(name, n);
        } else {
            weights->add_matrix(name, static_cast<WeightFormat>(nb::cast<int>(entry[1])), n,
                                nb::cast<size_t>(entry[3]));
        }
    }
    weights->allocate();
    return weights;
}

// Names are const char*: nanobind terminates the process if it cannot allocate a std::string.
void pack_call(const Shared<Weights>& weights, const char* slot, size_t first, uintptr_t address, StoredType type,
               size_t n, size_t width, ptrdiff_t row_stride, ptrdiff_t column_stride) {
    const StoredRows rows = rows_at(address, type, n, width, row_stride, column_stride);
    const ReleasedGil released;
    weights.value->pack(slot, first, rows);
}

nb::tuple measure_loss_call(const Shared<Weights>& weights, const char* slot, size_t first, uintptr_t address,
                            StoredType type, size_t n, size_t width, ptrdiff_t row_stride, ptrdiff_t column_stride) {
    const StoredRows rows = rows_at(address, type, n, width, row_stride, column_stride);
    PackingLoss loss;
    {
        const ReleasedGil released;
        loss = weights.value->measure_loss(slot, first, rows);
    }
    return to_tuple(loss);
}

// Views a contiguous float32 or bfloat16 array for `count` rows of a slot: (count, k), or 1-D with as many numbers.
// Returns false for other arrays.
bool view_out(nb::handle object, const Weights& weights, const char* slot, size_t count, Array& out) {
    Rows rows;
    return view_strided(object.ptr(), out, true) && out.is_narrow_float() && out.ndim <= 2 && rows_of(out, rows) &&
           rows.is_contiguous() && static_cast<size_t>(out.size()) == count * weights.k(slot) &&
           (out.ndim == 1 || static_cast<size_t>(out.shape[0]) == count);
}

nb::object rows_call(const Shared<Weights>& weights, const char* slot, size_t first, size_t n, nb::handle object) {
    Array out;
    if (!view_out(object, *weights.value, slot, n, out)) return not_implemented();
    nb::object result = nb::borrow(object);
    const ReleasedGil released;
    weights.value->rows(slot, first, n, out.data, out.dtype == DType::kBFloat16);
    return result;
}

nb::object gather_call(const Shared<Weights>& weights, const char* slot, nb::handle ids, nb::handle object) {
    Array rows, out;
    if (!view_vector(ids, DType::kInt64, rows) ||
        !view_out(object, *weights.value, slot, static_cast<size_t>(rows.size()), out)) {
        return not_implemented();
    }
    nb::object result = nb::borrow(object);
    const ReleasedGil released;
    weights.value->gather(slot, rows.as<int64_t>(), static_cast<size_t>(rows.size()), out.data,
                          out.dtype == DType::kBFloat16);
    return result;
}

}  // namespace

void bind_weights(nb::module_& m) {
    using nb::arg;
    m.def("checksum", &checksum_call);
    m.def("is_finite", &is_finite_call, nb::kw_only(), arg("address"), arg("type"), arg("n"), arg("width"),
          arg("row_stride"), arg("column_stride"));
    m.def("packing_loss", &packing_loss_call, nb::kw_only(), arg("format"), arg("address"), arg("type"), arg("n"),
          arg("width"), arg("row_stride"), arg("column_stride"));
    nb::enum_<Norm>(m, "Norm").value("rms", Norm::kRms).value("layer", Norm::kLayer);
    nb::class_<Shared<Weights>>(m, "Weights")
        .def(
            "__init__",
            [](Shared<Weights>* self, const nb::dict& config, const nb::sequence& slots) {
                auto weights = make_weights(config, slots);
                new (self) Shared<Weights>{std::move(weights)};
            },
            arg("config"), arg("slots"))
        .def("pack", &pack_call, arg("slot"), nb::kw_only(), arg("first"), arg("address"), arg("type"), arg("n"),
             arg("width"), arg("row_stride"), arg("column_stride"))
        .def("measure_loss", &measure_loss_call, arg("slot"), nb::kw_only(), arg("first"), arg("address"), arg("type"),
             arg("n"), arg("width"), arg("row_stride"), arg("column_stride"))
        .def("rows", &rows_call, arg("slot"), arg("first"), arg("n"), arg("out"))
        .def("gather", &gather_call, arg("slot"), arg("ids"), arg("out"))
        .def("checksum",
             [](const Shared<Weights>& weights, const char* slot) {
                 const ReleasedGil released;
                 return weights.value->checksum(slot);
             })
        .def(
            "release", [](const Shared<Weights>& weights) { return weights.value->release(); },
            nb::call_guard<ReleasedGil>())
        .def_prop_ro("size_bytes", [](const Shared<Weights>& weights) { return weights.value->size_bytes(); });
}

}  // namespace whet
