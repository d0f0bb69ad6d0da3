// Body of quantize_q, shared by quantize_q.cu and prepare.cu.
#pragma once

#include "common/quantize.cuh"
#include "data_movement/row_ring.cuh"
#include "quantize_q_params.h"

// Address of row (b, s, h), counted with the head fastest. `flat`: one stride leads through all
// rows (a contiguous q, or one request and token), which saves the divisions.
__device__ __forceinline__ RowPlace query_row(const QuantizeQParams& p, u32 row) {
  if (p.flat) {
    const i64 index = row;
    return RowPlace{static_cast<const char*>(p.q_nope) + index * p.nope_stride_h,
                    static_cast<const char*>(p.q_rope) + index * p.rope_stride_h};
  }
  const u32 token = row / p.num_heads, head = row % p.num_heads;
  const u32 request = token / p.seq_len_q, position = token % p.seq_len_q;
  const char* nope = static_cast<const char*>(p.q_nope);
  const char* rope = static_cast<const char*>(p.q_rope);
  return RowPlace{
      nope + request * p.nope_stride_b + position * p.nope_stride_s + head * p.nope_stride_h,
      rope + request * p.rope_stride_b + position * p.rope_stride_s + head * p.rope_stride_h,
  };
}

// Those of a warp of a CTA, for RowRing.
struct QueryRows {
  const QuantizeQParams& p;
  const u32 first;  // of the CTA

  __device__ __forceinline__ RowPlace row(u32 i) const {
    return query_row(p, first + row_in_cta(i));
  }
  __device__ __forceinline__ bool is_linear() const { return p.flat; }
  __device__ __forceinline__ i64 latent_step() const { return kRowWarps * p.nope_stride_h; }
  __device__ __forceinline__ i64 rope_step() const { return kRowWarps * p.rope_stride_h; }
};

// The rows of one CTA. kWide: p.wide, known at compile time.
template <int kInput, bool kWide>
__device__ __forceinline__ void quantize_query_rows(const QuantizeQParams& p, u32 cta) {
  const CtaRows rows = cta_rows(cta, p.rows_per_cta, p.longer_ctas);
  const u32 existing = existing_rows(rows);
  const u32 lane = threadIdx.x % kWarpSize;
  float scale = 0.0f;  // of row `lane`, so that one store writes all scales of the warp
  const auto write = [&](const LaneCodes& codes, u32 i) {
    const i64 row = rows.first + row_in_cta(i);
    store_codes(codes, static_cast<char*>(p.out_nope) + row * 512,
                static_cast<char*>(p.out_rope) + row * 128, true);
    if (lane == i) scale = codes.scale;
  };
  RowRing<kInput, kWide, QueryRows> ring{QueryRows{p, rows.first}};
  ring.start(existing);
  ring.run(existing, p.pow2, 0, 1, write);
  if (existing >> lane & 1) {
    const i64 row = rows.first + row_in_cta(lane);
    st_global_u32(static_cast<char*>(p.out_scale) + row * 4, __float_as_uint(scale));
  }
}
