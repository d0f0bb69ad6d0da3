// The score warpgroup: scores to quantised weights, [S2] to [S7] and the row part of [S9].
#pragma once

#include "common/log2.cuh"
#include "common/profile.cuh"
#include "common/softmax.cuh"
#include "mla_decode/schedule.cuh"
#include "mla_decode/scores.cuh"
#include "mla_decode/storage.cuh"
#include "mla_decode/trace.cuh"
#include "ptx/ld_shared.cuh"

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

// Token groups whose terms of l are summed before the hand-over: with Q in registers there is no
// room for their factors then.
constexpr int kEarlySums = kQueryInRegisters ? 0 : 4;

using Scores = float[kPages][kScores];
using PerRow = float[kHalves];

// A thread's rows (row_of). Its token columns: 8 j + 2 (lane % 4) + {0, 1} of each page; element
// 4 j + 2 half + pair of the accumulator.
struct Rows {
  PerRow factor;     // c, [S0]
  PerRow reference;  // R
  PerRow row_sum;    // L of this lane
};

// [S0] start of a split for this thread's rows; `row` is the first one's place in the request.
__device__ __forceinline__ void start_rows(Rows& rows, const MlaDecodeParams& p, int req, int row) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int at = row + 8 * half;
    const float scale =
        at < p.num_rows ? p.q_scale[static_cast<long long>(req) * p.num_rows + at] : 0.0f;
    rows.factor[half] = clamp_keep_nan(__fmul_rn(scale, p.logit_factor), kFltMinNormal, kFltMax);
    rows.reference[half] = kNegInf;
    rows.row_sum[half] = 0.0f;
  }
}

// ks and lk of this thread's token columns of a page ([S3]).
struct TokenScales {
  float4 pair[8];

  __device__ __forceinline__ explicit TokenScales(const float4* token_scale) {
    const unsigned from = shared_address(token_scale + (threadIdx.x & 3));
#pragma unroll
    for (int j = 0; j < 8; ++j) pair[j] = ld_shared_v4_f32(from + 64 * j);
  }
};

// rk of the token groups kBegin .. kEnd - 1 of those columns ([S7]).
template <int kBegin, int kEnd>
struct TokenInverses {
  float2 pair[kEnd > kBegin ? kEnd - kBegin : 1];

  __device__ __forceinline__ explicit TokenInverses(const float2* token_inverse) {
    const unsigned from = shared_address(token_inverse + 4 * kBegin + (threadIdx.x & 3));
#pragma unroll
    for (int j = 0; j < kEnd - kBegin; ++j) pair[j] = ld_shared_v2_f32(from + 32 * j);
  }
};

// [S3] u = fma(S ks, c, lk), in place.
__device__ __forceinline__ void scores_to_logits(float (&x)[kScores], const Rows& rows,
                                                 const TokenScales& scales) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float4 token = scales.pair[j];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float& first = x[4 * j + 2 * half];
      float& second = x[4 * j + 2 * half + 1];
      first = __fmaf_rn(__fmul_rn(first, token.x), rows.factor[half], token.z);
      second = __fmaf_rn(__fmul_rn(second, token.y), rows.factor[half], token.w);
    }
  }
}

// [S3] visible u held within +-2^100, masked u = -inf. `limit` counts from the page's start.
__device__ __forceinline__ void hold_and_mask(float (&u)[kScores], const int (&limit)[kHalves]) {
  const int lane = threadIdx.x & 3;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i) {
      const int token = 8 * j + 2 * lane + (i & 1);
      float& logit = u[4 * j + i];
      const float held = clamp_keep_nan(logit, -kLogitMax, kLogitMax);
      logit = token < limit[i >> 1] ? held : kNegInf;
    }
  }
}

// [S4] M of the rows; NaN where all u of a row are NaN, which counts as extreme (find_max).
__device__ __forceinline__ void block_max(PerRow& top, const Scores& u) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    float lane_top[2];  // two chains: the maximum has no order
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float pair = fmaxf(u[page][4 * j + 2 * half], u[page][4 * j + 2 * half + 1]);
        lane_top[j & 1] = page == 0 && j < 2 ? pair : fmaxf(lane_top[j & 1], pair);
      }
    }
    top[half] = quad_max(fmaxf(lane_top[0], lane_top[1]));
  }
}

