#include "engine/primitives.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/dispatch.h"
#include "runtime/split.h"

namespace whet {
namespace {

constexpr size_t kTaskElements = 4096;

// total[2] of a kernel: a sum and its compensation, which is NaN if the sum is infinite.
double total_of(const double total[2]) { return std::isfinite(total[0]) ? total[0] + total[1] : total[0]; }

// TwoSum, as in simd/math.h.
void add_compensated(const double part[2], double total[2]) {
    const double sum = total[0] + part[0], back = sum - total[0];
    total[1] += (total[0] - (sum - back)) + (part[0] - back) + part[1];
    total[0] = sum;
}

template <class T, class Kernel>
void sum_rows(Kernel kernel, const T* p, const T* q, const uint8_t* mask, size_t rows, size_t columns, double* sums) {
    const double work = static_cast<double>(rows) * static_cast<double>(columns) * (sizeof(T) == 4 ? 0.35 : 1.0);
    const auto sum = [&](size_t at, size_t n, double* total) {
        kernel(p + at, q + at, mask == nullptr ? nullptr : mask + at, n, total);
    };
    if (columns <= kTaskElements) {
        parallel_split(rows, std::max<size_t>(1, kTaskElements / std::max<size_t>(1, columns)), work,
                       [&](size_t begin, size_t end) {
                           for (size_t row = begin; row < end; ++row) {
                               double total[2] = {0.0, 0.0};
                               sum(row * columns, columns, total);
                               sums[row] = total_of(total);
                           }
                       });
        return;
    }
    const size_t chunks = ceil_div(columns, kTaskElements);
    std::vector<double> parts(2 * rows * chunks, 0.0);
    parallel_for(rows * chunks, work, [&](size_t task) {
        const size_t begin = task % chunks * kTaskElements;
        sum(task / chunks * columns + begin, std::min(kTaskElements, columns - begin), &parts[2 * task]);
    });
    for (size_t row = 0; row < rows; ++row) {
        double total[2] = {0.0, 0.0};
        for (size_t i = row * chunks; i < (row + 1) * chunks; ++i) add_compensated(&parts[2 * i], total);
        sums[row] = total_of(total);
    }
}

template <class T, class Advantages, class Deviation>
void scale_groups(Advantages advantages, Deviation deviation, const T* rewards, size_t n_groups, size_t group_size,
                  AdvantageScale scale, double ddof, double eps, T* out) {
    double batch_scale = std::numeric_limits<double>::quiet_NaN();  // NaN: the kernel uses each group's scale
    if (scale == AdvantageScale::kNone) batch_scale = 1.0;
    if (scale == AdvantageScale::kBatch) {
        batch_scale = deviation(rewards, n_groups * group_size, ddof);
        // Infinity makes every advantage of a zero-variance batch 0.
        batch_scale = eps >= 0.0           ? batch_scale + eps
                      : batch_scale < 1e-8 ? std::numeric_limits<double>::infinity()
                                           : batch_scale;
    }
    // A multiple of 8 groups per task, so that vectors never straddle tasks.
    const size_t groups_per_task = std::max<size_t>(8, kTaskElements / 4 / group_size / 8 * 8);
    parallel_split(n_groups, groups_per_task, static_cast<double>(n_groups * group_size),
                   [&](size_t begin, size_t end) {
                       const size_t at = begin * group_size;
                       advantages(rewards + at, end - begin, group_size, ddof, eps, batch_scale, out + at);
                   });
}

}  // namespace

void token_kl(bool schulman, const ArrayView& p, const ArrayView& q, const uint8_t* mask, size_t rows, size_t columns,
              double* sums) {
    const Kernels& k = kernels();
    const auto run = [&]<class T>(void (*kernel)(const T*, const T*, const uint8_t*, size_t, double*)) {
        sum_rows(kernel, p.as<T>(), q.as<T>(), mask, rows, columns, sums);
    };
    if (p.is_float32()) return run(schulman ? k.token_kl_schulman_f32 : k.token_kl_f32);
    run(schulman ? k.token_kl_schulman_f64 : k.token_kl_f64);
}

void group_advantages(const ArrayView& rewards, size_t n_groups, size_t group_size, AdvantageScale scale, double ddof,
                      double eps, void* out) {
    const Kernels& k = kernels();
    const auto run = [&]<class T>(auto advantages, double (*deviation)(const T*, size_t, double)) {
        scale_groups(advantages, deviation, rewards.as<T>(), n_groups, group_size, scale, ddof, eps,
                     static_cast<T*>(out));
    };
    if (rewards.is_float32()) return run(k.group_advantages_f32, k.batch_deviation_f32);
    run(k.group_advantages_f64, k.batch_deviation_f64);
}

void token_logprobs(const ArrayView& logits, const int64_t* token_ids, double temperature, float* logprobs,
                    float* entropy) {
    const auto rows = static_cast<size_t>(logits.shape[0]), vocab_size = static_cast<size_t>(logits.shape[1]);
    const auto run = [&]<class T>(void (*kernel)(const T*, size_t, size_t, double, float*, float*)) {
        parallel_for(rows, static_cast<double>(rows * vocab_size) * 0.25, [&](size_t row) {
            kernel(logits.as<T>() + row * vocab_size, vocab_size, static_cast<size_t>(token_ids[row]), temperature,
                   logprobs + row, entropy == nullptr ? nullptr : entropy + row);
        });
    };
    logits.is_float32() ? run(kernels().token_logprobs_f32) : run(kernels().token_logprobs_bf16);
}

void gae(const ArrayView& rewards, const ArrayView& values, const uint8_t* dones, const double* last_values,
         double gamma, double lambda, void* advantages, void* returns) {
    const auto n = static_cast<size_t>(rewards.last()), rows = static_cast<size_t>(rewards.size()) / n;
    const auto run =
        [&]<class T>(void (*kernel)(const T*, const T*, const uint8_t*, double, size_t, double, double, T*, T*)) {
            parallel_for(rows, static_cast<double>(rows * n), [&](size_t row) {
                const size_t at = row * n;
                kernel(rewards.as<T>() + at, values.as<T>() + at, dones + at, last_values[row], n, gamma, lambda,
                       static_cast<T*>(advantages) + at, static_cast<T*>(returns) + at);
            });
        };
    rewards.is_float32() ? run(kernels().gae_f32) : run(kernels().gae_f64);
}

}  // namespace whet
