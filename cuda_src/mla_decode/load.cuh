// The producer warpgroup: cache blocks, token factors ([S1]) and query tiles.
#pragma once

#include "common/log2.cuh"
#include "common/pipeline.cuh"
#include "common/profile.cuh"
#include "mla_decode/schedule.cuh"
#include "mla_decode/storage.cuh"
#include "ptx/fence.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/tma.cuh"

// Start the copies of cache block `page` into a stage (one thread).
__device__ __forceinline__ void load_block(const MlaDecodeParams& p, Storage& s, unsigned stage,
                                           int page, unsigned long long policy) {
  const unsigned bar = shared_address(&s.barriers.stage_full[stage]);
  mbarrier_arrive_expect_tx(bar, kStageTxBytes);
  tma_load_4d(shared_address(s.stages[stage].latent), &p.ckv_map, bar, policy, 0, 0, 0, page);
  tma_load_3d(shared_address(s.stages[stage].rope), &p.rope_map, bar, policy, 0, 0, page);
  tma_load_2d(shared_address(s.scale[stage]), &p.k_scale_map, bar, policy, 0,
              page * p.k_scale_step);
}

// Start the copies of a split's Q tile (one thread). Rows beyond the request's are zero-filled.
__device__ __forceinline__ void load_query_tile(const MlaDecodeParams& p, Stage& tile, unsigned bar,
                                                int req, unsigned long long policy) {
  const int row = blockIdx.x * kTileM;
  mbarrier_arrive_expect_tx(bar, kQueryTxBytes);
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    tma_load_3d(shared_address(tile.latent + chunk * kChunkBytes), &p.q_nope_map, bar, policy,
                chunk * 128, row, req);
  }
  tma_load_3d(shared_address(tile.rope), &p.q_rope_map, bar, policy, 0, row, req);
}

// Load warp: all cache blocks of the CTA, as early as stages are free. Page ids are read by the
// whole warp, 32 at a time and one batch ahead, so no copy waits for its id.
__device__ __forceinline__ void load_role(const MlaDecodeParams& p, Storage& s) {
  const int lane = threadIdx.x & 31;
  const unsigned long long policy = createpolicy_evict_first();
  const unsigned long long query_policy = createpolicy_evict_last();
  Schedule schedule(p);
  Split split;
  Ring<kStages> ring;
  Profile<2> profile;  // waiting for a free stage; the rest
  while (schedule.next(split)) {
    if constexpr (kQueryInRegisters) {
      if (lane == 0) {
        MBARRIER_WAIT(shared_address(&s.barriers.stage_empty[ring.index]), ring.phase ^ 1);
        load_query_tile(p, s.stages[ring.index],
                        shared_address(&s.barriers.stage_full[ring.index]), split.req, query_policy);
      }
      __syncwarp();
      ring.advance();
    }
    const int* table = p.block_table + split.req * p.block_table_stride;
    const int first = split.begin * kPages, end = split.end * kPages;
    const int last = (split.seqlen + kBlockSize - 1) / kBlockSize;  // pages that exist
    int ids = 0;
    int ahead = first + lane < min(end, last) ? table[first + lane] : 0;
    for (int page = first; page < end; ++page) {
      const int offset = (page - first) & 31;
      if (offset == 0) {
        ids = ahead;
        ahead = page + 32 + lane < min(end, last) ? table[page + 32 + lane] : 0;
      }
      const int id = __shfl_sync(0xffffffffu, ids, offset);
      DEVICE_CHECK(id >= 0 && id < p.num_blocks);
      if (lane == 0) {
        profile.mark(1);
        MBARRIER_WAIT(shared_address(&s.barriers.stage_empty[ring.index]), ring.phase ^ 1);
        profile.mark(0);
        if (kPages == 1 || page < last) {  // an odd number of pages leaves half a block of two
          load_block(p, s, ring.index, id, policy);
        } else {
          mbarrier_arrive(shared_address(&s.barriers.stage_full[ring.index]));
        }
      }
      __syncwarp();
      ring.advance();
    }
  }
  if (lane == 0) profile.store(profile_slot(p, kProducerRole));
}

