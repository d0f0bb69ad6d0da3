// append_kv: new tokens quantised and written straight into their slots of the paged cache.
// Mirror: reference/append_kv.py, whose bytes this kernel equals.
//
// Steps, per token of 576 values:
//   [A1] slot = slot_mapping[token]; negative (or beyond the cache): skipped
//   [A2] of several tokens with one slot the last (highest index) is written, whole
//   [A3] [Q1] to [Q4] of common/quantize.cuh; codes, scale and RoPE to block slot / 64, offset
//        slot % 64
//
// [A2] decides before it writes, so a slot never holds parts of two tokens. Two variants:
//   scan   up to APPEND_SCAN_MAX tokens, a token a warp: the CTA looks through the slots after its
//          own tokens. No workspace.
//   claim  any number, TOKENS_PER_WARP a warp: one atomic exchange per token on claims[slot] tells
//          whether another token of the launch claimed the slot before. Such tokens (there are none
//          in a proper mapping) wait on a list for the last CTA to finish, which writes the last one
//          of each slot.
//
// Arguments (AppendKvParams; the API checks them):
//   cache         planes, strides in bytes, num_slots; wide: codes 16-byte, RoPE 4-byte aligned
//   kv_c, k_pe    INPUT_DTYPE [n][512], [n][64], row strides in bytes; wide: rows of kv_c 16-byte,
//                 of k_pe 8-byte aligned
//   slot_mapping  i32 or i64 [n], stride in bytes
//   pow2          not 0: scale_rounding="pow2"
//   claims        u32 [num_slots], any content; deferred u32 [n][2]; counters u32 [2], zero before
//                 the first launch, left zero by each; claim_base. claim variant only; one workspace
//                 serves launches that follow one another, not two at the same time.
//
// Launch: 1-D grid of ceil(n / tokens of a CTA) CTAs, 256 threads; may be launched as a dependent of
// the kernel that writes kv_c.
#include "append_kv_params.h"
#include "data_movement/append_kv.cuh"
#include "ptx/griddep.cuh"

extern "C" __global__ void __launch_bounds__(256, MIN_CTAS)
    append_kv(const __grid_constant__ AppendKvParams p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
#if TOKENS_PER_WARP
  append_claimed<INPUT_DTYPE>(p, blockIdx.x);
#else
  append_scanned<INPUT_DTYPE>(p, blockIdx.x);
#endif
}
