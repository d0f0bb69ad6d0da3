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

// One matrix of a fragment: 8 rows of this warp by 16 bytes of a step; this lane's address.
__device__ __forceinline__ unsigned query_address(unsigned tile, int half, int unit) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  const int row = kRowsPerWarp * warp + (lane & 7) + 8 * half;
  return tile + row * 128 + ((unit ^ (row & 7)) << 4);
}

// Fragments of `kSteps` steps whose 32-byte pieces follow each other in 128-byte rows; a step is 32
// bytes of a row in both types, so both load alike. Register i: row half i % 2, 16-byte half i / 2.
template <int kSteps>
__device__ __forceinline__ void load_fragments(unsigned (&a)[kSteps][4], unsigned tile) {
  const int matrix = (threadIdx.x >> 3) & 3;
  if constexpr (kHalves == 2) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int unit = 2 * (step & 3) + (matrix >> 1);
      ldmatrix_x4(a[step], query_address(tile + (step >> 2) * kChunkBytes, matrix & 1, unit));
    }
  } else {
    // The lower half's rows are zero: two steps a load.
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      unsigned r[4];
      const int unit = 2 * (step & 3) + matrix;
      ldmatrix_x4(r, query_address(tile + (step >> 2) * kChunkBytes, 0, unit));
      a[step][0] = r[0];
      a[step][2] = r[1];
      a[step + 1][0] = r[2];
      a[step + 1][2] = r[3];
      a[step][1] = a[step][3] = a[step + 1][1] = a[step + 1][3] = 0;
    }
  }
}

__device__ __forceinline__ void load_query(QueryFragments& q, unsigned tile) {
  load_fragments<kLatentSteps>(q.latent, tile);
  load_fragments<kRopeSteps>(q.rope, tile + kLatentBytes);
}

// S = Q K^T of one page, issued in pieces: the queue of the tensor core holds about five
// instructions, so a warp that issues all twenty at once stands still until most have run.
constexpr int kScoreSteps = kLatentSteps + kRopeSteps;
constexpr int kScorePieces = 4;
constexpr int kPieceSteps = kScoreSteps / kScorePieces;

struct PageOperands {
  unsigned long long key, query;

  // A base that is uniform over the warp keeps the descriptors in uniform registers. That of Q is
  // told by its distance from K's: a descriptor built anew in each block is one register pair, which
  // a step advances by one addition; one that stays from block to block takes three. RoPE lies
  // behind the latent part.
  __device__ __forceinline__ PageOperands(const Storage& s, unsigned stage) {
    const unsigned base = __shfl_sync(0xffffffffu, stage, 0);
    key = wgmma_desc_sw128(base);
    if constexpr (!kQueryInRegisters) {
      query = wgmma_desc_moved(key, (query_tile(s) >> 4) - (base >> 4));
    }
  }
};

// [S2] one step of the twenty, in order: e4m3 first, RoPE last.
template <int kStep>
__device__ __forceinline__ void issue_step(float (&scores)[kScores], const QueryFragments& q,
                                           const PageOperands& at) {
  if constexpr (kStep < kLatentSteps) {
    constexpr int kOffset = ((kStep >> 2) * kChunkBytes + (kStep & 3) * 32) >> 4;
    if constexpr (kQueryInRegisters) {
      wgmma_m64k32_e4m3_rs(scores, q.latent[kStep], at.key + kOffset, kStep != 0);
    } else {
      wgmma_m64n64k32_e4m3_ss(scores, at.query + kOffset, at.key + kOffset, kStep != 0);
    }
  } else {
    constexpr int kOffset = (kLatentBytes + (kStep - kLatentSteps) * 32) >> 4;
    if constexpr (kQueryInRegisters) {
      wgmma_m64n64k16_bf16_rs(scores, q.rope[kStep - kLatentSteps], at.key + kOffset, true);
    } else {
      wgmma_m64n64k16_bf16_ss(scores, at.query + kOffset, at.key + kOffset, true);
    }
  }
}

template <int kStep, int kEnd>
__device__ __forceinline__ void issue_steps(float (&scores)[kScores], const QueryFragments& q,
                                            const PageOperands& at) {
  issue_step<kStep>(scores, q, at);
  if constexpr (kStep + 1 < kEnd) issue_steps<kStep + 1, kEnd>(scores, q, at);
}

// One piece; the first one opens the commit group and the last one closes it. The caller waits
// before touching `scores`.
template <int kPiece>
__device__ __forceinline__ void issue_piece(float (&scores)[kScores], const QueryFragments& q,
                                            const PageOperands& at) {
  __syncwarp();  // keeps the compiler from gathering the pieces
  if constexpr (kPiece == 0) wgmma_fence();
  issue_steps<kPiece * kPieceSteps, (kPiece + 1) * kPieceSteps>(scores, q, at);
  if constexpr (kPiece == kScorePieces - 1) wgmma_commit_group();
}

__device__ __forceinline__ void issue_scores(float (&scores)[kScores], const QueryFragments& q,
                                             const Storage& s, unsigned stage) {
  const PageOperands at(s, stage);
  wgmma_fence();
  issue_steps<0, kScoreSteps>(scores, q, at);
  wgmma_commit_group();
}
