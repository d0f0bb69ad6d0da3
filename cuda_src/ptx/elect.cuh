// One thread of a warp: PTX ISA, "elect.sync".
#pragma once

// elect.sync: true in one lane, the same one each time; all lanes call it together. Behind it the
// compiler knows that a single thread runs, and keeps what copies need in uniform registers.
__device__ __forceinline__ bool elect_one() {
  unsigned chosen;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(chosen));
  return chosen != 0;
}
