// Guard that releases Python's GIL while the core computes.
//
// nanobind's guard aborts the process if a daemon thread is in the core when the interpreter exits: before 3.14,
// CPython ends a thread that acquires the GIL by pthread_exit, which unwinds its stack through a noexcept destructor.
// This guard blocks the thread until the process exits, as CPython 3.14 does.
#pragma once
#include <Python.h>

#include <chrono>
#include <thread>

namespace whet {

// Whether this thread has released the GIL in the core: the stable ABI has no PyGILState_Check.
inline thread_local bool gil_is_released = false;

// Whether this thread holds the GIL. Threads of Python enter the core with the GIL; others have no thread state.
inline bool holds_gil() noexcept { return !gil_is_released && PyGILState_GetThisThreadState() != nullptr; }

inline PyThreadState* release_gil() noexcept {
    gil_is_released = true;
    return PyEval_SaveThread();
}

inline void acquire_gil(void* thread_state) noexcept {
    try {
        PyEval_RestoreThread(static_cast<PyThreadState*>(thread_state));
    } catch (...) {
        for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
    gil_is_released = false;
}

class ReleasedGil {
public:
    ReleasedGil() : thread_state_(release_gil()) {}
    ReleasedGil(const ReleasedGil&) = delete;
    ~ReleasedGil() { acquire_gil(thread_state_); }

private:
    PyThreadState* thread_state_;
};

// Holds the GIL in a part of the core that runs without it.
class AcquiredGil {
public:
    AcquiredGil() : state_(PyGILState_Ensure()), was_released_(gil_is_released) { gil_is_released = false; }
    AcquiredGil(const AcquiredGil&) = delete;
    ~AcquiredGil() {
        gil_is_released = was_released_;
        PyGILState_Release(state_);
    }

private:
    PyGILState_STATE state_;
    bool was_released_;
};

}  // namespace whet
