// plan_decode: the split-KV schedule of a decode step. Mirror: reference/plan_decode.py, whose
// integers this kernel equals.
//
//   [L1] blocks = ceil(seqlen / block_n); a request costs blocks + F, also when empty
//   [L2] without fixed cuts: parts are filled in order up to ceil(total / parts) + F, and beyond it
//        where at most remainder_blocks would be left of a request that the part takes some of
//   [L3] with fixed cuts: whole splits go to part floor((2 start + cost) parts / (2 total))
//   [L4] num_splits is cumulative; every request has at least one split
//
// Arguments (PlanDecodeParams):
//   cache_seqlens i32 [batch]
//   parts         i32 [num_parts][8]: begin_req, begin_block, end_req (included), end_block
//                 (excluded), begin_split, 0, 0, 0; end_req < begin_req means no work
//   num_splits    i32 [batch + 1]
//   fixed_splits  splits of every request, or 0; split_blocks: blocks of a split, or 0
//
// Launch: one warp, once a decode step; may be captured in a graph and re-reads cache_seqlens at
// each replay. Lengths are read 32 at a time; only lane 0 walks the requests in [L2], since each
// part begins where the last one ended.
#include "plan_decode_params.h"
#include "ptx/griddep.cuh"
#include "snapmla_config.h"

constexpr unsigned kFullMask = 0xffffffffu;

__device__ __forceinline__ int num_blocks_of(const PlanDecodeParams& p, int req) {
  return (p.cache_seqlens[req] + p.block_n - 1) / p.block_n;  // [L1]
}

__device__ __forceinline__ long long warp_sum(long long x) {
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(kFullMask, x, step);
  return x;
}

// Sum over the lanes before this one.
__device__ __forceinline__ long long warp_exclusive_sum(long long x, int lane) {
  long long total = x;
  for (int step = 1; step < 32; step <<= 1) {
    const long long below = __shfl_up_sync(kFullMask, total, step);
    if (lane >= step) total += below;
  }
  return total - x;
}

// --- [L2] ----------------------------------------------------------------------------------------

// The part being filled.
struct OpenPart {
  int index, begin_req, begin_block, begin_split, end_req, end_block, room;

  __device__ __forceinline__ void open(int at, int req, int block, int split, int payload) {
    index = at;
    begin_req = req;
    begin_block = block;
    begin_split = split;
    end_req = req - 1;
    end_block = 0;
    room = payload;
  }

  __device__ __forceinline__ void close(int* parts) const {
    int4* line = reinterpret_cast<int4*>(parts + static_cast<long long>(index) * kPlanFields);
    line[0] = make_int4(begin_req, begin_block, end_req, end_block);
    line[1] = make_int4(begin_split, 0, 0, 0);
  }
};

// Place one request; returns its number of splits.
__device__ __forceinline__ int place_request(OpenPart& part, const PlanDecodeParams& p, int req,
                                             int num_blocks, int payload) {
  int block = 0, split = 0;
  while (true) {
    const int left = num_blocks - block;
    const int beyond = part.room > p.overhead_blocks ? p.remainder_blocks : 0;
    const bool whole = part.room + beyond >= left + p.overhead_blocks;
    const int taken = whole ? left : part.room - p.overhead_blocks;
    if (whole || taken > 0) {
      part.end_req = req;
      part.end_block = block + taken;
      part.room -= taken + p.overhead_blocks;
      if (whole) return split + 1;
      block += taken;
      ++split;
    }
    part.close(p.parts);
    part.open(part.index + 1, req, block, split, payload);
  }
}

__device__ void fill_balanced(const PlanDecodeParams& p, int lane, long long total) {
  __shared__ int blocks[32], ends[32];
  const int payload = static_cast<int>((total + p.num_parts - 1) / p.num_parts) + p.overhead_blocks;
  OpenPart part;
  part.open(0, 0, 0, 0, payload);
  int splits = 0;
  int ahead = lane < p.batch ? num_blocks_of(p, lane) : 0;
  for (int base = 0; base < p.batch; base += 32) {
    blocks[lane] = ahead;
    const int next = base + 32 + lane;
    ahead = next < p.batch ? num_blocks_of(p, next) : 0;
    __syncwarp();
    if (lane == 0) {
      for (int i = 0; i < min(32, p.batch - base); ++i) {
        splits += place_request(part, p, base + i, blocks[i], payload);
        ends[i] = splits;
      }
    }
    __syncwarp();
    if (base + lane < p.batch) p.num_splits[base + lane + 1] = ends[lane];  // [L4]
    __syncwarp();
  }
  if (lane != 0) return;
  part.close(p.parts);
  for (int i = part.index + 1; i < p.num_parts; ++i) {
    part.open(i, p.batch, 0, 0, payload);
    part.close(p.parts);
  }
}

