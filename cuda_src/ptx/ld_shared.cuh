// Loads from shared memory at a 32-bit address: PTX ISA, "ld".
//
// An address that a loop carries on costs less than one that is built anew from the name of a
// variable each time.
#pragma once

// ld.shared.v4.u32: 16 bytes; 16-byte aligned.
__device__ __forceinline__ uint4 ld_shared_v4(unsigned from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

// ld.shared.u32: one element, 4-byte aligned.
__device__ __forceinline__ unsigned ld_shared_u32(unsigned from) {
  unsigned x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}
