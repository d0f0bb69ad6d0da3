"""Hash, pool, table, debug mode, snapshot and threads: what the machine does not reach."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from snapmla_rt.config import MAX_CACHE_SEQLEN
from snapmla_rt.errors import ArgumentError, OutOfBlocksError, SnapMLAError

BLOCK = 64


def tokens(n: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + n, dtype=np.int32)


# --- block_hash -------------------------------------------------------------------------------


def test_hash_is_the_documented_chain(kv: Any) -> None:
    ids = tokens(130)
    parent = hashlib.sha256(b"snapmla_rt prefix cache v1\0").digest()
    first = hashlib.sha256(parent + ids[:64].astype("<i4").tobytes()).digest()
    second = hashlib.sha256(first + ids[64:128].astype("<i4").tobytes()).digest()
    assert kv.block_hash.hash_sequence(ids) == [first, second]
    assert kv.block_hash.hash_sequence(ids[:63]) == []


def test_hash_is_the_same_in_another_process(kv: Any) -> None:
    code = (
        "from snapmla_rt.kv_cache.block_hash import hash_sequence;"
        "print(hash_sequence(list(range(64)), ('adapter', 3, None, b'x'))[0].hex())"
    )
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        )
        here = kv.block_hash.hash_sequence(tokens(64), ("adapter", 3, None, b"x"))[0].hex()
        assert run.stdout.strip() == here


KEYS = st.lists(
    st.one_of(st.none(), st.text(max_size=3), st.integers(-5, 5), st.binary(max_size=3)), max_size=3
)


@given(a=KEYS, b=KEYS)
def test_extra_keys_are_encoded_injectively(kv: Any, a: list[Any], b: list[Any]) -> None:
    encode = kv.block_hash.encode_extra_keys
    same = [(type(x), x) for x in a] == [(type(x), x) for x in b]
    assert (encode(a) == encode(b)) == same


def test_bad_extra_keys_and_tokens(kv: Any) -> None:
    manager = kv.KVCacheManager(4)
    for keys in ("adapter", b"x", (1.5,), (True,), ((1,),), 7):
        with pytest.raises(ArgumentError, match="extra_keys"):
            manager.get_computed_blocks([1], keys)
    for ids in ([-1], [2**31], [1.5], [[1]], ["a"], None, [2**70]):
        with pytest.raises(ArgumentError, match="token_ids"):
            manager.get_computed_blocks(ids)
    assert manager.get_computed_blocks([]).num_tokens == 0


def test_extra_keys_separate_equal_tokens(kv: Any) -> None:
    manager = kv.KVCacheManager(16)
    ids = tokens(129)
    manager.allocate_slots("a", 129, extra_keys=("adapter", 1))
    manager.commit("a", ids)
    assert manager.get_computed_blocks(ids).num_tokens == 0
    assert manager.get_computed_blocks(ids, ("adapter", 2)).num_tokens == 0
    hit = manager.get_computed_blocks(ids, ("adapter", 1))
    assert hit.num_tokens == 128
    with pytest.raises(ArgumentError, match="extra_keys"):
        manager.allocate_slots("b", 1, computed=hit, extra_keys=("adapter", 2))
    manager.free("a")
    assert manager.reset_prefix_cache()
    assert manager.debug_state()["roots"] == {}  # no growth by salts


# --- block pool alone -------------------------------------------------------------------------


def test_pool_frees_in_reverse_and_unhashed_to_the_front(kv: Any) -> None:
    pool = kv.BlockPool(10)
    cached = pool.get_new_blocks(3)
    plain = pool.get_new_blocks(3)
    assert pool.cache_full_blocks(cached, tokens(192)) == 3
    pool.free_blocks(cached)
    pool.free_blocks(plain)
    # plain ones first, in the order of their sequence; cached ones last, its end before its start
    assert pool.debug_state()["free_queue"] == [4, 5, 6, 7, 8, 9, 3, 2, 1]
    assert pool.usage == 0.0 and pool.num_cached_blocks == 3
    assert pool.get_new_blocks(7).tolist() == [4, 5, 6, 7, 8, 9, 3]
    assert pool.num_cached_blocks == 2


def test_pool_cached_block_lookup_walks_the_chain(kv: Any) -> None:
    pool = kv.BlockPool(10)
    ids = pool.get_new_blocks(2).tolist()
    data = tokens(128)
    first, second = kv.block_hash.hash_sequence(data)
    assert pool.cache_full_blocks(ids[:1], data[:64]) == 1
    assert pool.cache_full_blocks(ids, data, num_cached_blocks=1) == 1
    assert pool.get_cached_block(first, data[:64]) == ids[0]
    assert pool.get_cached_block(second, data[64:], parent_block=ids[0]) == ids[1]
    assert pool.get_cached_block(second, data[64:]) is None  # not a first block
    assert pool.get_cached_block(first, data[64:]) is None  # right digest, other tokens
    assert pool.get_cached_block(first, data[:64], extra_keys=("x",)) is None
    assert pool.evict(ids[:1]) == 1 and pool.evict(ids[:1]) == 0
    assert pool.get_cached_block(first, data[:64]) is None
    pool.free_blocks(ids)
    kv.debug.check_pool(pool)
    assert pool.reset_prefix_cache() and pool.num_cached_blocks == 0


def test_pool_refuses_bad_calls_and_changes_nothing(kv: Any) -> None:
    pool = kv.BlockPool(6)
    ids = pool.get_new_blocks(3).tolist()
    data = tokens(128)
    pool.cache_full_blocks(ids[:1], data[:64])
    calls = [
        (OutOfBlocksError, lambda: pool.get_new_blocks(3)),
        (ArgumentError, lambda: pool.get_new_blocks(-1)),
        (ArgumentError, lambda: pool.get_new_blocks(1.0)),
        (ArgumentError, lambda: pool.touch([0])),
        (ArgumentError, lambda: pool.touch([ids[0], 5])),
        (ArgumentError, lambda: pool.cache_full_blocks(ids[:1], data[:64])),  # cached already
        (ArgumentError, lambda: pool.cache_full_blocks([ids[1], ids[1]], data)),
        (ArgumentError, lambda: pool.cache_full_blocks([5], data[:64])),  # free
        (ArgumentError, lambda: pool.cache_full_blocks(ids[1:2], data[:63])),
        (ArgumentError, lambda: pool.cache_full_blocks(ids[1:3], data, num_cached_blocks=1)),
        (ArgumentError, lambda: pool.get_cached_block(b"short", data[:64])),
        (ArgumentError, lambda: pool.evict([6])),
    ]
    for error, call in calls:
        before = pool.debug_state()
        with pytest.raises(error):
            call()
        assert pool.debug_state() == before
    assert not pool.reset_prefix_cache()
    for bad in (1, 0, -5, True, "8", 2.0, 2**40):
        with pytest.raises(ArgumentError, match="num_blocks"):
            kv.BlockPool(bad)


@pytest.mark.parametrize("homes", [1, 4, 1000])
def test_map_finds_what_is_in_it_and_nothing_else(
    kv: Any, monkeypatch: pytest.MonkeyPatch, homes: int
) -> None:
    """600 insertions and evictions of one-block chains, many of them equal, whose digests start
    their probes at few positions, the last of the table included, so that probes wrap around."""

    def weak(parent: bytes, data: bytes) -> bytes:
        digest = hashlib.sha256(parent + data).digest()
        return (-1 - digest[0] % homes).to_bytes(8, "little", signed=True) + digest[8:]

    monkeypatch.setattr(kv.block_hash, "hash_block", weak)
    random = np.random.default_rng(homes)
    pool = kv.BlockPool(40)
    free = pool.get_new_blocks(39).tolist()  # held all along: only the map changes
    content: dict[int, int] = {}
    for step in range(600):
        if random.integers(0, 2) and free:
            block, value = free.pop(), int(random.integers(0, 20))
            pool.free_blocks([block])
            assert pool.get_new_blocks(1).tolist() == [block]  # a block with nothing known
            pool.cache_full_blocks([block], np.full(64, value))
            content[block] = value
        elif content:
            block = sorted(content)[int(random.integers(0, len(content)))]
            assert pool.evict([block]) == 1
            del content[block]
            free.append(block)
        if step % 20 == 0:
            kv.debug.check_pool(pool)
        for value in (int(random.integers(0, 20)), int(random.integers(0, 20))):
            data = np.full(64, value)
            found = pool.get_cached_block(kv.block_hash.hash_sequence(data)[0], data)
            assert (found is None) == (value not in content.values())
            assert found is None or content[found] == value
    kv.debug.check_pool(pool)


def test_without_caching_nothing_is_cached(kv: Any) -> None:
    manager = kv.KVCacheManager(8, enable_caching=False)
    manager.allocate_slots("a", 200)
    manager.commit("a", tokens(200))
    assert manager.get_computed_blocks(tokens(200)).num_tokens == 0
    manager.truncate("a", 100)
    manager.fork("a", "b")
    assert len(manager.allocate_slots("b", 1).copies) == 1
    kv.debug.check_manager(manager)
    data = manager.snapshot()
    assert kv.KVCacheManager.restore(data).snapshot() == data
    manager.free("a")
    manager.free("b")
    assert manager.reset_prefix_cache() and manager.num_free_blocks == 7


def test_requests_that_compute_the_same_prompt_at_once(kv: Any) -> None:
    """Equal blocks share one chain: whichever goes first, the others keep the prefix findable."""
    manager = kv.KVCacheManager(32)
    ids = tokens(193)
    for request in ("a", "b", "c"):
        manager.allocate_slots(request, 193)
    for request in ("a", "b", "c"):
        manager.commit(request, ids)
    blocks = {r: manager.block_ids(r)[:3].tolist() for r in "abc"}
    assert manager.get_computed_blocks(ids).block_ids.tolist() == blocks["a"]
    manager.pool.evict(blocks["a"])
    hit = manager.get_computed_blocks(ids)
    assert hit.num_tokens == 192 and set(hit.block_ids.tolist()) <= {*blocks["b"], *blocks["c"]}
    manager.pool.evict(hit.block_ids[:1])
    assert manager.get_computed_blocks(ids).num_tokens == 192
    kv.debug.check_manager(manager)


def test_fork_with_uncommitted_tokens_owes_equal_ids(kv: Any) -> None:
    manager = kv.KVCacheManager(16)
    manager.allocate_slots("a", 130)
    manager.fork("a", "b")
    manager.commit("a", tokens(130))
    before = manager.snapshot()
    with pytest.raises(ArgumentError, match="ids already committed"):
        manager.commit("b", tokens(130, 1))
    assert manager.snapshot() == before
    manager.commit("b", tokens(130))
    kv.debug.check_manager(manager)
    manager.allocate_slots("b", 62)
    manager.commit("b", tokens(62, 130))
    assert manager.get_computed_blocks(tokens(193)).num_tokens == 192


def test_bad_requests_and_choices(kv: Any) -> None:
    manager = kv.KVCacheManager(4)
    for request in (None, 1.0, True, (1,), b"x", np.int64(3)):
        with pytest.raises(ArgumentError, match="request"):
            manager.allocate_slots(request, 1)
    with pytest.raises(ArgumentError, match="on_shortage"):
        manager.allocate_slots("a", 1, on_shortage="maybe")
    with pytest.raises(ArgumentError, match="num_new_tokens"):
        kv.KVCacheManager(1 << 15).allocate_slots("a", MAX_CACHE_SEQLEN, 1)
    manager.allocate_slots("a", 1)
    with pytest.raises(ArgumentError, match="extra_keys"):
        manager.allocate_slots("a", 1, extra_keys=())
    with pytest.raises(ArgumentError, match="table"):
        manager.allocate_step("no table")
    with pytest.raises(ArgumentError, match="new_request"):
        manager.fork("a", None)


# --- block table ------------------------------------------------------------------------------


def test_slot_mapping_of_a_batch(kv: Any) -> None:
    manager = kv.KVCacheManager(32)
    table = kv.BlockTable(4, 8, 64)
    for i, n in enumerate((1, 64, 200)):
        manager.allocate_slots(i, n)
    manager.update_table(table, [0, 1, 2])
    rows = [manager.block_ids(i) for i in range(3)]
    last = [rows[0][0] * 64, rows[1][0] * 64 + 63, rows[2][3] * 64 + 7]
    assert table.slot_mapping([0, 63, 199]).tolist() == last
    assert table.slot_mapping([0, 63, 199, -1]).tolist() == [*last, -1]
    assert table.slot_mapping([[0, -1], [62, 63], [64, 199]]).tolist() == [
        last[0],
        -1,
        last[1] - 1,
        last[1],
        rows[2][1] * 64,
        last[2],
    ]
    picked = table.slot_mapping(np.array([5, -1, 3], np.int32), rows=[2, 0, 1])
    assert picked.tolist() == [rows[2][0] * 64 + 5, -1, rows[1][0] * 64 + 3]
    assert picked.dtype == np.int64
    out = np.full(6, 99, dtype=np.int64)
    assert table.slot_mapping([0, 63, 199], out=out) is out
    assert out.tolist() == [*last, -1, -1, -1]
    bad: list[tuple[str, Any, dict[str, Any]]] = [
        ("positions", [64, 0], {}),  # row 0 has one block
        ("positions", [0, 0, 0, 0], {}),  # row 3 is padding
        ("positions", [-2], {}),
        ("positions", [0.5], {}),
        ("positions", [0] * 5, {}),
        ("rows", [0], {"rows": [4]}),
        ("rows", [0], {"rows": [0, 1]}),
        ("out", [0, 0], {"out": np.zeros(1, np.int64)}),
        ("out", [0], {"out": np.zeros(4, np.int32)}),
    ]
    for name, positions, options in bad:
        with pytest.raises(ArgumentError, match=f"^{name}: expected"):
            table.slot_mapping(positions, **options)


def test_table_uses_the_callers_arrays_in_place(kv: Any) -> None:
    given: dict[str, Any] = {
        "block_table": np.full((2, 4), 9, dtype=np.int32),
        "cache_seqlens": np.full(2, 9, dtype=np.int32),
        "slots": np.full(2, 9, dtype=np.int64),
    }
    table = kv.BlockTable(2, 4, **given)
    assert all(getattr(table, name) is array for name, array in given.items())
    manager = kv.KVCacheManager(9)
    manager.allocate_slots("a", 64)
    manager.update_table(table, ["a"])
    step = manager.allocate_step(table)
    assert np.shares_memory(step.slot_mapping, given["slots"])
    assert given["cache_seqlens"].tolist() == [65, 0] and given["slots"].tolist() == [128, -1]
    assert given["block_table"].tolist() == [[1, 2, 0, 0], [0, 0, 0, 0]]
    with pytest.raises(ArgumentError, match="cache_seqlens"):
        kv.BlockTable(2, 4, cache_seqlens=np.zeros(2, dtype=np.int64))
    with pytest.raises(ArgumentError, match="slots"):
        kv.BlockTable(2, 4, slots=np.zeros(4, dtype=np.int64)[::2])


def test_a_step_that_does_not_fit_the_table_changes_nothing(kv: Any) -> None:
    manager = kv.KVCacheManager(32)
    table = kv.BlockTable(2, 2, 4)
    manager.allocate_slots("a", 127)
    manager.allocate_slots("b", 64)
    manager.update_table(table, ["a", "b"])
    for counts, error in ((2, "num_new_tokens"), ([0, 5], "num_new_tokens"), ([1], "one a row")):
        before, rows = manager.snapshot(), table.block_table.copy()
        with pytest.raises(ArgumentError, match=error):
            manager.allocate_step(table, counts)
        assert manager.snapshot() == before and np.array_equal(table.block_table, rows)
    manager.allocate_slots("b", 100)  # past the table's width, behind its back
    with pytest.raises(ArgumentError, match="tokens in a row"):
        manager.allocate_step(table, 0)
    with pytest.raises(ArgumentError, match="requests"):
        manager.update_table(table, ["b"])
    with pytest.raises(ArgumentError, match="token_ids"):
        manager.commit_step(table, [1])


# --- debug mode -------------------------------------------------------------------------------


def test_debug_names_the_holders(kv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPMLA_DEBUG", "1")
    manager = kv.KVCacheManager(8)
    assert manager.pool.debug
    monkeypatch.setenv("SNAPMLA_DEBUG", "0")
    assert not kv.BlockPool(8).debug
    manager.allocate_slots("a", 65)
    manager.fork("a", "b")
    state = manager.debug_state()
    assert state["holders"] == {1: ["a", "b"], 2: ["a", "b"]}
    manager.allocate_slots("b", 1)
    manager.free("a")
    state = manager.debug_state()
    assert state["holders"] == {1: ["b"], 3: ["b"]}
    assert state["last_holder"][2] == "a"
    manager.pool.check_held([1, 3], "b")
    with pytest.raises(ArgumentError, match="block 2, already freed by 'a'"):
        manager.pool.check_held([2], "b")
    with pytest.raises(ArgumentError, match="held by 'a', got block 3, held by"):
        manager.pool.check_held([3], "a")
    restored = kv.KVCacheManager.restore(manager.snapshot(), debug=True)
    assert restored.debug_state()["holders"] == {1: ["b"], 3: ["b"]}


def test_debug_finds_writes_to_freed_blocks_and_poisons(kv: Any) -> None:
    storage = kv.HostKVCacheStorage(8)
    manager = kv.KVCacheManager(8, debug=True, storage=storage)
    assert storage.written_blocks(range(1, 8)) == []
    first = manager.allocate_slots("a", 64).block_ids
    storage.k_scale_cache[first] = 1.0
    manager.free("a")
    assert storage.written_blocks(first) == []  # freed: poisoned
    storage.k_scale_cache[first, 3] = 1.0  # "a" writes after its end
    with pytest.raises(SnapMLAError, match=f"block {first[0]}, freed by 'a', was written"):
        manager.allocate_slots("b", 1)
    assert "b" not in manager.requests
    assert manager.allocate_slots("b", 1) is not None  # reported once, then poisoned again
    # cached content stays until it is evicted
    manager.allocate_slots("c", 64)
    block = manager.block_ids("c")
    storage.k_scale_cache[block] = 2.0
    manager.commit("c", tokens(64))
    manager.free("c")
    assert storage.written_blocks(block) == block.tolist()
    manager.pool.evict(block)
    assert storage.written_blocks(block) == []
    with pytest.raises(ArgumentError, match="storage"):
        kv.KVCacheManager(9, debug=True, storage=storage)


# --- snapshot ---------------------------------------------------------------------------------


def busy_manager(kv: Any) -> Any:
    manager = kv.KVCacheManager(20)
    manager.allocate_slots("a", 200, 70, extra_keys=("adapter", None, 4))
    manager.commit("a", tokens(190))
    manager.fork("a", "ü\ud800")
    manager.allocate_slots(-7, 64)
    manager.commit(-7, tokens(64))
    manager.allocate_slots(8, 64)
    manager.commit(8, tokens(64))
    manager.free(8)
    manager.pool.evict(manager.block_ids(-7))
    return manager


def test_snapshot_round_trip_goes_on_the_same(kv: Any) -> None:
    manager = busy_manager(kv)
    data = manager.snapshot()
    other = kv.KVCacheManager.restore(data)
    assert other.snapshot() == data == manager.snapshot()
    assert other.debug_state() == manager.debug_state()
    for m in (manager, other):
        m.commit("a", tokens(10, 190))
        m.allocate_slots("ü\ud800", 30)
        m.allocate_slots("n", 300)
        m.free("a")
        m.allocate_slots("n", 100)
    assert other.snapshot() == manager.snapshot()
    hit = other.get_computed_blocks(tokens(190), ("adapter", None, 4))
    mine = manager.get_computed_blocks(tokens(190), ("adapter", None, 4))
    assert hit.block_ids.tolist() == mine.block_ids.tolist()


def test_snapshot_crosses_processes_and_twins(kv: Any) -> None:
    data = busy_manager(kv).snapshot()
    code = (
        "import sys; from snapmla_rt.kv_cache.manager import KVCacheManager;"
        "m = KVCacheManager.restore(sys.stdin.buffer.read());"
        "sys.stdout.buffer.write(m.snapshot())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        input=data,
        capture_output=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert run.stdout == data


def test_snapshot_refuses_other_bytes(kv: Any) -> None:
    data = busy_manager(kv).snapshot()
    for bad in (b"", data[:-1], data[: len(data) // 2], data + b"\0", b"x" * 200, None, "text"):
        with pytest.raises(ArgumentError, match=r"^data: expected"):
            kv.KVCacheManager.restore(bad)
    random = np.random.default_rng(3)
    for at in random.integers(0, len(data), 50):
        harmed = bytearray(data)
        harmed[at] ^= 1 << int(random.integers(0, 8))
        with pytest.raises(ArgumentError, match=r"^data: expected"):
            kv.KVCacheManager.restore(bytes(harmed))


# --- threads ----------------------------------------------------------------------------------


def test_threads_share_one_manager(kv: Any) -> None:
    """Four threads, all operations at once; a short switch interval makes races likely."""
    manager = kv.KVCacheManager(200, debug=False)
    faults: list[BaseException] = []

    def work(name: int) -> None:
        random = np.random.default_rng(name)
        try:
            for i in range(150):
                request = f"{name}/{i}"
                ids = tokens(int(random.integers(1, 300)))
                hit = manager.get_computed_blocks(ids)
                try:
                    got = manager.allocate_slots(
                        request, len(ids) - hit.num_tokens, 3, computed=hit
                    )
                except ArgumentError as stale:  # another thread took the hit's blocks
                    assert stale.name == "computed"
                    continue
                if got is None:
                    continue
                manager.commit(request, ids[hit.num_tokens :])
                manager.fork(request, request + "f")
                manager.free(request)
                manager.allocate_slots(request + "f", 2)
                manager.truncate(request + "f", len(ids) // 2)
                manager.free(request + "f")
        except BaseException as fault:
            faults.append(fault)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not faults
    kv.debug.check_manager(manager)
    assert manager.num_free_blocks == 199 and manager.requests == []


@settings(max_examples=25)
@given(
    arrays=st.lists(hnp.arrays(np.uint8, st.integers(0, 3), elements=st.integers(0, 2)), max_size=6)
)
def test_any_integer_dtype_and_readonly_arrays_are_taken(kv: Any, arrays: list[Any]) -> None:
    manager = kv.KVCacheManager(8)
    manager.allocate_slots("a", 20)
    done = 0
    for array in arrays:
        array.flags.writeable = False
        done += len(array)
        assert manager.commit("a", array) == done


def test_import_brings_no_cuda(kv: Any) -> None:
    code = (
        "import sys; import snapmla_rt.kv_cache.manager, snapmla_rt.kv_cache.storage;"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('cuda', 'torch', 'cupy')];"
        "assert not bad, bad"
    )
    env = {"PYTHONPATH": ":".join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
