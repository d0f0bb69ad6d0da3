// Atomic operations with a stated memory order: PTX ISA, "atom".
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
