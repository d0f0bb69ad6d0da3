// Bodies of append_kv, shared by append_kv.cu and prepare.cu. Steps [A1] to [A3] are explained in
// append_kv.cu.
#pragma once

#include "append_kv_params.h"
#include "common/layout.cuh"
#include "common/quantize.cuh"

constexpr int kAppendWarps = 8;
constexpr int kAppendThreads = kAppendWarps * kWarpSize;

// [A1] the slot of a token, -1 to skip it.
__device__ __forceinline__ int token_slot(const AppendKvParams& p, u32 token) {
  return valid_slot(load_slot(p.slot_mapping, p.slot_stride, p.slots_are_64bit, token), p.cache);
}

template <int kInput>
__device__ __forceinline__ void load_token(LaneRow<kInput>& row, const AppendKvParams& p,
                                           u32 token) {
  const i64 index = token;
  load_row<kInput>(row, static_cast<const char*>(p.kv_c) + index * p.kv_c_stride,
                   static_cast<const char*>(p.k_pe) + index * p.k_pe_stride, p.wide);
}

// [A3]
template <int kInput>
__device__ __forceinline__ void write_token(const LaneRow<kInput>& row, const AppendKvParams& p,
                                            int slot) {
  const TokenPlace to = token_place(p.cache, slot);
  store_row(quantize_row<kInput>(row, p.pow2), to.codes, to.rope, to.scale, p.cache.wide);
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
template <int kInput>
__device__ __forceinline__ void append_scanned(const AppendKvParams& p, u32 cta) {
  __shared__ int s_slot[kAppendWarps];
  __shared__ u32 s_superseded;
  const u32 warp = threadIdx.x / kWarpSize, first = cta * kAppendWarps, token = first + warp;
  LaneRow<kInput> row;
  int slot = -1;
  if (token < p.num_tokens) {
    slot = token_slot(p, token);
    load_token<kInput>(row, p, token);
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
  if (slot >= 0 && !(s_superseded >> warp & 1)) write_token<kInput>(row, p, slot);
}

#if TOKENS_PER_WARP

// [A2] by claiming, for many tokens. claims[slot] holds the token that came last, as a number that
// counts on from launch to launch (claim_base is the first of this one); what earlier launches left
// there need not be cleared, because a claim counts only if that token of this launch really has
// this slot. The first token of a slot is written at once; every other one is put on a list.
// Returns the slot to write, or -1.
__device__ __forceinline__ int claim_slot(const AppendKvParams& p, u32 token) {
  const int slot = token_slot(p, token);
  if (slot < 0) return -1;
  const u32 other = atomicExch(p.claims + slot, p.claim_base + token) - p.claim_base;
  if (other >= p.num_tokens || other == token || token_slot(p, other) != slot) return slot;
  const u32 place = atomicAdd(p.counters + 1, 1u);
  p.deferred[2 * place] = token;
  p.deferred[2 * place + 1] = other;
  return -1;
}

// True in the last CTA to come here, when the writes of all others are done and visible.
__device__ __forceinline__ bool is_last_cta(const AppendKvParams& p) {
  __shared__ bool s_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    s_last = atomicInc(p.counters, gridDim.x - 1) == gridDim.x - 1;  // wraps to 0 by itself
    __threadfence();
  }
  __syncthreads();
  return s_last;
}

// The listed tokens: of each slot the last token of all is written, unless it was the first to
// claim and so is written already.
template <int kInput>
__device__ __noinline__ void write_deferred(const AppendKvParams& p) {
  const u32 count = __ldcg(p.counters + 1);
  for (u32 i = threadIdx.x; i < count; i += kAppendThreads) {
    atomicExch(p.claims + token_slot(p, __ldcg(p.deferred + 2 * i)), 0u);
  }
  __threadfence();
  __syncthreads();
  for (u32 i = threadIdx.x; i < count; i += kAppendThreads) {
    const u32 token = __ldcg(p.deferred + 2 * i), other = __ldcg(p.deferred + 2 * i + 1);
    atomicMax(p.claims + token_slot(p, token), max(token, other) + 1);
  }
  __threadfence();
  __syncthreads();
  for (u32 i = threadIdx.x / kWarpSize; i < count; i += kAppendWarps) {
    const u32 token = __ldcg(p.deferred + 2 * i);
    const int slot = token_slot(p, token);
    if (__ldcg(p.claims + slot) != token + 1) continue;
    LaneRow<kInput> row;
    load_token<kInput>(row, p, token);
    write_token<kInput>(row, p, slot);
  }
  if (threadIdx.x == 0) p.counters[1] = 0;
}

template <int kInput>
__device__ __forceinline__ void append_claimed(const AppendKvParams& p, u32 cta) {
  const u32 warp = cta * kAppendWarps + threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const u32 first = warp * TOKENS_PER_WARP;
  LaneRow<kInput> rows[TOKENS_PER_WARP];
#pragma unroll
  for (u32 k = 0; k < TOKENS_PER_WARP; ++k) {
    if (first + k < p.num_tokens) load_token<kInput>(rows[k], p, first + k);
  }
  int slot = -1;
  if (lane < TOKENS_PER_WARP && first + lane < p.num_tokens) slot = claim_slot(p, first + lane);
  __syncwarp();
#pragma unroll
  for (u32 k = 0; k < TOKENS_PER_WARP; ++k) {
    const int to = __shfl_sync(kAllLanes, slot, k);
    if (to >= 0) write_token<kInput>(rows[k], p, to);
  }
  if (is_last_cta(p) && __ldcg(p.counters + 1) != 0) write_deferred<kInput>(p);
}

#endif
