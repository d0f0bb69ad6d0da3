// The two output warpgroups: T = P V and its promotion into O ([S8]), and the output part of [S9].
//
// O^T = V^T P^T: A is V^T, taken from the cache block as it lies (ldmatrix.trans and one byte
// permutation a register), B is P^T. Each warpgroup owns 256 dims of all rows; each of its warps 16
// dims of every 64-dim chunk.
#pragma once

#include "common/profile.cuh"
#include "common/softmax.cuh"
#include "mla_decode/schedule.cuh"
#include "mla_decode/storage.cuh"
#include "mla_decode/trace.cuh"
#include "ptx/math.cuh"
#include "ptx/matrix.cuh"
#include "ptx/wgmma.cuh"

// Where the output warps' cycles go.
enum OutputInterval {
  kProfileWaitWeights,  // for P of the next block
  kProfileWaitStage,    // for the cache block's own barrier
  kProfileOutput,       // T and O
  kProfileStore,        // 1 / L and the outputs
  kOutputIntervals
};

constexpr int kOutputChunks = 4;         // 64-dim chunks of a warpgroup
constexpr int kTileRegisters = kRows / 2;  // accumulator registers of a 64-dim chunk
// Chunks whose tensor-core work is in flight together.
constexpr int kChunkGroup = kRows == 16 ? 2 : 1;
// At 64 rows the next values would cost the score warps 16 registers: measured slower (-7 %).
constexpr bool kLoadAhead = kRows <= 32;

using Outputs = float[kOutputChunks][kTileRegisters];

// V of 64 dims and 32 tokens as ldmatrix delivers it.
__device__ __forceinline__ void load_values(unsigned (&raw)[4], unsigned latent, int half,
                                            int chunk, int step) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  const int unit = (4 * (chunk & 1) + warp) ^ (lane & 7);
  ldmatrix_x4_trans(raw, latent + (2 * half + (chunk >> 1)) * kChunkBytes +
                             (32 * step + lane) * 128 + unit * 16);
}

// The A fragment of V^T for one k32 step. Rows: dims 2 (lane / 4) and + 1; slots of its columns hold
// tokens in the order of pack_weights.
__device__ __forceinline__ void transpose_values(unsigned (&a)[4], const unsigned (&raw)[4]) {
  a[0] = __byte_perm(raw[0], raw[1], 0x6420);
  a[1] = __byte_perm(raw[0], raw[1], 0x7531);
  a[2] = __byte_perm(raw[2], raw[3], 0x6420);
  a[3] = __byte_perm(raw[2], raw[3], 0x7531);
}

// O *= factor by row (columns of the accumulator).
__device__ __forceinline__ void scale_outputs(Outputs& o, const float* factor) {
  const float4* mine = reinterpret_cast<const float4*>(factor + (threadIdx.x & 3) * kFactorStride);
#pragma unroll
  for (int j = 0; j < kRows / 16; ++j) {
    const float4 f = mine[j];
#pragma unroll
    for (int c = 0; c < kOutputChunks; ++c) {
      o[c][8 * j + 0] = __fmul_rn(o[c][8 * j + 0], f.x);
      o[c][8 * j + 1] = __fmul_rn(o[c][8 * j + 1], f.y);
      o[c][8 * j + 2] = __fmul_rn(o[c][8 * j + 2], f.x);
      o[c][8 * j + 3] = __fmul_rn(o[c][8 * j + 3], f.y);
      o[c][8 * j + 4] = __fmul_rn(o[c][8 * j + 4], f.z);
      o[c][8 * j + 5] = __fmul_rn(o[c][8 * j + 5], f.w);
      o[c][8 * j + 6] = __fmul_rn(o[c][8 * j + 6], f.z);
      o[c][8 * j + 7] = __fmul_rn(o[c][8 * j + 7], f.w);
    }
  }
}

