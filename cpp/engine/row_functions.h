// Functions of an array's last axis over the pool: norms, softmax, activations.
//
// Rows are float32 or bfloat16, all of a call of one dtype and shape; the caller has checked that, and that no result
// overlaps what is read, but for a result in the place of its argument. Rows are cut into tasks whose size does not
// depend on the number of threads.
#pragma once
#include "engine/config.h"
#include "runtime/array.h"

namespace whet {

struct NormArguments {
    Rows x, residual, out;                          // residual.data null: none; it gets x added before the norm
    const void *weight = nullptr, *bias = nullptr;  // (length,); null: none
    DType weight_dtype = DType::kFloat32;           // of both: x's, or float32
    double eps = 0.0;
};

void rms_norm(const NormArguments& arguments);
void layer_norm(const NormArguments& arguments);

void softmax(const Rows& x, float scale, bool log, const Rows& out);

void activate(Activation activation, const Rows& x, const Rows& out);
void softcap(const Rows& x, float cap, const Rows& out);
void swiglu(const Rows& gate, const Rows& up, const Rows& out);

}  // namespace whet
