// Shared memory, barriers, roles and register budgets of mla_decode.
#pragma once

#include "common/pipeline.cuh"
#include "mla_decode_params.h"
#include "ptx/barrier.cuh"
#include "ptx/griddep.cuh"
#include "snapmla_config.h"

// offsetof, which NVRTC 13.0 does not have. Not a constant expression; compilers fold it.
#define OFFSET_OF(Type, member) \
  static_cast<unsigned>(        \
      reinterpret_cast<unsigned long long>(&static_cast<const Type*>(nullptr)->member))

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

// The latent part and the RoPE part of a cache block or a Q tile: 64 tokens or rows.
struct Tile {
  unsigned char latent[kLatentBytes];  // [chunk][token][128 B], 128-byte swizzle
  unsigned char rope[kRopeBytes];      // [token][128 B], 128-byte swizzle
};

// A place of the ring, with all that belongs to the cache block in it at constant distances: an
// instruction of the loops is as dear as a wait, and so none builds an address anew (v11).
struct alignas(1024) Stage {
  Tile tile;
  float4 token_scale[kBlockSize / 2];    // token pairs: ks, ks', lk, lk'
  float4 token_inverse[kBlockSize / 4];  // rk of two token pairs, 8 apart: inverse_index
  float scale[kBlockSize];               // ks as loaded
  // Barriers by the fact whose completion they announce.
  unsigned long long full;   // cache block landed          load -> tokens (debug builds: output too)
  unsigned long long empty;  // cache block no longer read  output -> load warp
  unsigned long long ready;  // token factors, tails zeroed tokens -> scores
  // A Q tile in the ring: load -> tokens and scores; scores -> load warp; tokens -> scores.
};

// P of a block and what the output warps need with it. r and the flags stay as the last block of the
// tile that was not calm (ScoreLoop) left them: 1 and 0 before the first calm one.
struct alignas(1024) Weights {
  unsigned char tile[kTileM * kBlockN];  // P^T: [row][kBlockN slots], swizzled as wide
  float block_factor[kFactors];          // t of the rows
  float raise_factor[kFactors];          // r of the rows
  int raised[4];                         // by score warp: a row rose that had seen a token
  unsigned long long full;               // P and row factors written   scores -> output
  unsigned long long empty;              // P and row factors read      output -> scores
};

constexpr unsigned kWeightsBytes = sizeof(Weights);

// The Q tile where it stays in shared memory.
template <bool kInRing>
struct QueryPlace {
  Tile query;
};
template <>
struct QueryPlace<true> {};

struct alignas(1024) Storage : QueryPlace<kQueryInRegisters> {
  Stage stages[kStages];
  Weights weights[kBuffers];
  float sum_inverse[kFactors];     // 1 / L of the rows
  unsigned long long query_full;   // Q tile landed (not in ring) query or load warp -> scores
  unsigned long long query_empty;  // Q tile no longer read       scores -> query warp
  unsigned long long sum_full;     // 1 / L written               scores -> output
  unsigned long long sum_empty;    // 1 / L read                  output -> scores
};
static_assert(sizeof(Storage) == SMEM_BYTES, "the kernel table states the size");

// Where a role is in the ring of stages: the shared address of the next stage, and the parity of its
// barriers.
struct StageRing {
  unsigned at;
  unsigned phase = 0;

  __device__ __forceinline__ explicit StageRing(const Storage& s)
      : at(shared_address(s.stages)), begin_(at) {}

  __device__ __forceinline__ void advance() {
    constexpr unsigned kBytes = sizeof(Stage);  // 32-bit sums
    at += kBytes;
    if (at == begin_ + kStages * kBytes) {
      at = begin_;
      phase ^= 1;
    }
  }

 private:
  unsigned begin_;
};

// Where the rk of a token is in token_inverse, in floats: 16 bytes hold what a lane of the score warps
// needs of two groups of 8 tokens.
__device__ __forceinline__ int inverse_index(int token) {
  return (token >> 4) * 16 + ((token & 7) >> 1) * 4 + (token >> 3 & 1) * 2 + (token & 1);
}

// Shared address of the Q tile where it stays.
__device__ __forceinline__ unsigned query_tile(const QueryPlace<false>& place) {
  return shared_address(&place.query);
}
__device__ __forceinline__ unsigned query_tile(const QueryPlace<true>&) { return 0; }

// Barriers of the stage at a shared address.
__device__ __forceinline__ unsigned full_barrier(unsigned stage) {
  return stage + OFFSET_OF(Stage, full);
}
__device__ __forceinline__ unsigned empty_barrier(unsigned stage) {
  return stage + OFFSET_OF(Stage, empty);
}
__device__ __forceinline__ unsigned ready_barrier(unsigned stage) {
  return stage + OFFSET_OF(Stage, ready);
}

// Parities of the barriers of the P tiles. Splits begin with P tile 0, so that a loop over pairs of
// blocks knows at compile time which one a block takes; a tile is then passed over where a split
// ends with the other one, and each has a parity of its own.
struct WeightsPhases {
  unsigned first = 0, second = 0;

  __device__ __forceinline__ unsigned parity(unsigned buffer) const {
    return buffer == 0 ? first : second;
  }
  __device__ __forceinline__ void pass(unsigned buffer) {
    if (buffer == 0) {
      first ^= 1;
    } else {
      second ^= 1;
    }
  }
};

// A role's first step: storage is ready, and everything before this kernel on the stream has completed
// and may be read. (The load warp waits for the second first, and reads while the others make ready.)
__device__ __forceinline__ void wait_for_storage() { barrier_sync<1, kThreads>(); }
__device__ __forceinline__ void wait_for_start() {
  wait_for_storage();
  griddepcontrol_wait();
}

// Where a role of this CTA stores its profile: 16 floats a role (SNAPMLA_PROFILE builds).
__device__ __forceinline__ float* profile_slot(const MlaDecodeParams& p, int role) {
  return p.trace + ((blockIdx.y * gridDim.x + blockIdx.x) * 4 + role) * 16;
}
