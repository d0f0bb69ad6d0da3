// fetch_dequant: tokens gathered from the paged cache and dequantised to bf16 while loading, for
// chunked prefill and prefix reuse. Mirror: reference/fetch_dequant.py, whose bytes this kernel
// equals.
//
// Steps, per output row:
//   [F0] ranges: row i of request r is token starts[r] + i - cu_seqlens[r], its block from the block
//        table; slots: slots[i]
//   [F1] latent = bf16(f32(code) * scale)
//   [F2] rope   = bf16(f32(rope') * scale)
//   [F3] a negative slot gives zeros (so does, here, one beyond the cache or the table)
//
// Arguments (FetchDequantParams; the API checks them):
//   cache        planes, strides in bytes, num_slots; wide: codes 16-byte, RoPE 4-byte aligned
//   slots        i32 or i64 [n], stride in bytes                         variant slots
//   block_table  i32 [b][max_blocks], row stride in elements; starts i32 [b]; cu_seqlens i32 [b + 1]
//                                                                        variant ranges
//   kv_c, k_pe   bf16 [n][512], [n][64], row strides in bytes (parts of one [n][576] array, or two);
//                wide_out: rows of kv_c 16-byte, of k_pe 4-byte aligned
//
// Launch: 1-D grid of ceil(n / (8 TOKENS_PER_WARP)) CTAs, 256 threads; a warp has the loads of all
// its tokens under way at once. May be launched as a dependent of the kernel that writes the cache.
#include "common/access.cuh"
#include "common/fp8.cuh"
#include "common/layout.cuh"
#include "fetch_dequant_params.h"
#include "ptx/griddep.cuh"

constexpr int kWarps = 8;
constexpr int kTokens = TOKENS_PER_WARP;

// One lane's share of a token: 16 codes, two RoPE values.
struct LaneToken {
  uint4 codes;
  u32 rope;
  float scale;
};

#if FROM_RANGES

// [F0] slots of kTokens consecutive rows, -1 where a row or its block lies outside what it may.
//
// The request of a row is the last r with cu_seqlens[r] <= row. The warp narrows 32-fold a step, so
// up to 1,023 requests take two loads; all rows go through each step together.
__device__ __forceinline__ void load_slots(int (&slot)[kTokens], const FetchDequantParams& p,
                                           u32 first) {
  const u32 lane = threadIdx.x % kWarpSize;
  u32 request[kTokens];
#pragma unroll
  for (u32 k = 0; k < kTokens; ++k) request[k] = 0;
  for (u32 size = p.batch + 1, step; size > 1; size = step) {
    step = (size + kWarpSize - 1) / kWarpSize;
    int bound[kTokens];
#pragma unroll
    for (u32 k = 0; k < kTokens; ++k) {
      const u32 at = request[k] + lane * step;
      const bool inside = lane * step < size && at <= p.batch;
      bound[k] = inside ? static_cast<int>(ld_global_u32(p.cu_seqlens + at)) : 0x7fffffff;
    }
#pragma unroll
    for (u32 k = 0; k < kTokens; ++k) {  // sorted, so the lanes that hold are the first ones
      const u32 below = __popc(__ballot_sync(kAllLanes, bound[k] <= static_cast<int>(first + k)));
      request[k] += (below ? below - 1 : 0) * step;
    }
  }
  i64 position[kTokens];
#pragma unroll
  for (u32 k = 0; k < kTokens; ++k) {
    const u32 r = min(request[k], p.batch - 1);
    position[k] = static_cast<i64>(static_cast<int>(ld_global_u32(p.starts + r))) + first + k -
                  static_cast<int>(ld_global_u32(p.cu_seqlens + r));
  }
  i64 wanted[kTokens];
#pragma unroll
  for (u32 k = 0; k < kTokens; ++k) {
    const i64 column = position[k] / kBlockSize;
    wanted[k] = -1;
    if (request[k] < p.batch && position[k] >= 0 && column < p.max_blocks) {
      const int* entry = p.block_table + request[k] * p.block_table_stride + column;
      wanted[k] = static_cast<i64>(static_cast<int>(ld_global_u32(entry))) * kBlockSize +
                  position[k] % kBlockSize;
    }
  }
#pragma unroll
  for (u32 k = 0; k < kTokens; ++k) {
    slot[k] = first + k < p.num_rows ? valid_slot(wanted[k], p.cache) : -1;
  }
}

