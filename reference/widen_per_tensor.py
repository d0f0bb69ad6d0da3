"""Stage widen_per_tensor: an FP8 cache with one scale for everything, as mla_decode reads it.

Mirror: ``cuda_src/widen_per_tensor.cu``. vLLM's fork of FlashMLA keeps 576 e4m3 codes a token, the
RoPE quantised too, with one scale for the whole cache (`descale_k`) and one for the queries
(`descale_q`). The latent codes stay where they are; what mla_decode wants beside them is made here:

    [W1] of each request the blocks of its first ceil(length / 64) table entries; ids outside the
         cache are passed over
    [W2] rope = bf16(f32(code)) of every token of such a block, and of every query row: exact, and
         already divided by the scale, since code * scale is the value
    [W3] 64 key scales = descale_k, a line that serves every block; a scale a query row = descale_q
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from snapmla_rt.config import BLOCK_SIZE, KV_LORA_RANK

from .numerics import bf16_from_f32, f32_from_e4m3

__all__ = ["rope_bits", "visible_blocks", "widen_per_tensor"]


def visible_blocks(
    block_table: NDArray[np.int32], cache_seqlens: NDArray[np.int32], num_blocks: int
) -> NDArray[np.int64]:
    """[W1] ids of the blocks that some request sees, each once."""
    used = -(-np.maximum(cache_seqlens, 0).astype(np.int64) // BLOCK_SIZE)
    seen = block_table[np.arange(block_table.shape[1])[None, :] < used[:, None]].astype(np.int64)
    return np.unique(seen[(seen >= 0) & (seen < num_blocks)])


def rope_bits(codes: NDArray[Any]) -> NDArray[np.uint16]:
    """[W2] the RoPE codes of rows [..., 576] as bf16 bits [..., 64]; NaN codes give 0x7fff."""
    rope = np.ascontiguousarray(codes[..., KV_LORA_RANK:]).view(np.uint8)
    return bf16_from_f32(f32_from_e4m3(rope))


def widen_per_tensor(
    k_cache: NDArray[Any],
    block_table: NDArray[np.int32],
    cache_seqlens: NDArray[np.int32],
    descale_k: NDArray[np.float32],
    k_rope: NDArray[Any],
    k_scale: NDArray[np.float32],
) -> None:
    """Fill k_rope bf16 [num_blocks, 64, 64] (visible blocks alone) and k_scale float32 [64].

    k_cache: e4m3 or uint8 [num_blocks, 64, 576]; block_table int32 [b, n]; cache_seqlens int32
    [b]; descale_k float32 [1]. Queries are one `rope_bits` and one descale_q a row ([W3]).
    """
    blocks = visible_blocks(block_table, cache_seqlens, k_cache.shape[0])
    k_rope.view(np.uint16)[blocks] = rope_bits(k_cache[blocks])
    k_scale[...] = descale_k[0]  # [W3]
