// Named barriers: PTX ISA, "bar / barrier". Barrier 0 is __syncthreads().
#pragma once

// bar.sync: wait until `threads` threads have arrived at barrier `id`.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// bar.arrive: this warp has arrived at barrier `id` of `threads` threads, and goes on.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
