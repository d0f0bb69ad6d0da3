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

// Where a lane reads, from the addresses of what it reads in.
struct OutputPlaces {
  // 16 bytes of V in a stage: the warpgroup's first 64-dim chunk and its second, tokens 0 .. 31. The
  // second chunk is the other half of the 128-byte rows.
  unsigned even, odd;
  unsigned factors;  // the row factors of P tile 0, from their array

  __device__ __forceinline__ OutputPlaces(const Storage& s, int half) {
    const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
    even = 2 * half * kChunkBytes + lane * 128 + ((warp ^ (lane & 7)) << 4);
    odd = even ^ 64;
    factors = shared_address(s.weights) + (lane & 3) * (kFactorStride * 4);
    keep_in_register(even);
    keep_in_register(odd);
    keep_in_register(factors);
  }
};

// The A fragment of V^T for one k32 step. Rows: dims 2 (lane / 4) and + 1; slots of its columns hold
// tokens in the order of pack_weights.
__device__ __forceinline__ void transpose_values(unsigned (&a)[4], const unsigned (&raw)[4]) {
  a[0] = __byte_perm(raw[0], raw[1], 0x6420);
  a[1] = __byte_perm(raw[0], raw[1], 0x7531);
  a[2] = __byte_perm(raw[2], raw[3], 0x6420);
  a[3] = __byte_perm(raw[2], raw[3], 0x7531);
}

// Factors of the rows of this thread's columns: four rows an element.
using RowFactors = float4[kRows / 16];

__device__ __forceinline__ void load_factors(RowFactors& t, unsigned from) {
#pragma unroll
  for (int j = 0; j < kRows / 16; ++j) t[j] = ld_shared_v4_f32(from + 16 * j);
}

