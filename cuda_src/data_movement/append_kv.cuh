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

// counters as one number: CTAs that are done in the lower half, tokens on the list in the upper.
__device__ __forceinline__ u64* counters(const AppendKvParams& p) {
  return reinterpret_cast<u64*>(p.counters);
}

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
__device__ __forceinline__ bool list_if_shared(const AppendKvParams& p, u32 token, u32 claim) {
  const u32 before = claim - p.claim_base;
  if (before >= p.num_tokens || before == token) return false;
  if (token_slot(p, before) != token_slot(p, token)) return false;
  const u32 place = static_cast<u32>(atomicAdd(counters(p), 1ull << 32) >> 32);
  p.deferred[2 * place] = token;
  p.deferred[2 * place + 1] = before;
  return true;
}

// The number of listed tokens in the last CTA to come here, when the writes of all others are done
// and visible; 0 in every other CTA. The last one sets the counters back for the next launch.
__device__ __forceinline__ u32 listed_for_last_cta(const AppendKvParams& p) {
  __shared__ u32 s_listed;
  __syncthreads();
  if (threadIdx.x == 0) {
    const u64 before = atom_acq_rel_add(counters(p), 1);
    const bool is_last = static_cast<u32>(before) == gridDim.x - 1;
    if (is_last) *counters(p) = 0;
    s_listed = is_last ? static_cast<u32>(before >> 32) : 0;
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
  const u32 claim = claim_slot(p, token, slot);
  SharedToken& own = tokens[threadIdx.x];
  const TokenPlace place = token_place(p.cache, slot);
  bool is_written = slot >= 0;
  // Narrow accesses leave no register to keep the answer in.
  constexpr bool kWaits = !kWide;
  if (kWaits && list_if_shared(p, token, claim)) is_written = false;
  own.to = {is_written ? place.codes : nullptr, place.rope};
  own.scale_to = place.scale;
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
  ring.run(wanted, p.pow2, of_warp, kRowWarps * sizeof(SharedToken), write);
  __syncthreads();

  if (own.to.codes) st_global_u32(own.scale_to, __float_as_uint(own.scale));
  if (!kWaits) list_if_shared(p, token, claim);
  const u32 listed = listed_for_last_cta(p);
  if (listed) write_listed<kInput>(p, listed);
}

#endif
