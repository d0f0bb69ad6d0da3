// Conversions between packed small types, and their packed maximum: PTX ISA, "cvt", "max".
#pragma once

// cvt.rn.f16x2.e4m3x2: exact; NaN codes give 0x7fff. The lower byte becomes the lower half.
__device__ __forceinline__ unsigned cvt_f16x2_e4m3x2(unsigned short codes) {
  unsigned pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(codes));
  return pair;
}

// cvt.f32.f16: exact; NaN gives 0x7fffffff.
__device__ __forceinline__ float cvt_f32_f16(unsigned short half) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
  return x;
}

// max.u16x2: the larger of each half, as unsigned integers.
__device__ __forceinline__ unsigned max_u16x2(unsigned a, unsigned b) {
  unsigned x;
  asm("max.u16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
  return x;
}
