// Short names of the fixed-width types, and the element types that inputs may have.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// INPUT_DTYPE of a variant: the element type of kv_c, k_pe and q.
constexpr int kInputBf16 = 0;
constexpr int kInputF16 = 1;
constexpr int kInputF32 = 2;

constexpr int kWarpSize = 32;
constexpr u32 kAllLanes = 0xffffffffu;
