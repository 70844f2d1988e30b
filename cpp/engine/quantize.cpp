#include "engine/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace whet {
namespace {

float largest(const float* x, size_t n) {
    float top = 0.0f;
    for (size_t i = 0; i < n; ++i) top = std::max(top, std::fabs(x[i]));
    return top;
}

// Rounds to the nearest integer in [-127, 127], ties to even; NaN, after an overflow, gives -127.
int nearest(float x) {
    const float above = x > -127.0f ? x : -127.0f;
    return static_cast<int>(std::lrintf(above < 127.0f ? above : 127.0f));
}

void to_int8(const float* x, size_t n, float scale, int8_t* q) {
    for (size_t i = 0; i < n; ++i) q[i] = static_cast<int8_t>(scale > 0.0f ? nearest(x[i] / scale) : 0);
}

void quantize(const float* x, BlockQ8_0& block) {
    block.d = f16_of(largest(x, kQuantBlock) / 127.0f);
    to_int8(x, kQuantBlock, f32_of(block.d), block.q);
}

}  // namespace

void quantize_int8(const float* x, size_t k, uint8_t* row) {
    const float scale = largest(x, k) / 127.0f;
    to_int8(x, k, scale, reinterpret_cast<int8_t*>(row));
    std::memcpy(row + k, &scale, sizeof scale);
}

void dequantize_int8(const uint8_t* row, size_t k, float* x) {
    float scale;
    std::memcpy(&scale, row + k, sizeof scale);
    for (size_t i = 0; i < k; ++i) x[i] = scale * static_cast<float>(static_cast<int8_t>(row[i]));
}

void quantize_q8_0(const float* x, size_t k, uint8_t* row) {
    for (size_t i = 0; i < k; i += kQuantBlock, row += sizeof(BlockQ8_0)) {
        BlockQ8_0 block;
        quantize(x + i, block);
        std::memcpy(row, &block, sizeof block);
    }
}

void to_q8_0(const UnpackedBlock& unpacked, size_t length, size_t group, BlockQ8_0* blocks) {
    for (size_t first = 0; first < length; first += kQuantBlock, ++blocks) {
        const int8_t* q = unpacked.q + first;
        const float scale = unpacked.scale[first / group], size = std::fabs(scale);
        const bool is_symmetric = group >= kQuantBlock && unpacked.min[first / group] == 0.0f;
        blocks->d = f16_of(scale);
        if (is_symmetric && (f32_of(blocks->d) == scale || (size >= 0x1p-14f && size <= 65504.0f))) {
            std::memcpy(blocks->q, q, kQuantBlock);
            continue;
        }
        float x[kQuantBlock];
        dequantize(unpacked, first, kQuantBlock, group, x);
        quantize(x, *blocks);
    }
}

}  // namespace whet
