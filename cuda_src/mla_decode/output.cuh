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
#include "ptx/fence.cuh"
#include "ptx/ld_shared.cuh"
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

constexpr int kOutputChunks = 4;           // 64-dim chunks of a warpgroup
constexpr int kTileRegisters = kRows / 2;  // accumulator registers of a 64-dim chunk
// Rows of T that are computed together: at 64 rows the halves of T follow each other, which leaves
// the registers that hold the row factors for all chunks.
constexpr int kPartRows = kRows < 32 ? kRows : 32;
constexpr int kParts = kRows / kPartRows;
constexpr int kPartRegisters = kPartRows / 2;
// At 64 rows the next values would cost the score warps 16 registers: measured slower (-7 %).
constexpr bool kLoadAhead = kRows <= 32;

using Outputs = float[kOutputChunks][kTileRegisters];

// Where a lane's 16 bytes of V lie in a stage: the warpgroup's first chunk, tokens 0 .. 31.
__device__ __forceinline__ unsigned value_offset(int half) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  unsigned at = 2 * half * kChunkBytes + lane * 128 + ((warp ^ (lane & 7)) << 4);
  keep_in_register(at);
  return at;
}

// V of 64 dims and 32 tokens as ldmatrix delivers it. `at`: value_offset from the stage's address;
// an odd chunk is the other half of the 128-byte rows.
__device__ __forceinline__ void load_values(unsigned (&raw)[4], unsigned at, int chunk, int step) {
  const unsigned half_row = (chunk & 1) != 0 ? at ^ 64 : at;
  ldmatrix_x4_trans(raw, half_row + (chunk >> 1) * kChunkBytes + 32 * 128 * step);
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

// Factors of the rows of this thread's columns: four rows an element.
using RowFactors = float4[kRows / 16];

__device__ __forceinline__ void load_factors(RowFactors& t, const float* factor) {
  const float4* mine = reinterpret_cast<const float4*>(factor + (threadIdx.x & 3) * kFactorStride);
#pragma unroll
  for (int j = 0; j < kRows / 16; ++j) t[j] = mine[j];
}

// [S8] O = fma(T, t, O) for one part of the rows of a chunk.
__device__ __forceinline__ void promote(float (&o)[kTileRegisters],
                                        const float (&tile)[kPartRegisters], const RowFactors& factor,
                                        int part) {
#pragma unroll
  for (int j = 0; j < kPartRows / 16; ++j) {
    const float4 t = factor[part * (kPartRows / 16) + j];
    float* to = o + part * kPartRegisters + 8 * j;
    to[0] = __fmaf_rn(tile[8 * j + 0], t.x, to[0]);
    to[1] = __fmaf_rn(tile[8 * j + 1], t.y, to[1]);
    to[2] = __fmaf_rn(tile[8 * j + 2], t.x, to[2]);
    to[3] = __fmaf_rn(tile[8 * j + 3], t.y, to[3]);
    to[4] = __fmaf_rn(tile[8 * j + 4], t.z, to[4]);
    to[5] = __fmaf_rn(tile[8 * j + 5], t.w, to[5]);
    to[6] = __fmaf_rn(tile[8 * j + 6], t.z, to[6]);
    to[7] = __fmaf_rn(tile[8 * j + 7], t.w, to[7]);
  }
}

// Matrix descriptor of a P tile and the offset of one k32 step in it.
__device__ __forceinline__ unsigned long long weights_desc(const Storage& s, unsigned buffer) {
  const unsigned base = __shfl_sync(0xffffffffu, shared_address(s.weights[buffer]), 0);
  return kPages == 1 ? wgmma_desc_sw64(base) : wgmma_desc_sw128(base);
}

using ChunkValues = unsigned[2 * kPages][4];  // a k32 step each

// Load V of one chunk. `at`: value_offset from each page's stage.
__device__ __forceinline__ void load_chunk(ChunkValues& raw, const unsigned (&at)[kPages],
                                           int chunk) {
#pragma unroll
  for (int page = 0; page < kPages; ++page) {
    load_values(raw[2 * page], at[page], chunk, 0);
    load_values(raw[2 * page + 1], at[page], chunk, 1);
  }
}

// Start T of one part, from zero, one step a 32 tokens.
__device__ __forceinline__ void issue_part(float (&tile)[kPartRegisters], const ChunkValues& a,
                                           unsigned long long weights) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 2 * kPages; ++step) {
    wgmma_m64k32_e4m3_rs(tile, a[step], weights + 2 * step, step != 0);
  }
  wgmma_commit_group();
}

// The block's pages are no longer read.
__device__ __forceinline__ void release_pages(Storage& s, const unsigned (&stage)[kPages]) {
#pragma unroll
  for (int page = 0; page < kPages; ++page) {
    warp_arrive(shared_address(&s.barriers.stage_empty[stage[page]]));
  }
}

