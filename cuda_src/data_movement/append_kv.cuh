// Bodies of append_kv, shared by append_kv.cu and prepare.cu. Steps [A1] to [A3] are explained in
// append_kv.cu.
#pragma once

#include "append_kv_params.h"
#include "common/layout.cuh"
#include "common/quantize.cuh"
#if CLAIM
#include "data_movement/row_ring.cuh"
#include "ptx/atomic.cuh"
#include "ptx/ld_shared.cuh"
#endif

constexpr int kAppendWarps = 8;
constexpr int kAppendThreads = kAppendWarps * kWarpSize;

// [A1] the slot of a token, -1 to skip it.
__device__ __forceinline__ int token_slot(const AppendKvParams& p, u32 token) {
  return valid_slot(load_slot(p.slot_mapping, p.slot_stride, p.slots_are_64bit, token), p.cache);
}

__device__ __forceinline__ RowPlace token_source(const AppendKvParams& p, u32 token) {
  const i64 index = token;
  return RowPlace{static_cast<const char*>(p.kv_c) + index * p.kv_c_stride,
                  static_cast<const char*>(p.k_pe) + index * p.k_pe_stride};
}

// kWide: the host found every access wide; else p.wide and p.cache.wide say so one by one.
template <int kInput, bool kWide>
__device__ __forceinline__ void load_token(LaneRow<kInput>& row, const AppendKvParams& p,
                                           u32 token) {
  const RowPlace from = token_source(p, token);
  load_row<kInput>(row, from.latent, from.rope, kWide || p.wide);
}

// [A3] a token alone. Called by all lanes together.
template <int kInput, bool kWide>
__device__ __forceinline__ void write_token(const LaneRow<kInput>& row, const AppendKvParams& p,
                                            int slot) {
  const LaneCodes codes = quantize_row<kInput, false>(row, p.pow2);
  const TokenPlace to = token_place(p.cache, slot);
  store_codes(codes, to.codes, to.rope, kWide || p.cache.wide);
  if (threadIdx.x % kWarpSize == 0) st_global_u32(to.scale, __float_as_uint(codes.scale));
}

// [A2] by looking: bit w of the result is set where a token after `first + w` has slot own[w].
// Every thread of the CTA looks at its share of the mapping, kLooks slots at once.
__device__ __forceinline__ u32 superseded_tokens(const AppendKvParams& p, u32 first,
                                                 const int (&own)[kAppendWarps]) {
  constexpr u32 kLooks = 4;
  u32 found = 0;
  for (u32 base = first + 1 + threadIdx.x; base < p.num_tokens; base += kLooks * kAppendThreads) {
    i64 slot[kLooks];
#pragma unroll
    for (u32 i = 0; i < kLooks; ++i) {  // beyond the end: the last token again, which harms nothing
      const u32 token = min(base + i * kAppendThreads, p.num_tokens - 1);
      slot[i] = load_slot(p.slot_mapping, p.slot_stride, p.slots_are_64bit, token);
    }
#pragma unroll
    for (u32 i = 0; i < kLooks; ++i) {
      const u32 token = min(base + i * kAppendThreads, p.num_tokens - 1);
      const int other = valid_slot(slot[i], p.cache);
#pragma unroll
      for (u32 w = 0; w < kAppendWarps; ++w) {
        if (other == own[w] && token > first + w) found |= 1u << w;
      }
    }
  }
  return found;
}

// A token a warp, for up to APPEND_SCAN_MAX tokens: no workspace, one pass.
template <int kInput, bool kWide>
__device__ __forceinline__ void append_scanned(const AppendKvParams& p, u32 cta) {
  __shared__ int s_slot[kAppendWarps];
  __shared__ u32 s_superseded;
  const u32 warp = threadIdx.x / kWarpSize, first = cta * kAppendWarps, token = first + warp;
  LaneRow<kInput> row;
  int slot = -1;
  if (token < p.num_tokens) {
    slot = token_slot(p, token);
    load_token<kInput, kWide>(row, p, token);
  }
  if (threadIdx.x % kWarpSize == 0) s_slot[warp] = slot;
  if (threadIdx.x == 0) s_superseded = 0;
  __syncthreads();
  int own[kAppendWarps];
#pragma unroll
  for (int w = 0; w < kAppendWarps; ++w) own[w] = s_slot[w];
  const u32 found = superseded_tokens(p, first, own);
  if (found) atomicOr(&s_superseded, found);
  __syncthreads();
  if (slot >= 0 && !(s_superseded >> warp & 1)) write_token<kInput, kWide>(row, p, slot);
}

