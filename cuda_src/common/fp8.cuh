// e4m3, bf16 and f16 values in packed registers, to and from fp32. Reference: numerics.py.
#pragma once

#include "common/types.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"

// Four e4m3 codes, a in the lowest byte; round to nearest even, saturating.
__device__ __forceinline__ u32 e4m3x4_from_f32(float a, float b, float c, float d) {
  const u32 low = cvt_e4m3x2(b, a), high = cvt_e4m3x2(d, c);
  return low | (high << 16);
}

// The values of four e4m3 codes; exact, NaN codes give NaN.
__device__ __forceinline__ void f32_from_e4m3x4(float (&x)[4], u32 codes) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 pair = cvt_f16x2_e4m3x2(static_cast<u16>(codes >> (16 * i)));
    x[2 * i] = cvt_f32_f16(static_cast<u16>(pair));
    x[2 * i + 1] = cvt_f32_f16(static_cast<u16>(pair >> 16));
  }
}

// The two values of a bf16 pair; exact.
__device__ __forceinline__ float f32_from_bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float f32_from_bf16_high(u32 pair) {
  return __uint_as_float(pair & 0xffff0000u);
}