// O *= factor by row (columns of the accumulator).
__device__ __forceinline__ void scale_outputs(Outputs& o, unsigned factors) {
#pragma unroll
  for (int j = 0; j < kRows / 16; ++j) {
    const float4 f = ld_shared_v4_f32(factors + 16 * j);
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

// Shared address of P tile 0, kept in a uniform register: an address that is built anew in each block
// costs a read of a special register there.
__device__ __forceinline__ unsigned weights_address(const Storage& s) {
  return __shfl_sync(0xffffffffu, shared_address(s.weights), 0);
}

// Matrix descriptor of P tile 0; of the other one, and of a k32 step, by constant distances.
__device__ __forceinline__ unsigned long long weights_desc(unsigned weights) {
  return kPages == 1 ? wgmma_desc_sw64(weights) : wgmma_desc_sw128(weights);
}

using ChunkValues = unsigned[2 * kPages][4];  // a k32 step each

// V of one chunk as ldmatrix delivers it; stages: of the block's pages.
__device__ __forceinline__ void load_chunk(ChunkValues& raw, const unsigned (&stages)[kPages],
                                           const OutputPlaces& places, int chunk) {
  const unsigned place = ((chunk & 1) != 0 ? places.odd : places.even) + (chunk >> 1) * kChunkBytes;
#pragma unroll
  for (int page = 0; page < kPages; ++page) {
    ldmatrix_x4_trans(raw[2 * page], stages[page] + place);
    ldmatrix_x4_trans(raw[2 * page + 1], stages[page] + place + 32 * 128);
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

// A page's own barrier makes what the copy wrote visible; the token warps waited for it, on whose
// arrival the score warps waited, on whose arrival the output warps do, so it need not be asked
// again. racecheck follows no such chain.
#if SNAPMLA_DEBUG
constexpr bool kAskPages = true;
#else
constexpr bool kAskPages = false;
#endif

// The blocks of a split, in order.
struct OutputLoop {
  const MlaDecodeParams& p;
  Storage& s;
  const int half;
  const OutputPlaces places;
  const unsigned weights;            // weights_address
  const unsigned long long desc;     // weights_desc
  StageRing ring;                    // of the next page
  WeightsPhases phases;
  Profile<kOutputIntervals> profile;

  __device__ __forceinline__ OutputLoop(const MlaDecodeParams& p_, Storage& s_, int half_)
      : p(p_),
        s(s_),
        half(half_),
        places(s_, half_),
        weights(weights_address(s_)),
        desc(weights_desc(weights)),
        ring(s_) {}

  // Address of P tile `buffer` and of what belongs to it.
  __device__ __forceinline__ unsigned weights_at(unsigned buffer) const {
    return weights + buffer * kWeightsBytes;
  }

  // Waits for the block in P tile `buffer`; the stages of its pages.
  __device__ __forceinline__ void take_block(unsigned (&stages)[kPages], unsigned buffer) {
    MBARRIER_WAIT(weights_at(buffer) + OFFSET_OF(Weights, full), phases.parity(buffer));
    phases.pass(buffer);
    fence_proxy_async_shared();  // P was written by the score warps, the tensor core reads it
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
      if (kAskPages) MBARRIER_WAIT(full_barrier(ring.at), ring.phase);
      stages[page] = ring.at;
      ring.advance();
    }
    profile.mark(kProfileWaitWeights);
  }

  // The block's pages are no longer read.
  __device__ __forceinline__ void release_pages(const unsigned (&stages)[kPages]) {
#pragma unroll
    for (int page = 0; page < kPages; ++page) warp_arrive(empty_barrier(stages[page]));
  }

  // [S8] One block. `buffer`, its P tile, is known at compile time.
  __device__ __forceinline__ void run_block(Outputs& o, unsigned buffer, const TraceOutput& trace) {
    const unsigned kBlockFactor = OFFSET_OF(Weights, block_factor);
    const unsigned kRaiseFactor = OFFSET_OF(Weights, raise_factor);
    const unsigned factors = places.factors + buffer * kWeightsBytes;
    const unsigned long long tile_desc = desc + buffer * (kWeightsBytes >> 4);
    unsigned stages[kPages];
    take_block(stages, buffer);
    ChunkValues raw, a;
    load_chunk(raw, stages, places, 0);
    const uint4 raised = ld_shared_v4(weights_at(buffer) + OFFSET_OF(Weights, raised));
    if (raised.x | raised.y | raised.z | raised.w) scale_outputs(o, factors + kRaiseFactor);
    RowFactors factor;
    load_factors(factor, factors + kBlockFactor);
#pragma unroll
    for (int chunk = 0; chunk < kOutputChunks; ++chunk) {
      const bool last = chunk + 1 == kOutputChunks;
      if (!kLoadAhead && chunk > 0) load_chunk(raw, stages, places, chunk);
#pragma unroll
      for (int step = 0; step < 2 * kPages; ++step) transpose_values(a[step], raw[step]);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        float tile[kPartRegisters];
        issue_part(tile, a, tile_desc + part * (kPartRows * kBlockN >> 4));
        if (last && part == 0) release_pages(stages);
        if (kLoadAhead && !last && part == 0) load_chunk(raw, stages, places, chunk + 1);
        wgmma_wait_group<0>();
        promote(o[chunk], tile, factor, part);
        trace.chunk(chunk, part, tile, o[chunk]);
      }
    }
    warp_arrive(weights_at(buffer) + OFFSET_OF(Weights, empty));
    profile.mark(kProfileOutput);
  }

  __device__ __forceinline__ void run(Outputs& o, const Split& split) {
    // The Q tile's place in the ring; not waited for: nothing here would keep it from its next phase.
    if (kQueryInRegisters) ring.advance();
    int block = split.begin;
#pragma unroll 1
    while (block < split.end) {
      run_block(o, 0, TraceOutput(p, split.req, block, half));
      if (++block == split.end) break;
      run_block(o, 1, TraceOutput(p, split.req, block, half));
      ++block;
    }
  }
};

// [S9] o = hold(O / L); `inverse`: address of 1 / L of a lane's rows. Hardly ever does a value need to
// be held; the code of the usual case is short, since it runs once a split and comes from far.
__device__ __forceinline__ void divide_outputs(Outputs& o, unsigned inverse) {
  scale_outputs(o, inverse);
  float largest = 0.0f;
#pragma unroll
  for (int c = 0; c < kOutputChunks; ++c) {
#pragma unroll
    for (int i = 0; i < kTileRegisters; ++i) largest = fmaxf(largest, fabsf(o[c][i]));  // NaN is kept
  }
  if (__builtin_expect(largest > kBf16Max, 0)) {
#pragma unroll
    for (int c = 0; c < kOutputChunks; ++c) {
#pragma unroll
      for (int i = 0; i < kTileRegisters; ++i) o[c][i] = hold(o[c][i]);
    }
  }
}

// Two dims of a row, in bf16 and in fp32.
__device__ __forceinline__ void store_pair(unsigned short* to, float x, float y) {
  *reinterpret_cast<unsigned*>(to) = cvt_bf16x2(y, x);
}
__device__ __forceinline__ void store_pair(float* to, float x, float y) {
  *reinterpret_cast<float2*>(to) = make_float2(x, y);
}

// This lane's rows of a result [rows][512], from its first row on, of which `rows` exist, at `to`. All
// places are constant distances from there.
template <class T>
__device__ __forceinline__ void store_rows(T* to, int rows, const Outputs& o) {
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
    for (int d = 0; d < 2; ++d) {
      if (8 * j + d >= rows) continue;
#pragma unroll
      for (int c = 0; c < kOutputChunks; ++c) {
        store_pair(to + (8 * j + d) * kKvLoraRank + 64 * c, o[c][4 * j + d], o[c][4 * j + 2 + d]);
      }
    }
  }
}

// [S9] Divide by L and store: bf16 where the split is the only one, fp32 partials otherwise.
__device__ __forceinline__ void store_outputs(Outputs& o, const MlaDecodeParams& p, const Storage& s,
                                              const Split& split, int half) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  divide_outputs(o, shared_address(s.sum_inverse) + (lane & 3) * (kFactorStride * 4));
  const bool single = split.result == kOnlySplit;
  const long long block = single ? split.req : split.result;
  const int row = blockIdx.x * kTileM + 2 * (lane & 3);
  const int dim = 256 * half + 16 * warp + 2 * (lane >> 2);
  const long long at = (block * p.num_rows + row) * kKvLoraRank + dim;
  if (single) {
    store_rows(static_cast<unsigned short*>(p.out) + at, p.num_rows - row, o);
  } else {
    store_rows(p.o_accum + at, p.num_rows - row, o);
  }
}

__device__ __forceinline__ void output_role(const MlaDecodeParams& p, Storage& s, int half) {
  Schedule schedule(p);
  Split split;
  OutputLoop loop(p, s, half);
  unsigned phase = 0;
  while (schedule.next(split)) {
    Outputs o = {};
    loop.run(o, split);
    MBARRIER_WAIT(shared_address(&s.sum_full), phase);
    store_outputs(o, p, s, split, half);
    warp_arrive(shared_address(&s.sum_empty));
    phase ^= 1;
    loop.profile.mark(kProfileStore);
  }
  if (threadIdx.x % kWarpgroup == 0) loop.profile.store(profile_slot(p, kOutputLeftRole + half));
}
