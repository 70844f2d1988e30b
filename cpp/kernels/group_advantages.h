// Group-relative advantages: A = (r - mean) / scale.
//
// A group's mean and standard deviation are over its scored rewards; NaN means unscored and gives advantage 0.
//   scale = std                       A = 0 if std < 1e-8           (eps < 0: the default)
//   scale = std + eps                                               (eps >= 0: TRL)
// std = sqrt(sum (r - mean)^2 / (n - ddof)), 0 if n <= ddof. `batch_scale`, if not NaN, replaces scale: the deviation
// of the batch, or 1. All arithmetic is float64; the mean is stored in two parts, so that rewards close to it do not
// lose digits.
//
// Groups of 2, 4 or 8 share a vector: lanes combine by butterflies within their group.
#pragma once
#include "simd/math.h"
#include "simd/vec.h"

namespace whet::WHET_ISA {
namespace {

WHET_INLINE f64x8 load_rewards(const double* x) { return load(x); }
WHET_INLINE f64x8 load_rewards(const float* x) { return load_wide(x); }
WHET_INLINE void store_rewards(double* out, f64x8 v) { store(out, v); }
WHET_INLINE void store_rewards(float* out, f64x8 v) { store_narrow(out, v); }

WHET_INLINE f64x8 load_first_rewards(const double* x, int n) { return load_first(x, n, 0.0); }
WHET_INLINE f64x8 load_first_rewards(const float* x, int n) { return widen(load_first(x, n, 0.0f)).low; }
WHET_INLINE void store_first_rewards(double* out, f64x8 v, int n) { store_first(out, v, n); }
WHET_INLINE void store_first_rewards(float* out, f64x8 v, int n) {
    float lanes[8];
    store_narrow(lanes, v);
    __builtin_memcpy(out, lanes, static_cast<size_t>(n) * sizeof *out);
}

// Calls visit(i, rewards i to i + 7, keep): keep(x) is x with 0 in the lanes beyond the last reward.
template <class T, class Visit>
WHET_INLINE void each_vector(const T* rewards, size_t n, Visit visit) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) visit(i, load_rewards(rewards + i), [](f64x8 x) WHET_INLINE_LAMBDA { return x; });
    if (i < n) {
        constexpr double kLane[] = {0, 1, 2, 3, 4, 5, 6, 7};
        const int rest = static_cast<int>(n - i);
        const auto here = load(kLane) < f64x8(static_cast<double>(rest));
        visit(i, load_first_rewards(rewards + i, rest),
              [&](f64x8 x) WHET_INLINE_LAMBDA { return select(here, x, f64x8(0.0)); });
    }
}

// A count of rewards, 1 / count, and 1 / (count - ddof), or 0 without degrees of freedom.
struct Counts {
    f64x8 count, per_reward, per_freedom;

    WHET_INLINE Counts(f64x8 count, double ddof) : count(count), per_reward(f64x8(1.0) / count) {
        const f64x8 freedom = count - f64x8(ddof);
        per_freedom = select(freedom > f64x8(0.0), f64x8(1.0) / freedom, f64x8(0.0));
    }
};

// Moments of the rewards of a segment of lanes, equal in all lanes of the segment.
struct GroupMoments {
    f64x8 mean_high, mean_low, deviation;

    WHET_INLINE f64x8 distance(f64x8 reward) const { return (reward - mean_high) - mean_low; }
};

// Moments of n rewards or, with width < 8, of the 8 / width groups in one vector. `some_unscored` excludes NaN. The
// mean is exact in two parts for any rounding of the first, so multiplying by 1 / count is sufficient.
template <int width, bool some_unscored, class T>
WHET_SHARED GroupMoments moments_of(const T* rewards, size_t n, const Counts& c) {
    const f64x8 zero(0.0);
    const auto scored = [&](f64x8 r, f64x8 x)
                            WHET_INLINE_LAMBDA { return some_unscored ? select(r == r, x, zero) : x; };
    f64x8 sum(0.0), dropped(0.0);
    each_vector(rewards, n, [&](size_t i, f64x8 r, auto) WHET_INLINE_LAMBDA {
        r = scored(r, r);
        // float32 rewards leave 29 spare bits in float64 sums: only float64 rewards need the compensation.
        sum = i == 0 ? r : sizeof(T) == 4 ? sum + r : two_sum(sum, r, dropped);
    });
    sum = sizeof(T) == 4 ? segment_sum<width>(sum) : segment_two_sum<width>(sum, dropped);
    GroupMoments m;
    m.mean_high = sum * c.per_reward;
    m.mean_low = (fma(-m.mean_high, c.count, sum) + dropped) * c.per_reward;

    // Squares are positive: runs of 8 vectors need no compensation.
    f64x8 squares(0.0), squares_dropped(0.0), run(0.0);
    each_vector(rewards, n, [&](size_t i, f64x8 r, auto keep) WHET_INLINE_LAMBDA {
        const f64x8 d = m.distance(r);
        run += keep(scored(r, d * d));
        if (i % 64 == 56) {
            squares = two_sum(squares, run, squares_dropped);
            run = zero;
        }
    });
    squares = segment_sum<width>((run + squares_dropped) + squares);
    const f64x8 variance = squares * c.per_freedom;
    // All lanes are equal, so one scalar root is enough: a vector root costs four times as much.
    m.deviation = width == 8 ? f64x8(__builtin_sqrt(variance[0])) : sqrt(variance);
    return m;
}

