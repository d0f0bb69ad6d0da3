"""DeviceKVCacheStorage against HostKVCacheStorage: the same operations, the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
from compare import assert_same_bytes

from snapmla_rt import api
from snapmla_rt.array import to_device
from snapmla_rt.device_storage import DeviceKVCacheStorage, PinnedBlocks
from snapmla_rt.driver.graph import Graph
from snapmla_rt.driver.memory import Stream
from snapmla_rt.errors import ArgumentError
from snapmla_rt.kv_cache.storage import HostKVCacheStorage
from snapmla_rt.reference.append_kv import append_kv as reference_append

LAYOUTS = ("separate", "record")
NUM_BLOCKS = 12


def filled(layout: str) -> tuple[DeviceKVCacheStorage, HostKVCacheStorage]:
    device, host = DeviceKVCacheStorage(NUM_BLOCKS, layout), HostKVCacheStorage(NUM_BLOCKS, layout)
    n = NUM_BLOCKS * 64
    tokens = np.random.default_rng(0).standard_normal((n, 576)).astype(np.float32)
    slots = np.arange(n)
    parts = tokens[:, :512].copy(), tokens[:, 512:].copy()
    latent, rope = (to_device(part).view() for part in parts)
    planes = (device.ckv_cache, device.k_scale_cache, device.k_rope_cache)
    api.append_kv(latent, rope, *planes, to_device(slots).view())
    reference_append(*parts, host.ckv_cache, host.k_scale_cache, host.k_rope_cache, slots)
    return device, host


def check(device: DeviceKVCacheStorage, host: HostKVCacheStorage) -> None:
    for name in ("ckv_cache", "k_scale_cache", "k_rope_cache"):
        got, want = getattr(device, name).numpy(), getattr(host, name)
        bits = f"u{want.dtype.itemsize}"
        assert_same_bytes(name, got.view(bits), np.ascontiguousarray(want).view(bits))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_starts_as_zeros_and_takes_appends(layout: str) -> None:
    check(DeviceKVCacheStorage(3, layout), HostKVCacheStorage(3, layout))
    check(*filled(layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_run_in_order(layout: str) -> None:
    """Chains, swaps through a third block, repeats, itself, and more than one launch holds."""
    device, host = filled(layout)
    rng = np.random.default_rng(1)
    for copies in (
        [(1, 2), (2, 3), (3, 4)],
        [(5, 11), (6, 5), (11, 6)],
        [(7, 8), (9, 8), (8, 8)],
        rng.integers(1, NUM_BLOCKS, (200, 2)).tolist(),
        [],
    ):
        device.copy_blocks(copies)
        host.copy_blocks(copies)
        check(device, host)
    with pytest.raises(ArgumentError, match="copies"):
        device.copy_blocks([(1, NUM_BLOCKS)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_can_be_captured(layout: str) -> None:
    device, host = filled(layout)
    stream = Stream(0)
    device.copy_blocks([(1, 2)], stream)
    stream.synchronize()
    graph = Graph(0)
    with graph.capture(stream.handle):
        device.copy_blocks([(3, 4), (4, 5)], stream)
    graph.launch(stream.handle)
    stream.synchronize()
    host.copy_blocks([(1, 2), (3, 4), (4, 5)])
    check(device, host)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("other", LAYOUTS)
def test_blocks_move_to_pinned_memory_and_back(layout: str, other: str) -> None:
    """A block on the host is a record, so it may come back into a pool of the other layout."""
    device, host = filled(layout)
    pinned = PinnedBlocks(4)
    device.to_host([3, 9, 1], pinned, rows=[2, 0, 3])
    device.synchronize()
    for block, row in ((3, 2), (9, 0), (1, 3)):
        assert pinned.array[row].tobytes() == host.block_bytes(block)
        assert device.block_bytes(block) == host.block_bytes(block)
    target, twin = DeviceKVCacheStorage(NUM_BLOCKS, other), HostKVCacheStorage(NUM_BLOCKS, other)
    target.from_host([5, 6], pinned, rows=[0, 2])
    target.synchronize()
    assert target.block_bytes(5) == host.block_bytes(9)
    assert target.block_bytes(6) == host.block_bytes(3)
    assert target.block_bytes(7) == twin.block_bytes(7)
    for rows in ([4], [-1], [0, 1]):
        with pytest.raises(ArgumentError, match="rows"):
            device.to_host([1], pinned, rows=rows)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_poison_shows_writes(layout: str) -> None:
    device, host = filled(layout)
    for storage in (device, host):
        storage.poison_blocks([2, 5])
    check(device, host)
    assert device.written_blocks([1, 2, 5]) == [1]
    device.copy_blocks([(1, 5)])
    assert device.written_blocks([2, 5]) == [5]
