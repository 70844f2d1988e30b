// Philox4x64-10 (Salmon, Moraes, Dror & Shaw 2011), counted and read as NumPy's Philox does.
//
// Stateless: the t-th number of a stream is computed from t.
#pragma once
#include <cstdint>

namespace whet {

// Replaces the counter by its block of four random words.
inline void philox(uint64_t (&counter)[4], uint64_t key_0, uint64_t key_1) {
    constexpr uint64_t kMultiplier[2] = {0xD2E7470EE14C6C93, 0xCA5A826395121157};
    constexpr uint64_t kWeyl[2] = {0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B};
    uint64_t key[2] = {key_0, key_1};
    for (int round = 0; round < 10; ++round) {
        const auto a = static_cast<unsigned __int128>(kMultiplier[0]) * counter[0];
        const auto b = static_cast<unsigned __int128>(kMultiplier[1]) * counter[2];
        counter[0] = static_cast<uint64_t>(b >> 64) ^ counter[1] ^ key[0];
        counter[2] = static_cast<uint64_t>(a >> 64) ^ counter[3] ^ key[1];
        counter[1] = static_cast<uint64_t>(b);
        counter[3] = static_cast<uint64_t>(a);
        key[0] += kWeyl[0];
        key[1] += kWeyl[1];
    }
}

// The t-th uniform in [0, 1) of the stream (seed, prompt, sample), as in whet.rollout.torch_engine.token_uniforms: the
// key is (seed, 0); the counter starts at (0, 0, prompt, sample) and is incremented before each block of four words.
inline double token_uniform(uint64_t seed, uint64_t prompt, uint64_t sample, uint64_t t) {
    uint64_t counter[4] = {t / 4 + 1, 0, prompt, sample};
    philox(counter, seed, 0);
    return static_cast<double>(counter[t % 4] >> 11) * 0x1p-53;
}

}  // namespace whet
