// merge_states: attention over two disjoint parts of the keys as attention over both, for decode
// context parallelism. Mirror: reference/merge_states.py, whose bytes this kernel equals.
//
// Maths, per row (request, query token, head), fp32 round to nearest:
//   [M1] a side is empty where its lse is +inf or -inf; both empty: out 0, lse +inf
//   [M2] one empty: the other side's out and lse pass, unchanged
//   [M3] top = max of both lse; w = exp2((lse - top) to_log2) of each side
//   [M4] total = w_a + w_b; weight = w rcp(total) of each side
//   [M5] o = weight_a o_a + weight_b o_b: two products, one sum, so that the sides may be swapped;
//        held within the finite range of out's type
//   [M6] lse = top + log2(total) from_log2
//
// Arguments (MergeStatesParams; the API checks them):
//   a, b, merged  out bf16 or (is_f32) f32 [b][s_q][h][width], strides in bytes, rows contiguous and
//                 16-byte aligned; lse f32 [b][h][s_q], any strides in bytes. merged may be a or b.
//   width         a multiple of 8; num_rows = b s_q h, the head fastest
//   to_log2, from_log2  log2 e and ln 2 for natural logarithms, 1 and 1 for base 2
//
// Launch: 1-D grid of ceil(rows / 8) CTAs, 256 threads, a warp a row: only that warp reads and writes
// the row, so results may overwrite an input. May be launched as a dependent.
#include "common/fp8.cuh"
#include "common/log2.cuh"
#include "common/softmax.cuh"
#include "merge_states_params.h"
#include "ptx/griddep.cuh"
#include "ptx/ldst.cuh"

constexpr u32 kRowsPerCta = 8;
constexpr u32 kPerLane = 8;  // values of a row that a lane takes at once

struct RowPlace {
  char* out;
  char* lse;
};

__device__ __forceinline__ RowPlace row_place(const StateParams& state, u32 request, u32 position,
                                              u32 head) {
  return RowPlace{
      static_cast<char*>(state.out) + request * state.out_stride_b +
          position * state.out_stride_s + head * state.out_stride_h,
      reinterpret_cast<char*>(state.lse) + request * state.lse_stride_b +
          position * state.lse_stride_s + head * state.lse_stride_h,
  };
}

__device__ __forceinline__ void load_8(float (&x)[kPerLane], const char* row, u32 first, bool is_f32) {
  if (is_f32) {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const uint4 words = ld_global_no_allocate_v4(row + 4 * first + 16 * i);
      x[4 * i] = __uint_as_float(words.x);
      x[4 * i + 1] = __uint_as_float(words.y);
      x[4 * i + 2] = __uint_as_float(words.z);
      x[4 * i + 3] = __uint_as_float(words.w);
    }
    return;
  }
  const uint4 words = ld_global_no_allocate_v4(row + 2 * first);
  const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    x[2 * i] = f32_from_bf16_low(pairs[i]);
    x[2 * i + 1] = f32_from_bf16_high(pairs[i]);
  }
}

__device__ __forceinline__ void store_8(char* row, u32 first, const float (&x)[kPerLane],
                                        bool is_f32) {
  if (is_f32) {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      st_global_v4(row + 4 * first + 16 * i,
                   make_uint4(__float_as_uint(x[4 * i]), __float_as_uint(x[4 * i + 1]),
                              __float_as_uint(x[4 * i + 2]), __float_as_uint(x[4 * i + 3])));
    }
    return;
  }
  st_global_v4(row + 2 * first, make_uint4(cvt_bf16x2(x[1], x[0]), cvt_bf16x2(x[3], x[2]),
                                           cvt_bf16x2(x[5], x[4]), cvt_bf16x2(x[7], x[6])));
}

// [M1] [M2] what a row's two lse say.
struct Weights {
  bool empty_a, empty_b;
  float a, b;
  float lse;
};

__device__ __forceinline__ Weights weights_of(const MergeStatesParams& p, float lse_a, float lse_b) {
  Weights w;
  w.empty_a = lse_a == kPosInf || lse_a == kNegInf;  // [M1]
  w.empty_b = lse_b == kPosInf || lse_b == kNegInf;
  const float top = fmaxf(lse_a, lse_b);  // [M3]
  const float w_a = ex2_approx_ftz(__fmul_rn(__fsub_rn(lse_a, top), p.to_log2));
  const float w_b = ex2_approx_ftz(__fmul_rn(__fsub_rn(lse_b, top), p.to_log2));
  const float total = __fadd_rn(w_a, w_b);  // [M4]
  const float inverse = __frcp_rn(total);
  w.a = __fmul_rn(w_a, inverse);
  w.b = __fmul_rn(w_b, inverse);
  w.lse = __fadd_rn(top, __fmul_rn(log2_soft(total), p.from_log2));  // [M6]
  if (w.empty_a) w.lse = w.empty_b ? kPosInf : lse_b;  // [M2]
  if (w.empty_b && !w.empty_a) w.lse = lse_a;
  return w;
}

__device__ __forceinline__ float merge(const Weights& w, float a, float b, float limit) {
  if (w.empty_a) return w.empty_b ? 0.0f : b;  // [M1] [M2]
  if (w.empty_b) return a;
  return clamp_keep_nan(__fadd_rn(__fmul_rn(w.a, a), __fmul_rn(w.b, b)), -limit, limit);  // [M5]
}

extern "C" __global__ void __launch_bounds__(256)
    merge_states(const __grid_constant__ MergeStatesParams p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const u32 row = blockIdx.x * kRowsPerCta + threadIdx.x / kWarpSize;
  const u32 lane = threadIdx.x % kWarpSize;
  if (row >= p.num_rows) return;
  const u32 token = row / p.num_heads, head = row % p.num_heads;
  const u32 request = token / p.seq_len_q, position = token % p.seq_len_q;
  const RowPlace a = row_place(p.a, request, position, head);
  const RowPlace b = row_place(p.b, request, position, head);
  const RowPlace merged = row_place(p.merged, request, position, head);
  const Weights w = weights_of(p, __uint_as_float(ld_global_u32(a.lse)),
                               __uint_as_float(ld_global_u32(b.lse)));
  const float limit = p.merged.is_f32 ? kFltMax : kBf16Max;
  for (u32 first = lane * kPerLane; first < p.width; first += kWarpSize * kPerLane) {
    float x[kPerLane], y[kPerLane];
    load_8(x, a.out, first, p.a.is_f32);
    load_8(y, b.out, first, p.b.is_f32);
#pragma unroll
    for (u32 i = 0; i < kPerLane; ++i) x[i] = merge(w, x[i], y[i], limit);
    store_8(merged.out, first, x, p.merged.is_f32);
  }
  __syncwarp();  // every lane has read both lse
  if (lane == 0) st_global_u32(merged.lse, __float_as_uint(w.lse));
}