#if CLAIM

// Whether CTAs may end early, as append_claimed explains. Narrow rows are rare and do without.
template <bool kWide>
constexpr bool kEndsEarly = EARLY_END && kWide;

// What a CTA adds to a sum that comes to 0 when all CTAs have added to it, modulo 2^32, and never
// before: the first CTA 1 - gridDim.x, any other 1, so that the sums on the way are 1 to gridDim.x - 1
// or the negatives of these. Nobody has to be found who sets the sum back.
__device__ __forceinline__ u32 share_of_sum() { return blockIdx.x ? 1 : 1 - gridDim.x; }

// Tokens on the list in the lower half, the sum over the CTAs that are done in the upper.
__device__ __forceinline__ u64* done_counter(const AppendKvParams& p) {
  return reinterpret_cast<u64*>(p.counters);
}
__device__ __forceinline__ u64 share_of_done() { return static_cast<u64>(share_of_sum()) << 32; }

// Twice the sum over the CTAs that are claimed, all of whose tokens have heard whether another one
// has their slot, plus kSomeListed if there is a token on the list.
__device__ __forceinline__ u32* claimed_counter(const AppendKvParams& p) { return p.counters + 32; }
constexpr u32 kSomeListed = 1;
constexpr u32 kNotLooked = 1;  // no value of the counter that says anything

constexpr u32 kCountingThread = kAppendThreads - kWarpSize;  // of the warp with the fewest rows

// [A2] by claiming, for many tokens. claims[slot] holds the token that came last, as a number that
// counts on from launch to launch (claim_base is the first of this one); what earlier launches left
// there need not be cleared, because a claim counts only if that token of this launch really has
// this slot. Returns the claim before, or for no slot this one: nothing here uses it, so nothing
// waits for it.
__device__ __forceinline__ u32 claim_slot(const AppendKvParams& p, u32 token, int slot) {
  u32 claim = p.claim_base + token;
  if (slot >= 0) claim = atomicExch(p.claims + slot, claim);
  return claim;
}

// Lists a token whose slot another token of this launch claimed before; says whether it did. Of the
// tokens of a slot all but the first to claim it come on the list.
template <bool kWide>
__device__ __forceinline__ bool list_if_shared(const AppendKvParams& p, u32 token, u32 claim) {
  const u32 before = claim - p.claim_base;
  if (before >= p.num_tokens || before == token) return false;
  if (token_slot(p, before) != token_slot(p, token)) return false;
  const u32 place = static_cast<u32>(atomicAdd(done_counter(p), 1ull));
  p.deferred[2 * place] = token;
  p.deferred[2 * place + 1] = before;
  if (kEndsEarly<kWide>) atomicOr(claimed_counter(p), kSomeListed);
  return true;
}

// The number of listed tokens in the last CTA to come here, when the writes of all others are done
// and visible; 0 in every other CTA. The last one sets back what a list has left in the counters.
__device__ __forceinline__ u32 listed_for_last_cta(const AppendKvParams& p) {
  __shared__ u32 s_listed;
  __syncthreads();
  if (threadIdx.x == 0) {
    const u64 done = atom_acq_rel_add(done_counter(p), share_of_done()) + share_of_done();
    const bool is_last = done >> 32 == 0;
    const u32 listed = static_cast<u32>(done);
    if (is_last && listed) {
      *done_counter(p) = 0;
      *claimed_counter(p) = 0;
    }
    s_listed = is_last ? listed : 0;
  }
  __syncthreads();
  return s_listed;
}

