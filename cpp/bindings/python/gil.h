// Python's GIL, released while the core computes.
//
// nanobind's own guard aborts the process where a daemon thread is in the core when the interpreter ends: before 3.14
// CPython ends such a thread as it asks for the GIL, by pthread_exit, which unwinds its stack, and a destructor may not
// be unwound. Here the thread waits for the end of the process instead, as in 3.14.
#pragma once
#include <Python.h>
#include <unistd.h>

namespace whet {

inline void acquire_gil(void* thread_state) noexcept {
    try {
        PyEval_RestoreThread(static_cast<PyThreadState*>(thread_state));
    } catch (...) {
        for (;;) pause();
    }
}

class ReleasedGil {
public:
    ReleasedGil() : thread_state_(PyEval_SaveThread()) {}
    ReleasedGil(const ReleasedGil&) = delete;
    ~ReleasedGil() { acquire_gil(thread_state_); }

private:
    PyThreadState* thread_state_;
};

}  // namespace whet
