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
// Launch: a 1-D grid of any size, 128 threads, kWarps x kTileFloats floats of dynamic shared memory.
// Requests with at most one split are passed over: mla_decode finished them. Of the others a warp
// takes items on its own, without barriers of the CTA: two or one whole rows of up to 4 or 8 splits,
// else 128, 64 or 32 dims of a row, so that all splits (up to 136) of an item fit in the warp's
// shared memory and are on the way at once. More splits are taken 136 at a time. (Four rows of two
// splits fit as well, but make so few items that some warps have two and most have one.)
//
// May be launched as a dependent of mla_decode. num_splits is read before griddepcontrol.wait:
// mla_decode signals launch_dependents only after its own wait, so what ran before it (plan_decode,
// which writes num_splits) has then completed. Everything else is read after the wait. Warps that find
// nothing to merge end without it, but for those of the first CTA.
#include "common/log2.cuh"
#include "common/softmax.cuh"
#include "mla_combine_params.h"
#include "ptx/cp_async.cuh"
#include "ptx/griddep.cuh"

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kCtasPerSm = CTAS_PER_SM;  // as the kernel table has it
constexpr unsigned kFullMask = 0xffffffffu;
constexpr int kMaxSplits = 136;  // held at once; 132 SMs make up to 132 of a request
constexpr int kTileFloats = kMaxSplits * 32;  // o of a warp's item
constexpr int kLanesPerRow = 8;               // that hold the weights where a warp takes whole rows
constexpr int kLseRegisters = (kMaxSplits + 31) / 32;
static_assert(kWarps * kTileFloats * 4 == SMEM_BYTES, "the kernel table states the size");

// What a warp merges at a time, by the splits of the request.
template <int kRows_, int kDims_>
struct Shape {
  static constexpr int kRows = kRows_, kDims = kDims_;
  static constexpr int kSplits = kTileFloats / (kRows * kDims);  // that fit in the tile
  static constexpr int kPerRow = kKvLoraRank / kDims;            // items of kRows rows
  static constexpr bool kWholeRows = kDims == kKvLoraRank;
};

// Call f with the Shape for `count` splits. (Lambdas are host functions to NVRTC.)
template <class F>
__device__ __forceinline__ auto with_shape(int count, F f) {
  if (count <= Shape<2, 512>::kSplits) return f(Shape<2, 512>{});
  if (count <= Shape<1, 512>::kSplits) return f(Shape<1, 512>{});
  if (count <= Shape<1, 128>::kSplits) return f(Shape<1, 128>{});
  if (count <= Shape<1, 64>::kSplits) return f(Shape<1, 64>{});
  return f(Shape<1, 32>{});
}

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }

// --- Which item ----------------------------------------------------------------------------------

struct Item {
  int req, first_split, count;  // count 0: no item
  int index;                    // among the items of its request
};

struct CountItems {
  int num_rows;

  template <class S>
  __device__ __forceinline__ int operator()(S) const {
    return (num_rows + S::kRows - 1) / S::kRows * S::kPerRow;
  }
};

// Items of a request with `count` splits.
__device__ __forceinline__ int num_items(const MlaCombineParams& p, int count) {
  return count < 2 ? 0 : with_shape(count, CountItems{p.num_rows});
}

// Requests are looked at in groups of 128, four a lane.
constexpr int kRequestsPerLane = 4;
constexpr int kGroup = 32 * kRequestsPerLane;

struct Group {
  int base = -kGroup;                // its first request
  int splits[kRequestsPerLane + 1];  // num_splits at this lane's requests
  int own_items[kRequestsPerLane];   // of these
  int items_before;                  // of the lanes before
  int items_through;                 // of them and this lane
  int items = 0;                     // of all lanes
};

// The group after g. Read past the first-level cache: griddepcontrol.wait, which might be what
// makes it forget older data, has not run yet.
__device__ __forceinline__ void next_group(const MlaCombineParams& p, Group& g) {
  g.base += kGroup;
#pragma unroll
  for (int k = 0; k <= kRequestsPerLane; ++k) {
    const int req = min(g.base + kRequestsPerLane * lane_id() + k, p.batch);
    g.splits[k] = __ldcg(p.num_splits + req);
  }
  int mine = 0;
#pragma unroll
  for (int k = 0; k < kRequestsPerLane; ++k) {
    g.own_items[k] = num_items(p, g.splits[k + 1] - g.splits[k]);
    mine += g.own_items[k];
  }
  g.items_through = mine;
  for (int step = 1; step < 32; step <<= 1) {
    const int below = __shfl_up_sync(kFullMask, g.items_through, step);
    if (lane_id() >= step) g.items_through += below;
  }
  g.items_before = g.items_through - mine;
  g.items = __shfl_sync(kFullMask, g.items_through, 31);
}

