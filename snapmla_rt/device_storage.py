"""KVCacheStorage on a GPU: allocation, copy-on-write copies, moves to and from pinned host memory.

`kv_cache/storage.py` has the layouts and the sibling in main memory; this one enqueues everything
on a stream and waits for nothing, but where it says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .array import numpy_dtype
from .config import BLOCK_SIZE, RECORD_BYTES
from .data_kernels import COPY_CTAS_PER_BLOCK, COPY_PAIRS
from .driver.device import require_hopper
from .driver.memory import (
    LEGACY_STREAM,
    DeviceBuffer,
    PinnedBuffer,
    copy_to_device,
    copy_to_host,
    fill,
    synchronize,
)
from .errors import ArgumentError
from .kv_cache.storage import POISON_BYTE, ArraySpec, KVCacheStorage
from .tensor import TensorView, stream_handle

__all__ = ["CachePlane", "DeviceKVCacheStorage", "PinnedBlocks"]

_TYPESTR = {"float8_e4m3fn": "|u1", "bfloat16": "<u2", "float32": "<f4"}


class CachePlane:
    """One of the three arrays of a storage, a strided array on the GPU.

    Frameworks take it through `__cuda_array_interface__` (e4m3 as uint8, bf16 as uint16).
    """

    def __init__(self, spec: ArraySpec, buffer: DeviceBuffer) -> None:
        self.spec = spec
        self.buffer = buffer
        self.ptr = buffer.ptr + spec.offset
        self.shape = spec.shape
        self.strides = spec.strides
        self.dtype = spec.dtype.name
        self.device_index = buffer.device_index
        self.block_bytes = BLOCK_SIZE * spec.token_stride

    def view(self) -> TensorView:
        """A view for the API's calls that keeps the storage's memory alive."""
        return TensorView(
            self.ptr, self.shape, self.strides, self.dtype, "cuda", self.device_index, self
        )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": _TYPESTR[self.dtype],
            "data": (self.ptr, False),
            "strides": self.strides,
            "version": 3,
        }

    def numpy(self, stream: int = LEGACY_STREAM) -> NDArray[Any]:
        """A copy on the host, after everything enqueued on `stream` (waits for it)."""
        raw = np.empty((self.shape[0], self.block_bytes), np.uint8)
        base = raw.__array_interface__["data"][0]
        for block in range(self.shape[0]):
            source = self.ptr + block * self.spec.block_stride
            copy_to_host(
                base + block * self.block_bytes,
                source,
                self.block_bytes,
                self.device_index,
                stream,
            )
        synchronize(stream, self.device_index)
        return raw.view(numpy_dtype(self.dtype)).reshape(self.shape)


class PinnedBlocks:
    """Page-locked host memory for `num_blocks` blocks: where blocks go and come back from.

    Block i is a record of 41,216 bytes (latent plane, RoPE plane, scale plane) at byte
    41,216 i of `array`, whatever the layout of the storage on the GPU.
    """

    def __init__(self, num_blocks: int, device_index: int = 0) -> None:
        if num_blocks < 1:
            raise ArgumentError("num_blocks", "at least 1", num_blocks)
        self.num_blocks = num_blocks
        self._buffer = PinnedBuffer(num_blocks * RECORD_BYTES, device_index)
        self.ptr = self._buffer.ptr
        flat = np.frombuffer(self._buffer.view(), np.uint8)
        self.array = flat.reshape(num_blocks, RECORD_BYTES)


class DeviceKVCacheStorage(KVCacheStorage):
    """The cache of one layer on GPU `device_index`, zeros at first.

    ckv_cache, k_scale_cache and k_rope_cache are CachePlane objects: arguments of the API's calls
    as they are, and of torch.as_tensor or cupy.asarray. layout: "separate" or "record".
    stream: where copies are enqueued unless a call says otherwise (a handle, a torch or CuPy
    stream, or an object with `__cuda_stream__`; default: the legacy stream).
    Raises MemoryError where the GPU has too little memory, UnsupportedDeviceError for another GPU.
    """

    def __init__(
        self,
        num_blocks: int,
        layout: str = "separate",
        *,
        device_index: int = 0,
        stream: Any = None,
    ) -> None:
        super().__init__(num_blocks, layout)
        require_hopper(device_index)
        self.device_index = device_index
        self.stream = LEGACY_STREAM if stream is None else stream_handle(stream)
        self.buffer = DeviceBuffer(self.layout.num_bytes, device_index)
        fill(self.buffer.ptr, 0, self.layout.num_bytes, device_index, self.stream)
        self.ckv_cache, self.k_scale_cache, self.k_rope_cache = (
            CachePlane(spec, self.buffer) for spec in self.layout.arrays()
        )

    @property
    def planes(self) -> tuple[CachePlane, CachePlane, CachePlane]:
        """Latent, RoPE and scale: the order of a record."""
        return self.ckv_cache, self.k_rope_cache, self.k_scale_cache

    def _handle(self, stream: Any) -> int:
        return self.stream if stream is None else stream_handle(stream)

    def copy_blocks(self, copies: Any, stream: Any = None) -> None:
        """Copy whole blocks: integers [n, 2] of (source, target), done in order; enqueued only.

        The list travels in the launch's parameters, so `copies` may be changed afterwards.
        """
        from .kernels import kernel

        pairs = self._checked_copies(copies)
        if not len(pairs):
            return
        copy = kernel("copy_blocks", device_index=self.device_index)
        planes = self.planes
        head = (
            *(plane.ptr for plane in planes),
            *(plane.spec.block_stride for plane in planes),
            *(plane.block_bytes for plane in planes),
            self.num_blocks,
        )
        for group in independent_groups(pairs.tolist()):
            packed = [source << 32 | target for source, target in group]
            packed += [0] * (COPY_PAIRS - len(packed))
            grid = (COPY_CTAS_PER_BLOCK * len(group), 1, 1)
            copy.launch(grid, self._handle(stream), *head, *packed)

    def poison_blocks(self, block_ids: Any, stream: Any = None) -> None:
        """Fill blocks with NaN, so that a read of freed memory shows; enqueued only."""
        handle = self._handle(stream)
        for block in self._checked_ids(block_ids).tolist():
            for address, nbytes in self._pieces(block):
                fill(address, POISON_BYTE, nbytes, self.device_index, handle)

    def written_blocks(self, block_ids: Any) -> list[int]:
        """Those of the blocks that are no longer wholly poison, in the order given (waits)."""
        ids = self._checked_ids(block_ids).tolist()
        return [b for b in ids if set(self.block_bytes(b)) != {POISON_BYTE}]

    def block_bytes(self, block_id: int) -> bytes:
        """The block's three planes end to end, as in a record: latent, RoPE, scale (waits)."""
        (block,) = self._checked_ids([block_id]).tolist()
        raw = np.empty(RECORD_BYTES, np.uint8)
        self._read(raw.__array_interface__["data"][0], block, self.stream)
        synchronize(self.stream, self.device_index)
        return raw.tobytes()

    def to_host(
        self, block_ids: Any, target: PinnedBlocks, rows: Any = None, stream: Any = None
    ) -> None:
        """Enqueue copies of blocks into records of `target`; block_ids[i] goes to rows[i].

        rows: default 0, 1, ... The host may read `target` once the stream has come this far, and
        the blocks must not be freed before that.
        """
        for block, row in self._moves(block_ids, target, rows):
            self._read(target.ptr + row * RECORD_BYTES, block, self._handle(stream))

    def from_host(
        self, block_ids: Any, source: PinnedBlocks, rows: Any = None, stream: Any = None
    ) -> None:
        """Enqueue copies of records of `source` into blocks; rows[i] goes to block_ids[i].

        `source` must stay unchanged until the stream has come this far.
        """
        handle = self._handle(stream)
        for block, row in self._moves(block_ids, source, rows):
            address = source.ptr + row * RECORD_BYTES
            for place, nbytes in self._pieces(block):
                copy_to_device(place, address, nbytes, self.device_index, handle)
                address += nbytes

    def synchronize(self, stream: Any = None) -> None:
        """Wait for everything enqueued on the stream."""
        synchronize(self._handle(stream), self.device_index)

    def _moves(self, block_ids: Any, host: PinnedBlocks, rows: Any) -> Iterable[tuple[int, int]]:
        blocks = self._checked_ids(block_ids).tolist()
        places = list(range(len(blocks))) if rows is None else np.asarray(rows).tolist()
        if len(places) != len(blocks):
            raise ArgumentError("rows", f"{len(blocks)} rows", len(places))
        for row in places:
            if not isinstance(row, int) or not 0 <= row < host.num_blocks:
                raise ArgumentError("rows", f"0 to {host.num_blocks - 1}", row)
        return zip(blocks, places, strict=True)

    def _pieces(self, block: int) -> list[tuple[int, int]]:
        """(address, bytes) of a block's memory: one piece in the record layout, else three."""
        first = self.planes[0]
        if self.layout.layout == "record":
            return [(first.ptr + block * RECORD_BYTES, RECORD_BYTES)]
        return [(p.ptr + block * p.spec.block_stride, p.block_bytes) for p in self.planes]

    def _read(self, address: int, block: int, stream: int) -> None:
        for place, nbytes in self._pieces(block):
            copy_to_host(address, place, nbytes, self.device_index, stream)
            address += nbytes


def independent_groups(
    pairs: Sequence[Sequence[int]], limit: int = COPY_PAIRS
) -> list[list[tuple[int, int]]]:
    """Consecutive groups of copies that may run at once with the result of running in order.

    A group has at most `limit` copies; within one, no block is written twice, nor both read and
    written.
    """
    groups: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in pairs:
        clash = source in written or target in written or target in read
        if not groups or clash or len(groups[-1]) == limit:
            groups.append([])
            read, written = set(), set()
        groups[-1].append((source, target))
        read.add(source)
        written.add(target)
    return groups
