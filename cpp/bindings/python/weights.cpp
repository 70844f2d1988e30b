// Bindings of a model's weights, shared by engines and trainers, and of the checks of tensors before packing.
// whet.models validates arguments and explains errors; the checks here ensure memory safety.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "gil.h"
#include "engine/stored_rows.h"
#include "engine/weights.h"
#include "runtime/checksum.h"

namespace nb = nanobind;

namespace whet {
namespace {

// Reads a number, the name of a member of a bound enum, or a sequence of them.
template <class T>
void read(nb::handle from, T& value) {
    if constexpr (std::is_enum_v<T>) {
        value = nb::cast<T>(nb::type<T>()[from]);
    } else {
        value = nb::cast<T>(from);
    }
}
template <class T>
void read(nb::handle from, std::vector<T>& values) {
    for (nb::handle each : nb::cast<nb::sequence>(from)) {
        T value{};
        read(each, value);
        values.push_back(value);
    }
}

ModelConfig config_of(const nb::dict& from) {
    ModelConfig c;
#define MODEL(field) read(from[#field], c.field);
#include "bindings/fields.def"
    check(c);
    return c;
}

// A view of rows of `width` elements, with the strides of StoredRows.
void make_rows(StoredRows* self, uintptr_t address, StoredType type, size_t n, size_t width, ptrdiff_t row_stride,
               ptrdiff_t column_stride) {
    const size_t k = traits(type).row_length(width);
    new (self) StoredRows{type, reinterpret_cast<const void*>(address), n, k, row_stride, column_stride};
}

// Runs measure() without the GIL; returns the name of the format and the fields of the loss.
template <class Measure>
nb::tuple measure_without_gil(Measure&& measure) {
    const PackingLoss loss = [&] {
        const ReleasedGil released;
        return measure();
    }();
    return nb::make_tuple(traits(loss.format).name, loss.largest, loss.limit, loss.squared_norm, loss.squared_lost);
}

nb::tuple packing_loss_call(int format, const StoredRows& rows) {
    return measure_without_gil([&] { return measure_packing_loss(rows, static_cast<WeightFormat>(format)); });
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
void pack_call(const Shared<Weights>& weights, const char* slot, size_t first, const StoredRows& rows) {
    const ReleasedGil released;
    weights.value->pack(slot, first, rows);
}

// `owner` keeps the memory of the rows valid.
void defer_call(const Shared<Weights>& weights, const char* slot, size_t first, const StoredRows& rows,
                nb::object owner) {
    const std::shared_ptr<void> kept(owner.release().ptr(), [](void* object) {
        if (!nb::is_alive()) return;
        const nb::gil_scoped_acquire gil;
        Py_DECREF(static_cast<PyObject*>(object));
    });
    const ReleasedGil released;
    weights.value->defer(slot, first, rows, kept);
}

nb::tuple measure_loss_call(const Shared<Weights>& weights, const char* slot, size_t first, const StoredRows& rows) {
    return measure_without_gil([&] { return weights.value->measure_loss(slot, first, rows); });
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
    nb::class_<StoredRows>(m, "StoredRows", nb::dynamic_attr())  // for the owner of the rows
        .def("__init__", &make_rows, nb::kw_only(), arg("address"), arg("type"), arg("n"), arg("width"),
             arg("row_stride"), arg("column_stride"));
    m.def("is_finite", &is_finite, nb::call_guard<ReleasedGil>());
    m.def("packing_loss", &packing_loss_call);
    nb::enum_<Norm>(m, "Norm").value("rms", Norm::kRms).value("layer", Norm::kLayer);
    nb::enum_<Router>(m, "Router").value("softmax", Router::kSoftmax).value("sigmoid", Router::kSigmoid);
    nb::enum_<Mixer>(m, "Mixer")
        .value("attention", Mixer::kAttention)
        .value("conv", Mixer::kConv)
        .value("delta", Mixer::kDelta)
        .value("mamba", Mixer::kMamba)
        .value("none", Mixer::kNone);
    nb::class_<Shared<Weights>>(m, "Weights")
        .def(
            "__init__",
            [](Shared<Weights>* self, const nb::dict& config, const nb::sequence& slots) {
                auto weights = make_weights(config, slots);
                new (self) Shared<Weights>{std::move(weights)};
            },
            arg("config"), arg("slots"))
        .def("pack", &pack_call)
        .def("measure_loss", &measure_loss_call)
        .def("defer", &defer_call)
        .def_prop_ro("deferred_bytes", [](const Shared<Weights>& weights) { return weights.value->deferred_bytes(); })
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