// --- [L3] ----------------------------------------------------------------------------------------

__device__ __forceinline__ int split_length(const PlanDecodeParams& p, int num_blocks) {
  if (p.fixed_splits == 0) return p.split_blocks;
  return max((num_blocks + p.fixed_splits - 1) / p.fixed_splits, 1);
}

__device__ __forceinline__ int split_count(int num_blocks, int length) {
  return max((num_blocks + length - 1) / length, 1);
}

// The splits of one request: lengths, and where their cost starts in the total.
struct RequestSplits {
  int num_blocks, length, count;
  long long start;

  __device__ __forceinline__ int begin(int split) const { return split * length; }
  __device__ __forceinline__ int end(int split) const {
    return min((split + 1) * length, num_blocks);
  }
  __device__ __forceinline__ int part(const PlanDecodeParams& p, int split,
                                      long long total) const {
    const long long at = start + static_cast<long long>(split) * (length + p.overhead_blocks);
    const int cost = end(split) - begin(split) + p.overhead_blocks;
    return static_cast<int>((2 * at + cost) * p.num_parts / (2 * total));
  }
};

// Write the parts' limits that fall into this lane's request. `before` and `after` are the parts of
// the splits just before and after the request; -1 where there is none or it is not known yet (a
// later write then replaces this one).
__device__ __forceinline__ void write_limits(const PlanDecodeParams& p, int req,
                                             const RequestSplits& r, long long total, int before,
                                             int after) {
  int last = before;
  int part = r.part(p, 0, total);
  for (int split = 0; split < r.count; ++split) {
    const int next = split + 1 < r.count ? r.part(p, split + 1, total) : after;
    int* line = p.parts + static_cast<long long>(part) * kPlanFields;
    if (part != last) {
      line[0] = req;
      line[1] = r.begin(split);
      line[4] = split;
    }
    if (part != next) {
      line[2] = req;
      line[3] = r.end(split);
    }
    last = part;
    part = next;
  }
}

__device__ void fill_fixed_cuts(const PlanDecodeParams& p, int lane, long long total) {
  for (int i = lane; i < p.num_parts; i += 32) {
    int4* line = reinterpret_cast<int4*>(p.parts + static_cast<long long>(i) * kPlanFields);
    line[0] = make_int4(0, 0, -1, 0);
    line[1] = make_int4(0, 0, 0, 0);
  }
  long long start = 0, splits = 0;
  int before = -1;
  for (int base = 0; base < p.batch; base += 32) {
    __syncwarp();
    const int req = base + lane;
    const bool valid = req < p.batch;
    RequestSplits r{valid ? num_blocks_of(p, req) : 0, 1, 0, 0};
    r.length = split_length(p, r.num_blocks);
    r.count = valid ? split_count(r.num_blocks, r.length) : 0;
    const long long cost =
        r.num_blocks + static_cast<long long>(r.count) * p.overhead_blocks;
    r.start = start + warp_exclusive_sum(cost, lane);
    const long long split_end = splits + warp_exclusive_sum(r.count, lane) + r.count;
    if (valid) p.num_splits[req + 1] = static_cast<int>(split_end);  // [L4]

    const int first = valid ? r.part(p, 0, total) : -1;
    const int last = valid ? r.part(p, r.count - 1, total) : -1;
    int previous = __shfl_up_sync(kFullMask, last, 1);
    int after = __shfl_down_sync(kFullMask, first, 1);
    if (lane == 0) previous = before;
    if (lane == 31) after = -1;
    if (valid) write_limits(p, req, r, total, previous, after);
    before = __shfl_sync(kFullMask, last, 31);
    start = __shfl_sync(kFullMask, r.start + cost, 31);
    splits = __shfl_sync(kFullMask, split_end, 31);
  }
}

extern "C" __global__ void __launch_bounds__(32)
    plan_decode(const __grid_constant__ PlanDecodeParams p) {
  const int lane = threadIdx.x;
  griddepcontrol_wait();
  const bool fixed_cuts = p.fixed_splits + p.split_blocks > 0;
  long long total = 0;
  for (int req = lane; req < p.batch; req += 32) {
    const int num_blocks = num_blocks_of(p, req);
    const int count = fixed_cuts ? split_count(num_blocks, split_length(p, num_blocks)) : 1;
    total += num_blocks + static_cast<long long>(count) * p.overhead_blocks;
  }
  total = warp_sum(total);
  if (lane == 0) p.num_splits[0] = 0;
  if (fixed_cuts) {
    fill_fixed_cuts(p, lane, total);
  } else {
    fill_balanced(p, lane, total);
  }
  griddepcontrol_launch_dependents();
}
