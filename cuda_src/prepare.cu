// prepare: a decode step's preparation in one launch: append_kv of the new tokens and quantize_q of
// their queries. Mirror: reference/prepare.py, which calls the two stages one after the other.
//
// Arguments (PrepareParams): append (as in append_kv.cu, scan variant: at most APPEND_SCAN_MAX
// tokens), query (as in quantize_q.cu), append_ctas: the CTAs that append; the others quantise.
// Launch: 1-D grid of append_ctas and the CTAs that query's rows need, 256 threads. The tokens come
// first: their chain of loads is the longer one. May be launched as a dependent.
#include "data_movement/append_kv.cuh"
#include "data_movement/quantize_q.cuh"
#include "prepare_params.h"
#include "ptx/griddep.cuh"

template <bool kWide>
__device__ __forceinline__ void append_some(const PrepareParams& p) {
  append_scanned<INPUT_DTYPE, kWide>(p.append, blockIdx.x);
}

template <bool kWide>
__device__ __forceinline__ void quantize_some(const PrepareParams& p) {
  quantize_query_rows<INPUT_DTYPE, kWide>(p.query, blockIdx.x - p.append_ctas);
}

extern "C" __global__ void __launch_bounds__(256, MIN_CTAS)
    prepare(const __grid_constant__ PrepareParams p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (blockIdx.x < p.append_ctas) {
    if (p.append.wide && p.append.cache.wide) {
      append_some<true>(p);
    } else {
      append_some<false>(p);
    }
  } else if (p.query.wide) {
    quantize_some<true>(p);
  } else {
    quantize_some<false>(p);
  }
}
