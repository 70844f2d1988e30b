// Numbers for tests.
#pragma once

#include <cstddef>
#include <random>
#include <vector>

// n standard normal numbers of a seed, in memory of exactly their size.
inline std::vector<float> normal(size_t n, unsigned seed) {
    std::mt19937 bits(seed);
    std::normal_distribution<float> distribution;
    std::vector<float> x(n);
    for (float& value : x) value = distribution(bits);
    return x;
}
