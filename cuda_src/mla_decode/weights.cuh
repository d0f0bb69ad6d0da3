// The score warpgroup: scores to quantised weights, [S2] to [S7] and the row part of [S9].
#pragma once

#include "common/log2.cuh"
#include "common/profile.cuh"
#include "common/softmax.cuh"
#include "mla_decode/schedule.cuh"
#include "mla_decode/scores.cuh"
#include "mla_decode/storage.cuh"
#include "mla_decode/trace.cuh"
#include "ptx/fence.cuh"

// Where the score warps' cycles go.
enum ScoreInterval {
  kProfileWaitTokens,  // for a block's token factors
  kProfileIssue,       // issuing S
  kProfileSoftmax,     // logits, maximum, weights, row sums
  kProfileWaitBuffer,  // for a free P tile
  kProfilePublish,     // storing P and the factors
  kProfileWaitScores,  // for S of the next block
  kProfileSplit,       // start and end of a split
  kScoreIntervals
};
using ScoreProfile = Profile<kScoreIntervals>;

// A thread's two rows: 16 warp + lane / 4, and 8 below. Token columns: 8 j + 2 (lane % 4) + {0, 1}.
struct RowPair {
  float factor[2];     // c, [S0]
  float reference[2];  // R
  float row_sum[2];    // L of this lane
};

// [S0] start of a split for this thread's rows.
__device__ __forceinline__ void start_rows(RowPair& rows, const MlaDecodeParams& p, int req,
                                           int row) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = row + 8 * half;
    const float scale =
        at < p.num_rows ? p.q_scale[static_cast<long long>(req) * p.num_rows + at] : 0.0f;
    rows.factor[half] = clamp_keep_nan(__fmul_rn(scale, p.logit_factor), kFltMinNormal, kFltMax);
    rows.reference[half] = kNegInf;
    rows.row_sum[half] = 0.0f;
  }
}

// [S3] u = fma(S ks, c, lk), in place.
__device__ __forceinline__ void scores_to_logits(float (&x)[kScores], const RowPair& rows,
                                                 const float4* token_scale) {
  const int lane = threadIdx.x & 3;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float4 token = token_scale[4 * j + lane];
    x[4 * j + 0] = __fmaf_rn(__fmul_rn(x[4 * j + 0], token.x), rows.factor[0], token.z);
    x[4 * j + 1] = __fmaf_rn(__fmul_rn(x[4 * j + 1], token.y), rows.factor[0], token.w);
    x[4 * j + 2] = __fmaf_rn(__fmul_rn(x[4 * j + 2], token.x), rows.factor[1], token.z);
    x[4 * j + 3] = __fmaf_rn(__fmul_rn(x[4 * j + 3], token.y), rows.factor[1], token.w);
  }
}

// [S3] visible u held within +-2^100, masked u = -inf. `limit` counts from the block's start.
__device__ __forceinline__ void hold_and_mask(float (&u)[kScores], const int (&limit)[2]) {
  const int lane = threadIdx.x & 3;
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const int token = 8 * (i >> 2) + 2 * lane + (i & 1);
    const float held = clamp_keep_nan(u[i], -kLogitMax, kLogitMax);
    u[i] = token < limit[(i >> 1) & 1] ? held : kNegInf;
  }
}

// [S4] M of both rows.
__device__ __forceinline__ void block_max(float (&top)[2], const float (&u)[kScores]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float lane_top = kNegInf;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      lane_top = fmaxf(lane_top, fmaxf(u[4 * j + 2 * half], u[4 * j + 2 * half + 1]));
    }
    top[half] = quad_max(lane_top);
  }
}

// [S5] e in place of u, and l of [S7].
__device__ __forceinline__ void logits_to_weights(float (&x)[kScores], float (&lane_sum)[2],
                                                  const float (&n)[2],
                                                  const float2* token_inverse) {
  const int lane = threadIdx.x & 3;
  lane_sum[0] = lane_sum[1] = 0.0f;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 inverse = token_inverse[4 * j + lane];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& first = x[4 * j + 2 * half];
      float& second = x[4 * j + 2 * half + 1];
      first = ex2_approx_ftz(__fsub_rn(first, n[half]));
      second = ex2_approx_ftz(__fsub_rn(second, n[half]));
      lane_sum[half] = __fmaf_rn(first, inverse.x, lane_sum[half]);
      lane_sum[half] = __fmaf_rn(second, inverse.y, lane_sum[half]);
    }
  }
}

// [S5] P codes of one row, four tokens a word. Word m holds tokens 16 m + 2 lane + {0, 1, 8, 9}:
// the order in which the output warps' fragments of V take them, so nothing moves between lanes.
__device__ __forceinline__ unsigned pack_weights(const float (&e)[kScores], int m, int half) {
  const unsigned low = cvt_e4m3x2(e[8 * m + 2 * half + 1], e[8 * m + 2 * half]);
  const unsigned high = cvt_e4m3x2(e[8 * m + 2 * half + 5], e[8 * m + 2 * half + 4]);
  return low | (high << 16);
}

