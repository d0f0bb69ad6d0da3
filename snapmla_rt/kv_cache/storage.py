"""KVCacheStorage: sizes, layouts and strides of the three cache arrays, and their memory.

A token takes 644 bytes: 512 e4m3 latent values, 64 bf16 RoPE values, one float32 scale. A block
of 64 tokens is either a piece of three separate arrays, or one contiguous record of 41,216 bytes
(latent plane, RoPE plane, scale plane); the kernels take the three block strides either way.

KVCacheLayout is arithmetic alone and imports no CUDA. KVCacheStorage says what a storage can do;
HostKVCacheStorage does it in main memory. A device storage is another subclass: it hands out
arrays of its own and does the two operations, copy and poison, with its own memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..config import (
    BLOCK_SIZE,
    BYTES_PER_TOKEN,
    KV_LORA_RANK,
    QK_ROPE_HEAD_DIM,
    RECORD_BYTES,
    RECORD_ROPE_OFFSET,
    RECORD_SCALE_OFFSET,
)
from ..errors import ArgumentError
from .block_pool import MAX_NUM_BLOCKS
from .checks import check_count, int_array

LAYOUTS = ("separate", "record")
RECORD_ALIGNMENT = 128  # bytes: what TMA asks of a tensor map's base at most
POISON_BYTE = 0xFF  # e4m3 NaN, bf16 NaN and float32 NaN alike


@dataclass(frozen=True)
class ArraySpec:
    """One of the three arrays: strides and offset are in bytes.

    shape: [num_blocks, 64, width] or [num_blocks, 64]; strides: one per axis; offset: from the
    start of the buffer that holds it.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def block_stride(self) -> int:
        """Bytes from one block to the next."""
        return self.strides[0]

    @property
    def token_stride(self) -> int:
        """Bytes from one token of a block to the next."""
        return self.strides[1]


