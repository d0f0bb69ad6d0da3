// Dump of one block's intermediates, by the names of reference.mla_decode(..., trace=True).
//
// Built with SNAPMLA_TRACE only; otherwise every call is empty. The chosen block is named by the
// params trace_req and trace_block; each CTA of the row tiles writes its own rows.
#pragma once

#include "common/softmax.cuh"
#include "mla_decode/storage.cuh"

// Layout of the trace buffer in floats, a row tile after the other.
constexpr int kTraceScores = 0;                                    // S [64][kBlockN]
constexpr int kTraceWeights = kTraceScores + kTileM * kBlockN;     // e [64][kBlockN]
constexpr int kTraceRows = kTraceWeights + kTileM * kBlockN;       // M n t r R [5][64]
constexpr int kTraceSums = kTraceRows + 5 * kTileM;                // L [64][4]
constexpr int kTraceChunk = kTraceSums + 4 * kTileM;               // T [64][512]
constexpr int kTraceOutput = kTraceChunk + kTileM * kKvLoraRank;   // O [64][512]
constexpr int kTraceFloats = kTraceOutput + kTileM * kKvLoraRank;

#if SNAPMLA_TRACE
struct TraceBlock {
  float* base = nullptr;

  __device__ __forceinline__ TraceBlock(const MlaDecodeParams& p, int req, int block) {
    if (req == p.trace_req && block == p.trace_block) {
      base = p.trace + static_cast<long long>(blockIdx.x) * kTraceFloats;
    }
  }

  __device__ __forceinline__ void tile(int at, const float (&x)[kPages][32]) const {
    const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
    for (int page = 0; page < kPages; ++page) {
      for (int i = 0; i < 32; ++i) {
        const int half = (i >> 1) & 1, row = row_of(warp, lane, half);
        if (half >= kHalves || !lane_has_rows(lane)) continue;
        const int token = kBlockSize * page + 8 * (i >> 2) + 2 * (lane & 3) + (i & 1);
        base[at + row * kBlockN + token] = x[page][i];
      }
    }
  }

  __device__ __forceinline__ void scores(const float (&x)[kPages][32]) const {
    if (base) tile(kTraceScores, x);
  }

  __device__ __forceinline__ void rows(const float (&top)[kHalves], const float (&n)[kHalves],
                                       const float (&t)[kHalves], const float (&r)[kHalves],
                                       const float (&reference)[kHalves],
                                       const float (&sum)[kHalves]) const {
    const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
    if (!base || !lane_has_rows(lane)) return;
    for (int half = 0; half < kHalves; ++half) {
      const int row = row_of(warp, lane, half);
      // As the reference has them where nothing was seen.
      const float shown_n = top[half] == kNegInf ? 0.0f : n[half];
      const float shown_reference = reference[half] == kNoReference ? kNegInf : reference[half];
      const float values[5] = {top[half], shown_n, t[half], r[half], shown_reference};
      for (int i = 0; i < 5; ++i) base[kTraceRows + i * kTileM + row] = values[i];
      base[kTraceSums + row * 4 + (lane & 3)] = sum[half];
    }
  }

  // Each page's weights, just before their registers are used again.
  __device__ __forceinline__ void weights(const float (&x)[32], int page) const {
    const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
    if (!base || !lane_has_rows(lane)) return;
    for (int i = 0; i < 32; ++i) {
      const int half = (i >> 1) & 1;
      const int token = kBlockSize * page + 8 * (i >> 2) + 2 * (lane & 3) + (i & 1);
      if (half < kHalves) base[kTraceWeights + row_of(warp, lane, half) * kBlockN + token] = x[i];
    }
  }
};

struct TraceOutput {
  float* base = nullptr;
  int half;

  __device__ __forceinline__ TraceOutput(const MlaDecodeParams& p, int req, int block, int h)
      : half(h) {
    if (req == p.trace_req && block == p.trace_block) {
      base = p.trace + static_cast<long long>(blockIdx.x) * kTraceFloats;
    }
  }

  // One part of the rows of a chunk, after its promotion.
  template <int kRegisters>
  __device__ __forceinline__ void chunk(int c, int part, const float (&tile)[kRegisters],
                                        const float (&o)[kRows / 2]) const {
    if (!base) return;
    const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
    for (int i = 0; i < kRegisters; ++i) {
      const int row = 2 * kRegisters * part + 8 * (i >> 2) + 2 * (lane & 3) + (i & 1);
      const int dim = 256 * half + 64 * c + 16 * warp + 2 * (lane >> 2) + ((i >> 1) & 1);
      base[kTraceChunk + row * kKvLoraRank + dim] = tile[i];
      base[kTraceOutput + row * kKvLoraRank + dim] = o[kRegisters * part + i];
    }
  }
};
#else
struct TraceBlock {
  __device__ __forceinline__ TraceBlock(const MlaDecodeParams&, int, int) {}
  __device__ __forceinline__ void scores(const float (&)[kPages][32]) const {}
  __device__ __forceinline__ void weights(const float (&)[32], int) const {}
  __device__ __forceinline__ void rows(const float (&)[kHalves], const float (&)[kHalves],
                                       const float (&)[kHalves], const float (&)[kHalves],
                                       const float (&)[kHalves], const float (&)[kHalves]) const {}
};

struct TraceOutput {
  __device__ __forceinline__ TraceOutput(const MlaDecodeParams&, int, int, int) {}
  template <int kRegisters>
  __device__ __forceinline__ void chunk(int, int, const float (&)[kRegisters],
                                        const float (&)[kRows / 2]) const {}
};
#endif