// [S8] O = fma(T, t, O) for one chunk.
__device__ __forceinline__ void promote(float (&o)[kTileRegisters],
                                        const float (&tile)[kTileRegisters], const float* factor) {
  const float4* mine = reinterpret_cast<const float4*>(factor + (threadIdx.x & 3) * kFactorStride);
#pragma unroll
  for (int j = 0; j < kRows / 16; ++j) {
    const float4 t = mine[j];
    o[8 * j + 0] = __fmaf_rn(tile[8 * j + 0], t.x, o[8 * j + 0]);
    o[8 * j + 1] = __fmaf_rn(tile[8 * j + 1], t.y, o[8 * j + 1]);
    o[8 * j + 2] = __fmaf_rn(tile[8 * j + 2], t.x, o[8 * j + 2]);
    o[8 * j + 3] = __fmaf_rn(tile[8 * j + 3], t.y, o[8 * j + 3]);
    o[8 * j + 4] = __fmaf_rn(tile[8 * j + 4], t.z, o[8 * j + 4]);
    o[8 * j + 5] = __fmaf_rn(tile[8 * j + 5], t.w, o[8 * j + 5]);
    o[8 * j + 6] = __fmaf_rn(tile[8 * j + 6], t.z, o[8 * j + 6]);
    o[8 * j + 7] = __fmaf_rn(tile[8 * j + 7], t.w, o[8 * j + 7]);
  }
}

// Matrix descriptor of a P tile and the offset of one k32 step in it.
__device__ __forceinline__ unsigned long long weights_desc(const Storage& s, unsigned buffer) {
  const unsigned base = __shfl_sync(0xffffffffu, shared_address(s.weights[buffer]), 0);
  return kPages == 1 ? wgmma_desc_sw64(base) : wgmma_desc_sw128(base);
}

using GroupValues = unsigned[kPages][kChunkGroup][2][4];

// Load V of one group of chunks.
__device__ __forceinline__ void load_group(GroupValues& raw, const Storage& s, int half,
                                           const unsigned (&stage)[kPages], int group) {
#pragma unroll
  for (int page = 0; page < kPages; ++page) {
    const unsigned latent = shared_address(s.stages[stage[page]].latent);
#pragma unroll
    for (int c = 0; c < kChunkGroup; ++c) {
      load_values(raw[page][c][0], latent, half, group + c, 0);
      load_values(raw[page][c][1], latent, half, group + c, 1);
    }
  }
}

// Start T of one group of chunks, from zero, one step a 32 tokens.
__device__ __forceinline__ void issue_group(float (&tile)[kChunkGroup][kTileRegisters],
                                            GroupValues& a, const GroupValues& raw,
                                            unsigned long long weights) {
#pragma unroll
  for (int c = 0; c < kChunkGroup; ++c) {
#pragma unroll
    for (int step = 0; step < 2 * kPages; ++step) {
      transpose_values(a[step >> 1][c][step & 1], raw[step >> 1][c][step & 1]);
    }
  }
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < kChunkGroup; ++c) {
#pragma unroll
    for (int step = 0; step < 2 * kPages; ++step) {
      wgmma_m64k32_e4m3_rs(tile[c], a[step >> 1][c][step & 1], weights + 2 * step, step != 0);
    }
  }
  wgmma_commit_group();
}

// The block's pages are no longer read.
__device__ __forceinline__ void release_pages(Storage& s, const unsigned (&stage)[kPages]) {
  __syncwarp();
  if ((threadIdx.x & 31) != 0) return;
#pragma unroll
  for (int page = 0; page < kPages; ++page) {
    mbarrier_arrive(shared_address(&s.barriers.stage_empty[stage[page]]));
  }
}

