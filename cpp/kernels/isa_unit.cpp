// All kernels for one instruction set. Compiled once per set, with its flags and with WHET_ISA as its name.
//
// Every header uses an anonymous namespace and includes nothing of the C++ standard library: the linker could merge a
// shared function with another unit's copy, which has the wrong instructions.
#include "kernels/activations.h"
#include "kernels/adamw.h"
#include "kernels/adamw_8bit.h"
#include "kernels/attention.h"
#include "kernels/attention_backward.h"
#include "kernels/cached_attention.h"
#include "kernels/cached_attention_int8.h"
#include "kernels/convert.h"
#include "kernels/decode_attention.h"
#include "kernels/delta_rule.h"
#include "kernels/delta_rule_backward.h"
#include "kernels/dispatch.h"
#include "kernels/divergence.h"
#include "kernels/gae.h"
#include "kernels/gemv.h"
#include "kernels/group_advantages.h"
#include "kernels/linear.h"
#include "kernels/linear_bfmmla.h"
#include "kernels/linear_quantised.h"
#include "kernels/lora.h"
#include "kernels/norm.h"
#include "kernels/pack.h"
#include "kernels/pack_quantised.h"
#include "kernels/rope.h"
#include "kernels/rounded_linear.h"
#include "kernels/rows.h"
#include "kernels/sampling.h"
#include "kernels/short_conv.h"
#include "kernels/softcap.h"
#include "kernels/softmax.h"
#include "kernels/token_kl.h"
#include "kernels/token_logprobs.h"
#include "kernels/unpack.h"
#if !defined(__wasm__)
#include "kernels/probe.h"
#endif

namespace whet::WHET_ISA {

#define WHET_STRING_OF(x) #x
#define WHET_STRING(x) WHET_STRING_OF(x)
extern const Kernels table;
const Kernels table = {
    WHET_STRING(WHET_ISA),
#define KERNEL(result, name, parameters) name,
#if defined(__wasm__)
#define NATIVE_KERNEL(result, name, parameters) nullptr,
#if !defined(WHET_LEARNER)
#define LEARNER_KERNEL(result, name, parameters) nullptr,
#endif
#endif
#include "kernels/kernels.def"
#undef KERNEL
};

}  // namespace whet::WHET_ISA
