// The rows of a warp quantised one after another, with the copies of the next ones to shared memory
// under way. Such copies need no registers and land in the order of their groups; a loop over loads
// into registers would wait for all of them together, the newest as well.
#pragma once

#include "common/quantize.cuh"
#include "common/rows.cuh"
#include "common/types.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ld_shared.cuh"

// RING_ROWS rows are copied ahead. place(i) is where row i of the warp lies, write(codes, i) stores
// what becomes of it. kWide: the rows allow wide accesses; else they are loaded when their turn comes.
template <int kInput, bool kWide>
struct RowRing {
  static constexpr int kElement = LaneRow<kInput>::kBytes;
  static constexpr int kLatentBytes = kKvLoraRank * kElement;
  static constexpr int kRowBytes = kLatentBytes + kQkRopeHeadDim * kElement;

  // The first copies. existing: bit i set where row i of the warp exists.
  template <class Place>
  __device__ __forceinline__ void start(u32 existing, Place place) {
    if constexpr (kWide) {
#pragma unroll
      for (u32 k = 0; k < RING_ROWS; ++k) {
        if (existing >> k & 1) copy(memory() + k * kRowBytes, place(k));
        cp_async_commit();
      }
    }
  }

  // wanted: bit i set where row i is to be quantised.
  template <class Place, class Write>
  __device__ __forceinline__ void run(u32 wanted, bool pow2, Place place, Write write) {
    u32 stage = 0, at = memory();  // of row i
    for (u32 i = 0; wanted; ++i, wanted >>= 1) {
      const bool is_wanted = wanted & 1;
      LaneRow<kInput> row;
      if constexpr (kWide) {
        cp_async_wait_group<RING_ROWS - 1>();
        __syncwarp();  // fp32: what this lane reads another one has copied
        if (is_wanted) read(row, at);
        __syncwarp();  // all lanes have read
        if (wanted >> RING_ROWS & 1) copy(at, place(i + RING_ROWS));
        cp_async_commit();
        const bool is_last_stage = stage == RING_ROWS - 1;
        stage = is_last_stage ? 0 : stage + 1;
        at += is_last_stage ? -(RING_ROWS - 1) * kRowBytes : kRowBytes;
      } else if (is_wanted) {
        const RowPlace from = place(i);
        load_row<kInput>(row, from.latent, from.rope, false);
      }
      if (!is_wanted) continue;
      write(quantize_row<kInput>(row, pow2), i);
    }
    if constexpr (kWide) cp_async_wait_group<0>();  // of rows that exist and are not wanted
  }

 private:
  // Shared address of the warp's first stage.
  static __device__ __forceinline__ u32 memory() {
    __shared__ __align__(16) char s_rows[kRowWarps][RING_ROWS][kRowBytes];
    return static_cast<u32>(__cvta_generic_to_shared(s_rows[threadIdx.x / kWarpSize]));
  }

  static __device__ __forceinline__ void copy(u32 to, const RowPlace& from) {
    const u32 lane = threadIdx.x % kWarpSize;
    const char* latent = from.latent + 16 * lane;
#pragma unroll
    for (u32 at = 0; at < kLatentBytes; at += 16 * kWarpSize) {
      cp_async_16(to + 16 * lane + at, latent + at);
    }
    constexpr int kPair = 2 * kElement;
    cp_async_small<kPair>(to + kLatentBytes + kPair * lane, from.rope + kPair * lane);
  }

  static __device__ __forceinline__ void read(LaneRow<kInput>& row, u32 from) {
    constexpr int kLaneBytes = 8 * kElement;
    const u32 lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < LaneRow<kInput>::kWords; i += 4) {
        const uint4 x = ld_shared_v4(from + (half * kWarpSize + lane) * kLaneBytes + 4 * i);
        row.latent[half][i] = x.x;
        row.latent[half][i + 1] = x.y;
        row.latent[half][i + 2] = x.z;
        row.latent[half][i + 3] = x.w;
      }
    }
    const u32 rope = from + kLatentBytes + lane * 2 * kElement;
    row.rope[0] = ld_shared_u32(rope);
    if constexpr (kInput == kInputF32) row.rope[1] = ld_shared_u32(rope + 4);
  }
};
