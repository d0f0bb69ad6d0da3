// Where a token lies in the paged cache. Mirror: reference/layout.py.
//
// slot = block * 64 + offset. The three planes may be arrays of their own or parts of one record a
// block: only strides differ. All offsets are 64-bit.
#pragma once

#include "cache_params.h"
#include "common/types.cuh"
#include "ptx/ldst.cuh"
#include "snapmla_config.h"

struct TokenPlace {
  char* codes;
  char* rope;
  char* scale;
};

// Unsigned, because that halves the 64-bit products.
__device__ __forceinline__ TokenPlace token_place(const CacheParams& cache, int slot) {
  const u32 index = static_cast<u32>(slot);
  const i64 block = index / kBlockSize, offset = index % kBlockSize;
  return TokenPlace{
      static_cast<char*>(cache.ckv) + block * cache.ckv_block_stride +
          offset * cache.ckv_token_stride,
      static_cast<char*>(cache.k_rope) + block * cache.k_rope_block_stride +
          offset * cache.k_rope_token_stride,
      static_cast<char*>(cache.k_scale) + block * cache.k_scale_block_stride +
          offset * cache.k_scale_token_stride,
  };
}

// Entry `index` of an int32 or int64 slot array. Loads are kept apart from their checks, so that
// several can be under way at once.
__device__ __forceinline__ i64 load_slot(const void* slots, i64 stride, bool is_64bit, i64 index) {
  const char* at = static_cast<const char*>(slots) + index * stride;
  return is_64bit ? ld_global_s64(at) : static_cast<int>(ld_global_u32(at));
}

// The slot itself, or -1 where it is negative or beyond the cache: such a token is neither read nor
// written anywhere.
__device__ __forceinline__ int valid_slot(i64 slot, const CacheParams& cache) {
  return slot >= 0 && slot < cache.num_slots ? static_cast<int>(slot) : -1;
}
