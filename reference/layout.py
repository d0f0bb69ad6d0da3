"""Where a token lies in the paged cache. Mirror: ``cuda_src/common/layout.cuh``.

slot = block * 64 + offset. The three cache arrays may be any strided views, such as the planes of
one buffer of 41,216-byte records ("record" layout) or three arrays of their own ("separate").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from snapmla_rt.config import BLOCK_SIZE, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from snapmla_rt.errors import ArgumentError

__all__ = ["CacheViews", "cache_views", "ranges_to_slots", "slot_array"]


@dataclass(frozen=True)
class CacheViews:
    """The cache's bits: codes uint8 [blocks, 64, 512], scale uint32 [blocks, 64], rope uint16
    [blocks, 64, 64]; views of the caller's arrays."""

    codes: NDArray[np.uint8]
    scale: NDArray[np.uint32]
    rope: NDArray[np.uint16]

    @property
    def num_slots(self) -> int:
        return int(self.codes.shape[0]) * BLOCK_SIZE


def _view(
    name: str, array: Any, bits: Any, dtypes: tuple[Any, ...], shape: tuple[int | None, ...]
) -> NDArray[Any]:
    if not isinstance(array, np.ndarray):
        raise ArgumentError(name, "a NumPy array", type(array).__name__)
    want = tuple(array.shape[i] if s is None and i < array.ndim else s for i, s in enumerate(shape))
    if array.shape != want:
        text = ", ".join("num_blocks" if s is None else str(s) for s in shape)
        raise ArgumentError(name, f"shape [{text}]", list(array.shape))
    if array.dtype not in [np.dtype(d) for d in dtypes]:
        names = " or ".join(np.dtype(d).name for d in dtypes)
        raise ArgumentError(name, f"dtype {names}", array.dtype)
    return array.view(bits)


def cache_views(ckv_cache: Any, k_scale_cache: Any, k_rope_cache: Any) -> CacheViews:
    """Check the three cache arrays and view their bits.

    ckv_cache e4m3 or uint8 [num_blocks, 64, 512], k_scale_cache float32 [num_blocks, 64],
    k_rope_cache bf16 or uint16 [num_blocks, 64, 64]; any strides. Raises ArgumentError.
    """
    n, t = None, BLOCK_SIZE
    e4m3 = (ml_dtypes.float8_e4m3fn, np.uint8)
    bf16 = (ml_dtypes.bfloat16, np.uint16)
    codes = _view("ckv_cache", ckv_cache, np.uint8, e4m3, (n, t, KV_LORA_RANK))
    n = int(codes.shape[0])
    scale = _view("k_scale_cache", k_scale_cache, np.uint32, (np.float32,), (n, t))
    rope = _view("k_rope_cache", k_rope_cache, np.uint16, bf16, (n, t, QK_ROPE_HEAD_DIM))
    return CacheViews(codes, scale, rope)


def _ints(name: str, values: ArrayLike, ndim: int, expected: str) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.size == 0 and array.ndim == ndim:
        array = array.astype(np.int64)
    if array.ndim != ndim:
        raise ArgumentError(name, expected, f"shape {list(array.shape)}")
    if array.dtype not in (np.int32, np.int64):
        raise ArgumentError(name, f"{expected} of int32 or int64", array.dtype)
    return array.astype(np.int64, copy=False)


def slot_array(name: str, slots: ArrayLike, num_slots: int) -> NDArray[np.int64]:
    """Slots int32 or int64 [n] as int64; negative ones mean "no slot" and stay negative.

    A slot of num_slots or more raises ArgumentError that names the slot and its index.
    """
    array = _ints(name, slots, 1, "shape [n]")
    beyond = np.flatnonzero(array >= num_slots)
    if beyond.size:
        index = int(beyond[0])
        got = f"slot {int(array[index])} at index {index}"
        raise ArgumentError(name, f"slots below {num_slots} (negative: none)", got)
    return array


def ranges_to_slots(
    block_table: ArrayLike, starts: ArrayLike, cu_seqlens: ArrayLike, num_blocks: int
) -> NDArray[np.int64]:
    """[F0] the slots of the token ranges starts[r] .. starts[r] + length of each request r.

    block_table [b, max_blocks], starts [b], cu_seqlens [b + 1] (running sum of the lengths, first
    0), all int32 or int64. Row i belongs to the request with cu_seqlens[r] <= i < cu_seqlens[r+1].
    Entries of the table outside the ranges are never looked at. Raises ArgumentError.
    """
    table = _ints("block_table", block_table, 2, "shape [b, max_blocks]")
    first = _ints("starts", starts, 1, "shape [b]")
    ends = _ints("cu_seqlens", cu_seqlens, 1, "shape [b + 1]")
    if first.shape[0] != table.shape[0]:
        raise ArgumentError("starts", f"shape [{table.shape[0]}]", list(first.shape))
    if ends.shape[0] != table.shape[0] + 1:
        raise ArgumentError("cu_seqlens", f"shape [{table.shape[0] + 1}]", list(ends.shape))
    if ends[0] != 0 or (np.diff(ends) < 0).any():
        raise ArgumentError("cu_seqlens", "0 first and no decrease", ends.tolist())
    row = np.arange(int(ends[-1]), dtype=np.int64)
    request = np.searchsorted(ends, row, side="right") - 1
    position = first[request] + row - ends[request]
    column = position // BLOCK_SIZE
    outside = np.flatnonzero((position < 0) | (column >= table.shape[1]))
    if outside.size:
        r = int(request[outside[0]])
        expected = f"ranges within 0..{table.shape[1] * BLOCK_SIZE} (block_table's width)"
        got = f"request {r} from {int(first[r])} with {int(ends[r + 1] - ends[r])} tokens"
        raise ArgumentError("starts", expected, got)
    block = table[request, column]
    bad = np.flatnonzero((block < 0) | (block >= num_blocks))
    if bad.size:
        i = int(bad[0])
        got = f"{int(block[i])} at [{int(request[i])}, {int(column[i])}]"
        raise ArgumentError("block_table", f"block ids 0..{num_blocks - 1}", got)
    slots: NDArray[np.int64] = block * BLOCK_SIZE + position % BLOCK_SIZE
    return slots
