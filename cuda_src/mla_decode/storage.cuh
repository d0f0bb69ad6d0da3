// Shared memory, barriers, roles and register budgets of mla_decode.
#pragma once

#include "common/pipeline.cuh"
#include "mla_decode_params.h"
#include "snapmla_config.h"

// Query rows that this variant computes: 16, 32 or 64 of the 64 rows of a tile; the rest are zero.
constexpr int kRows = ROWS;
// Tokens of a softmax block: one cache block (page), or two.
constexpr int kBlockN = BLOCK_N;
constexpr int kPages = kBlockN / kBlockSize;
// Up to 32 rows leave registers for all of Q in the score warps, which frees shared-memory
// bandwidth; at 64 rows the outputs need them.
constexpr bool kQueryInRegisters = kRows <= 32;
static_assert(kPages == 1 || !kQueryInRegisters, "two pages of scores beside Q do not fit");

// Rows on the tensor core's 64: up to 32 rows are spread evenly over the four score warps, in the
// upper half of each warp's 16, so that every warp has work and a thread has one row, not two.
constexpr int kRowsPerWarp = kRows / 4;
constexpr int kHalves = kRows <= 32 ? 1 : 2;  // rows of a score thread
__device__ __forceinline__ int row_of(int warp, int lane, int half) {
  return kRowsPerWarp * warp + (lane >> 2) + 8 * half;
}
// Lanes beyond a warp's rows repeat rows of the next warp; what they compute is dropped.
__device__ __forceinline__ bool lane_has_rows(int lane) { return (lane >> 2) < kRowsPerWarp; }

constexpr int kWarpgroup = 128;
enum Role { kScoreRole = 0, kOutputLeftRole = 1, kOutputRightRole = 2, kProducerRole = 3 };
constexpr int kThreads = 4 * kWarpgroup;
// setmaxnreg: the four warpgroups share 512 x 128 registers.
constexpr int kRegistersAtLaunch = 128;
constexpr int kScoreRegisters = kQueryInRegisters ? 200 : 120;
constexpr int kOutputRegisters = kQueryInRegisters ? 144 : 184;
constexpr int kProducerRegisters = 24;
static_assert(kScoreRegisters + 2 * kOutputRegisters + kProducerRegisters == 4 * kRegistersAtLaunch,
              "register pool");

constexpr int kScoreWarps = 4, kOutputWarps = 8, kTokenWarps = 2;
enum ProducerWarp { kLoadWarp = 0, kTokenWarp0 = 1, kTokenWarp1 = 2, kQueryWarp = 3 };

// Cache blocks in shared memory. A Q tile is as large as one: where Q moves on to registers it
// passes through the ring, elsewhere it has a place of its own.
constexpr int kStages = kQueryInRegisters ? 5 : 4;
constexpr int kBuffers = 2;  // P tiles and their row factors
constexpr int kChunks = 4;   // 128-byte chunks of a latent row
constexpr int kChunkBytes = kBlockSize * 128;
constexpr int kLatentBytes = kChunks * kChunkBytes;  // 32,768
constexpr int kRopeBytes = kBlockSize * 128;         // 8,192
constexpr int kScaleBytes = kBlockSize * 4;
constexpr int kStageTxBytes = kLatentBytes + kRopeBytes + kScaleBytes;
constexpr int kQueryTxBytes = kLatentBytes + kRopeBytes;

// Factors of rows as the output warps read them: row 8 j + 2 lane + d at [lane][2 j + d], 80 bytes
// apart so that the four lanes' 16-byte reads touch different banks.
constexpr int kFactorStride = 20;
constexpr int kFactors = 4 * kFactorStride;
__device__ __forceinline__ int factor_index(int row) {
  return ((row & 7) >> 1) * kFactorStride + 2 * (row >> 3) + (row & 1);
}

// Barriers by the fact whose completion they announce.
struct Barriers {
  unsigned long long query_full;              // Q tile landed (not in ring) query warp -> scores
  unsigned long long query_empty;             // Q tile no longer read       scores -> query warp
  unsigned long long stage_full[kStages];     // cache block landed          load -> tokens, output
  unsigned long long stage_empty[kStages];    // cache block no longer read  output -> load warp
  unsigned long long tokens_ready[kStages];   // token factors, tails zeroed tokens -> scores
  unsigned long long weights_full[kBuffers];  // P and row factors written   scores -> output
  unsigned long long weights_empty[kBuffers]; // P and row factors read      output -> scores
  unsigned long long sum_full;                // 1 / L written               scores -> output
  unsigned long long sum_empty;               // 1 / L read                  output -> scores
};

// A cache block, or a Q tile: 64 tokens or rows.
struct Stage {
  unsigned char latent[kLatentBytes];  // [chunk][token][128 B], 128-byte swizzle
  unsigned char rope[kRopeBytes];      // [token][128 B], 128-byte swizzle
};

struct alignas(1024) Storage {
  Stage stages[5];  // kStages of the ring, then the Q tile where it stays
  unsigned char weights[kBuffers][kTileM * kBlockN];  // P^T: [row][kBlockN slots], swizzled as wide
  float scale[kStages][kBlockSize];                   // ks as loaded
  float4 token_scale[kStages][kBlockSize / 2];        // token pairs: ks, ks', lk, lk'
  float2 token_inverse[kStages][kBlockSize / 2];      // token pairs: rk, rk'
  float block_factor[kBuffers][kFactors];             // t of the rows
  float raise_factor[kBuffers][kFactors];             // r of the rows
  int raised[kBuffers][4];                            // by score warp: some r is not 1
  float sum_inverse[kFactors];                        // 1 / L of the rows
  Barriers barriers;
};
static_assert(sizeof(Storage) == SMEM_BYTES, "the kernel table states the size");

// Where a role of this CTA stores its profile: 16 floats a role (SNAPMLA_PROFILE builds).
__device__ __forceinline__ float* profile_slot(const MlaDecodeParams& p, int role) {
  return p.trace + ((blockIdx.y * gridDim.x + blockIdx.x) * 4 + role) * 16;
}
