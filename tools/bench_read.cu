// The yardstick of the decode benchmark: read memory with the bulk copy engine and do nothing with it.
// Each CTA keeps 6 copies of 16 KiB in flight; one thread does everything.
#include "bulk_read_params.h"

constexpr int kStages = 6;
constexpr unsigned kChunkBytes = 16384;

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void start_copy(unsigned stage, unsigned bar, const unsigned char* source) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(kChunkBytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          stage),
      "l"(source), "r"(kChunkBytes), "r"(bar)
      : "memory");
}

__device__ __forceinline__ void wait(unsigned bar, unsigned parity) {
  unsigned done = 0;
  while (!done) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
  }
}

extern "C" __global__ void __launch_bounds__(32) bulk_read(const __grid_constant__ BulkReadParams p) {
  extern __shared__ __align__(128) unsigned char stages[];
  __shared__ unsigned long long bars[kStages];
  if (threadIdx.x != 0) return;
  for (int i = 0; i < kStages; ++i) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&bars[i])) : "memory");
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  const unsigned char* data = static_cast<const unsigned char*>(p.data);
  const long long step = gridDim.x;
  long long ahead = blockIdx.x;
  for (int i = 0; i < kStages && ahead < p.num_chunks; ++i, ahead += step) {
    start_copy(shared_address(stages) + i * kChunkBytes, shared_address(&bars[i]),
               data + ahead * kChunkBytes);
  }
  unsigned stage = 0, parity = 0;
  for (long long chunk = blockIdx.x; chunk < p.num_chunks; chunk += step) {
    wait(shared_address(&bars[stage]), parity);
    if (ahead < p.num_chunks) {
      start_copy(shared_address(stages) + stage * kChunkBytes, shared_address(&bars[stage]),
                 data + ahead * kChunkBytes);
      ahead += step;
    }
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}