// [S8] One block; `stage` holds its pages. Where registers allow, V of the next group is loaded while
// the tensor core works on this one.
__device__ __forceinline__ void output_block(Outputs& o, Storage& s, int half,
                                             const unsigned (&stage)[kPages], unsigned buffer,
                                             const TraceOutput& trace) {
  const unsigned long long weights = weights_desc(s, buffer);
  GroupValues raw, a;
  if (kLoadAhead) load_group(raw, s, half, stage, 0);
  const int4 raised = *reinterpret_cast<const int4*>(s.raised[buffer]);
  if (raised.x | raised.y | raised.z | raised.w) scale_outputs(o, s.raise_factor[buffer]);
#pragma unroll
  for (int group = 0; group < kOutputChunks; group += kChunkGroup) {
    const bool last = group + kChunkGroup == kOutputChunks;
    float tile[kChunkGroup][kTileRegisters];
    if (!kLoadAhead) load_group(raw, s, half, stage, group);
    issue_group(tile, a, raw, weights);
    if (last) release_pages(s, stage);
    if (kLoadAhead && !last) load_group(raw, s, half, stage, group + kChunkGroup);
    wgmma_wait_group<0>();
#pragma unroll
    for (int c = 0; c < kChunkGroup; ++c) {
      promote(o[group + c], tile[c], s.block_factor[buffer]);
      trace.chunk(group + c, tile[c], o[group + c]);
    }
  }
  __syncwarp();
  if ((threadIdx.x & 31) == 0) {
    mbarrier_arrive(shared_address(&s.barriers.weights_empty[buffer]));
  }
}

// [S9] Divide by L and store: bf16 where the split is the only one, fp32 partials otherwise.
__device__ __forceinline__ void store_outputs(const Outputs& o, const MlaDecodeParams& p,
                                              const Storage& s, const Split& split, int half) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  const int first_split = p.num_splits[split.req];
  const bool single = p.num_splits[split.req + 1] - first_split == 1;
  const long long block = single ? split.req : first_split + split.split;
  const int dim = 256 * half + 16 * warp + 2 * (lane >> 2);
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
    for (int d = 0; d < 2; ++d) {
      const float inverse = s.sum_inverse[(lane & 3) * kFactorStride + 2 * j + d];
      const int row = blockIdx.x * kTileM + 8 * j + 2 * (lane & 3) + d;
      if (row >= p.num_rows) continue;
      const long long at = (block * p.num_rows + row) * kKvLoraRank + dim;
#pragma unroll
      for (int c = 0; c < kOutputChunks; ++c) {
        const float x = hold(__fmul_rn(o[c][4 * j + d], inverse));
        const float y = hold(__fmul_rn(o[c][4 * j + 2 + d], inverse));
        if (single) {
          reinterpret_cast<unsigned*>(p.out)[(at + 64 * c) >> 1] = cvt_bf16x2(y, x);
        } else {
          *reinterpret_cast<float2*>(p.o_accum + at + 64 * c) = make_float2(x, y);
        }
      }
    }
  }
}

__device__ __forceinline__ void output_role(const MlaDecodeParams& p, Storage& s, int half) {
  const int lane = threadIdx.x & 31;
  Schedule schedule(p);
  Split split;
  Ring<kStages> stage;
  Ring<kBuffers> buffer;
  Profile<kOutputIntervals> profile;
  unsigned phase = 0;
  while (schedule.next(split)) {
    Outputs o = {};
    // The Q tile's place in the ring; not waited for: nothing here would keep it from its next phase.
    if (kQueryInRegisters) stage.advance();
#pragma unroll 1
    for (int block = split.begin; block < split.end; ++block) {
      const TraceOutput trace(p, split.req, block, half);
      MBARRIER_WAIT(shared_address(&s.barriers.weights_full[buffer.index]), buffer.phase);
      profile.mark(kProfileWaitWeights);
      // The copies' own barriers make their writes visible to this thread; they completed long ago.
      unsigned pages[kPages];
#pragma unroll
      for (int page = 0; page < kPages; ++page) {
        MBARRIER_WAIT(shared_address(&s.barriers.stage_full[stage.index]), stage.phase);
        pages[page] = stage.index;
        stage.advance();
      }
      profile.mark(kProfileWaitStage);
      output_block(o, s, half, pages, buffer.index, trace);
      profile.mark(kProfileOutput);
      buffer.advance();
    }
    MBARRIER_WAIT(shared_address(&s.barriers.sum_full), phase);
    store_outputs(o, p, s, split, half);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&s.barriers.sum_empty));
    phase ^= 1;
    profile.mark(kProfileStore);
  }
  if (threadIdx.x % kWarpgroup == 0) profile.store(profile_slot(p, kOutputLeftRole + half));
}
