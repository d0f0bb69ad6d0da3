// Loads from shared memory, and stores, at a 32-bit address: PTX ISA, "ld", "st".
//
// An address that a loop carries on costs less than one that is built anew from the name of a
// variable each time.
#pragma once

// Nothing: but the compiler no longer knows how x came about, so it cannot compute it once more
// instead of keeping it.
__device__ __forceinline__ void keep_in_register(unsigned& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void keep_in_register(float& x) { asm volatile("" : "+f"(x)); }

// ld.shared.v4.u32: 16 bytes; 16-byte aligned.
__device__ __forceinline__ uint4 ld_shared_v4(unsigned from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

// ld.shared.v4.f32: 16 bytes; 16-byte aligned.
__device__ __forceinline__ float4 ld_shared_v4_f32(unsigned from) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
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

// ld.shared.v2.u64: 16 bytes; 16-byte aligned.
__device__ __forceinline__ ulonglong2 ld_shared_v2_u64(unsigned from) {
  ulonglong2 x;
  asm volatile("ld.shared.v2.u64 {%0, %1}, [%2];" : "=l"(x.x), "=l"(x.y) : "r"(from) : "memory");
  return x;
}

// st.shared.u32: one element, 4-byte aligned.
__device__ __forceinline__ void st_shared_u32(unsigned to, unsigned x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

// st.shared.v4.u32: 16 bytes; 16-byte aligned.
__device__ __forceinline__ void st_shared_v4(unsigned to, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}

// st.shared.b32 where `condition` holds: a predicate of the store, never a branch around it.
__device__ __forceinline__ void st_shared_if(bool condition, unsigned to, float x) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %0, 0;\n"
      "@p st.shared.f32 [%1], %2;\n"
      "}" ::"r"(static_cast<unsigned>(condition)),
      "r"(to), "f"(x)
      : "memory");
}
