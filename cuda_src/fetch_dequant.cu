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
//   rows_per_cta, longer_ctas  the first longer_ctas CTAs take rows_per_cta + 1 rows, the others
//                rows_per_cta, all rows together; 8 ROWS_PER_WARP at most
//
// Launch: 1-D grid of CTAs for all rows, 256 threads. A warp finds the slots of its rows, a lane a
// row, starts the copies of all of them to shared memory, and works on them as they land. Many short
// CTAs were measured to be faster than CTAs that all run at once and go through more rows each. May
// be launched as a dependent of the kernel that writes the cache.
#include "common/access.cuh"
#include "common/fp8.cuh"
#include "common/layout.cuh"
#include "common/rows.cuh"
#include "fetch_dequant_params.h"
#include "ptx/cp_async.cuh"
#include "ptx/griddep.cuh"

// One lane's share of a token: 8 codes of each half of 256, two RoPE values.
struct LaneToken {
  uint2 codes[2];
  u32 rope;
};

// One lane's share of an output row.
struct LaneOutput {
  uint4 latent[2];
  u32 rope;
};

#if FROM_RANGES

// The last r with cu_seqlens[r] <= row, 0 if there is none; the same row in all lanes. The warp
// narrows 32-fold a step, so up to 1,023 requests take two loads.
__device__ __forceinline__ u32 find_request(const FetchDequantParams& p, u32 row) {
  const u32 lane = threadIdx.x % kWarpSize;
  u32 request = 0;
  for (u32 size = p.batch + 1, step; size > 1; size = step) {
    step = (size + kWarpSize - 1) / kWarpSize;
    const u32 at = request + lane * step;
    int bound = 0x7fffffff;
    if (lane * step < size && at <= p.batch) {
      bound = static_cast<int>(ld_global_u32(p.cu_seqlens + at));
    }
    // sorted, so the lanes that hold are the first ones
    const u32 below = __popc(__ballot_sync(kAllLanes, bound <= static_cast<int>(row)));
    request += (below ? below - 1 : 0) * step;
  }
  return request;
}

// As find_request, of each lane's own row, which lies from `first` to `last`: the ends of requests
// between those are passed one by one. Mostly there are none.
__device__ __forceinline__ u32 own_request(const FetchDequantParams& p, u32 row, u32 first,
                                           u32 last) {
  const u32 lane = threadIdx.x % kWarpSize;
  u32 request = find_request(p, first), passed = kWarpSize;
  for (u32 next = request + 1; passed == kWarpSize && next <= p.batch; next += kWarpSize) {
    int bound = 0x7fffffff;
    if (next + lane <= p.batch) bound = static_cast<int>(ld_global_u32(p.cu_seqlens + next + lane));
    passed = __popc(__ballot_sync(kAllLanes, bound <= static_cast<int>(last)));
    for (u32 i = 0; i < passed; ++i) {
      request += __shfl_sync(kAllLanes, bound, i) <= static_cast<int>(row) ? 1 : 0;
    }
  }
  return request;
}

// [F0] the slot of lane i's row, -1 where the row or its block lies outside what it may.
__device__ __forceinline__ int find_slot(const FetchDequantParams& p, const CtaRows& rows,
                                         u32 existing) {
  const u32 lane = threadIdx.x % kWarpSize;
  const bool exists = existing >> lane & 1;
  const u32 first = rows.first + row_in_cta(0), row = exists ? rows.first + row_in_cta(lane) : first;
  const u32 last = rows.first + row_in_cta(31 - __clz(existing));
  const u32 request = own_request(p, row, first, last);
  const u32 r = min(request, p.batch - 1);
  const i64 position = static_cast<i64>(static_cast<int>(ld_global_u32(p.starts + r))) + row -
                       static_cast<int>(ld_global_u32(p.cu_seqlens + r));
  const i64 column = position / kBlockSize;
  if (!exists || request >= p.batch || position < 0 || column >= p.max_blocks) return -1;
  const int* entry = p.block_table + request * p.block_table_stride + column;
  const i64 block = static_cast<int>(ld_global_u32(entry));
  return valid_slot(block * kBlockSize + position % kBlockSize, p.cache);
}

#else

// [F0] the slot of lane i's row, -1 for none.
__device__ __forceinline__ int find_slot(const FetchDequantParams& p, const CtaRows& rows,
                                         u32 existing) {
  const u32 lane = threadIdx.x % kWarpSize;
  if (!(existing >> lane & 1)) return -1;
  const u32 row = rows.first + row_in_cta(lane);
  return valid_slot(load_slot(p.slots, p.slot_stride, p.slots_are_64bit, row), p.cache);
}

#endif

// The tokens of a warp on their way from the cache through shared memory, in order.
struct TokenCopies {
  static constexpr u32 kTokenBytes = 512 + 128;

  static __device__ __forceinline__ char* memory(u32 i) {
    __shared__ __align__(16) char s_tokens[kRowWarps][ROWS_PER_WARP][kTokenBytes];
    return s_tokens[threadIdx.x / kWarpSize][i];
  }

