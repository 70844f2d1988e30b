// Normalisation of a row, with a fused residual addition.
//
//   rms_norm     y = x / sqrt(mean(x^2) + eps) * weight                          (Zhang & Sennrich 2019)
//   layer_norm   y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias     (Ba, Kiros & Hinton 2016)
//
// weight and bias may be null. With a residual, residual += x is computed first, rounded to its dtype, and that sum is
// normed. Sums are as in rows.h; the rest is float32, and a bfloat16 result is rounded once. x, residual and out have
// one dtype (rms_norm_f32_bf16 rounds its result); out may be x.
//
//   rms_norm_backward     dx = r (g - x r^2 mean(g x)),  dweight += dy x r,   g = dy weight,  r = 1 / sqrt(mean(x^2) +
//   eps)
//   layer_norm_backward   dx = r (g - mean(g) - n mean(g n)),   n = (x - mean(x)) r,   r = 1 / sqrt(variance(x) + eps)
#pragma once
#include "kernels/rows.h"
#include "simd/lanes.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

namespace rows {

// residual += x.
template <class T>
WHET_INLINE void add_residual(const T* x, T* residual, size_t n) {
    each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        put(residual + at, read(x + at, count) + read(residual + at, count), count);
    });
}

WHET_INLINE f32x16 inverse_root(double mean_square, double eps) {
    return f32x16(static_cast<float>(1.0 / __builtin_sqrt(mean_square + eps)));
}

// Mean and variance of a row: the mean is `pivot + beyond`.
struct Moments {
    float pivot;
    double beyond, variance;
};
template <class T>
WHET_SHARED Moments moments_about(float pivot, const T* x, size_t n) {
    double total[2];
    sum(n, total, [&](f32x16(&sums)[2], size_t at, int count) WHET_INLINE_LAMBDA {
        const f32x16 d = read(x + at, count, pivot) - f32x16(pivot);
        sums[0] += d;
        sums[1] = fma(d, d, sums[1]);
    });
    const double beyond = total[0] / static_cast<double>(n);
    const double variance = total[1] / static_cast<double>(n) - beyond * beyond;
    return {pivot, beyond, variance < 0.0 ? 0.0 : variance};
}

// One pass about the mean of the first vector. If that is so far from the row's mean that the sum of squares would
// cancel, a second pass about the mean from the first pass.
template <class T>
WHET_INLINE Moments moments_of(const T* x, size_t n) {
    const int first = n < 16 ? static_cast<int>(n) : 16;
    const Moments m = moments_about(sum_lanes(read(x, first)) / static_cast<float>(first), x, n);
    if (m.beyond * m.beyond <= 4.0 * m.variance) return m;
    return moments_about(static_cast<float>(m.pivot + m.beyond), x, n);
}

}  // namespace rows

template <class T, class W, class Out>
WHET_INLINE void rms_norm(const T* x, T* residual, const W* weight, size_t n, double eps, bool streaming, Out* out) {
    if (residual != nullptr) {
        rows::add_residual(x, residual, n);
        x = residual;
    }
    double squares[1];
    rows::sum(n, squares, [&](f32x16(&sums)[1], size_t at, int count) WHET_INLINE_LAMBDA {
        const f32x16 v = rows::read(x + at, count);
        sums[0] = fma(v, v, sums[0]);
    });
    const f32x16 inverse = rows::inverse_root(squares[0] / static_cast<double>(n), eps);
    const auto write = [&](auto value) WHET_INLINE_LAMBDA {
        if constexpr (sizeof(T) == sizeof(Out)) {
            rows::write(n, out, streaming, value, x + n);
        } else {
            rows::write(n, out, streaming, value);
        }
    };
    if (weight == nullptr) {
        write([&](size_t at, int count) WHET_INLINE_LAMBDA { return rows::read(x + at, count) * inverse; });
    } else {
        write([&](size_t at, int count)
                  WHET_INLINE_LAMBDA { return rows::read(x + at, count) * inverse * rows::read(weight + at, count); });
    }
}

