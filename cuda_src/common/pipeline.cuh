// Waiting on mbarriers, and arriving at them.
#pragma once

#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"

// Shared address of a shared-memory object.
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

#if SNAPMLA_DEBUG
// Bounded: about two seconds, then the kernel stops and says where it waited.
constexpr long long kMaxWaitCycles = 4000000000ll;

__device__ __noinline__ void report_hang(unsigned bar, unsigned parity, const char* file, int line) {
  printf("%s:%d: CTA (%u, %u) thread %u waits on barrier 0x%x parity %u: hang\n", file, line,
         blockIdx.x, blockIdx.y, threadIdx.x, bar, parity);
  __trap();
}

__device__ __forceinline__ void wait_at(unsigned bar, unsigned parity, const char* file, int line) {
  const long long start = clock64();
  while (!mbarrier_try_wait_parity(bar, parity)) {
    if (clock64() - start > kMaxWaitCycles) report_hang(bar, parity, file, line);
  }
}
#define MBARRIER_WAIT(bar, parity) wait_at(bar, parity, __FILE__, __LINE__)

// Stops the kernel with file and line where a condition that the host promised does not hold.
#define DEVICE_CHECK(condition)                                                     \
  do {                                                                              \
    if (!(condition)) {                                                             \
      printf("%s:%d: CTA (%u, %u) thread %u: %s\n", __FILE__, __LINE__, blockIdx.x, \
             blockIdx.y, threadIdx.x, #condition);                                  \
      __trap();                                                                     \
    }                                                                               \
  } while (false)
#else
__device__ __forceinline__ void wait_for(unsigned bar, unsigned parity) {
  while (!mbarrier_try_wait_parity(bar, parity)) {
  }
}
#define MBARRIER_WAIT(bar, parity) wait_for(bar, parity)
#define DEVICE_CHECK(condition) ((void)0)
#endif

// A warp's arrival: what its lanes did before is done for whoever waits (__syncwarp, then one lane's
// release). The elected lane, not lane 0: to ask for the lane costs loops a special register or a vote
// each time. In debug builds every lane arrives: racecheck follows a thread's own arrival, not
// one made for it by another lane of its warp.
#if SNAPMLA_DEBUG
constexpr unsigned kWarpArrivals = 32;
#else
constexpr unsigned kWarpArrivals = 1;
#endif

__device__ __forceinline__ void mbarrier_init_warps(unsigned bar, unsigned warps) {
  mbarrier_init(bar, warps * kWarpArrivals);
}

__device__ __forceinline__ void warp_arrive(unsigned bar, unsigned count = 1) {
  __syncwarp();
  if (kWarpArrivals == 1 && !elect_one()) return;
  if (count == 1) {
    mbarrier_arrive(bar);
  } else {
    mbarrier_arrive_count(bar, count);
  }
}
