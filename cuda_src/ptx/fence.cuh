// Proxy fences: PTX ISA, "membar / fence".
#pragma once

// fence.proxy.async.shared::cta: ordinary shared-memory writes of this thread become visible to
// wgmma and the copy engine; needed before the barrier that hands them over.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
