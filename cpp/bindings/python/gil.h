// Guard that releases Python's GIL while the core computes.
//
// nanobind's guard aborts the process if a daemon thread is in the core when the interpreter exits: before 3.14,
// CPython ends a thread that acquires the GIL by pthread_exit, which unwinds its stack through a noexcept destructor.
// This guard blocks the thread until the process exits, as CPython 3.14 does.
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
