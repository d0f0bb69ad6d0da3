"""KVCacheStorage: sizes, both layouts byte by byte, copy and poison."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from snapmla_rt.config import BYTES_PER_TOKEN, RECORD_BYTES
from snapmla_rt.errors import ArgumentError


def test_storage_sizes(kv: Any) -> None:
    storage = kv.storage
    assert storage.bytes_per_token() == BYTES_PER_TOKEN == 644
    assert storage.pool_bytes(3) == 3 * 64 * 644 == 3 * RECORD_BYTES
    for size in (0, 1, RECORD_BYTES - 1, RECORD_BYTES, 10**12):
        n = storage.num_blocks_for(size)
        assert storage.pool_bytes(n) <= size < storage.pool_bytes(n + 1)
    with pytest.raises(ArgumentError, match="layout"):
        kv.HostKVCacheStorage(4, "tensor")
    with pytest.raises(ArgumentError, match="num_bytes"):
        storage.num_blocks_for(-1)


@pytest.mark.parametrize("layout", ["separate", "record"])
def test_storage_arrays_tile_the_buffer(kv: Any, layout: str) -> None:
    """Every byte of the buffer belongs to exactly one element of one array."""
    storage = kv.HostKVCacheStorage(5, layout)
    arrays = (storage.ckv_cache, storage.k_scale_cache, storage.k_rope_cache)
    assert [a.dtype for a in arrays] == [
        np.dtype(ml_dtypes.float8_e4m3fn),
        np.dtype(np.float32),
        np.dtype(ml_dtypes.bfloat16),
    ]
    assert [a.shape for a in arrays] == [(5, 64, 512), (5, 64), (5, 64, 64)]
    assert tuple(a.strides[0] for a in arrays) == storage.block_strides
    if layout == "record":
        assert storage.block_strides == (41216, 41216, 41216)
    else:
        assert storage.block_strides == (32768, 256, 8192)
        assert all(a.flags.c_contiguous for a in arrays)
    assert storage.buffer.nbytes == storage.layout.num_bytes == storage.pool_bytes(5)
    assert storage.buffer.ctypes.data % 128 == 0
    touched = np.zeros(storage.buffer.nbytes, dtype=np.int32)
    for array in arrays:
        start = array.__array_interface__["data"][0] - storage.buffer.ctypes.data
        assert start % 128 == 0
        index = np.indices(array.shape).reshape(array.ndim, -1)
        at = start + np.tensordot(np.array(array.strides), index, axes=1)
        for byte in range(array.itemsize):
            np.add.at(touched, at + byte, 1)
    assert (touched == 1).all()


@pytest.mark.parametrize("layout", ["separate", "record"])
def test_storage_copy_and_poison(kv: Any, layout: str) -> None:
    storage = kv.HostKVCacheStorage(5, layout)
    storage.buffer[:] = np.random.default_rng(5).integers(0, 255, storage.buffer.nbytes)
    before = [storage.block_bytes(b) for b in range(5)]
    storage.copy_blocks(np.array([[1, 2], [2, 3]]))  # in order: 3 gets what 1 had
    after = [storage.block_bytes(b) for b in range(5)]
    assert after == [before[0], before[1], before[1], before[1], before[4]]
    storage.poison_blocks([4])
    assert storage.written_blocks([1, 4]) == [1]
    assert np.isnan(storage.ckv_cache[4].astype(np.float32)).all()
    assert np.isnan(storage.k_scale_cache[4]).all()
    assert np.isnan(storage.k_rope_cache[4].astype(np.float32)).all()
    for copies in ([[0, 1]], [[1, 0]], [[1, 5]], [1, 2], [[1, 2, 3]]):
        with pytest.raises(ArgumentError, match="copies"):
            storage.copy_blocks(copies)
    storage.copy_blocks([])
