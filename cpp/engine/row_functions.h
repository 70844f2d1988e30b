// Functions over the last axis of an array, over the pool: norms, softmax, activations.
//
// Rows are float32 or bfloat16, with one dtype and shape per call. The caller checks that, and that results do not
// overlap inputs except in place. Rows are split into tasks whose size does not depend on the number of threads.
#pragma once
#include "engine/config.h"
#include "runtime/array.h"

namespace whet {

struct NormArguments {
    Rows x, residual, out;                          // residual += x before the norm; residual.data null: none
    const void *weight = nullptr, *bias = nullptr;  // (length,); null: none
    DType weight_dtype = DType::kFloat32;           // of weight and bias: the dtype of x, or float32
    double eps = 0.0;
};

void rms_norm(const NormArguments& arguments);
void layer_norm(const NormArguments& arguments);

void softmax(const Rows& x, float scale, bool log, const Rows& out);

void activate(Activation activation, const Rows& x, const Rows& out);
void softcap(const Rows& x, float cap, const Rows& out);
void swiglu(const Rows& gate, const Rows& up, const Rows& out);

}  // namespace whet
