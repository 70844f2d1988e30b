#include "engine/row_functions.h"

#include <algorithm>

#include "kernels/dispatch.h"
#include "runtime/split.h"

namespace whet {
namespace {

constexpr size_t kTaskElements = 16384;

// Rows per task: enough work per task, and at most 64 tasks.
size_t rows_per_task(const Rows& rows) {
    constexpr size_t kTasks = 64;
    return std::max({size_t{1}, kTaskElements / std::max<size_t>(1, rows.length), rows.count / kTasks});
}

// A result this large would evict everything else from the caches: use non-temporal stores.
bool is_streaming(const Rows& rows) {
    constexpr size_t kStreamingBytes = size_t{32} << 20;
    return rows.count * rows.length * item_size(rows.dtype) >= kStreamingBytes;
}

// Calls body(row) for each row.
template <class F>
void for_each_row(const Rows& rows, double element_ns, bool streaming, F&& body) {
    const double work = static_cast<double>(rows.count * rows.length) * element_ns;
    parallel_split(rows.count, rows_per_task(rows), work, [&](size_t begin, size_t end) {
        for (size_t row = begin; row < end; ++row) body(row);
        if (streaming) kernels().finish_rows();
    });
}

// Calls body(row, first element, elements) for chunks of rows; contiguous arrays are one row.
template <class F>
void for_each_chunk(const Rows& rows, bool contiguous, bool streaming, F&& body) {
    constexpr double kElementNs = 0.3;
    if (!contiguous) {
        for_each_row(rows, kElementNs, streaming, [&](size_t row) { body(row, size_t{0}, rows.length); });
        return;
    }
    const size_t size = rows.count * rows.length;
    parallel_split(size, kTaskElements, static_cast<double>(size) * kElementNs, [&](size_t begin, size_t end) {
        body(size_t{0}, begin, end - begin);
        if (streaming) kernels().finish_rows();
    });
}

// Calls apply(x, elements, streaming, out) for chunks of rows of T.
template <class T, class F>
void map_chunks(const Rows& x, const Rows& out, F&& apply) {
    const bool streaming = is_streaming(x);
    for_each_chunk(x, x.is_contiguous() && out.is_contiguous(), streaming, [&](size_t row, size_t at, size_t n) {
        apply(x.row<const T>(row) + at, n, streaming, out.row<T>(row) + at);
    });
}

// Calls run(kernel) for the dtypes of the rows and of the weights.
template <class Run, class F32, class BF16, class BF16WithF32>
void run_norm(const NormArguments& a, Run&& run, F32 f32, BF16 bf16, BF16WithF32 bf16_f32) {
    if (!a.x.is_bf16()) return run(f32);
    a.weight_dtype == DType::kFloat32 ? run(bf16_f32) : run(bf16);
}

constexpr double kNormNs = 0.06;  // per element

}  // namespace

void rms_norm(const NormArguments& a) {
    const bool streaming = is_streaming(a.x);
    const auto run = [&]<class T, class W>(void (*kernel)(const T*, T*, const W*, size_t, double, bool, T*)) {
        for_each_row(a.x, kNormNs, streaming, [&](size_t row) {
            kernel(a.x.row<const T>(row), a.residual.row<T>(row), static_cast<const W*>(a.weight), a.x.length, a.eps,
                   streaming, a.out.row<T>(row));
        });
    };
    const Kernels& k = kernels();
    run_norm(a, run, k.rms_norm_f32, k.rms_norm_bf16, k.rms_norm_bf16_f32);
}

void layer_norm(const NormArguments& a) {
    const bool streaming = is_streaming(a.x);
    const auto run = [&]<class T, class W>(void (*kernel)(const T*, T*, const W*, const W*, size_t, double, bool, T*)) {
        for_each_row(a.x, kNormNs, streaming, [&](size_t row) {
            kernel(a.x.row<const T>(row), a.residual.row<T>(row), static_cast<const W*>(a.weight),
                   static_cast<const W*>(a.bias), a.x.length, a.eps, streaming, a.out.row<T>(row));
        });
    };
    const Kernels& k = kernels();
    run_norm(a, run, k.layer_norm_f32, k.layer_norm_bf16, k.layer_norm_bf16_f32);
}

void softmax(const Rows& x, float scale, bool log, const Rows& out) {
    constexpr double kElementNs = 0.4;
    const auto run = [&]<class T>(void (*kernel)(const T*, size_t, float, T*)) {
        for_each_row(x, kElementNs, false,
                     [&](size_t row) { kernel(x.row<const T>(row), x.length, scale, out.row<T>(row)); });
    };
    const Kernels& k = kernels();
    if (x.is_bf16()) return run(log ? k.log_softmax_bf16 : k.softmax_bf16);
    run(log ? k.log_softmax_f32 : k.softmax_f32);
}

void activate(Activation activation, const Rows& x, const Rows& out) {
    const Kernels& k = kernels();
    const auto run = [&](auto f32, auto bf16) {
        x.is_bf16() ? map_chunks<uint16_t>(x, out, bf16) : map_chunks<float>(x, out, f32);
    };
    switch (activation) {
        case Activation::kSilu:
            return run(k.silu_f32, k.silu_bf16);
        case Activation::kGelu:
            return run(k.gelu_f32, k.gelu_bf16);
        case Activation::kGeluTanh:
            return run(k.gelu_tanh_f32, k.gelu_tanh_bf16);
        case Activation::kRelu2:
            return run(k.relu2_f32, k.relu2_bf16);
        case Activation::kClampedSwiglu:
            return;  // a function of two rows
    }
}

void softcap(const Rows& x, float cap, const Rows& out) {
    const auto run = [&]<class T>(void (*kernel)(const T*, size_t, float, bool, T*)) {
        map_chunks<T>(x, out,
                      [&](const T* from, size_t n, bool streaming, T* to) { kernel(from, n, cap, streaming, to); });
    };
    x.is_bf16() ? run(kernels().softcap_bf16) : run(kernels().softcap_f32);
}

void swiglu(const Rows& gate, const Rows& up, const Rows& out) {
    const bool contiguous = gate.is_contiguous() && up.is_contiguous() && out.is_contiguous();
    const bool streaming = is_streaming(gate);
    const auto run = [&]<class T>(void (*kernel)(const T*, const T*, size_t, bool, T*)) {
        for_each_chunk(gate, contiguous, streaming, [&](size_t row, size_t at, size_t n) {
            kernel(gate.row<const T>(row) + at, up.row<const T>(row) + at, n, streaming, out.row<T>(row) + at);
        });
    };
    gate.is_bf16() ? run(kernels().swiglu_bf16) : run(kernels().swiglu_f32);
}

}  // namespace whet
