// The one quantisation rule: a row of 512 latent and 64 RoPE values, one warp a row.
// Mirror: reference/quantize.py, whose bytes this equals.
//
//   [Q1] amax = max|latent|, rmax = max|rope|; a NaN or infinity: scale, codes and RoPE all NaN
//   [Q2] scale = max(amax / 448, 2^-96, rmax 2^-60); pow2: up to a power of two
//   [Q3] code  = e4m3(latent / scale)
//   [Q4] rope' = bf16(rope / scale)
//
// A lane holds latent values 8 lane to 8 lane + 7 of each half of 256, and RoPE values 2 lane and
// 2 lane + 1: every load is 16 bytes a lane and coalesced.
#pragma once

#include "common/access.cuh"
#include "common/fp8.cuh"
#include "common/types.cuh"
#include "snapmla_config.h"

static_assert(kKvLoraRank == 512 && kQkRopeHeadDim == 64, "the lane layout is for 512 + 64 values");

constexpr u32 kInfBits = 0x7f800000u;
constexpr u32 kNanBits = 0x7fffffffu;  // the one NaN of the hardware
constexpr float kSmallScale = 0x1p-92f;
constexpr float kLift = 0x1p+32f;
constexpr u32 kUsualLow = 0x21800000u;   // 2^-60
constexpr u32 kUsualHigh = 0x5d800000u;  // 2^60

// Where a row's latent and RoPE values lie.
struct RowPlace {
  const char* latent;
  const char* rope;
};

// One lane's share of a row, as it lies in memory.
template <int kInput>
struct LaneRow {
  static constexpr int kBytes = kInput == kInputF32 ? 4 : 2;  // of an element
  static constexpr int kWords = 2 * kBytes;                   // of 8 elements
  u32 latent[2][kWords];
  u32 rope[kBytes / 2];
};

// Two 16-bit or one 32-bit value of `x` as magnitudes, folded into the running maximum.
template <int kInput>
__device__ __forceinline__ u32 max_magnitude(u32 so_far, u32 x) {
  if constexpr (kInput == kInputF32) return max(so_far, x & 0x7fffffffu);
  return max_u16x2(so_far, x & 0x7fff7fffu);
}

// The warp's maximum as fp32 bits. Magnitude bits are ordered like magnitudes, infinity above every
// finite value and NaN above infinity, in all three input types.
template <int kInput>
__device__ __forceinline__ u32 warp_max_bits(u32 lane_max) {
  if constexpr (kInput == kInputF32) return __reduce_max_sync(kAllLanes, lane_max);
  const u32 bits = __reduce_max_sync(kAllLanes, max(lane_max & 0xffffu, lane_max >> 16));
  if constexpr (kInput == kInputBf16) return bits << 16;
  return __float_as_uint(cvt_f32_f16(static_cast<u16>(bits)));
}

// The fp32 value(s) in word i of some elements: value j of the row's share.
template <int kInput>
__device__ __forceinline__ float element(const u32* words, int j) {
  if constexpr (kInput == kInputF32) return __uint_as_float(words[j]);
  const u32 pair = words[j / 2];
  if constexpr (kInput == kInputF16) {
    return cvt_f32_f16(static_cast<u16>(j % 2 ? pair >> 16 : pair));
  }
  return j % 2 ? f32_from_bf16_high(pair) : f32_from_bf16_low(pair);
}

template <int kInput>
__device__ __forceinline__ void load_row_wide(LaneRow<kInput>& row, const char* latent,
                                              const char* rope) {
  constexpr int kLaneBytes = 4 * LaneRow<kInput>::kWords;
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const char* at = latent + lane * kLaneBytes + half * kWarpSize * kLaneBytes;
#pragma unroll
    for (int i = 0; i < LaneRow<kInput>::kWords; i += 4) {
      // fp32: two loads share each sector, so the first one leaves it in L1 for the second.
      const uint4 x = kInput == kInputF32 ? ld_global_v4(at + 4 * i) : ld_global_no_allocate_v4(at);
      row.latent[half][i] = x.x;
      row.latent[half][i + 1] = x.y;
      row.latent[half][i + 2] = x.z;
      row.latent[half][i + 3] = x.w;
    }
  }
  if constexpr (kInput == kInputF32) {
    const uint2 x = ld_global_no_allocate_v2(rope + 8 * lane);
    row.rope[0] = x.x;
    row.rope[1] = x.y;
  } else {
    row.rope[0] = ld_global_u32(rope + 4 * lane);
  }
}