// Of each slot with a listed token the last token of all is written once more, over whatever its
// tokens have left there. Each of them stands on the list, as the one or the other of a pair.
template <int kInput>
__device__ __noinline__ void write_listed(const AppendKvParams& p, u32 count) {
  for (u32 i = threadIdx.x; i < count; i += kAppendThreads) {
    atomicExch(p.claims + token_slot(p, __ldcg(p.deferred + 2 * i)), 0u);
  }
  __threadfence();
  __syncthreads();
  for (u32 i = threadIdx.x; i < count; i += kAppendThreads) {
    const u32 token = __ldcg(p.deferred + 2 * i), before = __ldcg(p.deferred + 2 * i + 1);
    atomicMax(p.claims + token_slot(p, token), max(token, before) + 1);
  }
  __threadfence();
  __syncthreads();
  for (u32 i = threadIdx.x / kWarpSize; i < count; i += kAppendWarps) {
    const u32 token = max(__ldcg(p.deferred + 2 * i), __ldcg(p.deferred + 2 * i + 1));
    const int slot = token_slot(p, token);
    if (__ldcg(p.claims + slot) != token + 1) continue;
    LaneRow<kInput> row;
    load_token<kInput, false>(row, p, token);
    write_token<kInput, false>(row, p, slot);
  }
}

// Where the codes and the RoPE of a token go: one load from shared memory reads both.
struct __align__(16) TokenTarget {
  char* codes;  // null for a token that is not written
  char* rope;
};

// What the warps of a CTA share of a token.
struct SharedToken {
  TokenTarget to;
  char* scale_to;
  float scale;
};
constexpr u32 kScaleOffset = sizeof(TokenTarget) + sizeof(char*);
static_assert(sizeof(SharedToken) == 32, "read_target and kScaleOffset rely on it");

__device__ __forceinline__ TokenTarget read_target(u32 token) {
  const ulonglong2 to = ld_shared_v2_u64(token);
  return TokenTarget{reinterpret_cast<char*>(to.x), reinterpret_cast<char*>(to.y)};
}

__device__ __forceinline__ SharedToken* cta_tokens() {
  __shared__ SharedToken s_tokens[kAppendThreads];
  return s_tokens;
}

// The tokens of a warp, for RowRing.
struct TokenRows {
  const AppendKvParams& p;
  const u32 first;  // of the CTA

  __device__ __forceinline__ RowPlace row(u32 i) const {
    return token_source(p, first + row_in_cta(i));
  }
  static __device__ __forceinline__ constexpr bool is_linear() { return true; }
  __device__ __forceinline__ i64 latent_step() const { return kRowWarps * p.kv_c_stride; }
  __device__ __forceinline__ i64 rope_step() const { return kRowWarps * p.k_pe_stride; }
};

