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
// Launch: a 1-D grid of any size, 128 threads; an item is one row's 128 dims, a thread one dim.
// Requests with one split were finished by mla_decode and are passed over 32 at a time. May be
// launched as a dependent of mla_decode.
#include "common/log2.cuh"
#include "common/softmax.cuh"
#include "mla_combine_params.h"
#include "ptx/griddep.cuh"

constexpr int kThreads = 128;
constexpr int kItemsPerRow = kKvLoraRank / kThreads;
constexpr int kChunk = 1024;  // splits whose weights are held at once
constexpr int kUnroll = 8;    // partial outputs in flight a thread

// [C1] the maximum of a row's lse2, on every thread.
__device__ __forceinline__ float row_top(const float* lse2, long long stride, int count,
                                         float (&scratch)[4]) {
  float top = kNegInf;
  for (int s = threadIdx.x; s < count; s += kThreads) top = fmaxf(top, lse2[s * stride]);
  for (int step = 16; step > 0; step >>= 1) {
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
  }
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = top;
  __syncthreads();
  return fmaxf(fmaxf(scratch[0], scratch[1]), fmaxf(scratch[2], scratch[3]));
}

// Are all splits of the row empty? A maximum of -inf can also come from NaN splits.
__device__ __forceinline__ bool row_empty(const float* lse2, long long stride, int count) {
  bool other = false;
  for (int s = threadIdx.x; s < count; s += kThreads) other |= !(lse2[s * stride] == kNegInf);
  return !__syncthreads_or(other);
}

// [C2] weights of splits first .. first + n - 1 into shared memory.
__device__ __forceinline__ void load_weights(float (&weights)[kChunk], const float* lse2,
                                             long long stride, int first, int n, float top) {
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += kThreads) {
    weights[i] = ex2_approx_ftz(__fsub_rn(lse2[(first + i) * stride], top));
  }
  __syncthreads();
}

// One row of one request: this thread's dim.
__device__ __forceinline__ void combine_row(const MlaCombineParams& p, int req, int first_split,
                                            int count, int row, int dim) {
  __shared__ float weights[kChunk];
  __shared__ float scratch[4];
  const float* lse2 = p.lse_accum + static_cast<long long>(first_split) * p.num_rows + row;
  const long long stride = p.num_rows;
  const float top = row_top(lse2, stride, count, scratch);
  const bool empty = top == kNegInf && row_empty(lse2, stride, count);

  float total = 0.0f;
  for (int first = 0; first < count; first += kChunk) {
    const int n = min(kChunk, count - first);
    load_weights(weights, lse2, stride, first, n, top);
#pragma unroll 8
    for (int i = 0; i < n; ++i) total = __fadd_rn(total, weights[i]);
  }
  const float inverse = __frcp_rn(total);

  float acc = 0.0f;
  const long long step = stride * kKvLoraRank;
  const float* o = p.o_accum + (static_cast<long long>(first_split) * p.num_rows + row) * kKvLoraRank + dim;
  for (int first = 0; first < count; first += kChunk) {
    const int n = min(kChunk, count - first);
    if (count > kChunk) load_weights(weights, lse2, stride, first, n, top);
    int i = 0;
    for (; i + kUnroll <= n; i += kUnroll) {
      float part[kUnroll];
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) part[k] = o[(first + i + k) * step];
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        acc = __fmaf_rn(__fmul_rn(weights[i + k], inverse), part[k], acc);  // [C3]
      }
    }
    for (; i < n; ++i) acc = __fmaf_rn(__fmul_rn(weights[i], inverse), o[(first + i) * step], acc);
  }

  const long long at = (static_cast<long long>(req) * p.num_rows + row) * kKvLoraRank + dim;
  const float value = empty ? 0.0f : hold(acc);  // [C4]
  static_cast<unsigned short*>(p.out)[at] = static_cast<unsigned short>(cvt_bf16x2(0.0f, value));
  if (dim == 0) {
    const int query = row / p.num_heads_q, head = row % p.num_heads_q;
    const long long line = static_cast<long long>(req) * p.num_heads_q + head;
    const float lse2_all = empty ? kNegInf : __fadd_rn(top, log2_soft(total));
    p.lse[line * p.seq_len_q + query] = natural_lse(lse2_all);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    mla_combine(const __grid_constant__ MlaCombineParams p) {
  const int lane = threadIdx.x & 31;
  const int items = p.num_rows * kItemsPerRow;
  griddepcontrol_wait();
  long long item = blockIdx.x;  // of the next request that has splits to merge
  for (int base = 0; base < p.batch; base += 32) {
    const int mine = base + lane;
    const int first = mine < p.batch ? p.num_splits[mine] : 0;
    const int count = mine < p.batch ? p.num_splits[mine + 1] - first : 0;
    unsigned several = __ballot_sync(0xffffffffu, count > 1);
    for (; several != 0; several &= several - 1) {
      const int source = __ffs(several) - 1;
      const int first_split = __shfl_sync(0xffffffffu, first, source);
      const int num_splits = __shfl_sync(0xffffffffu, count, source);
      for (; item < items; item += gridDim.x) {
        const int row = static_cast<int>(item) / kItemsPerRow;
        const int dim = (static_cast<int>(item) % kItemsPerRow) * kThreads + threadIdx.x;
        combine_row(p, base + source, first_split, num_splits, row, dim);
      }
      item -= items;
    }
  }
  griddepcontrol_launch_dependents();
}
