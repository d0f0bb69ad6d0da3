// Scalars of the online softmax, in log2 units; tags as in reference/mla_decode.py.
#pragma once

#include "ptx/math.cuh"
#include "snapmla_config.h"

#define kPosInf __int_as_float(0x7f800000)
#define kNegInf __int_as_float(0xff800000)
constexpr float kFltMax = 3.40282346638528859811704183484516925e+38f;
constexpr float kBf16Max = 3.38953138925153547590470800371487866880e+38f;

// In mla_decode: R of a row that has seen no token ([S6]: -inf), and n of a block that shows it none
// ([S4]: 0). Finite and so far apart that r = exp2(R - M) and t = exp2(n - R) come out as 0 without a
// question asked.
constexpr float kNoReference = -0x1p126f;
constexpr float kNoLogits = -kFltMax;

// x within [low, high]; a NaN stays NaN (fminf and fmaxf would drop it).
__device__ __forceinline__ float clamp_keep_nan(float x, float low, float high) {
  return x > high ? high : (x < low ? low : x);
}

// [S9] [C4] outputs stay within the finite bf16 range.
__device__ __forceinline__ float hold(float x) { return clamp_keep_nan(x, -kBf16Max, kBf16Max); }

// [S9] [C4] lse in nats from log2 units; a row that saw no key has lse +inf.
__device__ __forceinline__ float natural_lse(float lse2) {
  return lse2 == kNegInf ? kPosInf : __fmul_rn(lse2, kLn2);
}

// Maximum and sum over the four lanes that share a row; the sum is (l0 + l1) + (l2 + l3).
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
