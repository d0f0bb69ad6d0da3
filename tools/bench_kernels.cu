// Kernels of the benchmarks themselves: a spin that holds the stream while calls are queued behind
// it, and one that does nothing, whose reading is the floor of the method.
#include "nothing_params.h"
#include "spin_params.h"

extern "C" __global__ void __launch_bounds__(32) spin(const __grid_constant__ SpinParams p) {
  const long long start = clock64();
  while (clock64() - start < p.cycles) __nanosleep(1000);
}

extern "C" __global__ void __launch_bounds__(32)
    nothing(const __grid_constant__ NothingParams) {}
