// append_kv: new tokens quantised and written straight into their slots of the paged cache.
// Mirror: reference/append_kv.py, whose bytes this kernel equals.
//
// Steps, per token of 576 values:
//   [A1] slot = slot_mapping[token]; negative (or beyond the cache): skipped
//   [A2] of several tokens with one slot the last (highest index) is written, whole
//   [A3] [Q1] to [Q4] of common/quantize.cuh; codes, scale and RoPE to block slot / 64, offset
//        slot % 64
//
// Two variants decide [A2]:
//   scan   up to APPEND_SCAN_MAX tokens, a token a warp: before it writes, the CTA looks through the
//          slots after its own tokens. No workspace.
//   claim  any number, up to 256 a CTA: one atomic exchange per token on claims[slot] tells whether
//          another token of the launch claimed the slot before. Nobody waits for the answer: every
//          token is written at once, and those that share a slot (there are none in a proper
//          mapping) come on a list. The last CTA to finish, when all others have written, writes
//          the last token of each listed slot once more, whole. A CTA that learns in time that there
//          is no list ends without waiting for its writes (EARLY_END; 0: none does, to measure what
//          that is worth). A warp has the copies of RING_ROWS tokens to shared memory under way all
//          the time.
//
// Arguments (AppendKvParams; the API checks them):
//   cache         planes, strides in bytes, num_slots; wide: codes 16-byte, RoPE 4-byte aligned
//   kv_c, k_pe    INPUT_DTYPE [n][512], [n][64], row strides in bytes; wide: rows of kv_c 16-byte,
//                 of k_pe 8-byte aligned
//   slot_mapping  i32 or i64 [n], stride in bytes
//   pow2          not 0: scale_rounding="pow2"
//   claims        u32 [num_slots], any content; deferred u32 [n][2]; counters u32 [33], zero
//                 before the first launch, left zero by each, 8-byte aligned; claim_base. claim variant
//                 only; one workspace serves launches that follow one another, not two at the same
//                 time.
//   tokens_per_cta, longer_ctas  claim variant: the first longer_ctas CTAs take tokens_per_cta + 1
//                 tokens, the others tokens_per_cta, all tokens together; 256 at most
//
// Launch: 1-D grid of ceil(n / 8) CTAs (scan), or of CTAs for all tokens (claim), 256 threads; may
// be launched as a dependent of the kernel that writes kv_c.
#include "append_kv_params.h"
#include "data_movement/append_kv.cuh"
#include "ptx/griddep.cuh"

template <int kInput, bool kWide>
__device__ __forceinline__ void append(const AppendKvParams& p) {
#if CLAIM
  append_claimed<kInput, kWide>(p);
#else
  append_scanned<kInput, kWide>(p, blockIdx.x);
#endif
}

extern "C" __global__ void __launch_bounds__(256, MIN_CTAS)
    append_kv(const __grid_constant__ AppendKvParams p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (p.wide && p.cache.wide) {
    append<INPUT_DTYPE, true>(p);
  } else {
    append<INPUT_DTYPE, false>(p);
  }
}
