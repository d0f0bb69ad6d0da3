// The splits a CTA works on, in order: every role walks the same list (snapmla_rt/plan.py).
#pragma once

#include "mla_decode/storage.cuh"

enum PlanColumn { kBeginReq = 0, kBeginBlock = 1, kEndReq = 2, kEndBlock = 3, kBeginSplit = 4 };

struct Split {
  int req;
  int split;   // index among the request's splits
  int begin;   // first block
  int end;     // one past the last block; begin == end for an empty request
  int seqlen;  // tokens of the request
};

class Schedule {
 public:
  __device__ __forceinline__ explicit Schedule(const MlaDecodeParams& p)
      : seqlens_(p.cache_seqlens), num_splits_(p.fixed_splits), split_blocks_(p.split_blocks) {
    const int* part = p.parts + static_cast<long long>(blockIdx.y) * kPlanFields;
    req_ = part[kBeginReq];
    block_ = part[kBeginBlock];
    end_req_ = part[kEndReq];
    end_block_ = part[kEndBlock];
    split_ = part[kBeginSplit];
  }

  // The next split; false when the part is done.
  __device__ __forceinline__ bool next(Split& out) {
    if (req_ > end_req_) return false;
    const int seqlen = seqlens_[req_];
    const int num_blocks = (seqlen + kBlockN - 1) / kBlockN;
    const int stop = req_ == end_req_ ? end_block_ : num_blocks;
    int end = stop;
    if (num_splits_ + split_blocks_ > 0) {
      const int even = num_splits_ > 0 ? (num_blocks + num_splits_ - 1) / num_splits_ : split_blocks_;
      const int length = max(even, 1);
      split_ = block_ / length;
      end = min(block_ + length, stop);
    }
    out = Split{req_, split_, block_, end, seqlen};
    block_ = end;
    if (block_ >= stop) {
      ++req_;
      block_ = 0;
      split_ = 0;
    }
    return true;
  }

 private:
  const int* seqlens_;
  int num_splits_, split_blocks_;
  int req_, block_, end_req_, end_block_, split_;
};

// Tokens that query row `row` of the request sees ([S3]); may be negative.
__device__ __forceinline__ int row_limit(const MlaDecodeParams& p, int row, int seqlen) {
  return p.causal ? seqlen - (p.seq_len_q - 1 - row / p.num_heads_q) : seqlen;
}
