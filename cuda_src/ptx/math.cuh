// Arithmetic that C++ has no spelling for. Roundings are as the PTX ISA states them.
#pragma once

// ex2.approx.ftz.f32: one MUFU.EX2 (reference: numerics.exp2_mufu).
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// rcp.approx.ftz.f32: one MUFU.RCP, within 1 ulp.
__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// cvt.rn.satfinite.e4m3x2.f32: `hi` becomes the upper byte, `lo` the lower one.
__device__ __forceinline__ unsigned short cvt_e4m3x2(float hi, float lo) {
  unsigned short codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(hi), "f"(lo));
  return codes;
}

// cvt.rn.bf16x2.f32: `hi` becomes the upper half, `lo` the lower one.
__device__ __forceinline__ unsigned cvt_bf16x2(float hi, float lo) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
  return pair;
}
