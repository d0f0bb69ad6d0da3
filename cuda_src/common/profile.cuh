// Where a role's cycles go: builds with SNAPMLA_PROFILE only; otherwise every call is empty.
#pragma once

#if SNAPMLA_PROFILE
// Cycles by interval, as one thread of a role sees them.
template <int kIntervals>
struct Profile {
  unsigned last = static_cast<unsigned>(clock64());
  unsigned sum[kIntervals] = {};

  // The time since the last mark belongs to `interval`.
  __device__ __forceinline__ void mark(int interval) {
    const unsigned now = static_cast<unsigned>(clock64());
    sum[interval] += now - last;
    last = now;
  }

  __device__ __forceinline__ void store(float* out) const {
    for (int i = 0; i < kIntervals; ++i) out[i] = static_cast<float>(sum[i]);
  }
};
#else
template <int kIntervals>
struct Profile {
  __device__ __forceinline__ void mark(int) {}
  __device__ __forceinline__ void store(float*) const {}
};
#endif