// [S5] e in place of u, of a page's token groups kBegin .. kEnd - 1.
template <int kBegin, int kEnd>
__device__ __forceinline__ void logits_to_weights(float (&x)[kScores], const PerRow& n) {
#pragma unroll
  for (int j = kBegin; j < kEnd; ++j) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float& first = x[4 * j + 2 * half];
      float& second = x[4 * j + 2 * half + 1];
      first = ex2_approx_ftz(__fsub_rn(first, n[half]));
      second = ex2_approx_ftz(__fsub_rn(second, n[half]));
    }
  }
}

// [S7] the terms of l of the same groups, in order.
template <int kBegin, int kEnd>
__device__ __forceinline__ void sum_weights(PerRow& lane_sum, const float (&x)[kScores],
                                            const TokenInverses<kBegin, kEnd>& inverses) {
#pragma unroll
  for (int j = kBegin; j < kEnd; ++j) {
    const float2 inverse = inverses.pair[j - kBegin];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      lane_sum[half] = __fmaf_rn(x[4 * j + 2 * half], inverse.x, lane_sum[half]);
      lane_sum[half] = __fmaf_rn(x[4 * j + 2 * half + 1], inverse.y, lane_sum[half]);
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

// Shared address of 16 slots of a row of a P tile: rows of kBlockN bytes, swizzled as wide.
__device__ __forceinline__ unsigned weights_address(const unsigned char* tile, int row, int unit) {
  const int swizzle = kPages == 1 ? (row >> 1) & 3 : row & 7;
  return shared_address(tile) + row * kBlockN + ((unit ^ swizzle) << 4);
}

__device__ __forceinline__ void store_weights(unsigned char* tile, const float (&e)[kScores],
                                              int page) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    int row = kRowsPerWarp * warp + 8 * half + (lane & 7);
    // Rows that are another warp's land in the tile's unused part.
    if (kRowsPerWarp < 8 && (lane & 7) >= kRowsPerWarp) row = 32 + 8 * warp + (lane & 7);
    stmatrix_x4(weights_address(tile, row, 4 * page + (lane >> 3)), pack_weights(e, 0, half),
                pack_weights(e, 1, half), pack_weights(e, 2, half), pack_weights(e, 3, half));
  }
}

// [S6] raise the references; t and r for the output warps.
__device__ __forceinline__ void raise_rows(Rows& rows, const PerRow& top, const PerRow& n,
                                           PerRow& t, PerRow& r) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const bool raise = top[half] > __fadd_rn(rows.reference[half], kRaiseThreshold);
    r[half] = raise ? ex2_approx_ftz(__fsub_rn(rows.reference[half], top[half])) : 1.0f;
    rows.reference[half] = raise ? top[half] : rows.reference[half];
    const float scaled = ex2_approx_ftz(__fsub_rn(n[half], rows.reference[half]));
    t[half] = top[half] == kNegInf ? 0.0f : scaled;
  }
}

// [S7] L of this lane.
__device__ __forceinline__ void add_row_sums(Rows& rows, const PerRow& lane_sum, const PerRow& t,
                                             const PerRow& r) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    rows.row_sum[half] =
        __fmaf_rn(lane_sum[half], t[half], __fmul_rn(rows.row_sum[half], r[half]));
  }
}

// t and r of a block for the output warps. r is written also where this warp's rows stay: another
// warp's raise makes all of it read. Nothing needs scaling before the first block.
__device__ __forceinline__ void store_factors(Storage& s, unsigned buffer, const PerRow& t,
                                              const PerRow& r, bool first) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  const bool writes = (lane & 3) == 0 && lane_has_rows(lane);
  bool rose = false;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    rose |= r[half] != 1.0f;
    const int at = factor_index(row_of(warp, lane, half));
    st_shared_if(writes, shared_address(&s.block_factor[buffer][at]), t[half]);
    st_shared_if(writes, shared_address(&s.raise_factor[buffer][at]), r[half]);
  }
  const bool raised = __any_sync(0xffffffffu, rose && lane_has_rows(lane)) && !first;
  st_shared_if(lane == 0, shared_address(&s.raised[buffer][warp]), __int_as_float(raised));
}

