// The splits a CTA works on, in order: every role walks the same list (snapmla_rt/plan.py).
#pragma once

#include "mla_decode/storage.cuh"

struct Split {
  int req;
  int begin;   // first block
  int end;     // one past the last block; begin == end for an empty request
  int seqlen;  // tokens of the request
  int result;  // where its partial result goes among all splits; kOnlySplit: it is the request's only
               // one, whose result goes to out and lse
};
constexpr int kOnlySplit = -1;

class Schedule {
 public:
  // The line of the part: begin_req, begin_block, end_req, end_block, begin_split. The length is not
  // the plan's: within a block a plan serves the next steps too.
  __device__ __forceinline__ explicit Schedule(const MlaDecodeParams& p) : p_(p) {
    const int4* part = reinterpret_cast<const int4*>(p.parts) +
                       static_cast<long long>(blockIdx.y) * (kPlanFields / 4);
    const int4 limits = part[0];
    req_ = limits.x;
    block_ = limits.y;
    end_req_ = limits.z;
    end_block_ = limits.w;
    split_ = part[1].x;
    seqlen_ = req_ <= end_req_ ? p.cache_seqlens[req_] : 0;
  }

  // The next split; false when the part is done.
  __device__ __forceinline__ bool next(Split& out) {
    if (req_ > end_req_) return false;
    const int num_blocks = (seqlen_ + kBlockN - 1) / kBlockN;
    const int stop = req_ == end_req_ ? end_block_ : num_blocks;
    int end = stop;
    if (p_.fixed_splits + p_.split_blocks > 0) {
      const int even = p_.fixed_splits > 0 ? (num_blocks + p_.fixed_splits - 1) / p_.fixed_splits
                                           : p_.split_blocks;
      const int length = max(even, 1);
      split_ = block_ / length;
      end = min(block_ + length, stop);
    }
    // Read now, long before the result is there: at the end of a split nobody waits for memory.
    const int before = p_.num_splits[req_];
    const bool only = p_.num_splits[req_ + 1] - before == 1;
    out = Split{req_, block_, end, seqlen_, only ? kOnlySplit : before + split_};
    block_ = end;
    if (block_ >= stop) {
      ++req_;
      block_ = 0;
      split_ = 0;
      if (req_ <= end_req_) seqlen_ = p_.cache_seqlens[req_];  // of the next split, while this one runs
    }
    return true;
  }

 private:
  const MlaDecodeParams& p_;
  int req_, block_, end_req_, end_block_, split_, seqlen_;
};

// Tokens that query row `row` of the request sees ([S3]); may be negative.
__device__ __forceinline__ int row_limit(const MlaDecodeParams& p, int row, int seqlen) {
  return p.causal ? seqlen - (p.seq_len_q - 1 - row / p.num_heads_q) : seqlen;
}
