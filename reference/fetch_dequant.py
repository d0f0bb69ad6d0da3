"""Stage fetch_dequant: tokens gathered from the paged cache and dequantised to bf16.

Mirror: ``cuda_src/fetch_dequant.cu``. Source of the stage: SnapMLA, section 3.3.1
(Fused-Fetch-Dequant), for chunked prefill and prefix reuse.

    [F0] by ranges: row i of request r is the token starts[r] + i - cu_seqlens[r], its block from
         the block table (``layout.py``); by slots: row i is slots[i]
    [F1] latent = bf16(f32(code) * scale), one fp32 product, then nearest even
    [F2] rope   = bf16(f32(rope') * scale), likewise
    [F3] a negative slot gives a row of zeros
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from snapmla_rt.config import BLOCK_SIZE, KV_LORA_RANK, QK_ROPE_HEAD_DIM

from .layout import CacheViews, cache_views, ranges_to_slots, slot_array
from .numerics import bf16_from_f32, f32_from_bf16, f32_from_e4m3

__all__ = ["fetch_dequant", "fetch_dequant_ranges"]

_ROWS = 128  # rows handled at once stay in the second-level cache

Fetched = tuple[NDArray[ml_dtypes.bfloat16], NDArray[ml_dtypes.bfloat16]]


def fetch_dequant(
    ckv_cache: Any, k_scale_cache: Any, k_rope_cache: Any, slots: ArrayLike
) -> Fetched:
    """Gather and dequantise tokens by slot.

    ckv_cache e4m3 or uint8 [num_blocks, 64, 512], k_scale_cache float32 [num_blocks, 64],
    k_rope_cache bf16 or uint16 [num_blocks, 64, 64], any strides; slots int32 or int64 [n].
    Returns kv_c bf16 [n, 512] and k_pe bf16 [n, 64], both un-scaled; NaN tokens give NaN (0x7fff),
    negative slots give zeros. Raises ArgumentError for a slot beyond the cache.
    """
    cache = cache_views(ckv_cache, k_scale_cache, k_rope_cache)
    array = slot_array("slots", slots, cache.num_slots)
    kv_c = np.empty((array.size, KV_LORA_RANK), np.uint16)
    k_pe = np.empty((array.size, QK_ROPE_HEAD_DIM), np.uint16)
    for start in range(0, array.size, _ROWS):
        rows = slice(start, start + _ROWS)
        kv_c[rows], k_pe[rows] = _fetch_block(cache, array[rows])
    return kv_c.view(ml_dtypes.bfloat16), k_pe.view(ml_dtypes.bfloat16)


def fetch_dequant_ranges(
    ckv_cache: Any,
    k_scale_cache: Any,
    k_rope_cache: Any,
    block_table: ArrayLike,
    starts: ArrayLike,
    cu_seqlens: ArrayLike,
) -> Fetched:
    """Gather and dequantise one token range per request, the ranges one after another.

    block_table int32 [b, max_blocks], starts int32 [b] (first token of each range), cu_seqlens
    int32 [b + 1] (running sum of the ranges' lengths, first 0). Returns kv_c bf16
    [cu_seqlens[-1], 512] and k_pe bf16 [cu_seqlens[-1], 64]. Table entries outside the ranges are
    never read. Raises ArgumentError for ranges beyond the table and block ids beyond the cache.
    """
    cache = cache_views(ckv_cache, k_scale_cache, k_rope_cache)
    slots = ranges_to_slots(block_table, starts, cu_seqlens, int(cache.codes.shape[0]))  # [F0]
    return fetch_dequant(ckv_cache, k_scale_cache, k_rope_cache, slots)


@np.errstate(all="ignore")
def _fetch_block(cache: CacheViews, slots: NDArray[np.int64]) -> tuple[Any, Any]:
    """A few rows as bf16 bits: latent [n, 512], rope [n, 64]."""
    if cache.num_slots == 0:
        return np.uint16(0), np.uint16(0)  # slot_array let only negative slots through
    none = slots < 0
    block, offset = np.where(none, 0, slots) // BLOCK_SIZE, slots % BLOCK_SIZE
    scale = cache.scale[block, offset].view(np.float32)[:, None]
    latent = bf16_from_f32(f32_from_e4m3(cache.codes[block, offset]) * scale)  # [F1]
    rope = bf16_from_f32(f32_from_bf16(cache.rope[block, offset]) * scale)  # [F2]
    if none.any():
        latent[none], rope[none] = 0, 0  # [F3]
    return latent, rope
