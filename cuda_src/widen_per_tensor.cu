// widen_per_tensor: an FP8 cache with one scale for everything (576 e4m3 codes a token, RoPE
// quantised too) as mla_decode reads it. Mirror: reference/widen_per_tensor.py, whose bytes this
// kernel equals.
//
// The latent codes stay where they are (mla_decode takes them with their stride); their scale becomes
// a line of 64 equal scales that serves every block. RoPE codes become bf16, which is exact, and
// since both are multiplied by the same scale they already are what mla_decode calls pre-scaled.
//
//   [W1] of each request the blocks of its first ceil(length / 64) table entries; ids outside the
//        cache are passed over
//   [W2] rope = bf16(f32(code)) of every token of such a block, and of every query row
//   [W3] 64 key scales = descale_k; a scale a query row = descale_q
//
// Arguments (WidenPerTensorParams; the API checks them):
//   k_cache  e4m3 [num_blocks][64][576], strides in bytes, multiples of 16
//   k_rope   bf16 [num_blocks][64][64], contiguous; k_scale f32 [64]; descale_k f32 [1]
//   block_table i32 [b][max_blocks], row stride in elements; cache_seqlens i32 [b]
//   q        e4m3 [b][s_q][h][576], strides in bytes, multiples of 16; num_rows 0: no query
//   q_rope   bf16 [rows][64]; q_scale f32 [rows]; descale_q f32 [1]
//
// Launch: 1-D grid of block_ctas = b ctas_per_request CTAs for the blocks (those of a request share
// its columns; a CTA takes a block at once, 16 codes a thread), then ceil(num_rows / 64) for the
// query; 256 threads. A block of several requests is written several times with the same bytes. May
// be launched as a dependent.
#include "common/fp8.cuh"
#include "ptx/griddep.cuh"
#include "ptx/ldst.cuh"
#include "snapmla_config.h"
#include "widen_per_tensor_params.h"

constexpr u32 kLanesPerRow = kQkRopeHeadDim / 16;  // 16 codes a thread
constexpr u32 kRowsPerCta = 256 / kLanesPerRow;
static_assert(kRowsPerCta == kBlockSize, "a CTA takes a block at once");

// [W2] 16 codes as 16 bf16.
__device__ __forceinline__ void widen_16(char* to, const char* from) {
  const uint4 codes = ld_global_no_allocate_v4(from);
  const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
  u32 pairs[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float x[4];
    f32_from_e4m3x4(x, words[i]);
    pairs[2 * i] = cvt_bf16x2(x[1], x[0]);
    pairs[2 * i + 1] = cvt_bf16x2(x[3], x[2]);
  }
  st_global_v4(to, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
  st_global_v4(to + 16, make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]));
}

// [W1] the blocks of a request, every ctas_per_request-th of them.
__device__ __forceinline__ void widen_blocks(const WidenPerTensorParams& p) {
  const u32 request = blockIdx.x / p.ctas_per_request;
  const u32 first = blockIdx.x % p.ctas_per_request;
  const u32 row = threadIdx.x / kLanesPerRow, lane = threadIdx.x % kLanesPerRow;
  const int length = static_cast<int>(ld_global_u32(p.cache_seqlens + request));
  if (length <= 0) return;
  const u32 used = min((static_cast<u32>(length) + kBlockSize - 1) / kBlockSize, p.max_blocks);
  const int* table = p.block_table + request * p.block_table_stride;
  const char* cache = static_cast<const char*>(p.k_cache) + kKvLoraRank + 16 * lane;
  char* plane = static_cast<char*>(p.k_rope) + 32 * lane;
  for (u32 column = first; column < used; column += p.ctas_per_request) {
    const u32 block = ld_global_u32(table + column);  // a negative id is a large one
    if (block >= p.num_blocks) continue;
    const i64 token = static_cast<i64>(block) * kBlockSize + row;
    widen_16(plane + token * (2 * kQkRopeHeadDim),
             cache + block * p.k_block_stride + row * p.k_token_stride);
  }
}

__device__ __forceinline__ void widen_query(const WidenPerTensorParams& p) {
  const u32 cta = blockIdx.x - p.block_ctas;
  const u32 row = cta * kRowsPerCta + threadIdx.x / kLanesPerRow;
  const u32 lane = threadIdx.x % kLanesPerRow;
  if (row >= p.num_rows) return;
  const u32 token = row / p.num_heads, head = row % p.num_heads;
  const u32 request = token / p.seq_len_q, position = token % p.seq_len_q;
  const char* from = static_cast<const char*>(p.q) + request * p.q_stride_b +
                     position * p.q_stride_s + head * p.q_stride_h + kKvLoraRank + 16 * lane;
  char* to = static_cast<char*>(p.q_rope) + static_cast<i64>(row) * (2 * kQkRopeHeadDim) + 32 * lane;
  widen_16(to, from);
  if (lane == 0) st_global_u32(p.q_scale + row, ld_global_u32(p.descale_q));  // [W3]
}

extern "C" __global__ void __launch_bounds__(256)
    widen_per_tensor(const __grid_constant__ WidenPerTensorParams p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (blockIdx.x == 0 && threadIdx.x < kBlockSize) {
    st_global_u32(p.k_scale + threadIdx.x, ld_global_u32(p.descale_k));  // [W3]
  }
  if (blockIdx.x < p.block_ctas) {
    widen_blocks(p);
  } else {
    widen_query(p);
  }
}