// `whole` holds the counts of a segment without NaN; only segments with NaN are counted again.
template <int width, class T>
WHET_INLINE GroupMoments group_moments(const T* rewards, size_t n, double ddof, const Counts& whole) {
    const GroupMoments m = moments_of<width, false>(rewards, n, whole);
    const double check = width == 8 ? m.mean_low[0] : segment_sum<8>(m.mean_low)[0];
    if (check == check) return m;
    f64x8 count(0.0);
    each_vector(rewards, n, [&](size_t, f64x8 r, auto keep) WHET_INLINE_LAMBDA {
        count += keep(select(r == r, f64x8(1.0), f64x8(0.0)));
    });
    return moments_of<width, true>(rewards, n, Counts(segment_sum<width>(count), ddof));
}

template <int width, class T>
WHET_SHARED void advantages_of(const T* rewards, size_t n, double ddof, double eps, double batch_scale,
                               const Counts& whole, T* out) {
    const f64x8 zero(0.0);
    const GroupMoments m = group_moments<width>(rewards, n, ddof, whole);
    f64x8 scale = m.deviation;
    if (batch_scale == batch_scale) {
        scale = f64x8(batch_scale);
    } else if (eps >= 0.0) {
        scale += f64x8(eps);
    } else {
        // Infinity makes all advantages of a group of zero variance 0.
        scale = select(scale < f64x8(1e-8), f64x8(__builtin_inf()), scale);
    }
    const f64x8 per_scale = width == 8 ? f64x8(1.0 / scale[0]) : f64x8(1.0) / scale;
    auto advantage = [&](f64x8 r) WHET_INLINE_LAMBDA { return select(r == r, m.distance(r) * per_scale, zero); };
    size_t i = 0;
    for (; i + 8 <= n; i += 8) store_rewards(out + i, advantage(load_rewards(rewards + i)));
    if (i < n) {
        const int rest = static_cast<int>(n - i);
        store_first_rewards(out + i, advantage(load_first_rewards(rewards + i, rest)), rest);
    }
}

// Groups of 2 and 4 share a vector (step 8); others are processed one by one, common sizes with unrolled loops.
template <int width, size_t fixed_step, class T>
WHET_INLINE void advantages_of_each(const T* rewards, size_t n, size_t group_size, double ddof, double eps,
                                    double batch_scale, T* out) {
    const Counts whole(f64x8(static_cast<double>(group_size)), ddof);
    const size_t step = fixed_step != 0 ? fixed_step : group_size;
    size_t i = 0;
    for (; i + step <= n; i += step) advantages_of<width>(rewards + i, step, ddof, eps, batch_scale, whole, out + i);
    if (i < n) advantages_of<width>(rewards + i, n - i, ddof, eps, batch_scale, whole, out + i);
}

template <class T>
WHET_INLINE void group_advantages(const T* rewards, size_t n_groups, size_t group_size, double ddof, double eps,
                                  double batch_scale, T* out) {
    const size_t n = n_groups * group_size;
#if !defined(__wasm__)  // the general case gives the same bits
    switch (group_size) {
        case 2:
            return advantages_of_each<2, 8>(rewards, n, group_size, ddof, eps, batch_scale, out);
        case 4:
            return advantages_of_each<4, 8>(rewards, n, group_size, ddof, eps, batch_scale, out);
        case 8:
            return advantages_of_each<8, 8>(rewards, n, group_size, ddof, eps, batch_scale, out);
        case 16:
            return advantages_of_each<8, 16>(rewards, n, group_size, ddof, eps, batch_scale, out);
    }
#endif
    advantages_of_each<8, 0>(rewards, n, group_size, ddof, eps, batch_scale, out);
}

// The standard deviation of all scored rewards, for scale="batch".
template <class T>
WHET_INLINE double batch_deviation(const T* rewards, size_t n, double ddof) {
    return group_moments<8>(rewards, n, ddof, Counts(f64x8(static_cast<double>(n)), ddof)).deviation[0];
}

constexpr auto group_advantages_f32 = group_advantages<float>;
constexpr auto group_advantages_f64 = group_advantages<double>;
constexpr auto batch_deviation_f32 = batch_deviation<float>;
constexpr auto batch_deviation_f64 = batch_deviation<double>;

}  // namespace
}  // namespace whet::WHET_ISA
