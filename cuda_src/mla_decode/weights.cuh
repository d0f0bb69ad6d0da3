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
    rows.reference[half] = kNoReference;
    rows.row_sum[half] = 0.0f;
  }
}

// Where a lane reads and writes, from the addresses of what it reads in. What belongs to its other row
// lies at a constant distance.
struct ScorePlaces {
  unsigned tokens;   // of its token columns in an array of a stage
  unsigned weights;  // its 16 slots of the P tile of a `Weights`
  unsigned factors;  // its row's factor in an array of a `Weights`
  unsigned raised;   // the warp's flag in a `Weights`
  static constexpr unsigned kNextRow = 8 * kBlockN, kNextFactor = 2 * sizeof(float);

  __device__ __forceinline__ explicit ScorePlaces(const Storage& s) {
    const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
    const unsigned base = shared_address(s.weights);
    tokens = 16 * (lane & 3);
    int row = kRowsPerWarp * warp + (lane & 7);
    // Rows that are another warp's land in the tile's unused part.
    if (kRowsPerWarp < 8 && (lane & 7) >= kRowsPerWarp) row = 32 + 8 * warp + (lane & 7);
    const int swizzle = kPages == 1 ? (row >> 1) & 3 : row & 7;  // rows of kBlockN bytes, as wide
    weights = base + row * kBlockN + (((lane >> 3) ^ swizzle) << 4);
    factors = base + 4 * factor_index(row_of(warp, lane, 0));
    raised = base + 4 * warp;
    keep_in_register(tokens);
    keep_in_register(weights);
    keep_in_register(factors);
  }
};

// ks and lk of this thread's token columns of a page ([S3]).
struct TokenScales {
  float4 pair[8];

  __device__ __forceinline__ TokenScales(unsigned stage, const ScorePlaces& places) {
    const unsigned from = stage + places.tokens + OFFSET_OF(Stage, token_scale);
#pragma unroll
    for (int j = 0; j < 8; ++j) pair[j] = ld_shared_v4_f32(from + 64 * j);
  }
};

// rk of the token groups kBegin .. kEnd - 1, even numbers, of those columns ([S7]).
template <int kBegin, int kEnd>
struct TokenInverses {
  float2 pair[kEnd > kBegin ? kEnd - kBegin : 1];

  __device__ __forceinline__ TokenInverses(unsigned stage, const ScorePlaces& places) {
    const unsigned from = stage + places.tokens + OFFSET_OF(Stage, token_inverse);
#pragma unroll
    for (int j = kBegin; j < kEnd; j += 2) {
      const float4 two = ld_shared_v4_f32(from + 32 * j);
      pair[j - kBegin] = make_float2(two.x, two.y);
      pair[j - kBegin + 1] = make_float2(two.z, two.w);
    }
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

// `to`: ScorePlaces::weights of the P tile. A page of a block of two is the other half of its row.
__device__ __forceinline__ void store_weights(unsigned to, const float (&e)[kScores], int page) {
  to ^= 64 * page;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    stmatrix_x4(to + half * ScorePlaces::kNextRow, pack_weights(e, 0, half),
                pack_weights(e, 1, half), pack_weights(e, 2, half), pack_weights(e, 3, half));
  }
}

// [S6] whether a row's reference rises.
__device__ __forceinline__ bool rises(float top, float reference) {
  return top > __fadd_rn(reference, kRaiseThreshold);
}

// [S6] raise the references where they rise: r, also into L. Says whether one rose that had seen a
// token: the O of the others is zero.
__device__ __forceinline__ bool raise_rows(Rows& rows, const PerRow& top, PerRow& r) {
  bool rose = false;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    float& reference = rows.reference[half];
    const bool raise = rises(top[half], reference);
    rose |= raise && reference != kNoReference;
    r[half] = raise ? ex2_approx_ftz(__fsub_rn(reference, top[half])) : 1.0f;
    reference = raise ? top[half] : reference;
    rows.row_sum[half] = __fmul_rn(rows.row_sum[half], r[half]);
  }
  return rose;
}

// [S6] t of the block.
__device__ __forceinline__ void find_factors(PerRow& t, const Rows& rows, const PerRow& n) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    t[half] = ex2_approx_ftz(__fsub_rn(n[half], rows.reference[half]));
  }
}

// [S7] L of this lane.
__device__ __forceinline__ void add_row_sums(Rows& rows, const PerRow& lane_sum, const PerRow& t) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    rows.row_sum[half] = __fmaf_rn(lane_sum[half], t[half], rows.row_sum[half]);
  }
}

