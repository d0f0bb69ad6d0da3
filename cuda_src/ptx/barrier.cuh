// Barriers of a CTA's threads: PTX ISA, "bar / barrier".
#pragma once

// barrier.cta.sync: waits until `kThreadCount` threads, whole warps, have come to barrier kId; they may
// come from different places of the program. What they wrote to shared memory before is then visible.
template <int kId, int kThreadCount>
__device__ __forceinline__ void barrier_sync() {
  asm volatile("barrier.cta.sync %0, %1;" ::"n"(kId), "n"(kThreadCount) : "memory");
}
