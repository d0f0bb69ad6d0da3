// mla_combine: merge the splits of each request. Mirror: reference/mla_combine.py, whose bytes this
// kernel equals.
//
//   [C1] top = max lse2 over the splits; all empty: out 0, lse +inf
//   [C2] w = exp2(lse2 - top); total = sum of w in order
//   [C3] acc = fma(w rcp(total), o, acc) in order
//   [C4] out = bf16(hold(acc)); lse = (top + log2(total)) ln 2
//
// Arguments (MlaCombineParams):
//   o_accum f32 [splits][rows][512], lse_accum f32 [splits][rows] (log2 units), num_splits i32
//   [batch + 1] cumulative; out bf16 [batch][rows][512]; lse f32 [batch][heads][seq_len_q]
//
// Launch: a 1-D grid of any size, 128 threads, dynamic shared memory of kChunk x 512 bytes. Requests
// with one split were finished by mla_decode and are passed over 32 at a time. Of the others, those
// with few splits give a row to each warp; the others give 128 dims of a row to each CTA, which
// brings all splits at once. May be launched as a dependent of mla_decode.
#include "common/log2.cuh"
#include "common/softmax.cuh"
#include "mla_combine_params.h"
#include "ptx/cp_async.cuh"
#include "ptx/griddep.cuh"

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kFullMask = 0xffffffffu;
constexpr int kFewSplits = 8;  // up to here a row is a warp's
constexpr int kDimsPerItem = 128;
constexpr int kItemsPerRow = kKvLoraRank / kDimsPerItem;
constexpr int kChunk = 128;  // splits held at once
static_assert(kChunk * kDimsPerItem * 4 == SMEM_BYTES, "the kernel table states the size");

// The splits of one row.
struct Row {
  const float* lse2;  // of the first split
  const float* o;
  long long lse_stride, o_stride;  // between splits
  int count;
};

__device__ __forceinline__ Row row_of(const MlaCombineParams& p, int first_split, int count,
                                      int row) {
  const long long at = static_cast<long long>(first_split) * p.num_rows + row;
  return Row{p.lse_accum + at, p.o_accum + at * kKvLoraRank, p.num_rows,
             static_cast<long long>(p.num_rows) * kKvLoraRank, count};
}

__device__ __forceinline__ float warp_max(float x) {
  for (int step = 16; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(kFullMask, x, step));
  return x;
}

// [C4] lse of a row, by one thread.
__device__ __forceinline__ void store_lse(const MlaCombineParams& p, int req, int row, bool empty,
                                          float top, float total) {
  const int query = row / p.num_heads_q, head = row % p.num_heads_q;
  const long long line = static_cast<long long>(req) * p.num_heads_q + head;
  const float lse2 = empty ? kNegInf : __fadd_rn(top, log2_soft(total));
  p.lse[line * p.seq_len_q + query] = natural_lse(lse2);
}

// --- A row a warp: lane s holds the weight of split s ---------------------------------------------

__device__ __forceinline__ void combine_few(const MlaCombineParams& p, const Row& r, int req,
                                            int row) {
  const int lane = threadIdx.x & 31;
  const float lse2 = lane < r.count ? r.lse2[lane * r.lse_stride] : kNegInf;
  const float top = warp_max(lse2);  // [C1]
  const bool empty = !__any_sync(kFullMask, !(lse2 == kNegInf));
  const float weight = ex2_approx_ftz(__fsub_rn(lse2, empty ? 0.0f : top));  // [C2]
  float total = 0.0f;
  for (int s = 0; s < r.count; ++s) {
    total = __fadd_rn(total, __shfl_sync(kFullMask, weight, s));
  }
  const float mine = __fmul_rn(weight, __frcp_rn(total));

  float acc[4][4] = {};
  for (int s = 0; s < r.count; ++s) {
    const float a = __shfl_sync(kFullMask, mine, s);
    const float4* o = reinterpret_cast<const float4*>(r.o + s * r.o_stride) + lane;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 part = o[32 * i];
      acc[i][0] = __fmaf_rn(a, part.x, acc[i][0]);  // [C3]
      acc[i][1] = __fmaf_rn(a, part.y, acc[i][1]);
      acc[i][2] = __fmaf_rn(a, part.z, acc[i][2]);
      acc[i][3] = __fmaf_rn(a, part.w, acc[i][3]);
    }
  }
  uint2* out = static_cast<uint2*>(p.out) +
               (static_cast<long long>(req) * p.num_rows + row) * (kKvLoraRank / 4) + lane;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float value[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) value[k] = empty ? 0.0f : hold(acc[i][k]);  // [C4]
    out[32 * i] = make_uint2(cvt_bf16x2(value[1], value[0]), cvt_bf16x2(value[3], value[2]));
  }
  if (lane == 0) store_lse(p, req, row, empty, top, total);
}

// --- 128 dims of a row a CTA: a thread a dim --------------------------------------------------------

