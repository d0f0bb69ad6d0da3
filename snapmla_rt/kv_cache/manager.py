# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, annotation_typing=False
"""KVCacheManager: which blocks each request holds, and what may be reused or must be copied.

The life of a request: get_computed_blocks (what the prefix cache has of its prompt),
allocate_slots (blocks for the tokens of the next forward pass), the pass itself, commit (the
tokens whose values are now final; full blocks enter the prefix cache), truncate (draft tokens
that were rejected), free. allocate_step and commit_step do a whole batch through a BlockTable.

Writing rule: a block that others hold too is never written to. allocate_slots replaces such a
tail block by a new one and returns the pair in `copies`; the caller copies the values on the
device, in order and before the pass that writes.

All or nothing: a method that raises, or returns None for want of blocks, has changed nothing.

Thread-safety: every public method may be called from any thread; each holds the manager's lock
and is atomic. That covers a BlockTable passed to it, but not the table's own methods, nor use of
`pool` past the manager.

Runs as it is, and compiled as C through `manager.pxd`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..config import BLOCK_SIZE, MAX_CACHE_SEQLEN
from ..errors import ArgumentError, OutOfBlocksError
from . import block_hash as hashing
from .block_pool import BlockPool
from .block_table import BlockTable
from .checks import check_count, check_request, int_array, must_raise, never_fits, token_array
from .request_blocks import RequestBlocks
from .results import NO_BLOCKS, NO_COPIES, PrefixHit, SlotAllocation, StepAllocation, copy_array

_SHIFT = BLOCK_SIZE.bit_length() - 1  # typed as C ints in the .pxd
_OFFSET = BLOCK_SIZE - 1
_MAX_TOKENS = MAX_CACHE_SEQLEN
_LOOKUP_CHUNK = 64  # blocks hashed between two lookups, once the first ones have hit


class KVCacheManager:
    """Blocks of 64 tokens for any number of requests, out of one pool, with a prefix cache.

    num_blocks: size of the pool, the null block 0 included. enable_caching: keep full blocks for
    reuse. block_size: the kernels read blocks of 64 tokens; anything else is refused. debug and
    storage: see BlockPool. Requests are named by str or int ids.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        enable_caching: bool = True,
        block_size: int = BLOCK_SIZE,
        debug: bool | None = None,
        storage: Any = None,
    ) -> None:
        if block_size != BLOCK_SIZE:
            raise ArgumentError("block_size", f"{BLOCK_SIZE} (the kernels' block)", block_size)
        self.pool = BlockPool(
            num_blocks, enable_caching=enable_caching, debug=debug, storage=storage
        )
        self._requests: dict[Any, RequestBlocks] = {}
        self._lock = threading.Lock()

    # --- counts ---------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return self.pool.num_free_blocks

    @property
    def usage(self) -> float:
        """Share of the pool's blocks in use, 0.0 to 1.0."""
        return self.pool.usage

    @property
    def requests(self) -> list[Any]:
        """Ids of the requests known, oldest first."""
        with self._lock:
            return list(self._requests)

    def block_ids(self, request: Any) -> np.ndarray:
        """The request's blocks in order, reserved lookahead included: int32 [n], a copy."""
        with self._lock:
            return self._known(request).block_ids()

    def num_tokens(self, request: Any) -> int:
        """Positions of the request that have a slot, lookahead not counted."""
        with self._lock:
            return self._known(request).num_tokens

    def num_committed(self, request: Any) -> int:
        """Positions of the request whose tokens are final."""
        with self._lock:
            return self._known(request).num_committed

    # --- prefix cache ---------------------------------------------------------------------------

    def get_computed_blocks(self, token_ids: Any, extra_keys: Iterable[Any] = ()) -> PrefixHit:
        """The longest cached run of full blocks at the start of a sequence.

        token_ids: integers [n]; extra_keys: adapter, salt and the like (str, int, bytes, None).
        At least one token is left to compute, so a fully cached sequence hits one block less if
        its length is a multiple of 64. Nothing is held yet; every block of the hit was compared
        with the tokens, not only with their hash.
        """
        tokens = token_array("token_ids", token_ids)
        extra = hashing.encode_extra_keys(extra_keys)
        limit = (len(tokens) - 1) // BLOCK_SIZE if len(tokens) else 0
        with self._lock:
            return self._lookup(tokens, extra, limit)

    def _lookup(self, tokens: np.ndarray, extra: bytes, limit: int) -> PrefixHit:
        pool_map = self.pool._map
        found = 0
        blocks = np.empty(limit, dtype=np.int32)
        chains = np.empty(limit, dtype=np.int64)
        digest = hashing.root_digest(extra)
        parent = pool_map.root_ids.get(extra, 0) if self.pool.enable_caching else 0
        chunk = 1  # a miss at the first block, the usual one, costs one hash
        while parent != 0 and found < limit:
            count = min(chunk, limit - found)
            raw = hashing.token_bytes(tokens[found * BLOCK_SIZE : (found + count) * BLOCK_SIZE])
            digests = hashing.hash_blocks(digest, raw, 0, count)
            words = hashing.digest_words(b"".join(digests))
            hits = pool_map.find_prefix(words, tokens, found, count, parent, blocks)
            if hits:
                digest = digests[hits - 1]
                self._note_chains(blocks, chains, found, found + hits)
                found += hits
                parent = int(chains[found - 1])
            if hits < count:
                break
            chunk = min(2 * chunk, _LOOKUP_CHUNK)
        return PrefixHit(
            blocks[:found], found * BLOCK_SIZE, chains[:found], extra, digest, self.pool
        )

    def _note_chains(self, blocks: Any, chains: Any, start: int, stop: int) -> int:
        for i in range(start, stop):
            chains[i] = self.pool._map.chain[blocks[i]]
        return 0

    def _stale(self, blocks: Any, chains: Any, n: int) -> int:
        """Index of the first block that no longer holds what was found, or -1."""
        for i in range(n):
            if self.pool._map.chain[blocks[i]] != chains[i]:
                return i
        return -1

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks (after a change of weights). False while blocks are in use."""
        with self._lock:
            return self.pool.reset_prefix_cache()

    # --- allocation -----------------------------------------------------------------------------

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_lookahead: int = 0,
        *,
        computed: PrefixHit | None = None,
        extra_keys: Iterable[Any] | None = None,
        on_shortage: str = "none",
    ) -> SlotAllocation | None:
        """Blocks for num_new_tokens more tokens, and num_lookahead reserved behind them.

        A request not seen before is taken in: `computed` gives it the blocks of a prefix hit,
        whose tokens then count as committed; extra_keys are those of its prefix cache entries
        (default: those of the hit, else none). Lookahead slots are not counted in num_tokens; a
        later call uses them first, truncate returns them.

        Too few free blocks: returns None, or raises OutOfBlocksError for on_shortage="raise".
        A request larger than the whole pool raises OutOfBlocksError in both cases, since waiting
        cannot help. A hit whose blocks were given away since raises ArgumentError.
        """
        new = check_count("num_new_tokens", num_new_tokens, 0, _MAX_TOKENS)
        look = check_count("num_lookahead", num_lookahead, 0, _MAX_TOKENS)
        loud = must_raise(on_shortage)
        check_request("request", request)
        with self._lock:
            state = self._requests.get(request)
            if state is None:
                return self._admit(request, new, look, computed, extra_keys, loud)
            if computed is not None or extra_keys is not None:
                name = "computed" if computed is not None else "extra_keys"
                raise ArgumentError(name, f"None: {request!r} has its blocks", "a value")
            return self._extend(state, new, look, loud)

    def _admit(
        self, request: Any, new: int, look: int, computed: Any, extra_keys: Any, loud: bool
    ) -> SlotAllocation | None:
        pool = self.pool
        extra = self._checked_hit(computed, extra_keys)
        hits = 0 if computed is None else len(computed.block_ids)
        end = hits * BLOCK_SIZE + new
        total = self._checked_size(request, end, look)
        need = total - hits
        # A hit in the free queue is no longer free once it is held.
        idle = self._count_idle(computed.block_ids, hits) if hits else 0
        if need + idle > pool._num_free:
            return self._short(request, need + idle, loud)
        if pool.debug:
            pool.check_free_blocks(need)
        digest = hashing.root_digest(extra) if computed is None else computed.digest
        state = RequestBlocks(request, extra, digest, total)
        gained = np.empty(need, dtype=np.int32)
        self._requests[request] = state
        if hits:
            np.asarray(state.blocks)[:hits] = computed.block_ids
            pool._hold_all(state.blocks, 0, hits, request)
        pool._take(state.blocks, hits, need, request)
        gained[:] = np.asarray(state.blocks)[hits:total]
        state.num_blocks = total
        state.num_tokens = end
        state.num_committed = hits * BLOCK_SIZE
        return SlotAllocation(gained, NO_COPIES)

    def _checked_hit(self, computed: Any, extra_keys: Any) -> bytes:
        """The extra keys, encoded, once the hit is known to hold still."""
        if computed is None:
            return hashing.encode_extra_keys(() if extra_keys is None else extra_keys)
        if not isinstance(computed, PrefixHit) or computed.pool is not self.pool:
            raise ArgumentError("computed", "a PrefixHit of this manager", type(computed).__name__)
        if extra_keys is not None and hashing.encode_extra_keys(extra_keys) != computed.extra:
            raise ArgumentError("extra_keys", "those of the hit, or None", repr(extra_keys))
        stale = self._stale(computed.block_ids, computed.chain_ids, len(computed.block_ids))
        if stale >= 0:
            got = f"block {int(computed.block_ids[stale])}, given away since; look up again"
            raise ArgumentError("computed", "blocks that still hold the prefix", got)
        return computed.extra

    def _extend(
        self, state: RequestBlocks, new: int, look: int, loud: bool
    ) -> SlotAllocation | None:
        pool = self.pool
        have = state.num_blocks
        total = self._checked_size(state.request, state.num_tokens + new, look)
        need = max(total - have, 0)
        extra = 1 if new + look > 0 and state.tail_is_shared(self.pool) else 0
        if need + extra > pool._num_free:
            return self._short(state.request, need + extra, loud)
        if pool.debug:
            pool.check_free_blocks(need + extra)
        state.reserve(total)
        gained = NO_BLOCKS
        copies: list[int] = []
        if new + look > 0:
            state.open_tail(self.pool, copies)
        if need > 0:
            pool._take(state.blocks, have, need, state.request)
            gained = np.array(state.blocks[have:total])
            state.num_blocks = total
        state.num_tokens += new
        return SlotAllocation(gained, copy_array(copies))

    def can_allocate(
        self,
        num_new_tokens: int,
        num_lookahead: int = 0,
        *,
        request: Any = None,
        computed: PrefixHit | None = None,
    ) -> bool:
        """Whether allocate_slots with these arguments would succeed now. Changes nothing."""
        new = check_count("num_new_tokens", num_new_tokens, 0, _MAX_TOKENS)
        look = check_count("num_lookahead", num_lookahead, 0, _MAX_TOKENS)
        with self._lock:
            state = (
                None if request is None else self._requests.get(check_request("request", request))
            )
            if state is not None and computed is not None:
                raise ArgumentError("computed", f"None: {request!r} has its blocks", "a value")
            return self._has_room(state, computed, new, look)

    def _has_room(self, state: RequestBlocks | None, computed: Any, new: int, look: int) -> bool:
        idle = 0
        if state is not None:
            end = state.num_tokens + new
            have = state.num_blocks
            if new + look > 0 and state.tail_is_shared(self.pool):
                idle = 1  # a copy of the tail
        else:
            have = 0
            if computed is not None:
                self._checked_hit(computed, None)
                have = len(computed.block_ids)
                idle = self._count_idle(computed.block_ids, have)
            end = have * BLOCK_SIZE + new
        if end + look > _MAX_TOKENS:
            return False
        total = self._blocks_for(end + look)
        need = total - have if total > have else 0
        return total < self.pool.num_blocks and need + idle <= self.pool._num_free

    def _blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + _OFFSET) >> _SHIFT

    def _checked_size(self, request: Any, end: int, look: int) -> int:
        """Blocks of `end` tokens plus lookahead, which must fit the limits and an empty pool."""
        if end + look > _MAX_TOKENS:
            expected = f"at most {_MAX_TOKENS} tokens a request"
            raise ArgumentError("num_new_tokens", expected, f"{request!r} with {end + look}")
        total = self._blocks_for(end + look)
        if total > self.pool.num_blocks - 1:
            raise never_fits(request, total, self.pool.num_blocks)
        return total

    def _short(self, request: Any, need: int, loud: bool) -> Any:
        if loud:
            raise OutOfBlocksError(
                f"request {request!r}: {need} free blocks wanted, {self.pool._num_free} free"
            )
        return None

    def _count_idle(self, blocks: Any, n: int) -> int:
        idle = 0
        for i in range(n):
            if self.pool._count(blocks[i]) == 0:
                idle += 1
        return idle

    # --- whole batches --------------------------------------------------------------------------

    def update_table(self, table: BlockTable, requests: Iterable[Any] | None = None) -> None:
        """Give the table's rows to these requests, in order (None: as they are), and bring rows
        and lengths up to date in place. Raises ArgumentError, with the table as it was, for an
        unknown or repeated request, or one that does not fit in the table."""
        self._check_table(table)
        with self._lock:
            wanted = table.requests if requests is None else list(requests)
            self._bind_table(table, wanted)

    def allocate_step(
        self,
        table: BlockTable,
        num_new_tokens: Any = 1,
        num_lookahead: int = 0,
        *,
        on_shortage: str = "none",
    ) -> StepAllocation | None:
        """allocate_slots for every row of the table at once, all rows or none.

        num_new_tokens: an integer for all rows, or one per row. Rows, lengths (new tokens
        included) and `slots` are updated in place; entries of `slots` past the new tokens are
        -1. Shortage and refusal as for allocate_slots.
        """
        look = check_count("num_lookahead", num_lookahead, 0, _MAX_TOKENS)
        loud = must_raise(on_shortage)
        self._check_table(table)
        with self._lock:
            return self._step_table(table, num_new_tokens, look, loud)

    def commit_step(self, table: BlockTable, token_ids: Any, num_accepted: Any = None) -> None:
        """commit for every row of the table at once, all rows or none.

        token_ids: integers [rows] or [rows, n]. num_accepted: of each row's n ids, how many hold
        (an integer or one per row; None: all n). If given, positions past the accepted ones and
        reserved lookahead are rolled back as truncate does. The table follows in place.
        """
        self._check_table(table)
        array = np.asarray(token_ids)
        with self._lock:
            if array.ndim not in (1, 2) or array.shape[0] != table.num_reqs:
                raise ArgumentError("token_ids", f"[{table.num_reqs}] or [rows, n]", array.shape)
            tokens = token_array("token_ids", array.reshape(-1))
            width = array.shape[1] if array.ndim == 2 else 1
            accepted = width if num_accepted is None else num_accepted
            self._commit_table(table, tokens, width, accepted, num_accepted is not None)

    def _check_table(self, table: Any) -> None:
        if not isinstance(table, BlockTable):
            raise ArgumentError("table", "a BlockTable", type(table).__name__)

    def _bind_table(self, table: BlockTable, wanted: list[Any]) -> int:
        states = [self._known(request) for request in wanted]
        if len(set(wanted)) != len(wanted):
            raise ArgumentError("requests", "each request once", wanted)
        if len(states) > table.max_num_reqs:
            raise ArgumentError("requests", f"at most {table.max_num_reqs}", len(states))
        for state in states:
            if state.num_blocks > table.max_num_blocks:
                expected = f"requests of at most {table.max_num_blocks} blocks"
                got = f"{state.request!r} with {state.num_blocks}"
                raise ArgumentError("requests", expected, got)
        table._bind(states)
        return 0

    def _step_table(self, table: BlockTable, counts: Any, look: int, loud: bool) -> Any:
        self._set_counts(table, "num_new_tokens", counts, _MAX_TOKENS)
        need = table._plan_step(self.pool, look)
        if need > self.pool._num_free:
            return self._short("the batch", need, loud)
        if self.pool.debug:
            self.pool.check_free_blocks(need)
        copies: list[int] = []
        total = table._run_step(self.pool, look, copies)
        return StepAllocation(table.slots[:total], copy_array(copies))

    def _commit_table(
        self, table: BlockTable, tokens: Any, width: int, accepted: Any, roll_back: bool
    ) -> int:
        self._set_counts(table, "num_accepted", accepted, width)
        table._check_commit(self.pool, tokens, width)
        table._run_commit(self.pool, tokens, width, roll_back)
        return 0

    def _set_counts(self, table: BlockTable, name: str, counts: Any, high: int) -> int:
        if np.ndim(counts) == 0:
            table._fill_counts(check_count(name, counts, 0, high))
            return 0
        given = int_array(name, counts, 0, high, np.int32)
        if len(given) != table.num_reqs:
            raise ArgumentError(name, f"one a row ({table.num_reqs})", len(given))
        np.asarray(table._counts)[: len(given)] = given
        return 0

    # --- commit, truncate, fork, free -----------------------------------------------------------

    def commit(self, request: Any, token_ids: Any) -> int:
        """Declare the next tokens final: their values are computed and these are their ids.

        token_ids: integers [n], for the n positions after those committed; each must have a
        slot. Blocks that become full enter the prefix cache. Returns num_committed.
        """
        tokens = token_array("token_ids", token_ids)
        with self._lock:
            state = self._known(request)
            left = state.num_tokens - state.num_committed
            if len(tokens) > left:
                expected = f"at most {left} ids, as many as have slots and are not committed"
                raise ArgumentError("token_ids", expected, len(tokens))
            state.check_known_content(self.pool, tokens, 0, len(tokens))
            state.commit(self.pool, tokens, 0, len(tokens))
            return state.num_committed

    def truncate(self, request: Any, num_tokens: int) -> int:
        """Roll back to num_tokens positions (rejected draft tokens); returns blocks given up.

        num_tokens: 0 up to the present number; equal gives up reserved lookahead only. Committed
        tokens past it are forgotten. Each block past it is given up once.
        """
        with self._lock:
            state = self._known(request)
            n = check_count("num_tokens", num_tokens, 0, state.num_tokens)
            return state.truncate(self.pool, n)

    def fork(self, request: Any, new_request: Any) -> None:
        """Start new_request as a copy of request: it holds the same blocks, lookahead aside.

        No values are copied now. Whoever first writes to a shared, partly filled tail gets a
        block of its own, and the copy to make in the `copies` of that allocation.
        """
        check_request("new_request", new_request)
        with self._lock:
            state = self._known(request)
            if new_request in self._requests:
                raise ArgumentError("new_request", "an unused request id", repr(new_request))
            n = self._blocks_for(state.num_tokens)
            child = RequestBlocks(new_request, state.extra, state.digest, n)
            child.load(
                state.block_ids()[:n], state.tail_ids(), state.num_tokens, state.num_committed
            )
            self._requests[new_request] = child
            self.pool._hold_all(child.blocks, 0, n, new_request)

    def free(self, request: Any) -> int:
        """Give up all blocks of a request and forget it; returns how many it held.

        Cached blocks stay findable until they are evicted. Raises ArgumentError for an unknown
        request, so freeing twice is an error.
        """
        with self._lock:
            state = self._known(request)
            n = state.num_blocks
            self.pool._release(state.blocks, 0, n, request)
            state.num_blocks = 0
            state.alive = False
            del self._requests[request]
            return n

    def _known(self, request: Any) -> RequestBlocks:
        state = self._requests.get(check_request("request", request))
        if state is None:
            raise ArgumentError("request", "a request that holds blocks", repr(request))
        return state

    # --- state ----------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """The whole state as bytes (no pickle): restore gives a manager that goes on the same."""
        from .snapshot import dump

        with self._lock:
            return dump(self.pool, self._requests)

    @classmethod
    def restore(
        cls, data: bytes, *, debug: bool | None = None, storage: Any = None
    ) -> KVCacheManager:
        """A manager in the state that snapshot() wrote, in this or another process.

        The cache's values do not travel with it. Raises ArgumentError for bytes that are not a
        whole, unharmed snapshot of this version.
        """
        from .snapshot import load

        return load(cls, data, debug, storage)

    def _adopt(self, states: list[RequestBlocks]) -> None:
        for state in states:
            self._requests[state.request] = state

    def debug_state(self) -> dict[str, Any]:
        """The pool's state (see pool_state) and each request's, as plain Python."""
        from .debug import request_state

        with self._lock:
            state = self.pool.debug_state()
            state["requests"] = {key: request_state(value) for key, value in self._requests.items()}
            return state
