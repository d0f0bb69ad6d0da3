# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, annotation_typing=False
"""BlockTable: the batch's block ids, lengths and slots as arrays that the kernels read.

The arrays are made once (or given by the caller, pinned memory for instance) and updated in
place, so their addresses can live in a CUDA graph. A row changes only where its request did: a
decode step writes one entry for a request that crossed a block's end and nothing for the others.
Entries that mean nothing are 0, the null block, and slots that mean nothing are -1.

Thread-safety: none of its own. The manager's methods that take a table hold the manager's lock;
the table's own methods are for the thread that owns it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..config import BLOCK_SIZE, MAX_CACHE_SEQLEN
from ..errors import ArgumentError
from .block_pool import BlockPool
from .checks import check_count, int_array, int_view, never_fits
from .request_blocks import RequestBlocks

_SHIFT = BLOCK_SIZE.bit_length() - 1  # typed as C ints in the .pxd
_OFFSET = BLOCK_SIZE - 1
_MAX_TOKENS = MAX_CACHE_SEQLEN


def _given_or_zeros(name: str, given: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    if given is None:
        return np.zeros(shape, dtype=dtype)
    fits = isinstance(given, np.ndarray) and given.shape == shape and given.dtype == dtype
    if not fits or not given.flags.c_contiguous or not given.flags.writeable:
        expected = f"a writable contiguous {np.dtype(dtype).name} array of shape {shape}"
        shown = (
            f"{type(given).__name__} {getattr(given, 'shape', '')} {getattr(given, 'dtype', '')}"
        )
        raise ArgumentError(name, expected, shown)
    given[...] = 0
    return given


class BlockTable:
    """Rows for at most max_num_reqs requests of at most max_num_blocks blocks each.

    Arrays: `block_table` int32 [max_num_reqs, max_num_blocks], `cache_seqlens` int32
    [max_num_reqs], `slots` int64 [max_num_tokens] (default max_num_reqs). Rows from num_reqs on
    are padding: zeros, with length 0. Each array may be given; it is then zeroed and used.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_num_blocks: int,
        max_num_tokens: int | None = None,
        *,
        block_table: np.ndarray | None = None,
        cache_seqlens: np.ndarray | None = None,
        slots: np.ndarray | None = None,
    ) -> None:
        rows = check_count("max_num_reqs", max_num_reqs, 1, 1 << 24)
        width = check_count("max_num_blocks", max_num_blocks, 1, MAX_CACHE_SEQLEN // BLOCK_SIZE)
        wanted = rows if max_num_tokens is None else max_num_tokens
        tokens = check_count("max_num_tokens", wanted, 1, 1 << 30)
        self.max_num_reqs = rows
        self.max_num_blocks = width
        self.max_num_tokens = tokens
        self.block_table = _given_or_zeros("block_table", block_table, (rows, width), np.int32)
        self.cache_seqlens = _given_or_zeros("cache_seqlens", cache_seqlens, (rows,), np.int32)
        self.slots = _given_or_zeros("slots", slots, (tokens,), np.int64)
        self.slots.fill(-1)
        self.num_reqs = 0
        self._rows = int_view(self.block_table.reshape(-1))
        self._seqlens = int_view(self.cache_seqlens)
        self._slots = int_view(self.slots)
        self._num_slots = 0
        self._states: list[Any] = []
        self._row_len = int_view(np.zeros(rows, dtype=np.int32))
        self._row_version = int_view(np.zeros(rows, dtype=np.int64))
        self._counts = int_view(np.zeros(rows, dtype=np.int32))

    @property
    def requests(self) -> list[Any]:
        """The request id of each row in use."""
        return [state.request for state in self._states]

    def slot_mapping(
        self, positions: Any, rows: Any = None, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Slots (block id * 64 + offset) of token positions: int64, flat, -1 for padding.

        positions: integers [n] with rows [n] (the row of each), or, without rows, [r] or
        [r, s_q] for rows 0..r-1. Position -1 is padding. out: int64 [>= n] to write to; what is
        left of it becomes -1. Raises ArgumentError, with nothing written, where a position has
        no block in its row.
        """
        flat, where = self._checked_positions(positions, rows)
        n = len(flat)
        if out is None:
            out = np.empty(n, dtype=np.int64)
        elif not isinstance(out, np.ndarray) or out.dtype != np.int64 or out.ndim != 1:
            raise ArgumentError("out", "a 1-D int64 array", type(out).__name__)
        elif len(out) < n or not out.flags.c_contiguous:
            raise ArgumentError("out", f"contiguous, at least {n} entries", len(out))
        bad = self._first_unmapped(flat, where, n)
        if bad >= 0:
            row = int(where[bad])
            expected = f"-1 or below {int(self._row_len[row]) * BLOCK_SIZE} in row {row}"
            raise ArgumentError("positions", expected, int(flat[bad]))
        self._map(flat, where, n, out, len(out))
        return out

    def _checked_positions(self, positions: Any, rows: Any) -> tuple[np.ndarray, np.ndarray]:
        array = np.asarray(positions)
        if array.ndim == 2 and rows is None:
            num_rows, per_row = array.shape
        elif array.ndim == 1:
            num_rows, per_row = len(array), 1
        else:
            raise ArgumentError("positions", "[n], or [rows, s_q] without rows", array.shape)
        flat = int_array("positions", array.reshape(-1), -1, MAX_CACHE_SEQLEN - 1, np.int64)
        if rows is not None:
            where = int_array("rows", rows, 0, self.max_num_reqs - 1, np.int32)
            if len(where) != len(flat):
                raise ArgumentError("rows", f"one row a position ({len(flat)})", len(where))
            return flat, where
        if num_rows > self.max_num_reqs:
            raise ArgumentError("positions", f"at most {self.max_num_reqs} rows", num_rows)
        return flat, np.repeat(np.arange(num_rows, dtype=np.int32), per_row)

    def _first_unmapped(self, positions: Any, rows: Any, n: int) -> int:
        for i in range(n):
            if positions[i] >= 0 and positions[i] >> _SHIFT >= self._row_len[rows[i]]:
                return i
        return -1

    def _map(self, positions: Any, rows: Any, n: int, out: Any, size: int) -> int:
        for i in range(n):
            position = positions[i]
            if position < 0:
                out[i] = -1
                continue
            block = self._rows[rows[i] * self.max_num_blocks + (position >> _SHIFT)]
            out[i] = (block << _SHIFT) | (position & _OFFSET)
        for i in range(n, size):
            out[i] = -1
        return 0

    # --- used by KVCacheManager, under its lock -------------------------------------------------

    def _bind(self, states: list[Any]) -> int:
        """Give the rows to these requests, in order; rows that lose theirs become padding."""
        for row, state in enumerate(states):
            if row >= self.num_reqs or self._states[row] is not state:
                self._row_version[row] = -1  # no version is negative: the row is written anew
        for row in range(len(states), self.num_reqs):
            self._clear_row(row, 0)
            self._seqlens[row] = 0
        self._states = list(states)
        self.num_reqs = len(states)
        for row in range(self.num_reqs):
            self._sync(row, self._states[row])
        return 0

    def _sync(self, row: int, state: RequestBlocks) -> int:
        """Bring one row up to date with its request."""
        base = row * self.max_num_blocks
        have = self._row_len[row]
        first = have
        if self._row_version[row] != state.version:
            first = 0
            self._row_version[row] = state.version
        for j in range(first, state.num_blocks):
            self._rows[base + j] = state.blocks[j]
        if state.num_blocks < have:
            self._clear_row(row, state.num_blocks)
        self._row_len[row] = state.num_blocks
        self._seqlens[row] = state.num_tokens
        return 0

    def _replace(self, row: int, index: int, state: RequestBlocks) -> int:
        """Entry `index` is the one thing that changed since the row was written."""
        if index < self._row_len[row]:
            self._rows[row * self.max_num_blocks + index] = state.blocks[index]
        self._row_version[row] = state.version
        return 0

    def _fill_counts(self, count: int) -> int:
        for row in range(self.num_reqs):
            self._counts[row] = count
        return 0

    def _clear_row(self, row: int, first: int) -> int:
        base = row * self.max_num_blocks
        for j in range(first, self._row_len[row]):
            self._rows[base + j] = 0
        self._row_len[row] = first
        return 0

    def _pad_slots(self, used: int) -> int:
        """Entries of `slots` that the last step used and this one does not become -1."""
        for i in range(used, self._num_slots):
            self._slots[i] = -1
        self._num_slots = used
        return 0

    # --- a step of the whole batch, for KVCacheManager ------------------------------------------

    def _plan_step(self, pool: BlockPool, look: int) -> int:
        """Free blocks the step takes. Raises for a row that can never have its tokens."""
        need = 0
        tokens = 0
        shared = False
        for row in range(self.num_reqs):
            state = self._states[row]
            end = state.num_tokens + self._counts[row] + look
            total = (end + _OFFSET) >> _SHIFT
            if not state.alive or end > _MAX_TOKENS:
                self._refuse_row(row, end)
            if total > self.max_num_blocks or state.num_blocks > self.max_num_blocks:
                self._refuse_row(row, end)
            if total >= pool.num_blocks:
                raise never_fits(state.request, total, pool.num_blocks)
            if total > state.num_blocks:
                need += total - state.num_blocks
                state.reserve(total)
            if end > state.num_tokens and state.tail_is_shared(pool):
                shared = True
            tokens += self._counts[row]
        if tokens > self.max_num_tokens:
            raise ArgumentError("num_new_tokens", f"at most {self.max_num_tokens} in all", tokens)
        return need + (self._count_copies(pool, look) if shared else 0)

    def _refuse_row(self, row: int, end: int) -> int:
        state = self._states[row]
        if not state.alive:
            raise ArgumentError("table", "rows of live requests", f"{state.request!r}, freed")
        limit = min(_MAX_TOKENS, self.max_num_blocks * BLOCK_SIZE)
        got = f"{state.request!r} with {end} (lookahead included) in {state.num_blocks} blocks"
        raise ArgumentError("num_new_tokens", f"at most {limit} tokens in a row", got)

    def _count_copies(self, pool: BlockPool, look: int) -> int:
        """Tails to copy: of k rows that share one, all but the last to hold it."""
        tails: list[int] = []
        for row in range(self.num_reqs):
            state = self._states[row]
            if self._counts[row] + look > 0 and state.tail_is_shared(pool):
                block = state.blocks[state.num_tokens >> _SHIFT]
                pool._add_to_count(block, -1)
                tails.append(block)
        for tail in tails:
            pool._add_to_count(tail, 1)
        return len(tails)

    def _run_step(self, pool: BlockPool, look: int, copies: list[int]) -> int:
        k = 0
        for row in range(self.num_reqs):
            state = self._states[row]
            count = self._counts[row]
            if count + look > 0 and state.num_tokens & _OFFSET:
                was = state.version
                state.open_tail(pool, copies)
                if state.version != was and self._row_version[row] == was:
                    self._replace(row, state.num_tokens >> _SHIFT, state)
            total = (state.num_tokens + count + look + _OFFSET) >> _SHIFT
            if total > state.num_blocks:
                pool._take(state.blocks, state.num_blocks, total - state.num_blocks, state.request)
                state.num_blocks = total
            for position in range(state.num_tokens, state.num_tokens + count):
                block = state.blocks[position >> _SHIFT]
                self._slots[k] = (block << _SHIFT) | (position & _OFFSET)
                k += 1
            state.num_tokens += count
            self._sync(row, state)
        self._pad_slots(k)
        return k

    def _check_commit(self, pool: BlockPool, tokens: Any, width: int) -> int:
        for row in range(self.num_reqs):
            state = self._states[row]
            if not state.alive or state.num_blocks > self.max_num_blocks:
                self._refuse_row(row, state.num_tokens)
            count = self._counts[row]
            if count > state.num_tokens - state.num_committed:
                expected = f"at most {state.num_tokens - state.num_committed} for row {row}"
                raise ArgumentError("token_ids", f"{expected} (its slots not committed)", count)
            state.check_known_content(pool, tokens, row * width, count)
        return 0

    def _run_commit(self, pool: BlockPool, tokens: Any, width: int, roll_back: bool) -> int:
        for row in range(self.num_reqs):
            state = self._states[row]
            state.commit(pool, tokens, row * width, row * width + self._counts[row])
            if roll_back:
                was = state.version
                state.truncate(pool, state.num_committed)
                if self._row_version[row] == was:
                    self._row_version[row] = state.version  # it only became shorter
                self._sync(row, state)
        return 0
