// Global loads and stores with a stated width and cache hint: PTX ISA, "ld" and "st".
//
// Loads are volatile so that none moves above griddepcontrol.wait, and not .nc: the data may have
// been written by the kernel before, while this one was already running as its dependent.
#pragma once

// ld.global.L1::no_allocate.v4.u32: 16 bytes that are read once; 16-byte aligned.
__device__ __forceinline__ uint4 ld_global_no_allocate_v4(const void* from) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}

// ld.global.v4.u32: 16 bytes whose 32-byte sector another load of this thread also wants.
__device__ __forceinline__ uint4 ld_global_v4(const void* from) {
  uint4 x;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}

// ld.global.L1::no_allocate.v2.u32: 8 bytes; 8-byte aligned.
__device__ __forceinline__ uint2 ld_global_no_allocate_v2(const void* from) {
  uint2 x;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(x.x), "=r"(x.y)
               : "l"(from));
  return x;
}

// ld.global.u32, .u16, .u8, .s64: one element, aligned to its size.
__device__ __forceinline__ unsigned ld_global_u32(const void* from) {
  unsigned x;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(from));
  return x;
}

__device__ __forceinline__ unsigned ld_global_u16(const void* from) {
  unsigned short x;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(x) : "l"(from));
  return x;
}

__device__ __forceinline__ unsigned ld_global_u8(const void* from) {
  unsigned x;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(x) : "l"(from));
  return x;
}

__device__ __forceinline__ long long ld_global_s64(const void* from) {
  long long x;
  asm volatile("ld.global.s64 %0, [%1];" : "=l"(x) : "l"(from));
  return x;
}

// st.global.v4.u32: 16 bytes; 16-byte aligned.
__device__ __forceinline__ void st_global_v4(void* to, uint4 x) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}

// st.global.v2.u32: 8 bytes; 8-byte aligned.
__device__ __forceinline__ void st_global_v2(void* to, uint2 x) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(x.x), "r"(x.y) : "memory");
}

// st.global.u32, .u16, .u8: one element, aligned to its size.
__device__ __forceinline__ void st_global_u32(void* to, unsigned x) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

__device__ __forceinline__ void st_global_u16(void* to, unsigned x) {
  asm volatile("st.global.u16 [%0], %1;" ::"l"(to), "h"(static_cast<unsigned short>(x)) : "memory");
}

__device__ __forceinline__ void st_global_u8(void* to, unsigned x) {
  asm volatile("st.global.u8 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
