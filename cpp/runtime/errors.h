// Exception types that a binding translates to its own language.
#pragma once
#include <stdexcept>

namespace whet {

// A WHET_ environment variable has an invalid value. The message names the variable and the valid values.
struct VariableError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// An object may be half changed: another thread was using it when this process was forked.
struct ForkedError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace whet