__device__ __forceinline__ void store_weights(unsigned char* tile, const float (&e)[kScores]) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = 16 * warp + 8 * half + (lane & 7);
    const unsigned unit = (lane >> 3) ^ ((row >> 1) & 3);
    stmatrix_x4(shared_address(tile) + row * 64 + unit * 16, pack_weights(e, 0, half),
                pack_weights(e, 1, half), pack_weights(e, 2, half), pack_weights(e, 3, half));
  }
}

// [S6] and [S7]: raise the references, update L; t and r for the output warps.
__device__ __forceinline__ void update_rows(RowPair& rows, const float (&top)[2],
                                            const float (&n)[2], const float (&lane_sum)[2],
                                            float (&t)[2], float (&r)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool raise = top[half] > __fadd_rn(rows.reference[half], kRaiseThreshold);
    r[half] = raise ? ex2_approx_ftz(__fsub_rn(rows.reference[half], top[half])) : 1.0f;
    rows.reference[half] = raise ? top[half] : rows.reference[half];
    const float scaled = ex2_approx_ftz(__fsub_rn(n[half], rows.reference[half]));
    t[half] = top[half] == kNegInf ? 0.0f : scaled;
    rows.row_sum[half] =
        __fmaf_rn(lane_sum[half], t[half], __fmul_rn(rows.row_sum[half], r[half]));
  }
}

// Wait until the output warps have read the buffer. Score warps without rows wait too: one that ran
// ahead would arrive for a later block in the place of a warp that is still at this one.
__device__ __forceinline__ void wait_buffer(Storage& s, const Ring<kBuffers>& ring) {
  MBARRIER_WAIT(shared_address(&s.barriers.weights_empty[ring.index]), ring.phase ^ 1);
}

// Hand P, t and r of a block to the output warps.
__device__ __forceinline__ void publish_weights(Storage& s, const Ring<kBuffers>& ring,
                                                const float (&e)[kScores], const float (&t)[2],
                                                const float (&r)[2], bool first,
                                                ScoreProfile& profile) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  const bool raised = __any_sync(0xffffffffu, r[0] != 1.0f || r[1] != 1.0f) && !first;
  profile.mark(kProfileSoftmax);
  wait_buffer(s, ring);
  profile.mark(kProfileWaitBuffer);
  store_weights(s.weights[ring.index], e);
  if ((lane & 3) == 0) {
    const int row = 16 * warp + (lane >> 2);
    s.block_factor[ring.index][factor_index(row)] = t[0];
    s.block_factor[ring.index][factor_index(row + 8)] = t[1];
    // r is written also where this warp's rows stay: another warp's raise makes all of it read.
    s.raise_factor[ring.index][factor_index(row)] = r[0];
    s.raise_factor[ring.index][factor_index(row + 8)] = r[1];
  }
  if (lane == 0) s.raised[ring.index][warp] = raised;
  fence_proxy_async_shared();
}

// [S3]..[S7] of one block. `limit` is where each row's visible tokens end, from the block's start;
// `masked`: some row of the CTA does not see the whole block.
__device__ __forceinline__ void softmax_block(float (&x)[kScores], RowPair& rows, Storage& s,
                                              unsigned stage, const Ring<kBuffers>& ring,
                                              const int (&limit)[2], bool masked, bool first,
                                              const TraceBlock& trace, ScoreProfile& profile) {
  float top[2], n[2], lane_sum[2], t[2], r[2];
  trace.scores(x);
  scores_to_logits(x, rows, s.token_scale[stage]);
  block_max(top, x);
  // Holding changes nothing while the maximum is moderate; a NaN maximum cannot occur.
  const bool extreme = !(fabsf(top[0]) < kLogitSafe && fabsf(top[1]) < kLogitSafe);
  if (masked || __any_sync(0xffffffffu, extreme)) {
    hold_and_mask(x, limit);
    block_max(top, x);
  }
  n[0] = top[0] == kNegInf ? 0.0f : __fsub_ru(top[0], kLog2Fp8Max);
  n[1] = top[1] == kNegInf ? 0.0f : __fsub_ru(top[1], kLog2Fp8Max);
  logits_to_weights(x, lane_sum, n, s.token_inverse[stage]);
  update_rows(rows, top, n, lane_sum, t, r);
  publish_weights(s, ring, x, t, r, first, profile);
  trace.rows(top, n, t, r, rows.reference, rows.row_sum, x);
}

// [S9] 1 / L for the output warps, and the rows' lse.
__device__ __forceinline__ void finish_rows(const RowPair& rows, const MlaDecodeParams& p,
                                            Storage& s, const Split& split, int row) {
  const int lane = threadIdx.x & 31;
  const int first_split = p.num_splits[split.req];
  const bool single = p.num_splits[split.req + 1] - first_split == 1;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = quad_sum(rows.row_sum[half]);
    const bool empty = total == 0.0f;
    const int at = row + 8 * half;
    if ((lane & 3) != 0) continue;
    s.sum_inverse[factor_index(at & (kTileM - 1))] = empty ? 0.0f : __frcp_rn(total);
    const float lse2 = empty ? kNegInf : __fadd_rn(rows.reference[half], log2_soft(total));
    if (at >= p.num_rows) continue;
    if (single) {
      const int query = at / p.num_heads_q, head = at % p.num_heads_q;
      const long long line = static_cast<long long>(split.req) * p.num_heads_q + head;
      p.lse[line * p.seq_len_q + query] = natural_lse(lse2);
    } else {
      p.lse_accum[static_cast<long long>(first_split + split.split) * p.num_rows + at] = lse2;
    }
  }
}

