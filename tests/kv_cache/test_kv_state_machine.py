"""Random operations on the manager, against the model in kv_model.py, on both twins.

The model predicts every block id handed out, so equality below covers the eviction order. A
failed call is compared through snapshot(): it must change no byte.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kv_model import BLOCK, Model, Request

from snapmla_rt.errors import ArgumentError, OutOfBlocksError

# Prompts of the same stream share their beginning; three streams, so that prefixes are shared,
# diverge and collide in the pool. Lengths cluster at the edges of blocks.
STREAMS = st.integers(0, 2)
EXTRAS = st.sampled_from(["", "", "", "adapter"])
LENGTHS = st.sampled_from([130, 65, 200, 129, 192, 64, 300, 128, 256, 127, 63, 1, 0, 90, 170])
SMALL = st.sampled_from([1, 64, 5, 2, 63, 65, 0])
LOOKAHEAD = st.sampled_from([0, 0, 0, 1, 4, 64, 70])
NEVER = 10_000  # tokens: more than any pool below holds


def stream_tokens(stream: int, start: int, stop: int) -> list[int]:
    # the second stream leaves the first after one block: a shared prefix that diverges
    return [
        (0 if p < BLOCK and stream < 2 else stream) * 1000 + p // BLOCK for p in range(start, stop)
    ]


def keys_of(extra: str) -> tuple[str, ...]:
    return (extra,) if extra else ()


class ManagerMachine(RuleBasedStateMachine):
    kv: Any

    @initialize(num_blocks=st.sampled_from([24, 14, 9, 5, 2]))
    def start(self, num_blocks: int) -> None:
        self.manager = self.kv.KVCacheManager(num_blocks, debug=False)
        self.model = Model(num_blocks)
        self.table = self.kv.BlockTable(4, 64, 4096)
        self.rows: list[Any] = []
        self.named = 0

    # --- helpers ----------------------------------------------------------------------------

    def pick(self, data: Any) -> tuple[Any, Request]:
        key = data.draw(st.sampled_from(sorted(self.model.requests, key=str)))
        return key, self.model.requests[key]

    def new_key(self) -> Any:
        self.named += 1
        return self.named if self.named % 2 else f"request-{self.named}"

    def refused(self, error: Any, call: Any) -> str:
        before = self.manager.snapshot()
        table = self.table.block_table.copy()
        with pytest.raises(error) as caught:
            call()
        assert self.manager.snapshot() == before
        assert np.array_equal(self.table.block_table, table)
        return str(caught.value)

    # --- one request ------------------------------------------------------------------------

    @rule(
        stream=STREAMS,
        extra=EXTRAS,
        n=LENGTHS,
        look=LOOKAHEAD,
        use=st.sampled_from([True, True, False]),
        loud=st.booleans(),
        final=st.sampled_from([True, True, False]),
    )
    def admit(
        self, stream: int, extra: str, n: int, look: int, use: bool, loud: bool, final: bool
    ) -> None:
        key = self.new_key()
        tokens = stream_tokens(stream, 0, n)
        hit = self.manager.get_computed_blocks(np.array(tokens, dtype=np.int64), keys_of(extra))
        expected = self.model.lookup(tokens, extra)
        assert hit.block_ids.tolist() == expected
        assert hit.num_tokens == len(expected) * BLOCK < max(n, 1)
        self.check_hit(hit.block_ids.tolist(), tokens, extra)
        hits = expected if use else []
        new = n - len(hits) * BLOCK
        options = {"computed": hit} if use else {"extra_keys": keys_of(extra)}

        def call() -> Any:
            choice = "raise" if loud else "none"
            return self.manager.allocate_slots(key, new, look, on_shortage=choice, **options)

        idle = sum(self.model.ref[block] == 0 for block in hits)
        need = self.model.blocks_for(n + look) - len(hits) + idle
        fits = not self.model.never_fits(None, len(hits), new, look)
        room = fits and need <= len(self.model.free)
        assert self.manager.can_allocate(new, look, computed=hit if use else None) == room
        if not fits or (loud and not room):
            self.refused(OutOfBlocksError, call)
        elif not room:
            before = self.manager.snapshot()
            assert call() is None
            assert self.manager.snapshot() == before
        else:
            request = self.model.admit(key, extra, hits, tokens)
            gained, copies = self.model.extend(request, tokens[len(hits) * BLOCK :], look)
            result = call()
            assert result.block_ids.tolist() == gained
            assert len(result.copies) == len(copies) == 0
            if final:
                ids = tokens[request.committed :]
                self.model.commit(request, len(ids))
                assert self.manager.commit(key, ids) == n

    @rule(
        stream=STREAMS, first=st.booleans(), n=LENGTHS, keep=st.sampled_from([False, False, True])
    )
    def serve(self, stream: int, first: bool, n: int, keep: bool) -> None:
        """A request from prompt to end: what fills the prefix cache."""
        self.admit(stream if first else 0, "", n, 0, True, False, True)
        key = self.named if self.named % 2 else f"request-{self.named}"
        if key in self.model.requests and not keep:
            assert self.manager.free(key) == self.model.finish(key)

    def check_hit(self, blocks: list[int], tokens: list[int], extra: str) -> None:
        """A hit's blocks hold, in the model's memory, exactly the values of these tokens."""
        wanted = Request(extra)
        wanted.tokens = tokens[: len(blocks) * BLOCK]
        found = [value for block in blocks for value in self.model.memory[block]]
        assert found == wanted.values()

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data(), stream=STREAMS, new=SMALL, look=LOOKAHEAD)
    def extend(self, data: Any, stream: int, new: int, look: int) -> None:
        self.grow(self.pick(data)[0], stream, new, look)

    def grow(self, key: Any, stream: int, new: int, look: int) -> None:
        request = self.model.requests[key]
        n = len(request.tokens)
        need = self.model.need(request, new, look)
        fits = not self.model.never_fits(request, 0, new, look)
        room = fits and need <= len(self.model.free)
        assert self.manager.can_allocate(new, look, request=key) == room
        if not fits:
            self.refused(OutOfBlocksError, lambda: self.manager.allocate_slots(key, new, look))
        elif not room:
            before = self.manager.snapshot()
            assert self.manager.allocate_slots(key, new, look) is None
            assert self.manager.snapshot() == before
        else:
            tokens = stream_tokens(stream, n, n + new)
            gained, copies = self.model.extend(request, tokens, look)
            result = self.manager.allocate_slots(key, new, look)
            assert result.block_ids.tolist() == gained
            assert [tuple(pair) for pair in result.copies.tolist()] == copies

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data(), share=st.sampled_from([0.0, 0.5, 1.0, 1.0]))
    def commit(self, data: Any, share: float) -> None:
        key, request = self.pick(data)
        count = int((len(request.tokens) - request.committed) * share)
        ids = request.tokens[request.committed : request.committed + count]
        self.model.commit(request, count)
        assert self.manager.commit(key, ids) == request.committed

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data(), back=st.sampled_from([0, 0, 1, 3, 5, 64, 70, 130]))
    def truncate(self, data: Any, back: int) -> None:
        key, request = self.pick(data)
        n = max(len(request.tokens) - back, 0)
        gone = self.model.truncate(request, n)
        assert self.manager.truncate(key, n) == gone

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data(), back=st.sampled_from([1, 70, 100, 30, 64]), stream=STREAMS)
    def rewrite(self, data: Any, back: int, stream: int) -> None:
        """Back into what was committed, then on with other tokens, to the next block's end."""
        key, request = self.pick(data)
        n = max(len(request.tokens) - back, 0)
        assert self.manager.truncate(key, n) == self.model.truncate(request, n)
        self.grow(key, stream, BLOCK - n % BLOCK, 0)
        ids = request.tokens[request.committed :]
        self.model.commit(request, len(ids))
        assert self.manager.commit(key, ids) == request.committed

    @precondition(
        lambda self: any(len(r.tokens) == r.committed for r in self.model.requests.values())
    )
    @rule(data=st.data(), write=st.sampled_from(["child", "parent", ""]), stream=STREAMS)
    def fork(self, data: Any, write: str, stream: int) -> None:
        # Forks with uncommitted positions owe each other equal ids: tested apart.
        keys = [k for k, r in self.model.requests.items() if len(r.tokens) == r.committed]
        key = data.draw(st.sampled_from(sorted(keys, key=str)))
        child = self.new_key()
        self.model.fork(key, child)
        self.manager.fork(key, child)
        if write:
            self.grow(child if write == "child" else key, stream, 1, 0)

    @precondition(lambda self: len(self.model.requests) > 2)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        key, _ = self.pick(data)
        assert self.manager.free(key) == self.model.finish(key)
        self.rows = [row for row in self.rows if row != key]
        self.refused(ArgumentError, lambda: self.manager.free(key))
        if key in self.table.requests:
            stale = (ArgumentError, OutOfBlocksError)  # whichever row is met first
            self.refused(stale, lambda: self.manager.allocate_step(self.table))
            self.manager.update_table(self.table, self.rows)

    # --- prefix cache -----------------------------------------------------------------------

    @rule(data=st.data())
    def evict(self, data: Any) -> None:
        ids = data.draw(st.lists(st.integers(1, self.model.num_blocks - 1), max_size=3))
        assert self.manager.pool.evict(ids) == self.model.evict(ids)

    @precondition(lambda self: self.named % 4 == 0)
    @rule()
    def reset(self) -> None:
        assert self.manager.reset_prefix_cache() == self.model.reset()

    # --- a batch ----------------------------------------------------------------------------

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data())
    def set_rows(self, data: Any) -> None:
        keys = sorted(self.model.requests, key=str)
        self.rows = data.draw(
            st.lists(st.sampled_from(keys), unique=True, min_size=min(2, len(keys)), max_size=4)
        )
        self.manager.update_table(self.table, self.rows)
        self.check_table()
        if self.rows:
            self.step(data, 0, 0)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), stream=STREAMS, look=st.sampled_from([0, 0, 1, 4]))
    def decode(self, data: Any, stream: int, look: int) -> None:
        self.step(data, stream, look)

    def step(self, data: Any, stream: int, look: int) -> None:
        counts = data.draw(
            st.one_of(
                st.just([1] * len(self.rows)),
                st.lists(st.integers(0, 5), min_size=len(self.rows), max_size=len(self.rows)),
            )
        )
        requests = [self.model.requests[key] for key in self.rows]
        if any(self.model.never_fits(r, 0, c, look) for r, c in zip(requests, counts, strict=True)):
            self.refused(
                OutOfBlocksError, lambda: self.manager.allocate_step(self.table, counts, look)
            )
            return
        if self.step_need(requests, counts, look) > len(self.model.free):
            before = self.manager.snapshot()
            assert self.manager.allocate_step(self.table, counts, look) is None
            assert self.manager.snapshot() == before
            return
        copies, slots = [], []
        for request, count in zip(requests, counts, strict=True):
            n = len(request.tokens)
            _, pairs = self.model.extend(request, stream_tokens(stream, n, n + count), look)
            copies += pairs
            slots += [request.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(n, n + count)]
        given = counts[0] if len(set(counts)) == 1 else counts
        result = self.manager.allocate_step(self.table, given, look)
        assert [tuple(pair) for pair in result.copies.tolist()] == copies
        assert result.slot_mapping.tolist() == slots
        assert self.table.slots[len(slots) :].max() == -1
        self.check_table()

    def step_need(self, requests: list[Request], counts: list[int], look: int) -> int:
        """Blocks for all rows: rows that share a tail copy it once less than they are holders."""
        ref = list(self.model.ref)
        need = 0
        for request, count in zip(requests, counts, strict=True):
            total = self.model.blocks_for(len(request.tokens) + count + look)
            need += max(total - len(request.blocks), 0)
            tail = self.model.tail(request)
            if count + look > 0 and tail is not None and ref[tail] > 1:
                ref[tail] -= 1
                need += 1
        return need

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def accept(self, data: Any) -> None:
        """Speculative decoding: some of each row's uncommitted tokens hold, the rest goes."""
        requests = [self.model.requests[key] for key in self.rows]
        left = [len(r.tokens) - r.committed for r in requests]
        if max(left) > 100:
            return
        width = max(*left, 1)
        ids = np.zeros((len(requests), width), dtype=np.int32)
        accepted = [data.draw(st.integers(0, n)) for n in left]
        for row, (request, count) in enumerate(zip(requests, left, strict=True)):
            ids[row, :count] = request.tokens[request.committed :]
        for request, count in zip(requests, accepted, strict=True):
            self.model.commit(request, count)
            self.model.truncate(request, request.committed)
        self.manager.commit_step(self.table, ids, accepted)
        self.check_table()

    def check_table(self) -> None:
        table = self.table
        for row, key in enumerate(self.rows):
            request = self.model.requests[key]
            expected = request.blocks + [0] * (table.max_num_blocks - len(request.blocks))
            assert table.block_table[row].tolist() == expected
            assert table.cache_seqlens[row] == len(request.tokens)
        assert not table.block_table[len(self.rows) :].any()
        assert not table.cache_seqlens[len(self.rows) :].any()

    # --- bad calls, snapshot ----------------------------------------------------------------

    @precondition(lambda self: self.named % 3 == 0)
    @rule(data=st.data())
    def bad_calls(self, data: Any) -> None:
        manager = self.manager
        self.refused(ArgumentError, lambda: manager.truncate("nobody", 0))
        self.refused(ArgumentError, lambda: manager.allocate_slots("x", -1))
        self.refused(OutOfBlocksError, lambda: manager.allocate_slots("x", NEVER))
        self.refused(ArgumentError, lambda: manager.pool.free_blocks([0]))
        if self.model.free:
            block = data.draw(st.sampled_from(self.model.free))
            self.refused(ArgumentError, lambda: manager.pool.free_blocks([block]))
        if self.model.requests:
            key, request = self.pick(data)
            n = len(request.tokens)
            self.refused(ArgumentError, lambda: manager.truncate(key, n + 1))
            self.refused(ArgumentError, lambda: manager.commit(key, [1] * (n + 1)))
            self.refused(ArgumentError, lambda: manager.fork(key, key))
            self.refused(ArgumentError, lambda: manager.update_table(self.table, [key, key]))

    @rule()
    def move_to_another_process(self) -> None:
        data = self.manager.snapshot()
        self.manager = self.kv.KVCacheManager.restore(data, debug=False)
        assert self.manager.snapshot() == data
        self.manager.update_table(self.table, self.rows)

    # --- what always holds ------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "model"):
            return
        model, manager = self.model, self.manager
        self.kv.debug.check_manager(manager)
        state = manager.debug_state()
        assert state["free_queue"] == model.free
        assert state["ref_counts"] == model.ref
        used = sum(count > 0 for count in state["ref_counts"])
        assert manager.num_free_blocks + used + 1 == model.num_blocks
        assert manager.usage == pytest.approx(used / (model.num_blocks - 1))
        assert sorted(state["hash_map"]) == sorted(model.lists.values())
        assert set(state["known"]) == set(model.content)
        assert list(state["requests"]) == list(model.requests)
        for key, request in model.requests.items():
            seen = state["requests"][key]
            assert seen["block_ids"] == request.blocks
            assert seen["num_tokens"] == len(request.tokens)
            assert seen["num_committed"] == request.committed
            # nobody wrote over anybody: every position still holds its value
            values = [model.memory[b][o] for b in request.blocks for o in range(BLOCK)]
            assert values[: len(request.tokens)] == request.values()