// Lanes with the same row, and all lanes with the warp's flag, hold the same value: where all of them
// store it, nothing has to choose one. racecheck wants one writer; and of 16 rows some lanes have none.
#if SNAPMLA_DEBUG
constexpr bool kOneWriter = true;
#else
constexpr bool kOneWriter = kRowsPerWarp < 8;
#endif

// Factors of this thread's rows for the output warps, into an array of P tile `buffer` that begins at
// `array` in it.
__device__ __forceinline__ void store_factors(const ScorePlaces& places, unsigned buffer,
                                              unsigned array, const PerRow& x) {
  const int lane = threadIdx.x & 31;
  const bool writes = !kOneWriter || ((lane & 3) == 0 && lane_has_rows(lane));
  const unsigned at = places.factors + buffer * kWeightsBytes + array;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    st_shared_if(writes, at + half * ScorePlaces::kNextFactor, x[half]);
  }
}

// r and the warp's flag. r is written also where this warp's rows stay: another warp's raise makes all
// of it read.
__device__ __forceinline__ void store_raise(const ScorePlaces& places, unsigned buffer,
                                            const PerRow& r, bool rose) {
  const int lane = threadIdx.x & 31;
  store_factors(places, buffer, OFFSET_OF(Weights, raise_factor), r);
  const bool raised = __any_sync(0xffffffffu, rose && lane_has_rows(lane));
  st_shared_if(!kOneWriter || lane == 0,
               places.raised + buffer * kWeightsBytes + OFFSET_OF(Weights, raised),
               __int_as_float(raised));
}

// [S9] 1 / L of the rows for the output warps, and the sums L.
__device__ __forceinline__ void publish_sums(PerRow& total, const Rows& rows, Storage& s, int row) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    total[half] = quad_sum(rows.row_sum[half]);
    const float inverse = total[half] == 0.0f ? 0.0f : __frcp_rn(total[half]);
    if ((threadIdx.x & 3) != 0 || !lane_has_rows(threadIdx.x & 31)) continue;
    s.sum_inverse[factor_index((row + 8 * half) & (kTileM - 1))] = inverse;
  }
}