// Item `index` of those from the start of the group on. Moves group and index to where it is.
__device__ __forceinline__ Item find_item(const MlaCombineParams& p, Group& g, int& index) {
  while (index >= g.items) {
    index -= g.items;
    if (p.batch - g.base <= kGroup) return Item{0, 0, 0, 0};
    next_group(p, g);
  }
  Item item = {0, 0, 0, 0};  // right in the one lane whose requests it belongs to
  int local = index - g.items_before;
#pragma unroll
  for (int k = 0; k < kRequestsPerLane; ++k) {
    if (local >= 0 && local < g.own_items[k]) {
      item = Item{g.base + kRequestsPerLane * lane_id() + k, g.splits[k],
                  g.splits[k + 1] - g.splits[k], local};
    }
    local -= g.own_items[k];
  }
  const int owner = __ffs(__ballot_sync(kFullMask, index < g.items_through)) - 1;
  return Item{__shfl_sync(kFullMask, item.req, owner),
              __shfl_sync(kFullMask, item.first_split, owner),
              __shfl_sync(kFullMask, item.count, owner),
              __shfl_sync(kFullMask, item.index, owner)};
}

// --- Loads ---------------------------------------------------------------------------------------

// The splits of the rows and dims of one item.
struct Source {
  const float* lse2;  // of the first split and row
  const float* o;     // at its first dim
  int split_rows;     // rows of a split: the distance between splits
  int row, num_rows;  // first row, and how many the item has
  int dim, count;     // first dim; splits

  // Rows from the first split to another.
  __device__ __forceinline__ long long rows_to(int split) const {
    return static_cast<long long>(split) * split_rows;
  }
};

template <class S>
__device__ __forceinline__ Source source_of(const MlaCombineParams& p, const Item& item) {
  const int row = item.index / S::kPerRow * S::kRows;
  const int dim = item.index % S::kPerRow * S::kDims;
  const long long at = static_cast<long long>(item.first_split) * p.num_rows + row;
  const int rows = min(S::kRows, p.num_rows - row);
  return Source{p.lse_accum + at, p.o_accum + at * kKvLoraRank + dim, p.num_rows, row, rows, dim,
                item.count};
}

// Start bringing one row's splits first .. first + n - 1 into the tile, [split][dims]. With 128
// dims or more a lane brings just what it reads itself.
template <class S>
__device__ __forceinline__ void load_tile(float* tile, const Source& from, int row, int first,
                                          int n) {
  constexpr int kUnits = S::kDims / 4;  // 16-byte units of a split
  constexpr int kLanes = kUnits < 32 ? kUnits : 32;
  constexpr int kSplitsAtOnce = 32 / kLanes;
  const int split = lane_id() / kLanes;
  const float* o =
      from.o + (from.rows_to(first + split) + row) * kKvLoraRank + lane_id() % kLanes * 4;
  unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(tile)) + lane_id() * 16;
#pragma unroll(S::kWholeRows ? 1 : 4)
  for (int s = split; s < n; s += kSplitsAtOnce) {
#pragma unroll
    for (int unit = 0; unit < kUnits; unit += kLanes) {
      cp_async_16(to, o + 4 * unit);
      to += 32 * 16;
    }
    o += from.rows_to(kSplitsAtOnce) * kKvLoraRank;
  }
}

using Lse = float[kLseRegisters];

// lse2 of one row's splits first + lane, first + lane + 32, ... of those held at once; else -inf.
template <class S>
__device__ __forceinline__ void load_lse(Lse& lse2, const Source& from, int first) {
#pragma unroll
  for (int k = 0; 32 * k < S::kSplits; ++k) {
    const int split = lane_id() + 32 * k;
    const bool exists = split < S::kSplits && first + split < from.count;
    lse2[k] = exists ? from.lse2[from.rows_to(first + split)] : kNegInf;
  }
}

// Start everything of an item: lse2 first, since the weights are computed while o arrives.
template <class S>
__device__ __forceinline__ void load_item(float* tile, Lse& lse2, const Source& from) {
  if constexpr (S::kWholeRows) {
    const int row = lane_id() / kLanesPerRow, split = lane_id() % kLanesPerRow;
    const bool exists = row < from.num_rows && split < from.count;
    lse2[0] = exists ? from.lse2[from.rows_to(split) + row] : kNegInf;
#pragma unroll 1
    for (int r = 0; r < from.num_rows; ++r) {
      load_tile<S>(tile + r * S::kSplits * S::kDims, from, r, 0, from.count);
    }
  } else {
    load_lse<S>(lse2, from, 0);
    load_tile<S>(tile, from, 0, 0, min(from.count, S::kSplits));
  }
}

