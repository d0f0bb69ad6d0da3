"""Hostile filling of everything a stage must not read.

Unused slots of the cache hold NaN in all three planes, and the table's unused entries hold ids that
no cache has: a stage that reads one of them, even to multiply it by zero, gives NaN or faults.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

BLOCK = 64
# Largest int32, smallest int32, -1 as other engines pad, and an id just beyond any real cache.
ABSURD_IDS = np.array([2**31 - 1, -(2**31), -1, 1 << 24], np.int32)
NAN_E4M3 = (0x7F, 0xFF)
NAN_F32_BITS = np.uint32(0x7FC0DEAD)  # a NaN with a payload: copying it around shows
NAN_BF16_BITS = np.uint16(0xFFC1)


def poisoned_cache(num_blocks: int) -> tuple[NDArray, NDArray, NDArray]:
    """A cache of `num_blocks` in which every slot is NaN.

    Returns ckv_cache e4m3 [num_blocks, 64, 512], k_scale_cache f32 [num_blocks, 64], k_rope_cache
    bf16 [num_blocks, 64, 64].
    """
    ckv = np.full((num_blocks, BLOCK, 512), NAN_E4M3[0], np.uint8)
    ckv[..., 1::2] = NAN_E4M3[1]
    scale = np.full((num_blocks, BLOCK), NAN_F32_BITS, np.uint32)
    rope = np.full((num_blocks, BLOCK, 64), NAN_BF16_BITS, np.uint16)
    return (
        ckv.view(ml_dtypes.float8_e4m3fn),
        scale.view(np.float32),
        rope.view(ml_dtypes.bfloat16),
    )


def poison_unused_slots(
    ckv_cache: NDArray, k_scale_cache: NDArray, k_rope_cache: NDArray, used_slots: ArrayLike
) -> None:
    """Fill, in place, every slot that is not in `used_slots` with NaN in all three planes."""
    unused = np.ones(k_scale_cache.shape, bool)
    used = np.asarray(used_slots, np.int64)
    unused[used // BLOCK, used % BLOCK] = False
    bad_ckv, bad_scale, bad_rope = poisoned_cache(1)
    for cache, bad in (
        (ckv_cache, bad_ckv),
        (k_scale_cache, bad_scale),
        (k_rope_cache, bad_rope),
    ):
        # moved as bits: a cast of the NaN would lose its payload
        bits = np.dtype(f"u{cache.dtype.itemsize}")
        cache.view(bits)[unused] = bad.view(bits)[0, 0]


def poison_block_table(block_table: ArrayLike, cache_seqlens: ArrayLike) -> NDArray[np.int32]:
    """A copy of the table whose entries past each request's last block are absurd ids."""
    table = np.array(block_table, np.int32)
    used = -(-np.asarray(cache_seqlens) // BLOCK)
    column = np.arange(table.shape[1])
    unused = column[None, :] >= used[:, None]
    table[unused] = np.resize(ABSURD_IDS, int(unused.sum()))
    return table