// Thread i looks after token i of the CTA: it reads the slot, claims it, and writes the scale at the
// end; so these accesses are coalesced. The warps do the rest, a token after the other, and do not
// wait for the claims: nobody shares a slot in a proper mapping, and write_listed mends the others.
//
// The end. The CTA that mends must see what all others have written, so a CTA makes its writes
// visible and counts itself as done, which takes a while. Where nothing is to be mended that is for
// nothing, and a CTA that knows it in time ends early:
//   After the first RING_ROWS rows of its warp each thread hears what its claim found, and lists its
//   token if it must; the warp says so in s_heard. Once all warps have, the counting thread counts the
//   CTA as claimed; it asks after its row COUNT_ROW and the rows behind it, at the latest it counts at
//   the end. If it has counted when LOOK_ROWS rows are left to it, it begins to read claimed_counter.
//   If that is 0, the CTA ends early: it adds its share to done_counter as well, but waits for
//   nothing. Else, or if there were too few rows for all this, it ends as said above.
// Why nobody ends early in a launch with a list: a token comes on it before its CTA counts itself as
// claimed (a warp with a listed token makes that visible before it says that it has heard), and
// kSomeListed goes to the same number as that count, whose
// changes all see in one order. The thread that reads that number has counted the CTA before, so that
// what it reads is not the 0 from before the launch: it is 0 only when all CTAs have counted
// themselves and none has listed a token. So if one token is listed, all CTAs count themselves as
// done with the fence, and the last one is found; if none is, nobody needs to be found.
// A relaxed order will do for the count as claimed, as nothing else is read on its account: what
// stands on the list is handed over by the count as done.
// Why the counters are 0 for the next launch: every CTA adds its share to both of them (of narrow
// rows, to done_counter only), early end or not, and the shares come to 0; where there is a list, the
// last CTA, when no other has anything to add, clears both. The next launch begins to count when this
// one has finished.
template <int kInput, bool kWide>
__device__ __forceinline__ void append_claimed(const AppendKvParams& p) {
  SharedToken* const tokens = cta_tokens();
  const CtaRows rows = cta_rows(blockIdx.x, p.tokens_per_cta, p.longer_ctas);
  const u32 token = rows.first + threadIdx.x;
  const i64 named = load_slot(p.slot_mapping, p.slot_stride, p.slots_are_64bit,
                              min(token, p.num_tokens - 1));
  RowRing<kInput, kWide, TokenRows> ring{TokenRows{p, rows.first}};
  ring.start(existing_rows(rows));

  const int slot = threadIdx.x < rows.count ? valid_slot(named, p.cache) : -1;
  u32 answer = claim_slot(p, token, slot);
  SharedToken& own = tokens[threadIdx.x];
  const TokenPlace place = token_place(p.cache, slot);
  bool is_written = slot >= 0;
  // Narrow accesses leave no register to keep the answer in.
  constexpr bool kWaits = !kWide;
  if (kWaits && list_if_shared<kWide>(p, token, answer)) is_written = false;
  own.to = {is_written ? place.codes : nullptr, place.rope};
  own.scale_to = place.scale;
  __shared__ u32 s_heard;        // warps; these two with kEndsEarly only
  __shared__ bool s_ends_early;
  if (kEndsEarly<kWide> && threadIdx.x == 0) s_heard = 0;
  __syncthreads();

  const auto write = [&](const LaneCodes& codes, u32 token) {
    const TokenTarget to = read_target(token);
    store_codes(codes, to.codes, to.rope, kWide || p.cache.wide);
    if (threadIdx.x % kWarpSize == 0) {
      st_shared_u32(token + kScaleOffset, __float_as_uint(codes.scale));
    }
  };
  const SharedToken& of_lane = tokens[row_in_cta(threadIdx.x % kWarpSize)];
  const u32 wanted = __ballot_sync(kAllLanes, of_lane.to.codes != nullptr);
  const u32 of_warp = static_cast<u32>(__cvta_generic_to_shared(&tokens[row_in_cta(0)]));
  constexpr u32 kStep = kRowWarps * sizeof(SharedToken);
  // Of the counting thread; the others have nothing to count.
  bool to_count = kEndsEarly<kWide> && threadIdx.x == kCountingThread;
  const auto count = [&] {
    red_relaxed_add(claimed_counter(p), 2 * share_of_sum());
    to_count = false;
  };
  if constexpr (kEndsEarly<kWide>) {
    static_assert(COUNT_ROW >= RING_ROWS && LOOK_ROWS >= 1);
    const auto hear = [&] {
      const bool listed = list_if_shared<kWide>(p, token, answer);
      answer = kNotLooked;  // from here on: what the counting thread finds in claimed_counter
      if (__any_sync(kAllLanes, listed)) {
        __syncwarp();  // a vote orders nothing in memory
        __threadfence();
      }
      if (threadIdx.x % kWarpSize == 0) red_relaxed_shared_add(&s_heard, 1);
    };
    const auto after_row = [&](u32 i, u32 left) {
      if (threadIdx.x != kCountingThread || i < COUNT_ROW) return;
      if (to_count && atom_acquire_shared_read(&s_heard) == kAppendWarps) count();
      if (!to_count && left >> (LOOK_ROWS - 1) == 1) answer = ld_relaxed_u32(claimed_counter(p));
    };
    ring.run(wanted, p.pow2, of_warp, kStep, write, hear, after_row);
    if (threadIdx.x == kCountingThread) s_ends_early = answer == 0;
  } else {
    ring.run(wanted, p.pow2, of_warp, kStep, write);
  }
  __syncthreads();
  if (to_count) count();

  if (own.to.codes) st_global_u32(own.scale_to, __float_as_uint(own.scale));
  if (kEndsEarly<kWide> && s_ends_early) {
    if (threadIdx.x == kCountingThread) red_relaxed_add(done_counter(p), share_of_done());
    return;
  }
  if (!kWaits && !kEndsEarly<kWide>) list_if_shared<kWide>(p, token, answer);
  const u32 listed = listed_for_last_cta(p);
  if (listed) write_listed<kInput>(p, listed);
}

#endif
