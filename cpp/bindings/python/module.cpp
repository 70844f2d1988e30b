// The extension module whet._core.
#include <nanobind/nanobind.h>

#include "arrays.h"
#include "kernels/dispatch.h"
#include "primitives.h"
#include "runtime/thread_pool.h"

namespace nb = nanobind;

NB_MODULE(_core, m) {
    whet::import_numpy();
    m.def("isa", [] { return whet::kernels().isa; });
    m.def("num_threads", &whet::num_threads);
    m.def("set_num_threads", &whet::set_num_threads, nb::call_guard<nb::gil_scoped_release>());
    whet::bind_primitives(m);
}
