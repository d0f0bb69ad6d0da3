// Bulk asynchronous copies: PTX ISA, "cp.async.bulk" and "cp.async.bulk.tensor".
// Destinations are shared addresses; completion is counted in bytes on an mbarrier.
#pragma once

// createpolicy.fractional.L2::evict_first: for data that is read once.
__device__ __forceinline__ unsigned long long createpolicy_evict_first() {
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// createpolicy.fractional.L2::evict_last: for data that other CTAs read again soon.
__device__ __forceinline__ unsigned long long createpolicy_evict_last() {
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// prefetch.tensormap: bring a tensor map in kernel-parameter space into the descriptor cache.
__device__ __forceinline__ void prefetch_tensormap(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// cp.async.bulk.tensor.2d, tiled, global to shared.
__device__ __forceinline__ void tma_load_2d(unsigned dst, const void* map, unsigned bar,
                                            unsigned long long policy, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(dst),
      "l"(map), "r"(bar), "l"(policy), "r"(x), "r"(y)
      : "memory");
}

// cp.async.bulk.tensor.3d, tiled, global to shared.
__device__ __forceinline__ void tma_load_3d(unsigned dst, const void* map, unsigned bar,
                                            unsigned long long policy, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(dst),
      "l"(map), "r"(bar), "l"(policy), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// cp.async.bulk.tensor.4d, tiled, global to shared.
__device__ __forceinline__ void tma_load_4d(unsigned dst, const void* map, unsigned bar,
                                            unsigned long long policy, int x, int y, int z,
                                            int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(dst),
      "l"(map), "r"(bar), "l"(policy), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
