// Body of quantize_q, shared by quantize_q.cu and prepare.cu.
#pragma once

#include "common/quantize.cuh"
#include "quantize_q_params.h"

constexpr int kWarpsPerCta = 8;
constexpr int kRowsPerWarp = ROWS_PER_WARP;

struct QueryRow {
  const char* nope;
  const char* rope;
};

// Address of row (b, s, h), counted with the head fastest. `flat`: one stride leads through all
// rows (a contiguous q, or one request and token), which saves the divisions.
__device__ __forceinline__ QueryRow query_row(const QuantizeQParams& p, u32 row) {
  if (p.flat) {
    const i64 index = row;
    return QueryRow{static_cast<const char*>(p.q_nope) + index * p.nope_stride_h,
                    static_cast<const char*>(p.q_rope) + index * p.rope_stride_h};
  }
  const u32 token = row / p.num_heads, head = row % p.num_heads;
  const u32 request = token / p.seq_len_q, position = token % p.seq_len_q;
  const char* nope = static_cast<const char*>(p.q_nope);
  const char* rope = static_cast<const char*>(p.q_rope);
  return QueryRow{
      nope + request * p.nope_stride_b + position * p.nope_stride_s + head * p.nope_stride_h,
      rope + request * p.rope_stride_b + position * p.rope_stride_s + head * p.rope_stride_h,
  };
}

// Rows cta * 16 to cta * 16 + 15: all loads of a warp are under way before the first is used.
template <int kInput>
__device__ __forceinline__ void quantize_query_rows(const QuantizeQParams& p, u32 cta) {
  const u32 first = (cta * kWarpsPerCta + threadIdx.x / kWarpSize) * kRowsPerWarp;
  LaneRow<kInput> rows[kRowsPerWarp];
#pragma unroll
  for (u32 k = 0; k < kRowsPerWarp; ++k) {
    if (first + k < p.num_rows) {
      const QueryRow from = query_row(p, first + k);
      load_row<kInput>(rows[k], from.nope, from.rope, p.wide);
    }
  }
#pragma unroll
  for (u32 k = 0; k < kRowsPerWarp; ++k) {
    if (first + k < p.num_rows) {
      const i64 row = first + k;
      store_row(quantize_row<kInput>(rows[k], p.pow2), static_cast<char*>(p.out_nope) + row * 512,
                static_cast<char*>(p.out_rope) + row * 128,
                static_cast<char*>(p.out_scale) + row * 4, true);
    }
  }
}
