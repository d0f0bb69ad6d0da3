// Dependent launch: PTX ISA, "griddepcontrol".
#pragma once

// griddepcontrol.wait: until the grids this one depends on have finished and their writes show.
__device__ __forceinline__ void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// griddepcontrol.launch_dependents: grids that depend on this one may be scheduled.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