def test_manager_equals_model(kv: Any) -> None:
    machine = type("Machine", (ManagerMachine,), {"kv": kv})
    # 80 runs of 50 steps: 4,000 operations on each twin
    run_state_machine_as_test(
        machine, settings=settings(max_examples=80, stateful_step_count=50, deadline=None)
    )


@pytest.mark.parametrize("homes", [0, 3])
def test_manager_equals_model_under_colliding_hashes(
    kv: Any, monkeypatch: pytest.MonkeyPatch, homes: int
) -> None:
    """All digests equal, so only the comparison tells contents apart; or all digests in a few
    positions of the table, so that probes run long and evictions close gaps."""

    def weak(parent: bytes, data: bytes) -> bytes:
        if homes == 0:
            return b"\7" * 32
        digest = sha256(parent + data).digest()
        return (digest[0] % homes).to_bytes(8, "little") + digest[8:]

    monkeypatch.setattr(kv.block_hash, "hash_block", weak)
    machine = type("Machine", (ManagerMachine,), {"kv": kv})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=30, stateful_step_count=50, deadline=None)
    )


@pytest.mark.slow
def test_manager_equals_model_for_long(kv: Any) -> None:
    machine = type("Machine", (ManagerMachine,), {"kv": kv})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=800, stateful_step_count=100, deadline=None)
    )
