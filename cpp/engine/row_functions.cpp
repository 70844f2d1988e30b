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

// Calls norm(x, residual, weight, bias, streaming, out) for each row of T, with weights of W.
template <class T, class W, class F>
void for_each_norm(const NormArguments& a, F&& norm) {
    constexpr double kElementNs = 0.06;
    const bool streaming = is_streaming(a.x);
    const auto *weight = static_cast<const W*>(a.weight), *bias = static_cast<const W*>(a.bias);
    for_each_row(a.x, kElementNs, streaming, [&](size_t row) {
        norm(a.x.row<const T>(row), a.residual.row<T>(row), weight, bias, streaming, a.out.row<T>(row));
    });
}

template <class T, class W, class Kernel>
void rms_norm_rows(const NormArguments& a, Kernel kernel) {
    for_each_norm<T, W>(a, [&](const T* x, T* residual, const W* weight, const W*, bool streaming, T* out) {
        kernel(x, residual, weight, a.x.length, a.eps, streaming, out);
    });
}

template <class T, class W, class Kernel>
void layer_norm_rows(const NormArguments& a, Kernel kernel) {
    for_each_norm<T, W>(a, [&](const T* x, T* residual, const W* weight, const W* bias, bool streaming, T* out) {
        kernel(x, residual, weight, bias, a.x.length, a.eps, streaming, out);
    });
}

template <class T>
void softmax_rows(void (*kernel)(const T*, size_t, float, T*), const Rows& x, float scale, const Rows& out) {
    constexpr double kElementNs = 0.4;
    for_each_row(x, kElementNs, false,
                 [&](size_t row) { kernel(x.row<const T>(row), x.length, scale, out.row<T>(row)); });
}

template <class T>
void activate_rows(void (*kernel)(const T*, size_t, bool, T*), const Rows& x, const Rows& out) {
    const bool streaming = is_streaming(x);
    for_each_chunk(x, x.is_contiguous() && out.is_contiguous(), streaming, [&](size_t row, size_t at, size_t n) {
        kernel(x.row<const T>(row) + at, n, streaming, out.row<T>(row) + at);
    });
}

template <class T>
void softcap_rows(void (*kernel)(const T*, size_t, float, bool, T*), const Rows& x, float cap, const Rows& out) {
    const bool streaming = is_streaming(x);
    for_each_chunk(x, x.is_contiguous() && out.is_contiguous(), streaming, [&](size_t row, size_t at, size_t n) {
        kernel(x.row<const T>(row) + at, n, cap, streaming, out.row<T>(row) + at);
    });
}

template <class T>
void swiglu_rows(void (*kernel)(const T*, const T*, size_t, bool, T*), const Rows& gate, const Rows& up,
                 const Rows& out) {
    const bool contiguous = gate.is_contiguous() && up.is_contiguous() && out.is_contiguous();
    const bool streaming = is_streaming(gate);
    for_each_chunk(gate, contiguous, streaming, [&](size_t row, size_t at, size_t n) {
        kernel(gate.row<const T>(row) + at, up.row<const T>(row) + at, n, streaming, out.row<T>(row) + at);
    });
}

}  // namespace

void rms_norm(const NormArguments& a) {
    const Kernels& k = kernels();
    if (!a.x.is_bf16()) return rms_norm_rows<float, float>(a, k.rms_norm_f32);
    if (a.weight_dtype == DType::kFloat32) return rms_norm_rows<uint16_t, float>(a, k.rms_norm_bf16_f32);
    rms_norm_rows<uint16_t, uint16_t>(a, k.rms_norm_bf16);
}

void layer_norm(const NormArguments& a) {
    const Kernels& k = kernels();
    if (!a.x.is_bf16()) return layer_norm_rows<float, float>(a, k.layer_norm_f32);
    if (a.weight_dtype == DType::kFloat32) return layer_norm_rows<uint16_t, float>(a, k.layer_norm_bf16_f32);
    layer_norm_rows<uint16_t, uint16_t>(a, k.layer_norm_bf16);
}

void softmax(const Rows& x, float scale, bool log, const Rows& out) {
    const Kernels& k = kernels();
    if (x.is_bf16()) return softmax_rows(log ? k.log_softmax_bf16 : k.softmax_bf16, x, scale, out);
    softmax_rows(log ? k.log_softmax_f32 : k.softmax_f32, x, scale, out);
}

void activate(Activation activation, const Rows& x, const Rows& out) {
    const Kernels& k = kernels();
    const auto run = [&](auto f32, auto bf16) {
        x.is_bf16() ? activate_rows(bf16, x, out) : activate_rows(f32, x, out);
    };
    switch (activation) {
        case Activation::kSilu:
            return run(k.silu_f32, k.silu_bf16);
        case Activation::kGelu:
            return run(k.gelu_f32, k.gelu_bf16);
        case Activation::kGeluTanh:
            return run(k.gelu_tanh_f32, k.gelu_tanh_bf16);
    }
}

void softcap(const Rows& x, float cap, const Rows& out) {
    if (x.is_bf16()) return softcap_rows(kernels().softcap_bf16, x, cap, out);
    softcap_rows(kernels().softcap_f32, x, cap, out);
}

void swiglu(const Rows& gate, const Rows& up, const Rows& out) {
    if (gate.is_bf16()) return swiglu_rows(kernels().swiglu_bf16, gate, up, out);
    swiglu_rows(kernels().swiglu_f32, gate, up, out);
}

}  // namespace whet
