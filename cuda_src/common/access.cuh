// 16 bytes, 8 codes and element pairs at addresses of any alignment their element type has.
//
// `wide` is the host's word that the whole array allows the wide access; it is the same for every
// thread of a launch, so the branch costs nothing. Narrow accesses give the same bytes, slower.
#pragma once

#include "common/types.cuh"
#include "ptx/ldst.cuh"

// 16 bytes of elements of kBytes each (1, 2 or 4) into four words.
template <int kBytes>
__device__ __forceinline__ uint4 load_16_narrow(const char* from) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = 0;
#pragma unroll
    for (int j = 0; j < 4; j += kBytes) {
      const char* at = from + 4 * i + j;
      const u32 element = kBytes == 4   ? ld_global_u32(at)
                          : kBytes == 2 ? ld_global_u16(at)
                                        : ld_global_u8(at);
      words[i] |= element << (8 * j);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <int kBytes>
__device__ __forceinline__ void store_16_narrow(char* to, uint4 x) {
  const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; j += kBytes) {
      char* at = to + 4 * i + j;
      const u32 element = words[i] >> (8 * j);
      if constexpr (kBytes == 2) {
        st_global_u16(at, element);
      } else {
        st_global_u8(at, element);
      }
    }
  }
}

// 16 bytes of e4m3 codes (kBytes 1) or bf16 values (kBytes 2).
template <int kBytes>
__device__ __forceinline__ void store_16(char* to, uint4 x, bool wide) {
  if (wide) {
    st_global_v4(to, x);
  } else {
    store_16_narrow<kBytes>(to, x);
  }
}

// Eight e4m3 codes.
__device__ __forceinline__ uint2 load_codes_8_narrow(const char* from) {
  u32 words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i) words[i / 4] |= ld_global_u8(from + i) << (8 * (i % 4));
  return make_uint2(words[0], words[1]);
}

__device__ __forceinline__ void store_codes_8(char* to, uint2 codes, bool wide) {
  if (wide) {
    st_global_v2(to, codes);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) st_global_u8(to + i, (i < 4 ? codes.x : codes.y) >> (8 * (i % 4)));
  }
}

// Two 16-bit elements, the first in the lower half.
__device__ __forceinline__ u32 load_pair(const char* from, bool wide) {
  return wide ? ld_global_u32(from) : ld_global_u16(from) | (ld_global_u16(from + 2) << 16);
}

__device__ __forceinline__ void store_pair(char* to, u32 x, bool wide) {
  if (wide) {
    st_global_u32(to, x);
  } else {
    st_global_u16(to, x);
    st_global_u16(to + 2, x >> 16);
  }
}