template <int kInput>
__device__ __forceinline__ void load_row_narrow(LaneRow<kInput>& row, const char* latent,
                                                const char* rope) {
  constexpr int kElement = LaneRow<kInput>::kBytes;
  constexpr int kLaneBytes = 4 * LaneRow<kInput>::kWords;
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const char* at = latent + lane * kLaneBytes + half * kWarpSize * kLaneBytes;
#pragma unroll
    for (int i = 0; i < LaneRow<kInput>::kWords; i += 4) {
      const uint4 x = load_16_narrow<kElement>(at + 4 * i);
      row.latent[half][i] = x.x;
      row.latent[half][i + 1] = x.y;
      row.latent[half][i + 2] = x.z;
      row.latent[half][i + 3] = x.w;
    }
  }
  if constexpr (kInput == kInputF32) {
    row.rope[0] = ld_global_u32(rope + 8 * lane);
    row.rope[1] = ld_global_u32(rope + 8 * lane + 4);
  } else {
    row.rope[0] = load_pair(rope + 4 * lane, false);
  }
}

// Starts the loads of a row; nothing waits for them before the values are used.
template <int kInput>
__device__ __forceinline__ void load_row(LaneRow<kInput>& row, const char* latent, const char* rope,
                                         bool wide) {
  if (wide) {
    load_row_wide<kInput>(row, latent, rope);
  } else {
    load_row_narrow<kInput>(row, latent, rope);
  }
}

// One lane's share of a quantised row.
struct LaneCodes {
  uint2 codes[2];  // of the 8 values of each half
  u32 rope;        // two bf16
  float scale;
};

__device__ __forceinline__ LaneCodes nan_codes() {
  const uint2 nan8 = make_uint2(0x7f7f7f7fu, 0x7f7f7f7fu);
  return LaneCodes{{nan8, nan8}, 0x7fff7fffu, __uint_as_float(kNanBits)};
}

// [Q2]
__device__ __forceinline__ float row_scale(float amax, float rmax, bool pow2) {
  const float floor = fmaxf(kScaleMin, __fmul_rn(rmax, kRopeGuard));
  const float scale = fmaxf(__fdiv_rn(amax, kFp8Max), floor);
  const u32 up = (__float_as_uint(scale) + 0x007fffffu) & 0xff800000u;
  return pow2 ? __uint_as_float(up) : scale;
}

// x / scale, near enough for [Q3]: the e4m3 code is that of the correctly rounded quotient.
//
// rcp is the correctly rounded reciprocal, q is within 2 ulp of x / scale, the remainder is exact,
// and the last fma leaves an error below 2^-45 before its one rounding. So the result is the
// rounded quotient wherever that is not a neighbour of a point half-way between two codes; there,
// all mantissas of scale (2^23) times all 16 half-way significands times the 13 nearest x have been
// tried: no quotient differs (tests/reference/test_division.py repeats it). The remainder is exact
// where exponent(q) + exponent(scale) >= -103, that is for every quotient from 2^-11 on if scale
// >= 2^-92 (latent_codes lifts smaller ones); below 2^-11 the code is a zero in any case.
// The remainder is taken as q scale - x so that -0 keeps its sign: fma(+0, -rcp, -0) = -0.
__device__ __forceinline__ float quotient(float x, float scale, float rcp) {
  const float q = __fmul_rn(x, rcp);
  const float remainder = __fmaf_rn(q, scale, -x);
  return __fmaf_rn(remainder, -rcp, q);
}

// [Q3] of the warp's row. kLifted: by numbers 2^32 times as large, whose quotients are the same.
template <int kInput, bool kLifted>
__device__ __forceinline__ void latent_codes(uint2 (&codes)[2], const LaneRow<kInput>& row,
                                             float row_scale) {
  const float scale = kLifted ? __fmul_rn(row_scale, kLift) : row_scale;
  const float rcp = __frcp_rn(scale);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float own = element<kInput>(row.latent[half], j);
      x[j] = quotient(kLifted ? __fmul_rn(own, kLift) : own, scale, rcp);
    }
    codes[half].x = e4m3x4_from_f32(x[0], x[1], x[2], x[3]);
    codes[half].y = e4m3x4_from_f32(x[4], x[5], x[6], x[7]);
  }
}

// 1 / scale in two parts, for inputs of 16 bits: hi is a little below it, lo > 0 is what it lacks.
struct Reciprocal {
  float hi;
  float lo;
};

// The hardware's value is within 1 ulp; 2 ulp less is below 1 / scale, by at most 4.
__device__ __forceinline__ Reciprocal reciprocal(float scale) {
  const float hi = __uint_as_float(__float_as_uint(rcp_approx_ftz(scale)) - 2);
  return Reciprocal{hi, __fmul_rn(__fmaf_rn(-scale, hi, 1.0f), hi)};
}

