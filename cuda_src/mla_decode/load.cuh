// The producer warpgroup: cache blocks, token factors ([S1]) and query tiles.
#pragma once

#include "common/log2.cuh"
#include "common/pipeline.cuh"
#include "common/profile.cuh"
#include "mla_decode/schedule.cuh"
#include "mla_decode/storage.cuh"
#include "ptx/elect.cuh"
#include "ptx/fence.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/tma.cuh"

// Start the copies of cache block `page` into a stage (one thread).
__device__ __forceinline__ void load_block(const MlaDecodeParams& p, unsigned stage, int page,
                                           unsigned long long policy) {
  const unsigned bar = full_barrier(stage);
  mbarrier_arrive_expect_tx(bar, kStageTxBytes);
  tma_load_4d(stage, &p.ckv_map, bar, policy, 0, 0, 0, page);
  tma_load_3d(stage + kLatentBytes, &p.rope_map, bar, policy, 0, 0, page);
  tma_load_2d(stage + OFFSET_OF(Stage, scale), &p.k_scale_map, bar, policy, 0,
              page * p.k_scale_step);
}

// Start the copies of a split's Q tile (one thread). Rows beyond the request's are zero-filled.
__device__ __forceinline__ void load_query_tile(const MlaDecodeParams& p, unsigned tile,
                                                unsigned bar, int req,
                                                unsigned long long policy) {
  const int row = blockIdx.x * kTileM;
  mbarrier_arrive_expect_tx(bar, kQueryTxBytes);
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    tma_load_3d(tile + chunk * kChunkBytes, &p.q_nope_map, bar, policy, chunk * 128, row, req);
  }
  tma_load_3d(tile + kLatentBytes, &p.q_rope_map, bar, policy, 0, row, req);
}

// Page ids of a split, read by the whole warp, 32 at a time and one batch ahead, so that no copy waits
// for its id.
class PageIds {
 public:
  __device__ __forceinline__ void open(const MlaDecodeParams& p, const Split& split) {
    table_ = p.block_table + split.req * p.block_table_stride;
    end_ = min(split.end * kPages, (split.seqlen + kBlockSize - 1) / kBlockSize);
    next_ = split.begin * kPages;
    read();
  }

  // The ids of the next 32 pages, one a lane; 0 where no page exists.
  __device__ __forceinline__ int take() {
    const int ids = ahead_;
    read();
    return ids;
  }

 private:
  __device__ __forceinline__ void read() {
    const int page = next_ + (threadIdx.x & 31);
    ahead_ = page < end_ ? table_[page] : 0;
    next_ += 32;
  }

  const int* table_;
  int end_, next_, ahead_;
};

// The first turn round the ring. Copies under way are served side by side: were all places asked for at
// once, the first block would land about when the last one does (after 5 us at 64 rows), and nothing
// could begin before. So the copy of a block waits until the one kAtOnce places before it has landed,
// which leaves as many under way as the memory's whole rate needs.
struct FirstTurn {
  static constexpr int kAtOnce = 2;
  int places = 0;  // asked for so far

  // One thread, before it asks for the place at `stage`.
  __device__ __forceinline__ void wait(unsigned stage) const {
    if (places < kAtOnce || places >= kStages) return;
    MBARRIER_WAIT(full_barrier(stage - kAtOnce * static_cast<unsigned>(sizeof(Stage))), 0);
  }
  __device__ __forceinline__ void pass() { ++places; }
};

// The cache block of one page into the next stage; `exists` is false for the second page of a block of
// two that the request does not reach.
__device__ __forceinline__ void load_page(const MlaDecodeParams& p, const StageRing& ring, int id,
                                          bool exists, unsigned long long policy,
                                          const FirstTurn& turn, Profile<2>& profile) {
  DEVICE_CHECK(id >= 0 && id < p.num_blocks);
  if (!elect_one()) return;
  profile.mark(1);
  MBARRIER_WAIT(empty_barrier(ring.at), ring.phase ^ 1);
  turn.wait(ring.at);
  profile.mark(0);
  if (exists) {
    load_block(p, ring.at, id, policy);
  } else {
    mbarrier_arrive(full_barrier(ring.at));
  }
}

// All cache blocks of a split, and before them its Q tile where it passes through the ring.
__device__ __forceinline__ void load_split(const MlaDecodeParams& p, StageRing& ring,
                                           FirstTurn& turn, const Split& split,
                                           PageIds& pages, unsigned long long policy,
                                           Profile<2>& profile) {
  if constexpr (kQueryInRegisters) {
    if (elect_one()) {
      MBARRIER_WAIT(empty_barrier(ring.at), ring.phase ^ 1);
      load_query_tile(p, ring.at, full_barrier(ring.at), split.req, createpolicy_evict_last());
    }
    __syncwarp();
    ring.advance();
    turn.pass();
  }
  const int last = (split.seqlen + kBlockSize - 1) / kBlockSize;
  const int end = split.end * kPages;
  for (int first = split.begin * kPages; first < end; first += 32) {
    const int ids = pages.take();
    const int count = min(32, end - first);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const bool exists = kPages == 1 || first + i < last;
      load_page(p, ring, __shfl_sync(0xffffffffu, ids, i), exists, policy, turn, profile);
      __syncwarp();
      turn.pass();
      ring.advance();
    }
  }
}

