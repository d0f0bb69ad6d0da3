// mla_decode: paged, split-KV FP8 MLA decode attention. Mirror: reference/mla_decode.py, whose bytes
// this kernel equals (out and lse).
//
// Maths, per query row and block of 64 tokens, blocks in order, fp32 round to nearest:
//   [S0] c = hold(q_scale softmax_scale log2 e)
//   [S1] lk = log2(ks), rk = 1 / ks; tokens beyond the length are zero
//   [S2] S = 16 e4m3 steps over the latent, then 4 bf16 steps over RoPE, one accumulator
//   [S3] u = fma(S ks, c, lk); masked u = -inf
//   [S4] M = max u; n = M - log2 448, rounded up
//   [S5] e = exp2(u - n); P = e4m3(e)
//   [S6] R rises where M > R + 8: r = exp2(R - M); t = exp2(n - R); L *= r, O *= r
//   [S7] l = sum e rk in lane order; L = fma(l, t, L)
//   [S8] T = P V from zero, 2 e4m3 steps; O = fma(T, t, O)
//   [S9] o = hold(O / L); lse2 = R + log2 L; one split: bf16 and nats, else fp32 partials
//
// Arguments (MlaDecodeParams; the API checks them):
//   q_nope_map, q_rope_map  tensor maps over q_nope e4m3 [b][rows][512], q_rope bf16 [b][rows][64]
//   q_scale                 f32 [b][rows], rows = seq_len_q x num_heads_q, query-major
//   ckv_map, rope_map       tensor maps over the latent and RoPE planes of the cache blocks
//   k_scale_map             tensor map over the scales, f32 [64] a block; k_scale_step 1, or 0 where one
//                           line serves every block. (A plain bulk copy would do, but racecheck takes
//                           what such a copy writes for the issuing thread's, and reports a race.)
//   block_table, block_table_stride  i32 [b][stride]; entries beyond the length are not read
//   cache_seqlens           i32 [b]; parts i32 [grid.y][8]; num_splits i32 [b + 1]: the plan
//   out bf16 [b][rows][512], lse f32 [b][heads][seq_len_q]: requests with one split
//   o_accum f32 [splits][rows][512], lse_accum f32 [splits][rows]: the others, for mla_combine
//   logit_factor            f32(softmax_scale log2 e), held in the normal range
//
// Launch: grid (row tiles of 64, parts), 512 threads, dynamic shared memory of `Storage`, one CTA an
// SM; may be launched as a dependent of the kernels that write Q and the cache.
//
// Variants: ROWS 16, 32 or 64 query rows computed of a tile; BLOCK_N 64 or 128 tokens of a softmax
// block. Roles, one warpgroup each (registers for up to 32 / 64 rows):
//   scores  200 / 120   S, softmax, P, row sums                       mla_decode/weights.cuh
//   output  144 / 184   two warpgroups, 256 dims each: T and O        mla_decode/output.cuh
//   load    24          warp 0 cache blocks and the first Q, 1-2 token factors,
//                       3 the other Q                                 mla_decode/load.cuh
// Shared memory (219 to 227 KB): five places, for cache blocks with all that belongs to them and for Q,
// and 2 P tiles with all that belongs to theirs; storage.cuh.
// Barriers (storage.cuh says who arrives and who waits): a stage goes load -> tokens -> scores ->
// output -> load; P tiles and row factors go scores -> output -> scores. Output warps take blocks
// strictly in order, so the order of accumulation is the reference's whatever the timing.
//
// Empty rows: a row without a visible token has L = 0: out 0, lse +inf (partials: -inf). A request
// of length 0 takes no block and writes exactly that. Not checked here: block ids in range, scales
// at least 2^-96 or NaN (debug builds check ids).
#include "mla_decode/load.cuh"
#include "mla_decode/output.cuh"
#include "mla_decode/storage.cuh"
#include "mla_decode/weights.cuh"
#include "ptx/griddep.cuh"
#include "ptx/setmaxnreg.cuh"

__device__ __forceinline__ void init_barriers(Storage& s) {
  mbarrier_init(shared_address(&s.query_full), 1);
  mbarrier_init_warps(shared_address(&s.query_empty), kScoreWarps);
  for (Stage& stage : s.stages) {
    mbarrier_init(shared_address(&stage.full), 1);
    mbarrier_init_warps(shared_address(&stage.empty), kOutputWarps);
    mbarrier_init_warps(shared_address(&stage.ready), kTokenWarps);
  }
  for (Weights& weights : s.weights) {
    mbarrier_init_warps(shared_address(&weights.full), kScoreWarps);
    mbarrier_init_warps(shared_address(&weights.empty), kOutputWarps);
  }
  mbarrier_init_warps(shared_address(&s.sum_full), kScoreWarps);
  mbarrier_init_warps(shared_address(&s.sum_empty), kOutputWarps);
  fence_mbarrier_init();
}

// What all roles find done when they have passed wait_for_storage.
__device__ __forceinline__ void start(const MlaDecodeParams& p, Storage& s) {
#if SNAPMLA_DEBUG
  // NaN codes wherever nothing has been written yet.
  unsigned* end = reinterpret_cast<unsigned*>(&s + 1);
  for (unsigned* at = reinterpret_cast<unsigned*>(&s) + threadIdx.x; at < end; at += kThreads) {
    *at = 0xffffffffu;
  }
  fence_proxy_async_shared();
  __syncthreads();  // barriers and flags are written after this
#endif
  // A warp that has nothing to look up meanwhile.
  if (threadIdx.x == kProducerRole * kWarpgroup + kQueryWarp * 32) {
    prefetch_tensormap(&p.ckv_map);
    prefetch_tensormap(&p.rope_map);
    prefetch_tensormap(&p.q_nope_map);
    prefetch_tensormap(&p.q_rope_map);
    prefetch_tensormap(&p.k_scale_map);
    init_barriers(s);
  }
  // Every score warp writes its flag before one is read; zero all the same.
  if (threadIdx.x < kBuffers * 4) s.weights[threadIdx.x / 4].raised[threadIdx.x % 4] = 0;
}

__device__ __forceinline__ void producer_role(const MlaDecodeParams& p, Storage& s) {
  const int warp = (threadIdx.x >> 5) & 3;
  if (warp == kLoadWarp) {
    load_role(p, s);
    griddepcontrol_launch_dependents();
    return;
  }
  wait_for_start();
  if (warp == kQueryWarp) {
    query_role(p, s);
  } else {
    token_role(p, s);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_decode(const __grid_constant__ MlaDecodeParams p) {
  extern __shared__ unsigned char raw[];
  Storage& s = *reinterpret_cast<Storage*>(raw);
  start(p, s);
  const int role = threadIdx.x / kWarpgroup;
  if (role == kProducerRole) {
    setmaxnreg_dec<kProducerRegisters>();
    producer_role(p, s);
  } else if (role == kScoreRole) {
    if constexpr (kScoreRegisters < kRegistersAtLaunch) {
      setmaxnreg_dec<kScoreRegisters>();
    } else {
      setmaxnreg_inc<kScoreRegisters>();
    }
    wait_for_start();
    score_role(p, s);
  } else {
    setmaxnreg_inc<kOutputRegisters>();
    wait_for_start();
    output_role(p, s, role - kOutputLeftRole);
  }
}
