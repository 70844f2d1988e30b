// The extension module whet._core.
#include <nanobind/nanobind.h>

#include <exception>
#include <string>

#include "arrays.h"
#include "bindings.h"
#include "gil.h"
#include "kernels/dispatch.h"
#include "runtime/host_lock.h"
#include "runtime/processors.h"
#include "runtime/system.h"
#include "runtime/thread_pool.h"
#include "runtime/errors.h"

namespace nb = nanobind;

namespace {

nb::dict build_info() {
    std::string built, usable;
    size_t count;
    const whet::Unit* unit = whet::units(count);
    for (const whet::Unit* end = unit + count; unit != end; ++unit) {
        const std::string isa = unit->table->isa;
        built += (built.empty() ? "" : " ") + isa;
        if (unit->usable) usable += (usable.empty() ? "" : " ") + isa;
    }
    nb::dict info;
#if defined(__clang__)
    info["compiler"] = __VERSION__;
#else
    info["compiler"] = "GCC " __VERSION__;
#endif
    info["build_type"] = WHET_BUILD_TYPE;
    info["instruction_sets"] = built.c_str();
    info["usable_instruction_sets"] = usable.c_str();
    info["processors"] = nb::str(nb::int_(whet::n_processors()));
    return info;
}

void raise_whet_error(const std::exception_ptr& error, void*) {
    const auto raise = [](const char* name, const std::exception& e) {
        PyErr_SetString(nb::module_::import_("whet.errors").attr(name).ptr(), e.what());
    };
    try {
        std::rethrow_exception(error);
    } catch (const whet::VariableError& e) {
        raise("WhetValueError", e);
    } catch (const whet::ForkedError& e) {
        raise("WhetError", e);
    }
}

// Releases the GIL if this thread holds it.
void* release_held_gil() { return whet::holds_gil() ? whet::release_gil() : nullptr; }

}  // namespace

NB_MODULE(_core, m) {
    nb::set_leak_warnings(false);  // scripts may exit with weights in a torch graph
    whet::import_numpy();
    whet::host_lock = {&release_held_gil, &whet::acquire_gil};
    nb::register_exception_translator(&raise_whet_error);
    m.def("isa", [] { return whet::kernels().isa; });
    m.def("num_threads", &whet::num_threads);
    m.def("set_num_threads", &whet::set_num_threads, nb::arg("n"), nb::arg("oversubscribe") = false,
          nb::call_guard<whet::ReleasedGil>());
    m.def("expect_siblings", &whet::expect_siblings);
    m.def("max_processors", &whet::max_processors);
    m.def("borrow_threads", [](uintptr_t fork) { whet::borrow_threads(reinterpret_cast<whet::Fork>(fork)); });
    m.def("build_info", &build_info);
    m.def("n_processors", &whet::n_processors);
    m.def("read_process_memory", [] {
        const whet::ProcessMemory memory = whet::read_process_memory();
        return nb::make_tuple(memory.resident, memory.peak);
    });
    m.def("read_machine_memory", [] {
        const whet::MachineMemory memory = whet::read_machine_memory();
        return nb::make_tuple(memory.total, memory.available);
    });
    whet::bind_primitives(m);
    whet::bind_linear(m);
    whet::bind_probe(m);
    whet::bind_lora(m);
    whet::bind_norm(m);
    whet::bind_kv_cache(m);
    whet::bind_learner(m);
    whet::bind_rope(m);
    whet::bind_attention(m);
    whet::bind_weights(m);
    whet::bind_engine(m);
    whet::bind_files(m);
    whet::bind_gpu(m);
    whet::bind_sampler(m);
    whet::bind_training(m);
}