// The Q tile of a CTA's first split, where Q has a place of its own. Nothing can begin without it: so the
// load warp asks for it before the first cache block.
__device__ __forceinline__ void load_first_query(const MlaDecodeParams& p, Storage& s,
                                                 const Split& split) {
  if constexpr (kQueryInRegisters) return;
  if (!elect_one()) return;
  load_query_tile(p, query_tile(s), shared_address(&s.query_full), split.req,
                  createpolicy_evict_last());
}

// Load warp: all cache blocks of the CTA, as early as stages are free. The first page ids are looked
// up while the other warps make the storage ready.
__device__ __forceinline__ void load_role(const MlaDecodeParams& p, Storage& s) {
  griddepcontrol_wait();
  const unsigned long long policy = createpolicy_evict_first();
  Schedule schedule(p);
  Split split;
  StageRing ring(s);
  Profile<2> profile;  // waiting for a free stage; the rest
  PageIds pages;
  bool started = false;
  FirstTurn turn;
  while (schedule.next(split)) {
    pages.open(p, split);
    if (!started) {
      wait_for_storage();
      load_first_query(p, s, split);
    }
    started = true;
    load_split(p, ring, turn, split, pages, policy, profile);
  }
  if (!started) wait_for_storage();
  if (elect_one()) profile.store(profile_slot(p, kProducerRole));
}

// Zero one token's latent and RoPE in a stage: rows stay whole under the swizzle.
__device__ __forceinline__ void zero_token(unsigned stage, int token) {
#pragma unroll 1
  for (int chunk = 0; chunk <= kChunks; ++chunk) {  // RoPE follows the last chunk
    const unsigned row = stage + chunk * kChunkBytes + token * 128;
    for (int i = 0; i < 8; ++i) st_shared_v4(row + 16 * i, make_uint4(0, 0, 0, 0));
  }
}

// Where a token's factors are, from the stage's address.
struct TokenPlaces {
  unsigned scale, pair, inverse;

  __device__ __forceinline__ explicit TokenPlaces(int token)
      : scale(OFFSET_OF(Stage, scale) + 4 * token),
        pair(OFFSET_OF(Stage, token_scale) + 16 * (token >> 1) + 4 * (token & 1)),
        inverse(OFFSET_OF(Stage, token_inverse) + 4 * inverse_index(token)) {
    keep_in_register(scale);
    keep_in_register(pair);
    keep_in_register(inverse);
  }
};

// [S1] One token's factors. In a block that hides tokens from some row, tokens beyond the length
// and NaN tokens are zeroed, so that 0 x NaN cannot reach a row that does not see them. The inverse of
// a token that has none is computed of 1 and dropped: a branch around it costs more.
__device__ __forceinline__ void prepare_token(unsigned stage, const TokenPlaces& at, int token,
                                              bool inside, bool masked) {
  const float loaded = __uint_as_float(ld_shared_u32(stage + at.scale));
  const float ks = inside ? loaded : 0.0f;
  const bool nan = ks != ks;
  if (masked && (!inside || nan)) {
    zero_token(stage, token);
    fence_proxy_async_shared();
  }
  st_shared_u32(stage + at.pair, __float_as_uint(ks));
  st_shared_u32(stage + at.pair + 8, __float_as_uint(log2_soft(ks)));
  const bool has_inverse = inside && !nan;
  const float inverse = __frcp_rn(has_inverse ? ks : 1.0f);
  st_shared_u32(stage + at.inverse, __float_as_uint(has_inverse ? inverse : 0.0f));
}

// Token warps: one thread a token of the block.
__device__ __forceinline__ void token_role(const MlaDecodeParams& p, Storage& s) {
  const int token = threadIdx.x & 63;
  const int first_row = blockIdx.x * kTileM;
  Schedule schedule(p);
  Split split;
  StageRing ring(s);
  const TokenPlaces places(token);
  while (schedule.next(split)) {
    if constexpr (kQueryInRegisters) {
      // A Q tile in the ring passes every barrier of its place. The score warps free it only after
      // this, so the wait cannot be overtaken by the next phase.
      MBARRIER_WAIT(full_barrier(ring.at), ring.phase);
      warp_arrive(ready_barrier(ring.at));
      ring.advance();
    }
    // From the page's begin: this lane's token is inside where `left` is positive, and the page's block
    // hides tokens from a row from page `whole` on.
    int left = split.seqlen - token - split.begin * kBlockN;
    const int end = split.end * kPages;
    const int whole = max(row_limit(p, first_row, split.seqlen), 0) / kBlockN * kPages;
#pragma unroll 1
    for (int page = split.begin * kPages; page < end; ++page, left -= kBlockSize) {
      MBARRIER_WAIT(full_barrier(ring.at), ring.phase);
      prepare_token(ring.at, places, token, left > 0, page >= whole);
      warp_arrive(ready_barrier(ring.at));
      ring.advance();
    }
  }
}

// Query warp, where Q has a place of its own: the Q tile of each split but the first, which the load
// warp brings.
__device__ __forceinline__ void query_role(const MlaDecodeParams& p, Storage& s) {
  if constexpr (kQueryInRegisters) return;
  if ((threadIdx.x & 31) != 0) return;
  const unsigned long long policy = createpolicy_evict_last();
  Schedule schedule(p);
  Split split;
  if (!schedule.next(split)) return;
  unsigned phase = 1;
  while (schedule.next(split)) {
    MBARRIER_WAIT(shared_address(&s.query_empty), phase ^ 1);
    load_query_tile(p, query_tile(s), shared_address(&s.query_full), split.req, policy);
    phase ^= 1;
  }
}
