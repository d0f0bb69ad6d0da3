// log2 in software, the same operations as reference/numerics.py log2_soft.
#pragma once

#include "snapmla_config.h"

// log2 of a positive normal x, exact at powers of two; 0 -> -inf, +inf -> +inf, NaN and negative
// numbers -> NaN. Subnormal x is outside what callers may pass (scales are at least 2^-96).
__device__ __forceinline__ float log2_soft(float x) {
  const int bits = __float_as_int(x);
  const int exponent = (bits - static_cast<int>(kSqrtHalfBits)) >> 23;
  const float f = __fsub_rn(__int_as_float(bits - (exponent << 23)), 1.0f);
  constexpr int kTerms = sizeof(kLog2CoeffsBits) / sizeof(kLog2CoeffsBits[0]);
  float p = kLog2Coeffs[kTerms - 1];
#pragma unroll
  for (int i = kTerms - 2; i >= 0; --i) p = __fmaf_rn(p, f, kLog2Coeffs[i]);
  const float result = __fmaf_rn(f, p, __int2float_rn(exponent));
  if (x > 0.0f && x < __int_as_float(0x7f800000)) return result;
  if (x == 0.0f) return __int_as_float(0xff800000);
  return x > 0.0f ? x : __int_as_float(0x7fffffff);
}