@dataclass(frozen=True)
class KVCacheLayout:
    """Where every byte of the cache lies. layout: "separate" or "record"."""

    num_blocks: int
    layout: str = "separate"

    def __post_init__(self) -> None:
        check_count("num_blocks", self.num_blocks, 1, MAX_NUM_BLOCKS)
        check_layout(self.layout)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays together; both layouts take the same."""
        return pool_bytes(self.num_blocks)

    def arrays(self) -> tuple[ArraySpec, ArraySpec, ArraySpec]:
        """ckv_cache, k_scale_cache and k_rope_cache.

        Separate arrays are described as parts of one buffer, one after the other, each start a
        multiple of 128 bytes; they may as well be allocated one by one.
        """
        n = self.num_blocks
        rope_bytes = 2 * QK_ROPE_HEAD_DIM
        if self.layout == "record":
            steps = (RECORD_BYTES, RECORD_BYTES, RECORD_BYTES)
            offsets = (0, RECORD_SCALE_OFFSET, RECORD_ROPE_OFFSET)
        else:
            steps = (BLOCK_SIZE * KV_LORA_RANK, BLOCK_SIZE * 4, BLOCK_SIZE * rope_bytes)
            # latent, RoPE, scale in this order: each is then a whole number of 128-byte lines
            offsets = (0, n * (steps[0] + steps[2]), n * steps[0])
        f8, bf16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
        return (
            ArraySpec(
                "ckv_cache",
                f8,
                (n, BLOCK_SIZE, KV_LORA_RANK),
                (steps[0], KV_LORA_RANK, 1),
                offsets[0],
            ),
            ArraySpec(
                "k_scale_cache",
                np.dtype(np.float32),
                (n, BLOCK_SIZE),
                (steps[1], 4),
                offsets[1],
            ),
            ArraySpec(
                "k_rope_cache",
                bf16,
                (n, BLOCK_SIZE, QK_ROPE_HEAD_DIM),
                (steps[2], rope_bytes, 2),
                offsets[2],
            ),
        )


def check_layout(layout: Any) -> str:
    """`layout` if it is one of LAYOUTS, else ArgumentError."""
    if layout not in LAYOUTS:
        raise ArgumentError("layout", f"one of {LAYOUTS}", repr(layout))
    return str(layout)


def bytes_per_token() -> int:
    """644: 512 e4m3, one float32, 64 bf16."""
    return BYTES_PER_TOKEN


def pool_bytes(num_blocks: int) -> int:
    """Bytes of num_blocks blocks of one layer, in either layout."""
    return check_count("num_blocks", num_blocks, 0) * RECORD_BYTES


def num_blocks_for(num_bytes: int) -> int:
    """The most blocks of one layer that num_bytes bytes hold, null block included."""
    return check_count("num_bytes", num_bytes, 0) // RECORD_BYTES


class KVCacheStorage(ABC):
    """The cache of one layer: three arrays over num_blocks blocks of 64 tokens.

    ckv_cache e4m3 [num_blocks, 64, 512], k_scale_cache float32 [num_blocks, 64], k_rope_cache
    bf16 [num_blocks, 64, 64]. In the "record" layout they are strided views of `buffer`.
    """

    ckv_cache: Any
    k_scale_cache: Any
    k_rope_cache: Any

    bytes_per_token = staticmethod(bytes_per_token)
    pool_bytes = staticmethod(pool_bytes)
    num_blocks_for = staticmethod(num_blocks_for)

    def __init__(self, num_blocks: int, layout: str = "separate") -> None:
        self.layout = KVCacheLayout(num_blocks, layout)

    @property
    def num_blocks(self) -> int:
        """Blocks, the null block 0 included."""
        return self.layout.num_blocks

    @property
    def block_strides(self) -> tuple[int, int, int]:
        """Bytes from block to block of ckv_cache, k_scale_cache and k_rope_cache."""
        ckv, scale, rope = self.layout.arrays()
        return ckv.block_stride, scale.block_stride, rope.block_stride

    @abstractmethod
    def copy_blocks(self, copies: Any) -> None:
        """Copy whole blocks: integers [n, 2] of (source, target), done in order."""

    @abstractmethod
    def poison_blocks(self, block_ids: Any) -> None:
        """Fill blocks with NaN, so that a read of freed memory shows."""

    @abstractmethod
    def written_blocks(self, block_ids: Any) -> list[int]:
        """Those of the blocks that are no longer wholly poison, in the order given."""

    def _checked_ids(self, block_ids: Any) -> np.ndarray:
        return int_array("block_ids", block_ids, 0, self.num_blocks - 1, np.int64)

    def _checked_copies(self, copies: Any) -> np.ndarray:
        """Pairs of blocks of the pool, the null block excluded."""
        array = np.asarray(copies)
        if array.size == 0:
            return np.empty((0, 2), dtype=np.int64)
        if array.ndim != 2 or array.shape[1] != 2:
            raise ArgumentError("copies", "integers [n, 2]", f"shape {array.shape}")
        pairs = int_array("copies", array.reshape(-1), 1, self.num_blocks - 1, np.int64)
        return pairs.reshape(-1, 2)


class HostKVCacheStorage(KVCacheStorage):
    """A cache in main memory, for the reference and for tests. Starts as zeros.

    The device storage will be its sibling; nothing above this class asks where the memory is.
    """

    def __init__(self, num_blocks: int, layout: str = "separate") -> None:
        super().__init__(num_blocks, layout)
        size = self.layout.num_bytes
        whole = np.zeros(size + RECORD_ALIGNMENT, dtype=np.uint8)
        start = -whole.ctypes.data % RECORD_ALIGNMENT
        self.buffer = whole[start : start + size]
        self.ckv_cache, self.k_scale_cache, self.k_rope_cache = (
            self._view(spec) for spec in self.layout.arrays()
        )
        self._planes = [
            np.ndarray(
                (self.num_blocks, BLOCK_SIZE * spec.token_stride),
                dtype=np.uint8,
                buffer=self.buffer,
                offset=spec.offset,
                strides=(spec.block_stride, 1),
            )
            for spec in self.layout.arrays()
        ]

    def _view(self, spec: ArraySpec) -> np.ndarray:
        return np.ndarray(
            spec.shape, spec.dtype, buffer=self.buffer, offset=spec.offset, strides=spec.strides
        )

    def copy_blocks(self, copies: Any) -> None:
        for source, target in self._checked_copies(copies).tolist():
            for plane in self._planes:
                plane[target] = plane[source]

    def poison_blocks(self, block_ids: Any) -> None:
        ids = self._checked_ids(block_ids)
        for plane in self._planes:
            plane[ids] = POISON_BYTE

    def written_blocks(self, block_ids: Any) -> list[int]:
        ids = self._checked_ids(block_ids)
        written = np.zeros(len(ids), dtype=bool)
        for plane in self._planes:
            written |= np.any(plane[ids] != POISON_BYTE, axis=1)
        return [int(block) for block in ids[written]]

    def block_bytes(self, block_id: int) -> bytes:
        """The block's three planes end to end, as in a record: latent, RoPE, scale."""
        block = check_count("block_id", block_id, 0, self.num_blocks - 1)
        ckv, scale, rope = (plane[block].tobytes() for plane in self._planes)
        return ckv + rope + scale