template <class T, class W>
WHET_INLINE void layer_norm(const T* x, T* residual, const W* weight, const W* bias, size_t n, double eps,
                            bool streaming, T* out) {
    if (residual != nullptr) {
        rows::add_residual(x, residual, n);
        x = residual;
    }
    const rows::Moments m = rows::moments_of(x, n);
    const f32x16 inverse = rows::inverse_root(m.variance, eps), pivot(m.pivot);
    const f32x16 shift = f32x16(static_cast<float>(-m.beyond)) * inverse;
    const auto normed = [&](size_t at, int count)
                            WHET_INLINE_LAMBDA { return fma(rows::read(x + at, count) - pivot, inverse, shift); };
    const auto write = [&](auto value) WHET_INLINE_LAMBDA { rows::write(n, out, streaming, value, x + n); };
    if (weight != nullptr && bias != nullptr) {
        write([&](size_t at, int count) WHET_INLINE_LAMBDA {
            return fma(normed(at, count), rows::read(weight + at, count), rows::read(bias + at, count));
        });
    } else if (weight != nullptr) {
        write([&](size_t at, int count)
                  WHET_INLINE_LAMBDA { return normed(at, count) * rows::read(weight + at, count); });
    } else if (bias != nullptr) {
        write([&](size_t at, int count)
                  WHET_INLINE_LAMBDA { return normed(at, count) + rows::read(bias + at, count); });
    } else {
        write(normed);
    }
}

constexpr auto rms_norm_f32 = rms_norm<float, float, float>;
constexpr auto rms_norm_bf16 = rms_norm<uint16_t, uint16_t, uint16_t>;
constexpr auto rms_norm_bf16_f32 = rms_norm<uint16_t, float, uint16_t>;
constexpr auto layer_norm_f32 = layer_norm<float, float>;
constexpr auto layer_norm_bf16 = layer_norm<uint16_t, uint16_t>;
constexpr auto layer_norm_bf16_f32 = layer_norm<uint16_t, float>;
void rms_norm_f32_bf16(const float* x, const float* weight, size_t n, double eps, uint16_t* out) {
    rms_norm(x, static_cast<float*>(nullptr), weight, n, eps, false, out);
}

// Adds to grad_weight, unless it is null; grad_x may be x or grad.
template <class T, class Grad>
WHET_INLINE void rms_norm_backward(const T* x, const float* weight, const Grad* grad, size_t n, double eps, T* grad_x,
                                   float* grad_weight) {
    double total[2];  // of x^2 and of g x
    rows::sum(n, total, [&](f32x16(&sums)[2], size_t at, int count) WHET_INLINE_LAMBDA {
        const f32x16 v = rows::read(x + at, count);
        sums[0] = fma(v, v, sums[0]);
        sums[1] = fma(rows::read(grad + at, count) * rows::read(weight + at, count), v, sums[1]);
    });
    const double size = static_cast<double>(n), r = 1.0 / __builtin_sqrt(total[0] / size + eps);
    const f32x16 root(static_cast<float>(r)), pull(static_cast<float>(-r * r * (total[1] / size)));
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        const f32x16 v = rows::read(x + at, count), d = rows::read(grad + at, count);
        if (grad_weight != nullptr) {
            rows::put(grad_weight + at, fma(d, v * root, rows::read(grad_weight + at, count)), count);
        }
        rows::put(grad_x + at, root * fma(v, pull, d * rows::read(weight + at, count)), count);
    });
}

// weight may be null; grad_x may be x or grad.
void layer_norm_backward_f32(const float* x, const float* weight, const float* grad, size_t n, double eps,
                             float* grad_x) {
    const rows::Moments m = rows::moments_of(x, n);
    const f32x16 inverse = rows::inverse_root(m.variance, eps), pivot(m.pivot);
    const f32x16 shift = f32x16(static_cast<float>(-m.beyond)) * inverse;
    const auto normed = [&](size_t at, int count)
                            WHET_INLINE_LAMBDA { return fma(rows::read(x + at, count) - pivot, inverse, shift); };
    const auto scaled_grad = [&](size_t at, int count) WHET_INLINE_LAMBDA {
        const f32x16 d = rows::read(grad + at, count);
        return weight == nullptr ? d : d * rows::read(weight + at, count);
    };
    double total[2];  // of g and of g n; lanes beyond `count` have g = 0
    rows::sum(n, total, [&](f32x16(&sums)[2], size_t at, int count) WHET_INLINE_LAMBDA {
        const f32x16 g = scaled_grad(at, count);
        sums[0] += g;
        sums[1] = fma(g, normed(at, count), sums[1]);
    });
    const f32x16 mean(static_cast<float>(total[0] / static_cast<double>(n)));
    const f32x16 pull(static_cast<float>(-total[1] / static_cast<double>(n)));
    rows::each(0, n, [&](size_t at, int count) WHET_INLINE_LAMBDA {
        rows::put(grad_x + at, inverse * fma(normed(at, count), pull, scaled_grad(at, count) - mean), count);
    });
}

constexpr auto rms_norm_backward_f32 = rms_norm_backward<float, float>;
constexpr auto rms_norm_backward_f32_bf16 = rms_norm_backward<float, uint16_t>;
constexpr auto rms_norm_backward_bf16 = rms_norm_backward<uint16_t, uint16_t>;

}  // namespace
}  // namespace whet::WHET_ISA