// What was there when looked for ahead of need: a test of a barrier takes some 70 cycles even where
// it succeeds, and here it runs beside the tensor core.
struct Seen {
  bool weights = false;
  bool pages[kPages] = {};
};

// A page's own barrier makes what the copy wrote visible; the token warps waited for it, on whose
// arrival the score warps waited, on whose arrival the output warps do, so it need not be asked
// again. racecheck follows no such chain. Up to 32 rows memory is the limit and asking is free.
#if SNAPMLA_DEBUG
constexpr bool kAskPages = true;
#else
constexpr bool kAskPages = kQueryInRegisters;
#endif

// The blocks of a split, in order.
struct OutputLoop {
  const MlaDecodeParams& p;
  Storage& s;
  const int half;
  const unsigned offset;  // value_offset
  Ring<kStages> stage;    // of the next page
  Ring<kBuffers> buffer;  // of the next block
  Seen seen;
  Profile<kOutputIntervals> profile;

  __device__ __forceinline__ void look_ahead() {
    seen.weights = mbarrier_test_wait_parity(
        shared_address(&s.barriers.weights_full[buffer.index]), buffer.phase);
    if constexpr (!kAskPages) return;
    Ring<kStages> at = stage;
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
      seen.pages[page] =
          mbarrier_test_wait_parity(shared_address(&s.barriers.stage_full[at.index]), at.phase);
      at.advance();
    }
  }

  // Waits for the next block; its pages and its P tile.
  __device__ __forceinline__ unsigned take_block(unsigned (&pages)[kPages]) {
    if (!seen.weights) {
      MBARRIER_WAIT(shared_address(&s.barriers.weights_full[buffer.index]), buffer.phase);
    }
    fence_proxy_async_shared();  // P was written by the score warps, the tensor core reads it
    profile.mark(kProfileWaitWeights);
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
      if (kAskPages && !seen.pages[page]) {
        MBARRIER_WAIT(shared_address(&s.barriers.stage_full[stage.index]), stage.phase);
      }
      pages[page] = stage.index;
      stage.advance();
    }
    profile.mark(kProfileWaitStage);
    const unsigned at = buffer.index;
    buffer.advance();
    return at;
  }

  // [S8] One block.
  __device__ __forceinline__ void run_block(Outputs& o, const TraceOutput& trace) {
    unsigned pages[kPages];
    const unsigned at = take_block(pages);
    const unsigned long long weights = weights_desc(s, at);
    ChunkValues raw, a;
    unsigned values[kPages];
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
      values[page] = shared_address(s.stages[pages[page]].latent) + offset;
    }
    load_chunk(raw, values, 0);
    const int4 raised = *reinterpret_cast<const int4*>(s.raised[at]);
    if (raised.x | raised.y | raised.z | raised.w) scale_outputs(o, s.raise_factor[at]);
    RowFactors factor;
    load_factors(factor, s.block_factor[at]);
#pragma unroll
    for (int chunk = 0; chunk < kOutputChunks; ++chunk) {
      const bool last = chunk + 1 == kOutputChunks;
      if (!kLoadAhead && chunk > 0) load_chunk(raw, values, chunk);
#pragma unroll
      for (int step = 0; step < 2 * kPages; ++step) transpose_values(a[step], raw[step]);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        float tile[kPartRegisters];
        issue_part(tile, a, weights + part * (kPartRows * kBlockN >> 4));
        if (last && part == 0) release_pages(s, pages);
        if (last && part == kParts - 1) look_ahead();
        if (kLoadAhead && !last && part == 0) load_chunk(raw, values, chunk + 1);
        wgmma_wait_group<0>();
        promote(o[chunk], tile, factor, part);
        trace.chunk(chunk, part, tile, o[chunk]);
      }
    }
    warp_arrive(shared_address(&s.barriers.weights_empty[at]));
    profile.mark(kProfileOutput);
  }

  __device__ __forceinline__ void run(Outputs& o, const Split& split) {
    // The Q tile's place in the ring; not waited for: nothing here would keep it from its next phase.
    if (kQueryInRegisters) stage.advance();
    seen = Seen{};
#pragma unroll 1
    for (int block = split.begin; block < split.end; ++block) {
      run_block(o, TraceOutput(p, split.req, block, half));
    }
  }
};

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
  Schedule schedule(p);
  Split split;
  OutputLoop loop{p, s, half, value_offset(half)};
  unsigned phase = 0;
  while (schedule.next(split)) {
    Outputs o = {};
    loop.run(o, split);
    MBARRIER_WAIT(shared_address(&s.barriers.sum_full), phase);
    store_outputs(o, p, s, split, half);
    warp_arrive(shared_address(&s.barriers.sum_empty));
    phase ^= 1;
    loop.profile.mark(kProfileStore);
  }
  if (threadIdx.x % kWarpgroup == 0) loop.profile.store(profile_slot(p, kOutputLeftRole + half));
}
