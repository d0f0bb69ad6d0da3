// Which rows a CTA and each of its warps take, where there are more rows than warps.
#pragma once

#include "common/types.cuh"

constexpr u32 kRowWarps = 8;  // of a CTA

// Consecutive rows of one CTA, at most kWarpSize for each warp, so that lane i of a warp can keep
// what belongs to its row i.
struct CtaRows {
  u32 first;
  u32 count;
};

// Every CTA takes rows_per_cta rows, and the first `longer_ctas` one more: even shares.
__device__ __forceinline__ CtaRows cta_rows(u32 cta, u32 rows_per_cta, u32 longer_ctas) {
  return CtaRows{cta * rows_per_cta + min(cta, longer_ctas), rows_per_cta + (cta < longer_ctas)};
}

// Row i of this warp, counted within the CTA: its warps go through the rows side by side.
__device__ __forceinline__ u32 row_in_cta(u32 i) {
  return i * kRowWarps + threadIdx.x / kWarpSize;
}

// Bit i: row i of the warp exists. A vote, so the compiler knows it to be the same in all lanes.
__device__ __forceinline__ u32 existing_rows(const CtaRows& rows) {
  return __ballot_sync(kAllLanes, row_in_cta(threadIdx.x % kWarpSize) < rows.count);
}
