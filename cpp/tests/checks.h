// Shared parts of the C++ tests: expectations that count and print failures, random numbers, exit codes.
#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdint>
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

// A hash of results (FNV-1a), which the tests of other processors compare.
inline uint64_t results_hash = 0xcbf29ce484222325;
template <class T>
void add_to_hash(const std::vector<T>& results) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(results.data());
    for (size_t i = 0; i < results.size() * sizeof(T); ++i) results_hash = (results_hash ^ bytes[i]) * 0x100000001b3;
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
    std::printf("results: %016llx\n%d failures\n", static_cast<unsigned long long>(results_hash), failures);
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