// --- Results -------------------------------------------------------------------------------------

// What a lane knows of a row's lse.
struct RowSum {
  int row;  // negative: not this lane's to store
  float top, total;
};

__device__ __forceinline__ RowSum row_sum(int row, bool empty, float top, float total) {
  return empty ? RowSum{row, kNegInf, 1.0f} : RowSum{row, top, total};
}

// [C4]
__device__ __forceinline__ void store_lse(const MlaCombineParams& p, int req, const RowSum& sum) {
  if (sum.row < 0) return;
  const int query = sum.row / p.num_heads_q, head = sum.row % p.num_heads_q;
  const long long line = static_cast<long long>(req) * p.num_heads_q + head;
  p.lse[line * p.seq_len_q + query] = natural_lse(__fadd_rn(sum.top, log2_soft(sum.total)));
}

// [C4] values as bf16 can show them. Hardly ever does one need to be held.
template <int kCount>
__device__ __forceinline__ void finish_values(float (&acc)[kCount], bool empty) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    acc[i] = empty ? 0.0f : acc[i];
    largest = fmaxf(largest, fabsf(acc[i]));  // NaN, which hold keeps, does not win
  }
  if (largest > kBf16Max) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) acc[i] = hold(acc[i]);
  }
}

// [C4] consecutive dims of out.
__device__ __forceinline__ void store_values(unsigned short* out, const float (&x)[1]) {
  *out = static_cast<unsigned short>(cvt_bf16x2(0.0f, x[0]));
}
__device__ __forceinline__ void store_values(unsigned short* out, const float (&x)[2]) {
  *reinterpret_cast<unsigned*>(out) = cvt_bf16x2(x[1], x[0]);
}
__device__ __forceinline__ void store_values(unsigned short* out, const float (&x)[4]) {
  *reinterpret_cast<uint2*>(out) = make_uint2(cvt_bf16x2(x[1], x[0]), cvt_bf16x2(x[3], x[2]));
}

__device__ __forceinline__ unsigned short* out_at(const MlaCombineParams& p, int req, int row,
                                                  int dim) {
  return static_cast<unsigned short*>(p.out) +
         (static_cast<long long>(req) * p.num_rows + row) * kKvLoraRank + dim;
}

// acc = fma(a, o, acc) over this lane's consecutive dims of one split.
__device__ __forceinline__ void add_split(float (&acc)[1], float a, const float* o) {
  acc[0] = __fmaf_rn(a, *o, acc[0]);
}
__device__ __forceinline__ void add_split(float (&acc)[2], float a, const float* o) {
  const float2 part = *reinterpret_cast<const float2*>(o);
  acc[0] = __fmaf_rn(a, part.x, acc[0]);
  acc[1] = __fmaf_rn(a, part.y, acc[1]);
}
__device__ __forceinline__ void add_split(float (&acc)[4], float a, const float* o) {
  const float4 part = *reinterpret_cast<const float4*>(o);
  acc[0] = __fmaf_rn(a, part.x, acc[0]);
  acc[1] = __fmaf_rn(a, part.y, acc[1]);
  acc[2] = __fmaf_rn(a, part.z, acc[2]);
  acc[3] = __fmaf_rn(a, part.w, acc[3]);
}

// --- Whole rows: eight lanes hold the weights of a row, lane 8 r + s that of split s -------------

