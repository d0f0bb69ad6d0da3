// Asynchronous copies by threads, one by one or in groups that land in order: PTX ISA, "cp.async".
#pragma once

// cp.async.cg: 16 bytes, global to shared, past the L1 cache.
__device__ __forceinline__ void cp_async_16(unsigned dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}

// cp.async.ca of 4 or 8 bytes, global to shared.
template <int kBytes>
__device__ __forceinline__ void cp_async_small(unsigned dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(dst), "l"(src), "n"(kBytes)
               : "memory");
}

// cp.async.commit_group: this thread's copies since the last one form a group, empty or not.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// cp.async.wait_group: all of this thread's groups but the newest kPending have landed.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// cp.async.wait_all: this thread's copies have landed.
__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