// [C1] the maximum of a row's lse2 and whether all of them are -inf, on every thread.
__device__ __forceinline__ float row_top(const Row& r, bool& empty) {
  __shared__ float tops[kWarps];
  float top = kNegInf;
  bool other = false;  // a maximum of -inf can also come from NaN splits
  for (int s = threadIdx.x; s < r.count; s += kThreads) {
    const float lse2 = r.lse2[s * r.lse_stride];
    top = fmaxf(top, lse2);
    other |= !(lse2 == kNegInf);
  }
  top = warp_max(top);
  if ((threadIdx.x & 31) == 0) tops[threadIdx.x >> 5] = top;
  empty = !__syncthreads_or(other);
  return fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
}

// Start bringing splits first .. first + n - 1 of this CTA's dims into shared memory.
__device__ __forceinline__ void load_splits(float* tile, const Row& r, int first, int n) {
  constexpr int kUnits = kDimsPerItem / 4;  // 16-byte units of a split
  const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  for (int i = threadIdx.x; i < n * kUnits; i += kThreads) {
    const int split = i / kUnits, unit = i % kUnits;
    cp_async_16(base + i * 16, r.o + (first + split) * r.o_stride + unit * 4);
  }
}

// [C2] weights of splits first .. first + n - 1.
__device__ __forceinline__ void load_weights(float* weights, const Row& r, int first, int n,
                                             float top) {
  if (threadIdx.x < n) {
    weights[threadIdx.x] =
        ex2_approx_ftz(__fsub_rn(r.lse2[(first + threadIdx.x) * r.lse_stride], top));
  }
}

__device__ __forceinline__ void combine_many(const MlaCombineParams& p, Row r, int req, int row,
                                             int first_dim) {
  extern __shared__ float tile[];
  __shared__ float weights[kChunk];
  static_assert(kChunk <= kThreads, "a thread a weight");
  r.o += first_dim;
  load_splits(tile, r, 0, min(kChunk, r.count));
  bool empty;
  float top = row_top(r, empty);
  top = empty ? 0.0f : top;
  float total = 0.0f;
  for (int first = 0; first < r.count; first += kChunk) {
    const int n = min(kChunk, r.count - first);
    __syncthreads();
    load_weights(weights, r, first, n, top);
    __syncthreads();
#pragma unroll 8
    for (int i = 0; i < n; ++i) total = __fadd_rn(total, weights[i]);
  }
  const float inverse = __frcp_rn(total);
  float acc = 0.0f;
  for (int first = 0; first < r.count; first += kChunk) {
    const int n = min(kChunk, r.count - first);
    if (r.count > kChunk) {
      __syncthreads();
      if (first > 0) load_splits(tile, r, first, n);
      load_weights(weights, r, first, n, top);
    }
    cp_async_wait_all();
    __syncthreads();
#pragma unroll 8
    for (int i = 0; i < n; ++i) {
      acc = __fmaf_rn(__fmul_rn(weights[i], inverse), tile[i * kDimsPerItem + threadIdx.x], acc);
    }
  }
  const int dim = first_dim + threadIdx.x;
  const long long at = (static_cast<long long>(req) * p.num_rows + row) * kKvLoraRank + dim;
  const float value = empty ? 0.0f : hold(acc);  // [C4]
  static_cast<unsigned short*>(p.out)[at] = static_cast<unsigned short>(cvt_bf16x2(0.0f, value));
  if (dim == 0) store_lse(p, req, row, empty, top, total);
  __syncthreads();
}

// ---------------------------------------------------------------------------------------------------

// Items of a request, and one of them. An item is four rows, or 128 dims of a row.
__device__ __forceinline__ int num_items(const MlaCombineParams& p, int count) {
  return count <= kFewSplits ? (p.num_rows + kWarps - 1) / kWarps : p.num_rows * kItemsPerRow;
}

__device__ __forceinline__ void combine_item(const MlaCombineParams& p, int req, int first_split,
                                             int count, int item) {
  if (count <= kFewSplits) {
    const int row = item * kWarps + (threadIdx.x >> 5);
    if (row < p.num_rows) combine_few(p, row_of(p, first_split, count, row), req, row);
  } else {
    const int row = item / kItemsPerRow;
    combine_many(p, row_of(p, first_split, count, row), req, row,
                 (item % kItemsPerRow) * kDimsPerItem);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 3)
    mla_combine(const __grid_constant__ MlaCombineParams p) {
  const int lane = threadIdx.x & 31;
  griddepcontrol_wait();
  long long item = blockIdx.x;  // of the next request that has splits to merge
  for (int base = 0; base < p.batch; base += 32) {
    const int mine = base + lane;
    const int first = mine < p.batch ? p.num_splits[mine] : 0;
    const int count = mine < p.batch ? p.num_splits[mine + 1] - first : 0;
    unsigned several = __ballot_sync(kFullMask, count > 1);
    for (; several != 0; several &= several - 1) {
      const int source = __ffs(several) - 1;
      const int first_split = __shfl_sync(kFullMask, first, source);
      const int num_splits = __shfl_sync(kFullMask, count, source);
      const int items = num_items(p, num_splits);
      for (; item < items; item += gridDim.x) {
        combine_item(p, base + source, first_split, num_splits, static_cast<int>(item));
      }
      item -= items;
    }
  }
  griddepcontrol_launch_dependents();
}