  // A group of copies, empty for no slot.
  static __device__ __forceinline__ void start(u32 i, const CacheParams& cache, int slot) {
    if (slot >= 0) {
      const u32 lane = threadIdx.x % kWarpSize;
      const u32 to = static_cast<u32>(__cvta_generic_to_shared(memory(i)));
      const TokenPlace from = token_place(cache, slot);
      cp_async_16(to + 16 * lane, from.codes + 16 * lane);
      cp_async_small<4>(to + 512 + 4 * lane, from.rope + 4 * lane);
    }
    cp_async_commit();
  }

  // Waits for the first group that nobody has waited for.
  static __device__ __forceinline__ void wait_for_next() {
    cp_async_wait_group<ROWS_PER_WARP - 1>();
    cp_async_commit();  // an empty group takes its place, so that the count stays
    __syncwarp();       // lanes read what others have copied
  }

  static __device__ __forceinline__ LaneToken read(u32 i) {
    const u32 lane = threadIdx.x % kWarpSize;
    const char* from = memory(i);
    const uint2* codes = reinterpret_cast<const uint2*>(from);
    return LaneToken{{codes[lane], codes[kWarpSize + lane]},
                     reinterpret_cast<const u32*>(from + 512)[lane]};
  }
};

// The same straight from the cache, at addresses of any alignment.
__device__ __forceinline__ LaneToken load_token(const CacheParams& cache, int slot) {
  const u32 lane = threadIdx.x % kWarpSize;
  const TokenPlace from = token_place(cache, slot);
  const char* codes = from.codes + 8 * lane;
  return LaneToken{{load_codes_8_narrow(codes), load_codes_8_narrow(codes + 256)},
                   load_pair(from.rope + 4 * lane, false)};
}

// [F1] eight codes as eight bf16.
__device__ __forceinline__ uint4 dequantise_8(uint2 codes, float scale) {
  float x[4], y[4];
  f32_from_e4m3x4(x, codes.x);
  f32_from_e4m3x4(y, codes.y);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = __fmul_rn(x[i], scale);
    y[i] = __fmul_rn(y[i], scale);
  }
  return make_uint4(cvt_bf16x2(x[1], x[0]), cvt_bf16x2(x[3], x[2]), cvt_bf16x2(y[1], y[0]),
                    cvt_bf16x2(y[3], y[2]));
}

__device__ __forceinline__ LaneOutput dequantise(const LaneToken& token, float scale) {
  const float low = __fmul_rn(f32_from_bf16_low(token.rope), scale);  // [F2]
  const float high = __fmul_rn(f32_from_bf16_high(token.rope), scale);
  return LaneOutput{{dequantise_8(token.codes[0], scale), dequantise_8(token.codes[1], scale)},
                    cvt_bf16x2(high, low)};
}

// Each store of the warp fills whole lines.
__device__ __forceinline__ void write_row(const FetchDequantParams& p, i64 row,
                                          const LaneOutput& out, bool wide) {
  const int lane = threadIdx.x % kWarpSize;
  char* latent = static_cast<char*>(p.kv_c) + row * p.kv_c_stride + 16 * lane;
  store_16<2>(latent, out.latent[0], wide);
  store_16<2>(latent + 512, out.latent[1], wide);
  char* rope = static_cast<char*>(p.k_pe) + row * p.k_pe_stride + 4 * lane;
  store_pair(rope, out.rope, wide);
}

// The scale of lane i's slot, 0 for none: one load for all tokens of the warp.
__device__ __forceinline__ float load_scale(const CacheParams& cache, int slot) {
  return slot < 0 ? 0.0f : __uint_as_float(ld_global_u32(token_place(cache, slot).scale));
}

// The rows of this warp. kWide: the host found every access wide.
template <bool kWide>
__device__ __forceinline__ void fetch_rows(const FetchDequantParams& p) {
  const CtaRows rows = cta_rows(blockIdx.x, p.rows_per_cta, p.longer_ctas);
  const u32 existing = existing_rows(rows);
  if (!existing) return;
  const int own = find_slot(p, rows, existing);  // -1 in lanes without a row
  if constexpr (kWide) {
#pragma unroll
    for (u32 i = 0; i < ROWS_PER_WARP; ++i) {
      TokenCopies::start(i, p.cache, __shfl_sync(kAllLanes, own, i));
    }
  }
  const float own_scale = load_scale(p.cache, own);
  for (u32 i = 0; existing >> i & 1; ++i) {
    if constexpr (kWide) TokenCopies::wait_for_next();
    LaneToken token{{make_uint2(0, 0), make_uint2(0, 0)}, 0};  // [F3] zeros times zero
    const int slot = __shfl_sync(kAllLanes, own, i);
    if (slot >= 0) token = kWide ? TokenCopies::read(i) : load_token(p.cache, slot);
    const LaneOutput out = dequantise(token, __shfl_sync(kAllLanes, own_scale, i));
    write_row(p, rows.first + row_in_cta(i), out, kWide || p.wide_out);
  }
}

extern "C" __global__ void __launch_bounds__(256, MIN_CTAS)
    fetch_dequant(const __grid_constant__ FetchDequantParams p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (p.cache.wide && p.wide_out) {
    fetch_rows<true>(p);
  } else {
    fetch_rows<false>(p);
  }
}
