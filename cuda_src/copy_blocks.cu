// copy_blocks: whole cache blocks copied inside one pool (copy-on-write). No stage of the reference:
// it moves bytes (KVCacheStorage.copy_blocks).
//
// Arguments (CopyBlocksParams): three planes (codes, RoPE, scales) as address, block stride and bytes
// of a block (a multiple of 16; plane contiguous within a block, 16-byte aligned); pair_0 to pair_63:
// source block << 32 | destination block, in the parameters themselves, so that no list has to reach
// the device first. No destination is a source or repeated (the caller sees to it); ids outside
// 0..num_blocks - 1 copy nothing.
// Launch: 1-D grid of 4 n CTAs, 256 threads: a CTA copies a quarter of a block. May be launched as a
// dependent.
#include "common/types.cuh"
#include "copy_blocks_params.h"
#include "ptx/griddep.cuh"
#include "ptx/ldst.cuh"

constexpr int kThreads = 256;
constexpr int kCtasPerBlock = 4;
constexpr int kInFlight = 3;  // 16-byte loads of a thread that are under way at once

__device__ __forceinline__ void copy_plane(void* plane, i64 stride, int bytes, i64 from, i64 to) {
  const char* source = static_cast<const char*>(plane) + from * stride;
  char* target = static_cast<char*>(plane) + to * stride;
  const int step = 16 * kThreads * kCtasPerBlock;
  int at = 16 * ((blockIdx.x % kCtasPerBlock) * kThreads + threadIdx.x);
  for (; at < bytes; at += kInFlight * step) {
    uint4 x[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (at + i * step < bytes) x[i] = ld_global_no_allocate_v4(source + at + i * step);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (at + i * step < bytes) st_global_v4(target + at + i * step, x[i]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(256)
    copy_blocks(const __grid_constant__ CopyBlocksParams p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const u64 pair = (&p.pair_0)[blockIdx.x / kCtasPerBlock];
  const i64 from = pair >> 32, to = pair & 0xffffffffu;
  if (from >= p.num_blocks || to >= p.num_blocks || from == to) return;
  copy_plane(p.ckv, p.ckv_block_stride, p.ckv_bytes, from, to);
  copy_plane(p.k_rope, p.k_rope_block_stride, p.k_rope_bytes, from, to);
  copy_plane(p.k_scale, p.k_scale_block_stride, p.k_scale_bytes, from, to);
}
