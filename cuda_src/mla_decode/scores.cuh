// [S2] S = Q K^T on the tensor core: 16 e4m3 steps of 32 dims, then 4 bf16 steps of 16 RoPE dims.
#pragma once

#include "mla_decode/storage.cuh"
#include "ptx/matrix.cuh"
#include "ptx/wgmma.cuh"

constexpr int kScores = 32;      // accumulator registers of a 64 x 64 tile
constexpr int kLatentSteps = 16;
constexpr int kRopeSteps = 4;

// The tile as A fragments: 16 latent and 4 RoPE steps of four registers each.
struct QueryFragments {
  unsigned latent[kLatentSteps][4];
  unsigned rope[kRopeSteps][4];
};

// Load this warp's 16 rows. A step is 32 bytes of a row in both types, so both load alike.
__device__ __forceinline__ void load_query(QueryFragments& q, const Stage& tile) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  const int row = 16 * warp + (lane & 15);
  const unsigned latent = shared_address(tile.latent) + row * 128;
  const unsigned rope = shared_address(tile.rope) + row * 128;
#pragma unroll
  for (int step = 0; step < kLatentSteps; ++step) {
    const int unit = (2 * (step & 3) + (lane >> 4)) ^ (row & 7);
    ldmatrix_x4(q.latent[step], latent + (step >> 2) * kChunkBytes + unit * 16);
  }
#pragma unroll
  for (int step = 0; step < kRopeSteps; ++step) {
    const int unit = (2 * step + (lane >> 4)) ^ (row & 7);
    ldmatrix_x4(q.rope[step], rope + unit * 16);
  }
}

// Issue S = Q K^T for one stage as one commit group. The caller waits before touching `scores`.
__device__ __forceinline__ void issue_scores(float (&scores)[kScores], const QueryFragments& q,
                                             const Storage& s, unsigned stage) {
  // Keeping the base uniform over the warp keeps the descriptors in uniform registers.
  const unsigned base =
      __shfl_sync(0xffffffffu, shared_address(s.stages[stage].latent), 0);
  const unsigned long long key = wgmma_desc_sw128(base);
  const unsigned long long key_rope = wgmma_desc_sw128(base + kLatentBytes);
  wgmma_fence();
  if constexpr (kQueryInRegisters) {
#pragma unroll
    for (int step = 0; step < kLatentSteps; ++step) {
      const int offset = ((step >> 2) * kChunkBytes + (step & 3) * 32) >> 4;
      wgmma_m64k32_e4m3_rs(scores, q.latent[step], key + offset, step != 0);
    }
#pragma unroll
    for (int step = 0; step < kRopeSteps; ++step) {
      wgmma_m64n64k16_bf16_rs(scores, q.rope[step], key_rope + step * 2, true);
    }
  } else {
    const unsigned query_base = __shfl_sync(0xffffffffu, shared_address(s.stages[kStages].latent), 0);
    const unsigned long long query = wgmma_desc_sw128(query_base);
    const unsigned long long query_rope = wgmma_desc_sw128(query_base + kLatentBytes);
#pragma unroll
    for (int step = 0; step < kLatentSteps; ++step) {
      const int offset = ((step >> 2) * kChunkBytes + (step & 3) * 32) >> 4;
      wgmma_m64n64k32_e4m3_ss(scores, query + offset, key + offset, step != 0);
    }
#pragma unroll
    for (int step = 0; step < kRopeSteps; ++step) {
      wgmma_m64n64k16_bf16_ss(scores, query_rope + step * 2, key_rope + step * 2, true);
    }
  }
  wgmma_commit_group();
}
