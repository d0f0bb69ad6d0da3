# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, annotation_typing=False
"""RequestBlocks: the blocks and token counts of one request.

num_tokens positions have a slot and may hold values; the first num_committed of them are final,
with known token ids. blocks[:num_blocks] cover num_tokens and, behind them, reserved lookahead.
KVCacheManager is the only one to change it. Runs as it is, and compiled through the `.pxd`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..config import BLOCK_SIZE
from ..errors import ArgumentError
from . import block_hash as hashing
from .block_pool import BlockPool
from .checks import int_view

_SHIFT = BLOCK_SIZE.bit_length() - 1  # typed as C ints in the .pxd
_OFFSET = BLOCK_SIZE - 1
_MIN_CAPACITY = 8


class RequestBlocks:
    """request: its id; extra: its encoded extra keys; digest: that of its last full block."""

    def __init__(self, request: Any, extra: bytes, digest: bytes, capacity: int) -> None:
        self.request = request
        self.extra = extra
        self.digest = digest
        self.blocks = int_view(np.empty(max(capacity, _MIN_CAPACITY), dtype=np.int32))
        self.capacity = max(capacity, _MIN_CAPACITY)
        self.num_blocks = 0
        self.num_tokens = 0
        self.num_committed = 0
        self.tail = int_view(np.zeros(BLOCK_SIZE, dtype=np.int32))  # ids since the last full one
        self.version = 0  # changes whenever `blocks` changes other than by growing
        self.alive = True

    def reserve(self, capacity: int) -> int:
        """Make room for `capacity` blocks; not part of the visible state."""
        if capacity > self.capacity:
            grown = max(capacity, self.capacity * 2)
            larger = np.empty(grown, dtype=np.int32)
            larger[: self.capacity] = self.blocks
            self.blocks = int_view(larger)
            self.capacity = grown
        return 0

    def block_ids(self) -> np.ndarray:
        """A copy of the block ids, lookahead included: int32 [num_blocks]."""
        return np.array(self.blocks[: self.num_blocks], dtype=np.int32)

    def tail_ids(self) -> np.ndarray:
        """A copy of the token ids committed since the last full block: int32 [0..63]."""
        return np.array(self.tail[: self.num_committed % BLOCK_SIZE], dtype=np.int32)

    def digest_hex(self) -> str:
        """Digest of the last full committed block, as hexadecimal text."""
        return self.digest.hex()

    def load(self, blocks: np.ndarray, tail: np.ndarray, num_tokens: int, committed: int) -> None:
        """Restore: everything but the constructor's arguments."""
        self.reserve(len(blocks))
        np.asarray(self.blocks)[: len(blocks)] = blocks
        np.asarray(self.tail)[: len(tail)] = tail
        self.num_blocks = len(blocks)
        self.num_tokens = num_tokens
        self.num_committed = committed

    # --- changes, each with all its checks done by the caller ------------------------------------

    def tail_is_shared(self, pool: BlockPool) -> bool:
        """Whether the block of the next position is partly filled and others hold it too."""
        if self.num_tokens & _OFFSET == 0:
            return False
        return pool._count(self.blocks[self.num_tokens >> _SHIFT]) > 1

    def open_tail(self, pool: BlockPool, copies: list[int]) -> int:
        """Make the partly filled tail block, if any, the request's own and unknown to the cache.

        One free block must be there if the tail is shared. copies gains source and target.
        """
        if self.num_tokens & _OFFSET == 0:
            return 0
        index = self.num_tokens >> _SHIFT
        block = self.blocks[index]
        if pool._count(block) > 1:
            pool._take(self.blocks, index, 1, self.request)
            pool._release_one(block, self.request)
            self.version += 1
            copies.append(block)
            copies.append(self.blocks[index])
        elif pool._map.chain[block] != 0:
            pool._map.forget(block)  # truncated into a cached block: its end is rewritten
        return 0

    def check_known_content(self, pool: BlockPool, tokens: Any, start: int, n: int) -> int:
        """Raise if ids go to a block that a fork has committed already, with other ids."""
        done = self.num_committed
        for i in range(n):
            block = self.blocks[(done + i) >> _SHIFT]
            if pool._map.chain[block] == 0:
                continue
            base = block * BLOCK_SIZE
            same = pool._map.tokens[base + ((done + i) & _OFFSET)] == tokens[start + i]
            if i == 0:
                for j in range(done & _OFFSET):
                    same = same and pool._map.tokens[base + j] == self.tail[j]
            if not same:
                got = f"others for block {block}, which {self.request!r} shares"
                raise ArgumentError("token_ids", "the ids already committed for a block", got)
        return 0

    def commit(self, pool: BlockPool, tokens: Any, start: int, stop: int) -> int:
        """Take tokens[start:stop] as final; each block they fill enters the prefix cache."""
        i = start
        while i < stop:
            count = (stop - i) >> _SHIFT
            if count > 0 and self.num_committed & _OFFSET == 0 and pool.enable_caching:
                self.seal_run(pool, tokens, i, count)
                i += count << _SHIFT
                continue
            self.tail[self.num_committed & _OFFSET] = tokens[i]
            self.num_committed += 1
            i += 1
            if self.num_committed & _OFFSET == 0 and pool.enable_caching:
                self.seal(pool)
        return 0

    def seal_run(self, pool: BlockPool, tokens: Any, at: int, count: int) -> int:
        """Commit `count` whole blocks of tokens, from tokens[at] on, at a block's start."""
        first = self.num_committed >> _SHIFT
        raw = hashing.token_bytes(np.asarray(tokens[at : at + (count << _SHIFT)]))
        digests = hashing.hash_blocks(self.digest, raw, 0, count)
        words = hashing.digest_words(b"".join(digests))
        parent = 0
        if first > 0:
            parent = pool._map.chain[self.blocks[first - 1]]
        elif pool._map.chain[self.blocks[0]] == 0:
            parent = pool._map.root_of(self.extra)
        for j in range(count):
            block = self.blocks[first + j]
            if pool._map.chain[block] == 0:  # else a fork that shares the block has entered it
                pool._map.insert(
                    block, words, j * hashing.DIGEST_WORDS, tokens, at + (j << _SHIFT), parent
                )
            parent = pool._map.chain[block]
        self.digest = digests[count - 1]
        self.num_committed += count << _SHIFT
        return 0

    def seal(self, pool: BlockPool) -> int:
        """Enter the block that has just become full into the prefix cache."""
        index = (self.num_committed >> _SHIFT) - 1
        ids = np.asarray(self.tail)
        digest = hashing.hash_block(self.digest, hashing.token_bytes(ids))
        self.digest = digest
        if pool._map.chain[self.blocks[index]] != 0:
            return 0  # a fork that shares the block has entered it
        if index == 0:
            parent = pool._map.root_of(self.extra)
        else:
            parent = pool._map.chain[self.blocks[index - 1]]
        words = hashing.digest_words(digest)
        pool._map.insert(self.blocks[index], words, 0, ids, 0, parent)
        return 0

    def truncate(self, pool: BlockPool, n: int) -> int:
        """Roll back to n positions and no lookahead; returns the blocks given up."""
        keep = (n + _OFFSET) >> _SHIFT
        if n < self.num_committed:
            if pool.enable_caching:
                self.reload_tail(pool, n)
            self.num_committed = n
        self.num_tokens = n
        gone = self.num_blocks - keep
        if gone > 0:
            pool._release(self.blocks, keep, self.num_blocks, self.request)
            self.num_blocks = keep
            self.version += 1
        return gone

    def reload_tail(self, pool: BlockPool, n: int) -> int:
        """Token ids and digest at an earlier point, from what the pool knows of the blocks."""
        index = n >> _SHIFT
        if index == self.num_committed >> _SHIFT:
            return 0  # within the same block: its first ids are at hand
        block = self.blocks[index]
        for j in range(n & _OFFSET):
            self.tail[j] = pool._map.tokens[(block << _SHIFT) + j]
        if index == 0:
            self.digest = hashing.root_digest(self.extra)
        else:
            self.digest = pool._map.digest_of(self.blocks[index - 1])
        return 0