// One step of the score pipeline: S of the next block is computed while this one is weighted.
struct ScoreLoop {
  const MlaDecodeParams& p;
  Storage& s;
  RowPair rows;
  int row;     // this thread's first row within the request
  int limit[2];
  int min_limit;  // of the CTA's rows
  Ring<kStages> stage;     // of the block whose scores are issued next
  Ring<kBuffers> buffer;   // of the block that is weighted next
  ScoreProfile profile;

  // The split's Q tile: into registers, which frees its place in the ring (the output warps' share
  // of the arrivals included), or just there.
  __device__ __forceinline__ void take_query(QueryFragments& q, unsigned phase) {
    if constexpr (kQueryInRegisters) {
      MBARRIER_WAIT(shared_address(&s.barriers.stage_full[stage.index]), stage.phase);
      load_query(q, s.stages[stage.index]);
      __syncwarp();
      if ((threadIdx.x & 31) == 0) {
        mbarrier_arrive_count(shared_address(&s.barriers.stage_empty[stage.index]),
                              kOutputWarps / kScoreWarps);
      }
      stage.advance();
    } else {
      MBARRIER_WAIT(shared_address(&s.barriers.query_full), phase);
    }
  }

  __device__ __forceinline__ void issue(float (&scores)[kScores], const QueryFragments& q) {
    MBARRIER_WAIT(shared_address(&s.barriers.tokens_ready[stage.index]), stage.phase);
    profile.mark(kProfileWaitTokens);
    issue_scores(scores, q, s, stage.index);
    stage.advance();
    profile.mark(kProfileIssue);
  }

  // Weight block `block`, whose scores are in `x` and whose tokens are in `from`.
  __device__ __forceinline__ void weigh(float (&x)[kScores], unsigned from, int block,
                                        const Split& split) {
    const int start = block * kBlockN;
    const int local[2] = {limit[0] - start, limit[1] - start};
    const bool active = ((threadIdx.x >> 5) & 3) * 16 < kRows;
    if (active) {
      const TraceBlock trace(p, split.req, block, row);
      softmax_block(x, rows, s, from, buffer, local, start + kBlockN > min_limit,
                    block == split.begin, trace, profile);
    } else {
      wait_buffer(s, buffer);
    }
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
      mbarrier_arrive(shared_address(&s.barriers.weights_full[buffer.index]));
    }
    buffer.advance();
    profile.mark(kProfilePublish);
  }

  __device__ __forceinline__ void wait_scores() {
    wgmma_wait_group<0>();
    profile.mark(kProfileWaitScores);
  }

  __device__ __forceinline__ void run(const QueryFragments& q, const Split& split) {
    const int count = split.end - split.begin;
    if (count == 0) return;
    float even[kScores], odd[kScores];
    unsigned from = stage.index;
    issue(even, q);
    wait_scores();
    int block = split.begin;
#pragma unroll 1
    for (; block + 2 < split.end; block += 2) {
      unsigned next = stage.index;
      issue(odd, q);
      weigh(even, from, block, split);
      wait_scores();
      from = stage.index;
      issue(even, q);
      weigh(odd, next, block + 1, split);
      wait_scores();
    }
    if (block + 1 < split.end) {
      const unsigned next = stage.index;
      issue(odd, q);
      weigh(even, from, block, split);
      wait_scores();
      weigh(odd, next, block + 1, split);
    } else {
      weigh(even, from, block, split);
    }
  }
};

__device__ __forceinline__ void score_role(const MlaDecodeParams& p, Storage& s) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  const int first_row = blockIdx.x * kTileM;
  ScoreLoop loop{p, s, {}, first_row + 16 * warp + (lane >> 2)};
  Schedule schedule(p);
  Split split;
  QueryFragments q;
  unsigned phase = 0;
  while (schedule.next(split)) {
    start_rows(loop.rows, p, split.req, loop.row);
    loop.limit[0] = row_limit(p, loop.row, split.seqlen);
    loop.limit[1] = row_limit(p, loop.row + 8, split.seqlen);
    loop.min_limit = row_limit(p, first_row, split.seqlen);
    loop.take_query(q, phase);
    loop.profile.mark(kProfileSplit);
    loop.run(q, split);
    if (!kQueryInRegisters) {
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared_address(&s.barriers.query_empty));
    }
    MBARRIER_WAIT(shared_address(&s.barriers.sum_empty), phase ^ 1);  // without rows, too: as above
    if (warp * 16 < kRows) finish_rows(loop.rows, p, s, split, loop.row);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&s.barriers.sum_full));
    phase ^= 1;
    loop.profile.mark(kProfileSplit);
  }
  if (threadIdx.x == 0) loop.profile.store(profile_slot(p, kScoreRole));
}
