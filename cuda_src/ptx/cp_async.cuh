// Asynchronous copies by threads: PTX ISA, "cp.async".
#pragma once

// cp.async.cg: 16 bytes, global to shared, past the L1 cache.
__device__ __forceinline__ void cp_async_16(unsigned dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}

// cp.async.wait_all: this thread's copies have landed.
__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
