// The rows of a warp quantised one after another, with the copies of the next ones to shared memory
// under way. Such copies need no registers and land in the order of their groups; a loop over loads
// into registers would wait for all of them together, the newest as well.
#pragma once

#include "common/quantize.cuh"
#include "common/rows.cuh"
#include "common/types.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ld_shared.cuh"

// RING_ROWS rows are copied ahead. `rows` says where the rows of the warp lie: rows.row(i), and from
// one to the next by rows.latent_step() and rows.rope_step() where rows.is_linear(), which saves
// products. write(codes, place) stores what becomes of a row; the place is a number that the loop
// carries on from row to row, so that nothing has to be built anew from the row's index. kWide: the
// rows allow wide accesses; else they are loaded when their turn comes.
template <int kInput, bool kWide, class Rows>
struct RowRing {
  static constexpr int kElement = LaneRow<kInput>::kBytes;
  static constexpr int kLatentBytes = kKvLoraRank * kElement;
  static constexpr int kRopeLaneBytes = 2 * kElement;
  static constexpr int kRowBytes = kLatentBytes + kQkRopeHeadDim * kElement;
  // Of 2-byte types each lane reads what it has copied itself.
  static constexpr bool kLanesShare = kInput == kInputF32;

  const Rows rows;

  explicit __device__ __forceinline__ RowRing(const Rows& of) : rows(of) {}

  // The first copies. existing: bit i set where row i of the warp exists.
  __device__ __forceinline__ void start(u32 existing) {
    if constexpr (kWide) {
      next_ = lane_part(rows.row(0));
#pragma unroll
      for (u32 k = 0; k < RING_ROWS; ++k) {
        if (existing >> k & 1) copy(memory() + k * kRowBytes);
        cp_async_commit();
        advance(k + 1);
      }
    }
  }

  // wanted: bit i set where row i is to be quantised. The place of row i is place + i place_step.
  template <class Write>
  __device__ __forceinline__ void run(u32 wanted, bool pow2, u32 place, u32 place_step,
                                      Write write) {
    begin();
    while (wanted) step(wanted, pow2, place, place_step, write);
    end();
  }

  // The same in two loops, with between() after RING_ROWS rows, or fewer where no more are wanted,
  // and after_row(i, left) after each of the rest; left: what is left of `wanted`, row i + 1 in bit 0.
  // What between() uses may be still on its way to its register in the loop before; the compiler has
  // what is used within a loop waited for in its first row.
  template <class Write, class Between, class AfterRow>
  __device__ __forceinline__ void run(u32 wanted, bool pow2, u32 place, u32 place_step, Write write,
                                      Between between, AfterRow after_row) {
    begin();
#pragma unroll 1
    for (u32 i = 0; wanted && i < RING_ROWS; ++i) step(wanted, pow2, place, place_step, write);
    between();
    for (u32 i = RING_ROWS; wanted; ++i) {
      step(wanted, pow2, place, place_step, write);
      after_row(i, wanted);
    }
    end();
  }

 private:
  RowPlace next_;  // this lane's first part of the row to be copied next
  u32 index_, stage_, at_;  // of the row whose turn it is; the address of its stage last

  __device__ __forceinline__ void begin() {
    index_ = stage_ = at_ = 0;
    if constexpr (kWide) {
      at_ = memory();
      keep_in_register(at_);
    }
  }

  __device__ __forceinline__ void end() {
    if constexpr (kWide) cp_async_wait_group<0>();  // of rows that exist and are not wanted
  }

  // A row, and on to the next.
  template <class Write>
  __device__ __forceinline__ void step(u32& wanted, bool pow2, u32& place, u32 place_step,
                                       Write write) {
    LaneRow<kInput> row;
    if constexpr (kWide) {
      cp_async_wait_group<RING_ROWS - 1>();
      if constexpr (kLanesShare) __syncwarp();
      read(row, at_);  // of a row that is not wanted, whatever lies there
      if constexpr (kLanesShare) __syncwarp();
      if (wanted >> RING_ROWS) copy(at_);  // wanted or not: that test would be one more
      cp_async_commit();
      advance(index_ + RING_ROWS + 1);
      const bool is_last_stage = stage_ == RING_ROWS - 1;
      stage_ = is_last_stage ? 0 : stage_ + 1;
      at_ += is_last_stage ? -(RING_ROWS - 1) * kRowBytes : kRowBytes;
    }
    if (wanted & 1) {
      if constexpr (!kWide) {
        const RowPlace from = rows.row(index_);
        load_row<kInput>(row, from.latent, from.rope, false);
      }
      write(quantize_row<kInput, kWide>(row, pow2), place);
    }
    ++index_;
    wanted >>= 1;
    place += place_step;
  }

  static __device__ __forceinline__ u32 lane() { return threadIdx.x % kWarpSize; }

  // Shared address of this lane's first 16 bytes in the warp's first stage.
  static __device__ __forceinline__ u32 memory() {
    __shared__ __align__(16) char s_rows[kRowWarps][RING_ROWS][kRowBytes];
    const char* own = &s_rows[threadIdx.x / kWarpSize][0][16 * lane()];
    return static_cast<u32>(__cvta_generic_to_shared(own));
  }

  static __device__ __forceinline__ RowPlace lane_part(const RowPlace& row) {
    return RowPlace{row.latent + 16 * lane(), row.rope + kRopeLaneBytes * lane()};
  }

  // Where this lane's RoPE values lie in the stage at `at`.
  static __device__ __forceinline__ u32 rope_at(u32 at) {
    return at + kLatentBytes - (16 - kRopeLaneBytes) * lane();
  }

  __device__ __forceinline__ void advance(u32 to_row) {
    if (rows.is_linear()) {
      next_.latent += rows.latent_step();
      next_.rope += rows.rope_step();
    } else {
      next_ = lane_part(rows.row(to_row));
    }
  }

  __device__ __forceinline__ void copy(u32 to) const {
#pragma unroll
    for (u32 at = 0; at < kLatentBytes; at += 16 * kWarpSize) {
      cp_async_16(to + at, next_.latent + at);
    }
    cp_async_small<kRopeLaneBytes>(rope_at(to), next_.rope);
  }

  static __device__ __forceinline__ void read(LaneRow<kInput>& row, u32 at) {
    constexpr int kLaneBytes = 8 * kElement;
    const u32 from = at + (kLaneBytes - 16) * lane();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < LaneRow<kInput>::kWords; i += 4) {
        const uint4 x = ld_shared_v4(from + half * kWarpSize * kLaneBytes + 4 * i);
        row.latent[half][i] = x.x;
        row.latent[half][i + 1] = x.y;
        row.latent[half][i + 2] = x.z;
        row.latent[half][i + 3] = x.w;
      }
    }
    const u32 rope = rope_at(at);
    row.rope[0] = ld_shared_u32(rope);
    if constexpr (kInput == kInputF32) row.rope[1] = ld_shared_u32(rope + 4);
  }
};