// [S9] The rows' lse, in nats where the split is the only one.
__device__ __forceinline__ void store_lse(const PerRow& total, const Rows& rows,
                                          const MlaDecodeParams& p, const Split& split, int row) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const float lse2 =
        total[half] == 0.0f ? kNegInf : __fadd_rn(rows.reference[half], log2_soft(total[half]));
    const int at = row + 8 * half;
    if ((threadIdx.x & 3) != 0 || !lane_has_rows(threadIdx.x & 31) || at >= p.num_rows) continue;
    if (split.result == kOnlySplit) {
      const int query = at / p.num_heads_q, head = at % p.num_heads_q;
      const long long line = static_cast<long long>(split.req) * p.num_heads_q + head;
      p.lse[line * p.seq_len_q + query] = natural_lse(lse2);
    } else {
      p.lse_accum[static_cast<long long>(split.result) * p.num_rows + at] = lse2;
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
  // Blocks that all of the CTA's rows see whole and whose P tile holds no raise of an earlier block:
  // calm_blocks from the block calm_begin on.
  int calm_begin, calm_blocks, whole_blocks;
  unsigned query_place;  // stage of the Q tile in the ring
  bool tokens_seen;      // the factors of the next page were there when looked for ahead of need
  const ScorePlaces places;
  StageRing ring;        // of the page whose scores are issued next
  WeightsPhases phases;
  ScoreProfile profile;

  __device__ __forceinline__ ScoreLoop(const MlaDecodeParams& p_, Storage& s_, int row_)
      : p(p_), s(s_), row(row_), places(s_), ring(s_) {}

  // The split's Q tile: into registers, or just there.
  __device__ __forceinline__ void take_query(QueryFragments& q, unsigned phase) {
    if constexpr (kQueryInRegisters) {
      // The token warps have passed this place: had they not, freeing it could let them be lapped.
      MBARRIER_WAIT(ready_barrier(ring.at), ring.phase);
      MBARRIER_WAIT(full_barrier(ring.at), ring.phase);
      load_query(q, ring.at);
      query_place = ring.at;
      ring.advance();
    } else {
      MBARRIER_WAIT(shared_address(&s.query_full), phase);
    }
  }

  // Frees the Q tile's place in the ring, the output warps' share of the arrivals included. Not
  // before an instruction has used what ldmatrix brought: an arrival can overtake the loads before
  // it, and the next copy into the place then lands before they read (seen on an H200).
  __device__ __forceinline__ void release_query() {
    if constexpr (kQueryInRegisters) {
      warp_arrive(empty_barrier(query_place), kOutputWarps / kScoreWarps);
    }
  }

  // The next page, once its factors are there; its stage.
  __device__ __forceinline__ unsigned take_page() {
    profile.mark(kProfileSoftmax);
    if (!tokens_seen) {
      MBARRIER_WAIT(ready_barrier(ring.at), ring.phase);
    }
    profile.mark(kProfileWaitTokens);
    const unsigned at = ring.at;
    ring.advance();
    tokens_seen = false;
    return at;
  }

  // A test of a barrier takes some 70 cycles even where it succeeds: made ahead of need, it runs
  // beside the arithmetic. Where it fails, the wait comes in its usual place.
  __device__ __forceinline__ void look_for_page() {
    tokens_seen = mbarrier_test_wait_parity(ready_barrier(ring.at), ring.phase);
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

  // No block before `block` is calm.
  __device__ __forceinline__ void calm_from(int block) {
    calm_begin = block;
    calm_blocks = max(whole_blocks - block, 0);
  }

  // [S3], [S4] of a block that hides tokens from a row or has a maximum that is not moderate.
  __device__ __forceinline__ void hold_block(Scores& x, int block, PerRow& top, PerRow& n) {
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
      int local[kHalves];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        local[half] = limit[half] - block * kBlockN - page * kBlockSize;
      }
      hold_and_mask(x[page], local);
    }
    block_max(top, x);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      top[half] = fmaxf(top[half], kNegInf);
      n[half] = top[half] == kNegInf ? kNoLogits : __fsub_ru(top[half], kLog2Fp8Max);
    }
  }

  // [S3], [S4], [S6]: M and n of u; r, 1 for most blocks. What a calm block does not need is behind
  // one vote: holding and masking, raises, and r in the P tile, which stays 1 from block to block.
  __device__ __forceinline__ void find_max(Scores& x, unsigned buffer, int block, PerRow& top,
                                           PerRow& n, PerRow& r) {
    block_max(top, x);
    // Holding changes nothing while the maximum is moderate; a NaN maximum is not.
    bool extreme = false, unusual = static_cast<unsigned>(block - calm_begin) >=
                                    static_cast<unsigned>(calm_blocks);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      r[half] = 1.0f;
      extreme |= !(fabsf(top[half]) < kLogitSafe);
      unusual |= rises(top[half], rows.reference[half]);
      n[half] = __fsub_ru(top[half], kLog2Fp8Max);
      keep_in_register(n[half]);  // computed while the vote below is on its way
    }
    if (__builtin_expect(__any_sync(0xffffffffu, unusual || extreme), 0)) {
      if (__any_sync(0xffffffffu, extreme || block >= whole_blocks)) hold_block(x, block, top, n);
      const bool rose = raise_rows(rows, top, r);
      profile.mark(kProfileSoftmax);
      MBARRIER_WAIT(shared_address(&s.weights[buffer].empty), phases.parity(buffer) ^ 1);
      profile.mark(kProfileWaitBuffer);
      store_raise(places, buffer, r, rose);
      bool ones = true;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) ones &= r[half] == 1.0f;
      if (!__all_sync(0xffffffffu, ones)) calm_from(block + 3);  // the P tile's next block writes 1
    }
  }

  // The hand-over of the block in P tile `buffer`.
  __device__ __forceinline__ void publish(const PerRow& t, unsigned buffer) {
    profile.mark(kProfileSoftmax);
    store_factors(places, buffer, OFFSET_OF(Weights, block_factor), t);
    // The readers fence P for the tensor core (OutputLoop).
    warp_arrive(shared_address(&s.weights[buffer].full));
    profile.mark(kProfilePublish);
  }

  __device__ __forceinline__ bool look_for_buffer(unsigned buffer) {
    return mbarrier_test_wait_parity(shared_address(&s.weights[buffer].empty),
                                     phases.parity(buffer) ^ 1);
  }

  __device__ __forceinline__ void wait_buffer(unsigned buffer, bool seen) {
    profile.mark(kProfileSoftmax);
    if (!seen) {
      MBARRIER_WAIT(shared_address(&s.weights[buffer].empty), phases.parity(buffer) ^ 1);
    }
    phases.pass(buffer);
    profile.mark(kProfileWaitBuffer);
  }

  // One page a block: weight `x` while S of the next page is issued into `next`, piece by piece.
  // Loads from shared memory take twice as long beside S, and one that is waited for beside it
  // holds up what is ready: so token factors come before S is on its way, and the terms of l that
  // have no registers for theirs by then are summed when the block has been handed over.
  // `buffer`, the block's P tile, is known at compile time but for the last block of a split.
  template <bool kNext>
  __device__ __forceinline__ void weigh_page(Scores& x, unsigned& from, Scores& next,
                                             unsigned buffer, int block, const Split& split,
                                             const QueryFragments& q) {
    const TraceBlock trace(p, split.req, block);
    PerRow top, n, t, r, lane_sum = {};
    trace.scores(x);
    const unsigned own = from;
    if constexpr (kNext) from = take_page();
    const TokenScales scales(own, places);
    const PageOperands at(s, from);
    issue<kNext, 0>(next[0], q, at);
    scores_to_logits(x[0], rows, scales);
    issue<kNext, 1>(next[0], q, at);
    find_max(x, buffer, block, top, n, r);
    find_factors(t, rows, n);
    const bool buffer_seen = look_for_buffer(buffer);
    const TokenInverses<0, kEarlySums> early(own, places);
    issue<kNext, 2>(next[0], q, at);
    logits_to_weights<0, 4>(x[0], n);
    issue<kNext, 3>(next[0], q, at);
    sum_weights(lane_sum, x[0], early);
    logits_to_weights<4, 8>(x[0], n);
    trace.weights(x[0], 0);
    wait_buffer(buffer, buffer_seen);
    store_weights(places.weights + buffer * kWeightsBytes, x[0], 0);
    const TokenInverses<kEarlySums, 8> late(own, places);
    if constexpr (kNext) look_for_page();
    publish(t, buffer);
    sum_weights(lane_sum, x[0], late);
    add_row_sums(rows, lane_sum, t);
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
      weigh_page<true>(even, from, odd, 0, block, split, q);
      weigh_page<true>(odd, from, even, 1, block + 1, split, q);
    }
    unsigned buffer = 0;
    if (block + 1 < split.end) {
      weigh_page<true>(even, from, odd, 0, block, split, q);
#pragma unroll
      for (int i = 0; i < kScores; ++i) even[0][i] = odd[0][i];  // one copy of the last block's code
      ++block;
      buffer = 1;
    }
    weigh_page<false>(even, from, odd, buffer, block, split, q);
  }

  // Two pages a block: S of the next block replaces each page's weights as soon as these are
  // stored, so the tensor core works while the rest is weighted.
  template <bool kNext>
  __device__ __forceinline__ void weigh_pages(Scores& x, unsigned (&from)[kPages], unsigned buffer,
                                              int block, const Split& split,
                                              const QueryFragments& q) {
    const TraceBlock trace(p, split.req, block);
    PerRow top, n, t, r, lane_sum = {};
    trace.scores(x);
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
      scores_to_logits(x[page], rows, TokenScales(from[page], places));
    }
    find_max(x, buffer, block, top, n, r);
    find_factors(t, rows, n);
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
      const TokenInverses<0, 8> inverses(from[page], places);
      logits_to_weights<0, 8>(x[page], n);
      sum_weights(lane_sum, x[page], inverses);
      trace.weights(x[page], page);
      if (page == 0) wait_buffer(buffer, false);
      store_weights(places.weights + buffer * kWeightsBytes, x[page], page);
      if constexpr (kNext) from[page] = issue(x[page], q);
    }
    add_row_sums(rows, lane_sum, t);
    publish(t, buffer);
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
      weigh_pages<true>(x, from, (block - split.begin) & 1, block, split, q);
    }
    weigh_pages<false>(x, from, (split.end - 1 - split.begin) & 1, split.end - 1, split, q);
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
  ScoreLoop loop(p, s, first_row + row_of(warp, lane, 0));
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
    loop.whole_blocks = max(row_limit(p, first_row, split.seqlen), 0) / kBlockN;
    loop.calm_from(split.begin + 2);  // both P tiles may hold raises of the last split
    loop.take_query(q, phase);
    loop.profile.mark(kProfileSplit);
    loop.run(q, split);
    if constexpr (!kQueryInRegisters) warp_arrive(shared_address(&s.query_empty));
    MBARRIER_WAIT(shared_address(&s.sum_empty), phase ^ 1);
    PerRow total;
    publish_sums(total, loop.rows, s, loop.row);
    warp_arrive(shared_address(&s.sum_full));  // nobody waits for the lse
    store_lse(total, loop.rows, p, split, loop.row);
    phase ^= 1;
    loop.profile.mark(kProfileSplit);
  }
  if (threadIdx.x == 0) loop.profile.store(profile_slot(p, kScoreRole));
}