// Zero one token's latent and RoPE in a stage: rows stay whole under the swizzle.
__device__ __forceinline__ void zero_token(Stage& stage, int token) {
  const float4 zero = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      reinterpret_cast<float4*>(stage.latent + chunk * kChunkBytes + token * 128)[i] = zero;
    }
    reinterpret_cast<float4*>(stage.rope + token * 128)[i] = zero;
  }
}

// Where a lane's token lies in the factor arrays of stage 0, as shared addresses.
struct TokenPlace {
  unsigned scale, pair;

  __device__ __forceinline__ TokenPlace(const Storage& s, int token)
      : scale(shared_address(&s.scale[0][token])),
        pair(shared_address(&s.token_scale[0][token >> 1]) + 4 * (token & 1)) {
    keep_in_register(scale);
    keep_in_register(pair);
  }
};

// [S1] One token's factors. In a block that hides tokens from some row, tokens beyond the length
// and NaN tokens are zeroed, so that 0 x NaN cannot reach a row that does not see them.
__device__ __forceinline__ void prepare_token(Storage& s, const TokenPlace& place, unsigned stage,
                                              int token, bool inside, bool masked) {
  static_assert(sizeof(Storage::scale) == sizeof(Storage::token_inverse), "a float a token each");
  constexpr unsigned kInverseOffset = sizeof(Storage::scale) + sizeof(Storage::token_scale);
  const unsigned scale = place.scale + stage * kScaleBytes;
  const unsigned pair = place.pair + stage * sizeof(s.token_scale[0]);
  const float loaded = __uint_as_float(ld_shared_u32(scale));
  const float ks = inside ? loaded : 0.0f;
  const bool nan = ks != ks;
  if (masked && (!inside || nan)) {
    zero_token(s.stages[stage], token);
    fence_proxy_async_shared();
  }
  st_shared_u32(pair, __float_as_uint(ks));
  st_shared_u32(pair + 8, __float_as_uint(log2_soft(ks)));
  st_shared_u32(scale + kInverseOffset, __float_as_uint(inside && !nan ? __frcp_rn(ks) : 0.0f));
}

__device__ __forceinline__ void announce_tokens(Storage& s, unsigned stage) {
  warp_arrive(shared_address(&s.barriers.tokens_ready[stage]));
}

// Token warps: one thread a token of the block.
__device__ __forceinline__ void token_role(const MlaDecodeParams& p, Storage& s) {
  const int token = threadIdx.x & 63;
  const int first_row = blockIdx.x * kTileM;
  Schedule schedule(p);
  Split split;
  Ring<kStages> ring;
  const TokenPlace place(s, token);
  while (schedule.next(split)) {
    if constexpr (kQueryInRegisters) {
      // A Q tile in the ring passes every barrier of its place. The score warps free it only after
      // this, so the wait cannot be overtaken by the next phase.
      MBARRIER_WAIT(shared_address(&s.barriers.stage_full[ring.index]), ring.phase);
      announce_tokens(s, ring.index);
      ring.advance();
    }
    const int limit = row_limit(p, first_row, split.seqlen);
    for (int page = split.begin * kPages; page < split.end * kPages; ++page) {
      const bool inside = page * kBlockSize + token < split.seqlen;
      const bool masked = (page / kPages + 1) * kBlockN > limit;
      MBARRIER_WAIT(shared_address(&s.barriers.stage_full[ring.index]), ring.phase);
      prepare_token(s, place, ring.index, token, inside, masked);
      announce_tokens(s, ring.index);
      ring.advance();
    }
  }
}

// Query warp, where Q has a place of its own: the Q tile of each split.
__device__ __forceinline__ void query_role(const MlaDecodeParams& p, Storage& s) {
  if (kQueryInRegisters || (threadIdx.x & 31) != 0) return;
  const unsigned long long policy = createpolicy_evict_last();
  Schedule schedule(p);
  Split split;
  unsigned phase = 0;
  while (schedule.next(split)) {
    MBARRIER_WAIT(shared_address(&s.barriers.query_empty), phase ^ 1);
    load_query_tile(p, s.stages[kStages], shared_address(&s.barriers.query_full), split.req, policy);
    phase ^= 1;
  }
}