// [S9] 1 / L for the output warps, and the rows' lse.
__device__ __forceinline__ void finish_rows(const Rows& rows, const MlaDecodeParams& p, Storage& s,
                                            const Split& split, int row) {
  const int lane = threadIdx.x & 31;
  const int first_split = p.num_splits[split.req];
  const bool single = p.num_splits[split.req + 1] - first_split == 1;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const float total = quad_sum(rows.row_sum[half]);
    const bool empty = total == 0.0f;
    const int at = row + 8 * half;
    if ((lane & 3) != 0 || !lane_has_rows(lane)) continue;
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

// The blocks of a split, in order.
struct ScoreLoop {
  const MlaDecodeParams& p;
  Storage& s;
  Rows rows;
  int row;             // this thread's first row within the request
  int limit[kHalves];  // where each row's visible tokens end
  int min_limit;       // the least of the CTA's rows
  unsigned query_place;   // of the Q tile in the ring
  bool tokens_seen;       // the factors of `stage` were there when looked for ahead of need
  Ring<kStages> stage;    // of the page whose scores are issued next
  Ring<kBuffers> buffer;  // of the block that is weighted next
  ScoreProfile profile;

  // The split's Q tile: into registers, or just there.
  __device__ __forceinline__ void take_query(QueryFragments& q, unsigned phase) {
    if constexpr (kQueryInRegisters) {
      // The token warps have passed this place: had they not, freeing it could let them be lapped.
      MBARRIER_WAIT(shared_address(&s.barriers.tokens_ready[stage.index]), stage.phase);
      MBARRIER_WAIT(shared_address(&s.barriers.stage_full[stage.index]), stage.phase);
      load_query(q, s.stages[stage.index]);
      query_place = stage.index;
      stage.advance();
    } else {
      MBARRIER_WAIT(shared_address(&s.barriers.query_full), phase);
    }
  }

  // Frees the Q tile's place in the ring, the output warps' share of the arrivals included. Not
  // before an instruction has used what ldmatrix brought: an arrival can overtake the loads before
  // it, and the next copy into the place then lands before they read (seen on an H200).
  __device__ __forceinline__ void release_query() {
    if constexpr (kQueryInRegisters) {
      warp_arrive(shared_address(&s.barriers.stage_empty[query_place]),
                  kOutputWarps / kScoreWarps);
    }
  }

  // The next page, once its factors are there; its stage.
  __device__ __forceinline__ unsigned take_page() {
    profile.mark(kProfileSoftmax);
    if (!tokens_seen) {
      MBARRIER_WAIT(shared_address(&s.barriers.tokens_ready[stage.index]), stage.phase);
    }
    profile.mark(kProfileWaitTokens);
    const unsigned at = stage.index;
    stage.advance();
    tokens_seen = false;
    return at;
  }

  // A test of a barrier takes some 70 cycles even where it succeeds: made ahead of need, it runs
  // beside the arithmetic. Where it fails, the wait comes in its usual place.
  __device__ __forceinline__ void look_for_page() {
    tokens_seen = mbarrier_test_wait_parity(
        shared_address(&s.barriers.tokens_ready[stage.index]), stage.phase);
  }

  // One piece of S of the next page, where there is one.
  template <bool kNext, int kPiece>
  __device__ __forceinline__ void issue(float (&scores)[kScores], const QueryFragments& q,
                                        const PageOperands& at) {
    if constexpr (!kNext) return;
    profile.mark(kProfileSoftmax);
    issue_piece<kPiece>(scores, q, at);
    profile.mark(kProfileIssue);
  }

  // Start all of S of the next page; returns its stage.
  __device__ __forceinline__ unsigned issue(float (&scores)[kScores], const QueryFragments& q) {
    const unsigned at = take_page();
    issue_scores(scores, q, s, at);
    profile.mark(kProfileIssue);
    return at;
  }

  __device__ __forceinline__ void wait_scores() {
    wgmma_wait_group<0>();
    profile.mark(kProfileWaitScores);
  }

  // [S3], [S4]: M and n of u, held and masked where that matters.
  __device__ __forceinline__ void find_max(Scores& x, int block, PerRow& top, PerRow& n) {
    const int start = block * kBlockN;
    block_max(top, x);
    // Holding changes nothing while the maximum is moderate; a NaN maximum cannot occur.
    bool unusual = start + kBlockN > min_limit;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      unusual |= !(fabsf(top[half]) < kLogitSafe);
      n[half] = __fsub_ru(top[half], kLog2Fp8Max);
      keep_in_register(n[half]);  // computed while the vote below is on its way
    }
    if (__builtin_expect(__any_sync(0xffffffffu, unusual), 0)) {
#pragma unroll
      for (int page = 0; page < kPages; ++page) {
        int local[kHalves];
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          local[half] = limit[half] - start - page * kBlockSize;
        }
        hold_and_mask(x[page], local);
      }
      block_max(top, x);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        top[half] = fmaxf(top[half], kNegInf);
        n[half] = top[half] == kNegInf ? 0.0f : __fsub_ru(top[half], kLog2Fp8Max);
      }
    }
  }

  // The hand-over of the block.
  __device__ __forceinline__ void publish(const PerRow& t, const PerRow& r, bool first) {
    profile.mark(kProfileSoftmax);
    store_factors(s, buffer.index, t, r, first);
    // The readers fence P for the tensor core (output_role).
    warp_arrive(shared_address(&s.barriers.weights_full[buffer.index]));
    buffer.advance();
    profile.mark(kProfilePublish);
  }

  __device__ __forceinline__ bool look_for_buffer() {
    return mbarrier_test_wait_parity(shared_address(&s.barriers.weights_empty[buffer.index]),
                                     buffer.phase ^ 1);
  }

  __device__ __forceinline__ void wait_buffer(bool seen) {
    profile.mark(kProfileSoftmax);
    if (!seen) {
      MBARRIER_WAIT(shared_address(&s.barriers.weights_empty[buffer.index]), buffer.phase ^ 1);
    }
    profile.mark(kProfileWaitBuffer);
  }

  // One page a block: weight `x` while S of the next page is issued into `next`, piece by piece.
  // Loads from shared memory take twice as long beside S, and one that is waited for beside it
  // holds up what is ready: so token factors come before S is on its way, and the terms of l that
  // have no registers for theirs by then are summed when the block has been handed over.
  template <bool kNext>
  __device__ __forceinline__ void weigh_page(Scores& x, unsigned& from, Scores& next, int block,
                                             const Split& split, const QueryFragments& q) {
    const TraceBlock trace(p, split.req, block);
    PerRow top, n, t, r, lane_sum = {};
    trace.scores(x);
    const unsigned own = from;
    if constexpr (kNext) from = take_page();
    const TokenScales scales(s.token_scale[own]);
    const PageOperands at(s, from);
    issue<kNext, 0>(next[0], q, at);
    scores_to_logits(x[0], rows, scales);
    issue<kNext, 1>(next[0], q, at);
    find_max(x, block, top, n);
    raise_rows(rows, top, n, t, r);
    const bool buffer_seen = look_for_buffer();
    const TokenInverses<0, kEarlySums> early(s.token_inverse[own]);
    issue<kNext, 2>(next[0], q, at);
    logits_to_weights<0, 4>(x[0], n);
    issue<kNext, 3>(next[0], q, at);
    sum_weights(lane_sum, x[0], early);
    logits_to_weights<4, 8>(x[0], n);
    trace.weights(x[0], 0);
    wait_buffer(buffer_seen);
    store_weights(s.weights[buffer.index], x[0], 0);
    const TokenInverses<kEarlySums, 8> late(s.token_inverse[own]);
    if constexpr (kNext) look_for_page();
    publish(t, r, block == split.begin);
    sum_weights(lane_sum, x[0], late);
    add_row_sums(rows, lane_sum, t, r);
    trace.rows(top, n, t, r, rows.reference, rows.row_sum);
    if constexpr (kNext) wait_scores();
  }

  __device__ __forceinline__ void run_double(const QueryFragments& q, const Split& split) {
    Scores even, odd;
    unsigned from = issue(even[0], q);
    wait_scores();
    release_query();
    int block = split.begin;
#pragma unroll 1
    for (; block + 2 < split.end; block += 2) {
      weigh_page<true>(even, from, odd, block, split, q);
      weigh_page<true>(odd, from, even, block + 1, split, q);
    }
    if (block + 1 < split.end) {
      weigh_page<true>(even, from, odd, block, split, q);
#pragma unroll
      for (int i = 0; i < kScores; ++i) even[0][i] = odd[0][i];  // one copy of the last block's code
      ++block;
    }
    weigh_page<false>(even, from, odd, block, split, q);
  }

  // Two pages a block: S of the next block replaces each page's weights as soon as these are
  // stored, so the tensor core works while the rest is weighted.
  template <bool kNext>
  __device__ __forceinline__ void weigh_pages(Scores& x, unsigned (&from)[kPages], int block,
                                              const Split& split, const QueryFragments& q) {
    const TraceBlock trace(p, split.req, block);
    PerRow top, n, t, r, lane_sum = {};
    trace.scores(x);
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
      scores_to_logits(x[page], rows, TokenScales(s.token_scale[from[page]]));
    }
    find_max(x, block, top, n);
    raise_rows(rows, top, n, t, r);
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
      const TokenInverses<0, 8> inverses(s.token_inverse[from[page]]);
      logits_to_weights<0, 8>(x[page], n);
      sum_weights(lane_sum, x[page], inverses);
      trace.weights(x[page], page);
      if (page == 0) wait_buffer(false);
      store_weights(s.weights[buffer.index], x[page], page);
      if constexpr (kNext) from[page] = issue(x[page], q);
    }
    add_row_sums(rows, lane_sum, t, r);
    publish(t, r, block == split.begin);
    trace.rows(top, n, t, r, rows.reference, rows.row_sum);
    if constexpr (kNext) wait_scores();
  }

  __device__ __forceinline__ void run_single(const QueryFragments& q, const Split& split) {
    Scores x;
    unsigned from[kPages];
#pragma unroll
    for (int page = 0; page < kPages; ++page) from[page] = issue(x[page], q);
    wait_scores();
#pragma unroll 1
    for (int block = split.begin; block + 1 < split.end; ++block) {
      weigh_pages<true>(x, from, block, split, q);
    }
    weigh_pages<false>(x, from, split.end - 1, split, q);
  }

  __device__ __forceinline__ void run(const QueryFragments& q, const Split& split) {
    tokens_seen = false;  // the last split may have looked at this one's Q tile
    if (split.begin == split.end) {
      release_query();  // of an empty request: nobody uses its Q
      return;
    }
    if constexpr (kPages == 1) {
      run_double(q, split);
    } else {
      run_single(q, split);
    }
  }
};

__device__ __forceinline__ void score_role(const MlaDecodeParams& p, Storage& s) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  const int first_row = blockIdx.x * kTileM;
  ScoreLoop loop{p, s, {}, first_row + row_of(warp, lane, 0)};
  Schedule schedule(p);
  Split split;
  QueryFragments q;
  unsigned phase = 0;
  while (schedule.next(split)) {
    start_rows(loop.rows, p, split.req, loop.row);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      loop.limit[half] = row_limit(p, loop.row + 8 * half, split.seqlen);
    }
    loop.min_limit = row_limit(p, first_row, split.seqlen);
    loop.take_query(q, phase);
    loop.profile.mark(kProfileSplit);
    loop.run(q, split);
    if constexpr (!kQueryInRegisters) warp_arrive(shared_address(&s.barriers.query_empty));
    MBARRIER_WAIT(shared_address(&s.barriers.sum_empty), phase ^ 1);
    finish_rows(loop.rows, p, s, split, loop.row);
    warp_arrive(shared_address(&s.barriers.sum_full));
    phase ^= 1;
    loop.profile.mark(kProfileSplit);
  }
  if (threadIdx.x == 0) loop.profile.store(profile_slot(p, kScoreRole));
}
