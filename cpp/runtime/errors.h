// Errors that a binding names in its own language.
#pragma once
#include <stdexcept>

namespace whet {

// An environment variable of Whet's has a value that cannot be used. The message names it, and what it can be.
struct VariableError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// An object is in the state in which a thread of the parent process left it when this process was forked.
struct ForkedError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace whet