#else

// [F0] slots of kTokens consecutive rows, -1 for none.
__device__ __forceinline__ void load_slots(int (&slot)[kTokens], const FetchDequantParams& p,
                                           u32 first) {
  i64 wanted[kTokens];
#pragma unroll
  for (u32 k = 0; k < kTokens; ++k) {
    const u32 row = min(first + k, p.num_rows - 1);
    wanted[k] = load_slot(p.slots, p.slot_stride, p.slots_are_64bit, row);
  }
#pragma unroll
  for (u32 k = 0; k < kTokens; ++k) {
    slot[k] = first + k < p.num_rows ? valid_slot(wanted[k], p.cache) : -1;
  }
}

#endif

__device__ __forceinline__ void load_token(LaneToken& token, const CacheParams& cache, int slot) {
  const int lane = threadIdx.x % kWarpSize;
  const TokenPlace from = token_place(cache, slot);
  token.codes = cache.wide ? ld_global_no_allocate_v4(from.codes + 16 * lane)
                           : load_16_narrow<1>(from.codes + 16 * lane);
  token.rope = load_pair(from.rope + 4 * lane, cache.wide);
  token.scale = __uint_as_float(ld_global_u32(from.scale));
}

// [F1] eight codes as eight bf16.
__device__ __forceinline__ uint4 dequantise_8(u32 low, u32 high, float scale) {
  float x[4], y[4];
  f32_from_e4m3x4(x, low);
  f32_from_e4m3x4(y, high);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = __fmul_rn(x[i], scale);
    y[i] = __fmul_rn(y[i], scale);
  }
  return make_uint4(cvt_bf16x2(x[1], x[0]), cvt_bf16x2(x[3], x[2]), cvt_bf16x2(y[1], y[0]),
                    cvt_bf16x2(y[3], y[2]));
}

// Lanes 2k and 2k + 1 swap eight codes before converting, so that each of the two stores fills whole
// 32-byte sectors: the pair's 64 output bytes are written as 2 x 16, then 2 x 16.
__device__ __forceinline__ void write_row(const FetchDequantParams& p, i64 row,
                                          const LaneToken& token) {
  const int lane = threadIdx.x % kWarpSize;
  const bool odd = lane % 2;
  const uint4 own = token.codes;
  const u32 got_low = __shfl_xor_sync(kAllLanes, odd ? own.x : own.z, 1);
  const u32 got_high = __shfl_xor_sync(kAllLanes, odd ? own.y : own.w, 1);
  const uint4 first = odd ? dequantise_8(got_low, got_high, token.scale)
                          : dequantise_8(own.x, own.y, token.scale);
  const uint4 second = odd ? dequantise_8(own.z, own.w, token.scale)
                           : dequantise_8(got_low, got_high, token.scale);
  char* latent = static_cast<char*>(p.kv_c) + row * p.kv_c_stride + 64 * (lane / 2) + 16 * odd;
  store_16<2>(latent, first, p.wide_out);
  store_16<2>(latent + 32, second, p.wide_out);
  const float low = __fmul_rn(f32_from_bf16_low(token.rope), token.scale);  // [F2]
  const float high = __fmul_rn(f32_from_bf16_high(token.rope), token.scale);
  char* rope = static_cast<char*>(p.k_pe) + row * p.k_pe_stride + 4 * lane;
  store_pair(rope, cvt_bf16x2(high, low), p.wide_out);
}

extern "C" __global__ void __launch_bounds__(256, MIN_CTAS)
    fetch_dequant(const __grid_constant__ FetchDequantParams p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const u32 first = (blockIdx.x * kWarps + threadIdx.x / kWarpSize) * kTokens;
  int slot[kTokens];
  LaneToken token[kTokens];
  load_slots(slot, p, first);
#pragma unroll
  for (u32 k = 0; k < kTokens; ++k) {
    token[k] = LaneToken{make_uint4(0, 0, 0, 0), 0, 0.0f};  // [F3] zeros times zero
    if (slot[k] >= 0) load_token(token[k], p.cache, slot[k]);
  }
#pragma unroll
  for (u32 k = 0; k < kTokens; ++k) {
    if (first + k < p.num_rows) write_row(p, first + k, token[k]);
  }
}
