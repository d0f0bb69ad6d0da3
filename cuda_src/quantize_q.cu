// quantize_q: queries to e4m3 with one scale per token and head, RoPE pre-scaled to bf16, in one
// pass over the data. Mirror: reference/quantize_q.py, whose bytes this kernel equals.
//
// Maths, per row of 576 values: [Q1] to [Q4] of common/quantize.cuh.
//
// Arguments (QuantizeQParams; the API checks them):
//   q_nope     INPUT_DTYPE [b][s_q][h][512], strides in bytes, last dimension contiguous
//   q_rope     INPUT_DTYPE [b][s_q][h][64], likewise (a part of one [..][576] array, or its own)
//   out_nope   e4m3 [rows][512], out_rope bf16 [rows][64], out_scale f32 [rows]; contiguous, 16-byte
//              aligned; rows = b s_q h < 2^31, the head fastest
//   wide       not 0: every row of q_nope is 16-byte aligned and every row of q_rope 8-byte
//   flat       not 0: stride_s = h stride_h and stride_b = s_q stride_s in both parts
//   pow2       not 0: scale_rounding="pow2"
//
//   rows_per_cta, longer_ctas  the first longer_ctas CTAs take rows_per_cta + 1 rows, the others
//              rows_per_cta, all rows together; 256 at most
//
// Launch: 1-D grid of CTAs for all rows, 256 threads, no dynamic shared memory; a warp has the
// copies of RING_ROWS rows to shared memory under way while it quantises. May be launched as a
// dependent of the kernel that writes q.
#include "data_movement/quantize_q.cuh"
#include "ptx/griddep.cuh"
#include "quantize_q_params.h"

extern "C" __global__ void __launch_bounds__(256, MIN_CTAS)
    quantize_q(const __grid_constant__ QuantizeQParams p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (p.wide) {
    quantize_query_rows<INPUT_DTYPE, true>(p, blockIdx.x);
  } else {
    quantize_query_rows<INPUT_DTYPE, false>(p, blockIdx.x);
  }
}