// One row; `mine`: the lane's normalised weight.
template <class S>
__device__ __forceinline__ void merge_row(unsigned short* out, const float* tile, int count,
                                          float mine, int source_lane, bool empty) {
  float acc[4][4] = {};
#pragma unroll
  for (int s = 0; s < S::kSplits; ++s) {
    if (s < count) {
      const float a = __shfl_sync(kFullMask, mine, source_lane + s);
#pragma unroll
      for (int i = 0; i < 4; ++i) add_split(acc[i], a, tile + s * S::kDims + 128 * i);  // [C3]
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    finish_values(acc[i], empty);
    store_values(out + 128 * i, acc[i]);
  }
}

template <class S>
__device__ __forceinline__ RowSum merge_rows(const MlaCombineParams& p, int req, const float* tile,
                                             const Lse& lse, const Source& from) {
  const float lse2 = lse[0];
  float top = lse2;  // [C1]
  for (int step = kLanesPerRow / 2; step > 0; step >>= 1) {
    top = fmaxf(top, __shfl_xor_sync(kFullMask, top, step));
  }
  // Not from top: NaN splits do not win it.
  const unsigned seen = __ballot_sync(kFullMask, !(lse2 == kNegInf));
  const int first_lane = lane_id() & ~(kLanesPerRow - 1);
  const bool empty = (seen >> first_lane & 0xffu) == 0;
  const float weight = ex2_approx_ftz(__fsub_rn(lse2, empty ? 0.0f : top));  // [C2]
  float total = 0.0f;
#pragma unroll
  for (int s = 0; s < S::kSplits; ++s) {
    if (s < from.count) {
      total = __fadd_rn(total, __shfl_sync(kFullMask, weight, s, kLanesPerRow));
    }
  }
  const float mine = __fmul_rn(weight, __frcp_rn(total));
  cp_async_wait_all();
#pragma unroll 1
  for (int r = 0; r < from.num_rows; ++r) {
    const bool row_empty = (seen >> (kLanesPerRow * r) & 0xffu) == 0;
    merge_row<S>(out_at(p, req, from.row + r, 4 * lane_id()),
                 tile + r * S::kSplits * S::kDims + 4 * lane_id(), from.count, mine,
                 kLanesPerRow * r, row_empty);
  }
  const int row = lane_id() / kLanesPerRow;
  const bool stores = lane_id() == first_lane && row < from.num_rows;
  return row_sum(stores ? from.row + row : -1, empty, top, total);
}

// --- Dims of one row: the weights of all splits lie in shared memory -----------------------------

template <class S>
__device__ __forceinline__ void put_weights(float* weights, const Lse& x) {
#pragma unroll
  for (int k = 0; 32 * k < S::kSplits; ++k) {
    if (lane_id() + 32 * k < kMaxSplits) weights[lane_id() + 32 * k] = x[k];
  }
  __syncwarp();
}

// [C2] lse2 becomes the weight.
template <class S>
__device__ __forceinline__ void weigh(Lse& lse2, float top) {
#pragma unroll
  for (int k = 0; 32 * k < S::kSplits; ++k) lse2[k] = ex2_approx_ftz(__fsub_rn(lse2[k], top));
}

// [C2] n weights in order. Those behind them, up to a multiple of four, are of splits that do not
// exist: zero, or NaN where top is -inf, but then a split is NaN and so is the total.
__device__ __forceinline__ float add_weights(float total, const float* weights, int n) {
#pragma unroll 4
  for (int i = 0; i < n; i += 4) {
    const float4 w = *reinterpret_cast<const float4*>(weights + i);
    total = __fadd_rn(__fadd_rn(__fadd_rn(__fadd_rn(total, w.x), w.y), w.z), w.w);
  }
  __syncwarp();  // read before they are replaced
  return total;
}

// [C3] n splits in order.
template <class S, int kCount>
__device__ __forceinline__ void add_splits(float (&acc)[kCount], const float* tile,
                                           const float* weights, int n) {
  const float* o = tile + kCount * lane_id();
  int i = 0;
#pragma unroll(kCount == 4 ? 2 : 4)
  for (; i + 4 <= n; i += 4) {
    const float4 a = *reinterpret_cast<const float4*>(weights + i);
    add_split(acc, a.x, o + (i + 0) * S::kDims);
    add_split(acc, a.y, o + (i + 1) * S::kDims);
    add_split(acc, a.z, o + (i + 2) * S::kDims);
    add_split(acc, a.w, o + (i + 3) * S::kDims);
  }
#pragma unroll 1
  for (; i < n; ++i) add_split(acc, weights[i], o + i * S::kDims);
  __syncwarp();  // read before they are replaced
}

// [C1] the row's top; `empty`: all its splits are. lse2 holds the first ones.
template <class S>
__device__ __forceinline__ float row_top(Lse& lse2, const Source& from, bool& empty) {
  float top = kNegInf;
  bool other = false;  // a top of -inf can also come from NaN splits
  for (int first = 0; first < from.count; first += S::kSplits) {
    if (first > 0) load_lse<S>(lse2, from, first);
#pragma unroll
    for (int k = 0; 32 * k < S::kSplits; ++k) {
      top = fmaxf(top, lse2[k]);
      other |= !(lse2[k] == kNegInf);
    }
  }
  for (int step = 16; step > 0; step >>= 1) {
    top = fmaxf(top, __shfl_xor_sync(kFullMask, top, step));
  }
  empty = !__any_sync(kFullMask, other);
  return empty ? 0.0f : top;
}

template <class S>
__device__ __forceinline__ RowSum merge_dims(const MlaCombineParams& p, int req, float* tile,
                                             float* weights, Lse& lse2, const Source& from) {
  // Only the narrowest shape meets more splits than are held at once.
  if constexpr (S::kSplits < kMaxSplits) __builtin_assume(from.count <= S::kSplits);
  const bool again = from.count > S::kSplits;
  bool empty;
  const float top = row_top<S>(lse2, from, empty);
  float total = 0.0f;
  for (int first = 0; first < from.count; first += S::kSplits) {
    if (again) load_lse<S>(lse2, from, first);
    weigh<S>(lse2, top);
    put_weights<S>(weights, lse2);
    total = add_weights(total, weights, min(S::kSplits, from.count - first));
  }
  const float inverse = __frcp_rn(total);
  float acc[S::kDims / 32] = {};
  for (int first = 0; first < from.count; first += S::kSplits) {
    const int n = min(S::kSplits, from.count - first);
    if (first > 0) load_tile<S>(tile, from, 0, first, n);
    if (again) {
      load_lse<S>(lse2, from, first);
      weigh<S>(lse2, top);
    }
#pragma unroll
    for (int k = 0; 32 * k < S::kSplits; ++k) lse2[k] = __fmul_rn(lse2[k], inverse);
    cp_async_wait_all();
    put_weights<S>(weights, lse2);  // ends in a barrier: the tile is there for all lanes
    add_splits<S>(acc, tile, weights, n);
  }
  finish_values(acc, empty);
  store_values(out_at(p, req, from.row, from.dim + S::kDims / 32 * lane_id()), acc);
  return row_sum(from.dim == 0 && lane_id() == 0 ? from.row : -1, empty, top, total);
}

// -------------------------------------------------------------------------------------------------

// Which turn this CTA has when items are given out. When a CTA of mla_decode leaves an SM, CTAs that
// follow one another come to it; turns that follow one another go to different SMs, so that all SMs
// have as much to merge.
__device__ __forceinline__ int turn_of_cta() {
  const int cta = static_cast<int>(blockIdx.x), grid = static_cast<int>(gridDim.x);
  const int place = cta % kCtasPerSm;
  return cta / kCtasPerSm + (place * grid + kCtasPerSm - 1) / kCtasPerSm;
}

struct LoadItem {
  const MlaCombineParams& p;
  const Item& item;
  float* tile;
  Lse& lse2;

  template <class S>
  __device__ __forceinline__ void operator()(S) const {
    load_item<S>(tile, lse2, source_of<S>(p, item));
  }
};

struct MergeItem {
  const MlaCombineParams& p;
  const Item& item;
  float *tile, *weights;
  Lse& lse2;

  template <class S>
  __device__ __forceinline__ RowSum operator()(S) const {
    const Source from = source_of<S>(p, item);
    if constexpr (S::kWholeRows) {
      return merge_rows<S>(p, item.req, tile, lse2, from);
    } else {
      return merge_dims<S>(p, item.req, tile, weights, lse2, from);
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kCtasPerSm)
    mla_combine(const __grid_constant__ MlaCombineParams p) {
  extern __shared__ float4 tiles[];
  __shared__ float4 all_weights[kWarps][kMaxSplits / 4];
  const int warp = __shfl_sync(kFullMask, threadIdx.x >> 5, 0);  // the same in all lanes
  float* tile = reinterpret_cast<float*>(tiles) + warp * kTileFloats;
  float* weights = reinterpret_cast<float*>(all_weights[warp]);

  // Few items are spread over the CTAs before a CTA gets more; two that follow one another, mostly
  // of one row, go to the same one, where its lse2 are then cached.
  const int grid = static_cast<int>(gridDim.x);
  int index = ((warp >> 1) * grid + turn_of_cta()) * 2 + (warp & 1);
  Group group;
  Item item = {0, 0, 0, 0};
  Lse lse2;
  for (;; index += kWarps * grid) {
    const Item next = find_item(p, group, index);  // while the loads of `item` are on the way
    if (item.count > 0) {
      store_lse(p, item.req, with_shape(item.count, MergeItem{p, item, tile, weights, lse2}));
      __syncwarp();  // the tile is read before the next item replaces it
    } else {
      // A warp without an item touches nothing and need not see mla_decode's end; the first CTA does,
      // so that this grid does not end before it. Where nothing is split, hundreds of CTAs less have
      // to end when it has.
      if (next.count == 0 && blockIdx.x != 0) break;
      griddepcontrol_wait();
      griddepcontrol_launch_dependents();  // they wait for this grid's end before they touch memory
    }
    if (next.count == 0) break;
    item = next;
    with_shape(item.count, LoadItem{p, item, tile, lse2});
  }
}
