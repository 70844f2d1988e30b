// Shared parts of the C++ tests: expectations that count and print failures, random numbers, exit codes.
#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <vector>

#include "kernels/dispatch.h"

inline int failures = 0;

// Tests run their threads at once on machines with fewer processors too.
constexpr bool kOversubscribe = true;

// `what` is a printf format for the following values.
__attribute__((format(printf, 2, 3))) inline void expect(bool holds, const char* what, ...) {
    if (holds) return;
    std::va_list values;
    va_start(values, what);
    std::printf("failed: ");
    std::vprintf(what, values);
    std::printf("\n");
    va_end(values);
    ++failures;
}

// Exit code of a test: 77 if this machine lacks the instruction set in WHET_ISA.
template <class Tests>
int run_tests(const Tests& tests) {
    try {
        std::printf("instruction set: %s\n", whet::kernels().isa);
    } catch (const std::runtime_error& error) {
        std::printf("%s\n", error.what());
        return 77;
    }
    tests();
    std::printf("%d failures\n", failures);
    return failures == 0 ? 0 : 1;
}

// n standard normal numbers, in memory of exactly their size.
inline std::vector<float> normal(size_t n, unsigned seed) {
    std::mt19937 bits(seed);
    std::normal_distribution<float> distribution;
    std::vector<float> x(n);
    for (float& value : x) value = distribution(bits);
    return x;
}
