"""Rows B110 to B121 of the list of public failures, each as the small case that must go right.

(The list has no rows B109 and B116.) Every test runs on both twins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapmla_rt.errors import ArgumentError, OutOfBlocksError

BLOCK = 64


def tokens(n: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + n, dtype=np.int32)


def write(storage: Any, slots: np.ndarray, ids: np.ndarray) -> None:
    """What an append kernel does: bytes that depend on the token, at its slot."""
    for slot, token in zip(slots.tolist(), ids.tolist(), strict=True):
        block, offset = divmod(slot, BLOCK)
        codes = np.random.default_rng(token).integers(0, 256, 512, dtype=np.uint8)
        storage.ckv_cache[block, offset].view(np.uint8)[:] = codes
        storage.k_scale_cache[block, offset] = np.float32(token + 1)
        storage.k_rope_cache[block, offset].view(np.uint16)[:] = token


def read(storage: Any, blocks: np.ndarray, n: int) -> bytes:
    """The cache's bytes of the first n tokens of these blocks."""
    parts = []
    for position in range(n):
        block, offset = blocks[position // BLOCK], position % BLOCK
        parts.append(storage.ckv_cache[block, offset].tobytes())
        parts.append(storage.k_scale_cache[block, offset].tobytes())
        parts.append(storage.k_rope_cache[block, offset].tobytes())
    return b"".join(parts)


def slots_of(manager: Any, request: Any, start: int, stop: int) -> np.ndarray:
    blocks = manager.block_ids(request)
    return np.array([blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(start, stop)])


def prefill(manager: Any, request: Any, ids: np.ndarray, **options: Any) -> Any:
    result = manager.allocate_slots(request, len(ids), on_shortage="raise", **options)
    manager.commit(request, ids)
    return result


@pytest.mark.parametrize("layout", ["separate", "record"])
@pytest.mark.parametrize("survivor", ["parent", "child"])
def test_b110_fork_append_free_leaves_the_others_bytes(kv: Any, layout: str, survivor: str) -> None:
    storage = kv.HostKVCacheStorage(16, layout)
    manager = kv.KVCacheManager(16, debug=True, storage=storage)
    prefill(manager, "parent", tokens(100))
    write(storage, slots_of(manager, "parent", 0, 100), tokens(100))
    manager.fork("parent", "child")
    for request, first in (("parent", 1000), ("child", 2000)):
        result = manager.allocate_slots(request, 30)
        storage.copy_blocks(result.copies)
        write(storage, slots_of(manager, request, 100, 130), tokens(30, first))
    expected = {r: read(storage, manager.block_ids(r), 130) for r in ("parent", "child")}
    assert expected["parent"] != expected["child"]
    other = {"parent": "child", "child": "parent"}[survivor]
    manager.free(other)
    assert read(storage, manager.block_ids(survivor), 130) == expected[survivor]
    # the freed blocks are given out and written to: still nothing of the survivor changes
    prefill(manager, "new", tokens(700, 5000))
    write(storage, slots_of(manager, "new", 0, 700), tokens(700, 5000))
    assert read(storage, manager.block_ids(survivor), 130) == expected[survivor]


@pytest.mark.parametrize("debug", [False, True])
def test_b111_double_free_and_foreign_ids_are_errors(kv: Any, debug: bool) -> None:
    pool = kv.BlockPool(8, debug=debug)
    held = pool.get_new_blocks(3, "a")
    once = pool.get_new_blocks(1, "b")
    pool.free_blocks(once, "b")
    bad = [
        [int(once[0])],  # freed already
        [7],  # never handed out
        [-1],
        [0],  # the null block
        [8],  # outside the pool
        [int(held[0]), int(held[0])],  # one hold, given up twice in one call
        [int(held[0]), int(held[1]), int(once[0])],  # good ones before the bad one
    ]
    for ids in bad:
        before = pool.debug_state()
        with pytest.raises(ArgumentError, match="block_ids: expected"):
            pool.free_blocks(ids)
        assert pool.debug_state() == before
    wrong: list[Any] = [[1.5], ["x"], [[1]], None, [True]]
    for value in wrong:
        with pytest.raises(ArgumentError, match="block_ids"):
            pool.free_blocks(value)
    if debug:
        with pytest.raises(ArgumentError, match=f"block {once[0]}, already freed by 'b'"):
            pool.free_blocks(once)
        with pytest.raises(ArgumentError, match="block 7, never handed out"):
            pool.free_blocks([7])
        with pytest.raises(ArgumentError, match="held by 'b', got block 1, held by"):
            pool.free_blocks(held[:1], "b")
    pool.free_blocks(held, "a")
    assert pool.num_free_blocks == 7


def test_b112_free_and_used_are_the_whole_pool_after_10000_operations(kv: Any) -> None:
    # Unlike the state machine, without a model: many operations, one invariant, big strides.
    random = np.random.default_rng(112)
    manager = kv.KVCacheManager(64, debug=False)
    live: list[int] = []
    for number in range(10_000):
        kind = random.integers(0, 6)
        if kind <= 1 or not live:
            n = int(random.integers(0, 400))
            if manager.allocate_slots(number, n, int(random.integers(0, 5))) is not None:
                manager.commit(number, tokens(n, int(random.integers(0, 2))))
                live.append(number)
            continue
        request = live[int(random.integers(0, len(live)))]
        if kind == 2:
            manager.allocate_slots(request, int(random.integers(1, 80)))
        elif kind == 3:
            manager.truncate(request, int(random.integers(0, manager.num_tokens(request) + 1)))
        elif kind == 4:
            manager.fork(request, number)
            live.append(number)
        else:
            manager.free(request)
            live.remove(request)
        if number % 500 == 0:
            kv.debug.check_manager(manager)
    kv.debug.check_manager(manager)
    state = manager.debug_state()
    used = sum(count > 0 for count in state["ref_counts"])
    assert len(state["free_queue"]) + used + 1 == 64
    for request in live:
        manager.free(request)
    assert manager.num_free_blocks == 63


@pytest.mark.parametrize("start", [59, 60, 62, 63, 64])  # 5 drafts cross the block's end or not
def test_b113_rejected_drafts_give_their_block_back_once(kv: Any, start: int) -> None:
    manager = kv.KVCacheManager(16, debug=True)
    prefill(manager, "r", tokens(start))
    free = manager.num_free_blocks
    for _ in range(1000):
        manager.allocate_slots("r", 5, on_shortage="raise")
        manager.commit("r", [7])
        manager.truncate("r", start + 1)
        assert len(manager.block_ids("r")) == -(-(start + 1) // BLOCK)
        manager.truncate("r", start)
        assert manager.num_free_blocks == free
    kv.debug.check_manager(manager)


def test_b114_a_referenced_cached_prefix_is_never_evicted(kv: Any) -> None:
    manager = kv.KVCacheManager(9)  # 8 blocks and the null block
    prefill(manager, "a", tokens(129))
    hit = manager.get_computed_blocks(tokens(129))
    manager.allocate_slots("b", 1, computed=hit)
    shared = set(hit.block_ids.tolist())
    prefill(manager, "c", tokens(65, 9000))
    manager.free("a")  # its prefix now lives by b alone
    for round_ in range(20):  # pressure: everything free is taken and given back
        got = manager.allocate_slots(f"p{round_}", manager.num_free_blocks * BLOCK)
        assert got is not None and not shared & set(got.block_ids.tolist())
        assert manager.allocate_slots("more", 1) is None
        manager.free(f"p{round_}")
    assert manager.block_ids("b")[:2].tolist() == hit.block_ids.tolist()
    again = manager.get_computed_blocks(tokens(129))
    assert again.block_ids.tolist() == hit.block_ids.tolist()


def test_b115_an_evicted_prefix_misses(kv: Any) -> None:
    manager = kv.KVCacheManager(5)
    prefill(manager, "a", tokens(129))
    manager.free("a")
    assert manager.get_computed_blocks(tokens(129)).num_tokens == 128
    manager.allocate_slots("b", 4 * BLOCK, on_shortage="raise")  # takes every block
    assert manager.get_computed_blocks(tokens(129)).num_tokens == 0
    assert manager.debug_state()["hash_map"] == []
    manager.free("b")
    assert manager.get_computed_blocks(tokens(129)).num_tokens == 0


def test_b117_a_hit_whose_block_was_given_away_is_refused(kv: Any) -> None:
    manager = kv.KVCacheManager(5)
    prefill(manager, "a", tokens(129))
    manager.free("a")
    hit = manager.get_computed_blocks(tokens(129))
    assert hit.num_tokens == 128
    manager.allocate_slots("b", 4 * BLOCK, on_shortage="raise")
    manager.free("b")
    before = manager.snapshot()
    with pytest.raises(ArgumentError, match="computed: expected blocks that still hold"):
        manager.allocate_slots("c", 1, computed=hit)
    with pytest.raises(ArgumentError, match="computed"):
        manager.can_allocate(1, computed=hit)
    assert manager.snapshot() == before
    # the same block with the same tokens again, but computed anew: still not what was found
    prefill(manager, "a", tokens(129))
    if set(manager.block_ids("a").tolist()) & set(hit.block_ids.tolist()):
        with pytest.raises(ArgumentError, match="computed"):
            manager.allocate_slots("c", 1, computed=hit)
    with pytest.raises(ArgumentError, match="a PrefixHit of this manager"):
        kv.KVCacheManager(5).allocate_slots("c", 1, computed=hit)


def test_b117_equal_hashes_are_not_equal_chains(kv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hash that collides always, every lookup is still right."""
    monkeypatch.setattr(kv.block_hash, "hash_block", lambda parent, data: b"\7" * 32)
    manager = kv.KVCacheManager(32)
    second = tokens(64, 64)
    a = np.concatenate([tokens(64), second, tokens(1)])
    b = np.concatenate([tokens(64, 500), second, tokens(1)])  # same second block, other parent
    prefill(manager, "a", a)
    assert manager.get_computed_blocks(b).num_tokens == 0
    prefill(manager, "b", b)
    for request, ids in (("a", a), ("b", b)):
        hit = manager.get_computed_blocks(ids)
        assert hit.block_ids.tolist() == manager.block_ids(request)[:2].tolist()
    assert manager.get_computed_blocks(a, ("salt",)).num_tokens == 0
    kv.debug.check_manager(manager)
    manager.free("a")
    manager.pool.evict(manager.get_computed_blocks(a).block_ids)
    assert manager.get_computed_blocks(a).num_tokens == 0
    assert manager.get_computed_blocks(b).num_tokens == 128
    kv.debug.check_manager(manager)


@settings(max_examples=20)
@given(n=st.integers(1, 300), layout=st.sampled_from(["separate", "record"]))
def test_b118_a_hit_reads_the_same_bytes_as_computing_anew(kv: Any, n: int, layout: str) -> None:
    storage = kv.HostKVCacheStorage(32, layout)
    manager = kv.KVCacheManager(32)
    ids = tokens(n)
    prefill(manager, "miss", ids)
    write(storage, slots_of(manager, "miss", 0, n), ids)
    hit = manager.get_computed_blocks(ids)
    assert hit.num_tokens == (n - 1) // BLOCK * BLOCK < n
    manager.allocate_slots("hit", n - hit.num_tokens, computed=hit)
    rest = slots_of(manager, "hit", hit.num_tokens, n)
    write(storage, rest, ids[hit.num_tokens :])
    recomputed = read(storage, manager.block_ids("miss"), n)
    assert read(storage, manager.block_ids("hit"), n) == recomputed


def test_b119_reviving_a_free_cached_block_holds_it_once(kv: Any) -> None:
    manager = kv.KVCacheManager(9)
    prefill(manager, "a", tokens(129))
    manager.free("a")
    hit = manager.get_computed_blocks(tokens(129))
    state = manager.debug_state()
    assert all(state["ref_counts"][b] == 0 and b in state["free_queue"] for b in hit.block_ids)
    manager.allocate_slots("b", 1, computed=hit)
    state = manager.debug_state()
    assert all(state["ref_counts"][b] == 1 for b in hit.block_ids)
    assert not set(hit.block_ids.tolist()) & set(state["free_queue"])
    kv.debug.check_manager(manager)
    manager.free("b")
    assert manager.num_free_blocks == 8
    # and through the pool alone
    manager.pool.touch(hit.block_ids)
    assert manager.num_free_blocks == 6
    manager.pool.free_blocks(hit.block_ids)
    with pytest.raises(ArgumentError, match="in use or cached"):
        manager.pool.touch([manager.debug_state()["free_queue"][0]])
    assert manager.num_free_blocks == 8


def test_b120_empty_request_null_block_and_zero_table(kv: Any) -> None:
    manager = kv.KVCacheManager(6)
    assert manager.allocate_slots("empty", 0).block_ids.tolist() == []
    table = kv.BlockTable(3, 4)
    assert table.block_table.dtype == np.int32 and not table.block_table.any()
    assert table.cache_seqlens.dtype == np.int32 and not table.cache_seqlens.any()
    assert table.slots.dtype == np.int64 and (table.slots == -1).all()
    manager.update_table(table, ["empty"])
    assert not table.block_table.any()
    with pytest.raises(ArgumentError, match="positions: expected -1 or below 0 in row 0"):
        table.slot_mapping([0])
    everything = manager.allocate_slots("all", 5 * BLOCK).block_ids
    assert sorted(everything.tolist()) == [1, 2, 3, 4, 5]  # never the null block
    assert manager.allocate_slots("empty", 1) is None
    manager.free("all")
    step = manager.allocate_step(table)
    assert step.slot_mapping.tolist() == [int(table.block_table[0, 0]) * BLOCK]
    assert table.block_table[0, 0] != 0
    manager.free("empty")
    assert manager.num_free_blocks == 5


def test_b121_the_block_size_is_64_and_says_so(kv: Any) -> None:
    for size in (1, 16, 32, 128, 0, None):
        with pytest.raises(ArgumentError, match="block_size: expected 64"):
            kv.KVCacheManager(8, block_size=size)
    assert kv.KVCacheManager(8, block_size=64).num_free_blocks == 7
    assert "64 tokens" in kv.manager.KVCacheManager.__doc__


def test_a_request_larger_than_the_pool_is_refused_at_once(kv: Any) -> None:
    manager = kv.KVCacheManager(5)
    prefill(manager, "other", tokens(1))
    assert manager.allocate_slots("fits later", 4 * BLOCK) is None
    for choice in ("none", "raise"):
        before = manager.snapshot()
        with pytest.raises(OutOfBlocksError, match="can never fit"):
            manager.allocate_slots("too large", 4 * BLOCK + 1, on_shortage=choice)
        assert manager.snapshot() == before
    assert not manager.can_allocate(4 * BLOCK + 1)
    with pytest.raises(OutOfBlocksError, match="4 free blocks wanted, 3 free"):
        manager.allocate_slots("fits later", 4 * BLOCK, on_shortage="raise")