// x / scale, correctly rounded, for x of 16 bits and a scale that is amax / 448 of such an amax, or a
// power of two: all pairs of significands have been tried, with each hi that may come
// (tests/reference/test_division.py repeats it). Where nothing underflows only significands count.
// Two instructions where `quotient` takes three; of 24-bit x it errs now and then. As lo is never
// below zero, -0 keeps its sign.
__device__ __forceinline__ float short_quotient(float x, const Reciprocal& rcp) {
  return __fmaf_rn(x, rcp.hi, __fmul_rn(x, rcp.lo));
}

// amax / 448, correctly rounded, by the two parts of 1 / 448: every significand has been tried.
__device__ __forceinline__ float scale_of_amax(float amax) {
  return __fmaf_rn(amax, 0x1.24924ap-9f, __fmul_rn(amax, -0x1.b6db6ep-34f));
}

// The rule on a row of 16-bit values as nearly all are: amax within 2^-60 and 2^60, so that nothing
// below goes out of range, and |RoPE / scale| within 2^-40 and 2^40, so that the RoPE does not raise
// the scale. False, and `out` of no use, for any other row: then for all lanes.
template <int kInput>
__device__ __forceinline__ bool quantize_usual_row(LaneCodes& out, const LaneRow<kInput>& row,
                                                   u32 amax_bits, bool pow2) {
  const u32 below_power = pow2 ? 0x007fffffu : 0;
  const u32 scale_bits = __float_as_uint(scale_of_amax(__uint_as_float(amax_bits)));
  out.scale = __uint_as_float((scale_bits + below_power) & ~below_power);  // [Q2]
  const Reciprocal rcp = reciprocal(out.scale);
  const float r0 = short_quotient(element<kInput>(row.rope, 0), rcp);  // [Q4]
  const float r1 = short_quotient(element<kInput>(row.rope, 1), rcp);
  out.rope = cvt_bf16x2(r1, r0);
  const bool is_usual = (amax_bits - kUsualLow < kUsualHigh - kUsualLow) & (fabsf(r0) >= 0x1p-40f) &
                        (fabsf(r1) >= 0x1p-40f) & (fabsf(r0) <= 0x1p40f) & (fabsf(r1) <= 0x1p40f);
  if (!__all_sync(kAllLanes, is_usual)) return false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      x[j] = short_quotient(element<kInput>(row.latent[half], j), rcp);  // [Q3]
    }
    out.codes[half].x = e4m3x4_from_f32(x[0], x[1], x[2], x[3]);
    out.codes[half].y = e4m3x4_from_f32(x[4], x[5], x[6], x[7]);
  }
  return true;
}

// The rule on one row of the warp. Called by all lanes together. kTryUsual: quickly, if it is such a
// row; of no use where narrow accesses take most of the time.
template <int kInput, bool kTryUsual>
__device__ __forceinline__ LaneCodes quantize_row(const LaneRow<kInput>& row, bool pow2) {
  constexpr int kWords = LaneRow<kInput>::kWords;
  u32 latent_max = 0, rope_max = 0;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    latent_max = max_magnitude<kInput>(latent_max, row.latent[0][i]);
    latent_max = max_magnitude<kInput>(latent_max, row.latent[1][i]);
  }
  const u32 amax_bits = warp_max_bits<kInput>(latent_max);  // [Q1]
  if constexpr (kTryUsual && kInput != kInputF32) {
    LaneCodes usual;
    if (quantize_usual_row<kInput>(usual, row, amax_bits, pow2)) return usual;
  }
#pragma unroll
  for (int i = 0; i < kWords / 4; ++i) rope_max = max_magnitude<kInput>(rope_max, row.rope[i]);
  const u32 rmax_bits = warp_max_bits<kInput>(rope_max);
  if (max(amax_bits, rmax_bits) >= kInfBits) return nan_codes();

  LaneCodes out;
  out.scale = row_scale(__uint_as_float(amax_bits), __uint_as_float(rmax_bits), pow2);  // [Q2]
  if (out.scale < kSmallScale) {  // the same for the whole warp, and rare
    latent_codes<kInput, true>(out.codes, row, out.scale);
  } else {
    latent_codes<kInput, false>(out.codes, row, out.scale);
  }
  const float r0 = element<kInput>(row.rope, 0), r1 = element<kInput>(row.rope, 1);
  out.rope = cvt_bf16x2(__fdiv_rn(r1, out.scale), __fdiv_rn(r0, out.scale));  // [Q4]
  return out;
}

// Writes the codes and the RoPE of a quantised row; `wide` as in access.cuh. Each store of the warp
// fills whole lines: 256 codes, 256 codes, 64 RoPE values.
__device__ __forceinline__ void store_codes(const LaneCodes& row, char* codes, char* rope,
                                            bool wide) {
  const int lane = threadIdx.x % kWarpSize;
  codes += 8 * lane;
  store_codes_8(codes, row.codes[0], wide);
  store_codes_8(codes + 256, row.codes[1], wide);
  store_pair(rope + 4 * lane, row.rope, wide);
}
