// Atomic operations and loads with a stated memory order: PTX ISA, "atom", "red", "ld".
#pragma once

// atom.acq_rel.gpu.add.u64: the value before. What this thread has written or seen written goes
// before it, what it reads and writes later comes after it, for the whole GPU.
__device__ __forceinline__ unsigned long long atom_acq_rel_add(unsigned long long* at,
                                                               unsigned long long by) {
  unsigned long long before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(at), "l"(by)
               : "memory");
  return before;
}

// red.relaxed.gpu.add.u32, .u64: nobody waits for it, and it orders nothing but itself among the
// other atomic operations on the same number.
__device__ __forceinline__ void red_relaxed_add(unsigned* at, unsigned by) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(at), "r"(by) : "memory");
}
__device__ __forceinline__ void red_relaxed_add(unsigned long long* at, unsigned long long by) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(at), "l"(by) : "memory");
}

// red.relaxed.cta and atom.acquire.cta of a number in shared memory: add, and read.
__device__ __forceinline__ void red_relaxed_shared_add(unsigned* at, unsigned by) {
  asm volatile("red.relaxed.cta.shared::cta.add.u32 [%0], %1;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(at))),
               "r"(by)
               : "memory");
}
__device__ __forceinline__ unsigned atom_acquire_shared_read(unsigned* at) {
  unsigned x;
  asm volatile("atom.acquire.cta.shared::cta.add.u32 %0, [%1], 0;"
               : "=r"(x)
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(at)))
               : "memory");
  return x;
}

// ld.relaxed.gpu.u32: what is there for the whole GPU, not what this SM remembers.
__device__ __forceinline__ unsigned ld_relaxed_u32(const unsigned* at) {
  unsigned x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
