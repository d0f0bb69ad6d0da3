# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, annotation_typing=False
"""BlockPool: ids, reference counts and the free queue; with PrefixMap, the prefix cache.

A block is a node of four int32 in one array; no Python object exists per block. The free queue
is a doubly linked list through the nodes with block 0, the null block, as its
sentinel, so no end is a special case. It is also the LRU eviction list: new blocks come from the
head, freed blocks whose content is cached go to the tail, freed blocks without go to the head.

What the blocks' content is, and how it is found, lives in PrefixMap.

This file runs as it is, and compiled as C through `block_pool.pxd`. Names with a leading
underscore trust their arguments; public ones check theirs and change nothing when they raise.

Thread-safety: none of its own. One thread at a time; KVCacheManager holds a lock around it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..config import BLOCK_SIZE
from ..errors import ArgumentError, OutOfBlocksError, SnapMLAError
from . import block_hash as hashing
from .checks import check_count, debug_wanted, int_array, int_view, token_array
from .prefix_map import FIELDS, SLOT, UNMAPPED, PrefixMap

MAX_NUM_BLOCKS = 1 << 28  # four int32 fields a block: still an int32 position
# Fields of a block's node, beside SLOT. One 16-byte node a block, not four arrays: taking or
# freeing a block touches one cache line and one page, which is what it costs in a large pool.
_REF = 0  # how many hold it
_NEXT = 1  # next in the free queue; -1 in use
_PREV = 2
_SLOT = SLOT  # typed as C ints in the .pxd
_FIELDS = FIELDS
_UNMAPPED = UNMAPPED


class BlockPool:
    """Fixed pool of `num_blocks` cache blocks of 64 tokens; block 0 is never handed out.

    num_blocks: 2..2**28, null block included. enable_caching: keep the prefix cache.
    debug: track who holds each block (None: SNAPMLA_DEBUG). storage: in debug mode, freed blocks
    are poisoned through it and checked when they are handed out again (see KVCacheStorage).
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        enable_caching: bool = True,
        debug: bool | None = None,
        storage: Any = None,
    ) -> None:
        n = check_count("num_blocks", num_blocks, 2, MAX_NUM_BLOCKS)
        self.num_blocks = n
        self.enable_caching = bool(enable_caching)
        self.debug = debug_wanted(debug)
        self._storage: Any = None
        nodes = np.zeros((n, FIELDS), dtype=np.int32)
        nodes[:, _NEXT] = np.arange(1, n + 1)
        nodes[:, _PREV] = np.arange(-1, n - 1)
        nodes[n - 1, _NEXT] = 0
        nodes[0, _PREV] = n - 1
        self._node = int_view(nodes.reshape(-1))
        self._num_free = n - 1
        self._map = PrefixMap(n, self.enable_caching, self._node)
        self._holders: dict[int, list[Any]] = {}
        self._last_holder: dict[int, Any] = {}
        if storage is not None:
            self._attach(storage)

    def _attach(self, storage: Any) -> None:
        if storage.num_blocks != self.num_blocks:
            got = storage.num_blocks
            raise ArgumentError("storage", f"a storage of {self.num_blocks} blocks", got)
        if self.debug:
            self._storage = storage
            empty = (np.asarray(self._node)[_REF::FIELDS] == 0) & (np.asarray(self._map.chain) == 0)
            self._storage.poison_blocks(np.flatnonzero(empty)[1:])

    # --- counts ---------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out, those whose content is still cached included."""
        return self._num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks the prefix cache can find, in use or free."""
        return self._map.num_cached

    @property
    def usage(self) -> float:
        """Share of the blocks (null block aside) that are in use: 0.0 to 1.0."""
        return 1.0 - float(self._num_free) / float(self.num_blocks - 1)

    # --- public operations ----------------------------------------------------------------------

    def get_new_blocks(self, num_blocks: int, owner: Any = None) -> np.ndarray:
        """Take `num_blocks` from the head of the queue: int32 [num_blocks], each held once.

        What they had cached is evicted. Raises OutOfBlocksError if too few are free.
        """
        n = check_count("num_blocks", num_blocks, 0)
        if n > self._num_free:
            raise OutOfBlocksError(f"num_blocks: {n} wanted, {self._num_free} free")
        if self.debug:
            self.check_free_blocks(n)
        out = np.empty(n, dtype=np.int32)
        self._take(out, 0, n, owner)
        return out

    def touch(self, block_ids: Any, owner: Any = None) -> None:
        """Hold each block once more; a free one leaves the queue (its content must be cached).

        Raises ArgumentError for the null block, an id outside the pool, or a free block without
        cached content: that is a use after free.
        """
        ids = self._checked_ids(block_ids)
        for block in ids.tolist():
            if self._count(block) == 0 and self._map.chain[block] == 0:
                raise ArgumentError(
                    "block_ids", "blocks in use or cached", self._describe_free(block)
                )
        self._hold_all(ids, 0, len(ids), owner)

    def free_blocks(self, block_ids: Any, owner: Any = None) -> None:
        """Give up one hold of each block, given in the order of the sequence.

        They are freed in reverse, so that the end of a sequence is evicted before its beginning.
        Raises ArgumentError for the null block, an id outside the pool and a block held fewer
        times than it is freed (double free); nothing is changed then.
        """
        ids = self._checked_ids(block_ids)
        bad = self._first_overfreed(ids, len(ids))
        if bad >= 0:
            block = int(ids[bad])
            raise ArgumentError("block_ids", "blocks in use", self._describe_free(block))
        if self.debug and owner is not None:
            for block in ids.tolist():
                if owner not in self._holders.get(block, ()):
                    got = f"block {block}, held by {self._holders.get(block)}"
                    raise ArgumentError("block_ids", f"blocks held by {owner!r}", got)
        self._release(ids, 0, len(ids), owner)

    def get_cached_block(
        self,
        block_hash: bytes,
        token_ids: Any,
        *,
        parent_block: int = 0,
        extra_keys: Iterable[Any] = (),
    ) -> int | None:
        """Id of a cached block with this digest, these 64 tokens and this parent, or None.

        parent_block: the block found for the preceding 64 tokens; 0: this is the first block, of
        a sequence with these extra_keys. The block is not held: touch it before anything else.
        """
        tokens = self._checked_tokens(token_ids, 1)
        if not isinstance(block_hash, bytes) or len(block_hash) != hashing.DIGEST_BYTES:
            raise ArgumentError("block_hash", "32 bytes", repr(block_hash))
        if not self.enable_caching:
            return None
        above = check_count("parent_block", parent_block, 0, self.num_blocks - 1)
        if above == 0:
            parent = self._map.root_ids.get(hashing.encode_extra_keys(extra_keys), 0)
        else:
            parent = self._map.chain[above]
        if parent == 0:
            return None
        return self._map.find(hashing.digest_words(block_hash), 0, tokens, 0, parent) or None

    def cache_full_blocks(
        self,
        block_ids: Any,
        token_ids: Any,
        *,
        num_cached_blocks: int = 0,
        extra_keys: Iterable[Any] = (),
    ) -> int:
        """Enter a sequence's full blocks into the prefix cache; returns how many were new.

        block_ids: all full blocks of the sequence, in order, each in use; token_ids: their
        64 * len(block_ids) tokens; the first num_cached_blocks of them are cached already.
        Raises ArgumentError and changes nothing if a block is free, repeated or known already.
        """
        if not self.enable_caching:
            return 0
        ids = self._checked_ids(block_ids)
        tokens = self._checked_tokens(token_ids, len(ids))
        first = check_count("num_cached_blocks", num_cached_blocks, 0, len(ids))
        new = ids[first:].tolist()
        for block in new:
            if self._count(block) == 0:
                raise ArgumentError("block_ids", "blocks in use", self._describe_free(block))
            if self._map.chain[block] != 0:
                raise ArgumentError("block_ids", "blocks not cached yet", f"block {block}")
        if len(set(new)) != len(new):
            raise ArgumentError("block_ids", "each block once", ids.tolist())
        if first and self._map.chain[int(ids[first - 1])] == 0:
            got = f"block {int(ids[first - 1])}, never cached"
            raise ArgumentError("num_cached_blocks", "a cached block before the new ones", got)
        extra = hashing.encode_extra_keys(extra_keys)
        raw = hashing.token_bytes(tokens)
        digests = hashing.hash_blocks(hashing.root_digest(extra), raw, 0, len(ids))
        if not new:
            return 0
        words = hashing.digest_words(b"".join(digests))
        parent = self._map.chain[int(ids[first - 1])] if first else self._map.root_of(extra)
        for j in range(first, len(ids)):
            self._map.insert(
                int(ids[j]), words, j * hashing.DIGEST_WORDS, tokens, j * BLOCK_SIZE, parent
            )
            parent = self._map.chain[int(ids[j])]
        return len(new)

    def evict(self, block_ids: Any) -> int:
        """Make the prefix cache forget these blocks; returns how many it knew.

        A block in use stays with its holders; a free one moves to the head of the queue.
        """
        ids = self._checked_ids(block_ids)
        evicted = 0
        for block in ids.tolist() if self.enable_caching else ():
            if not self._map.mapped(block):
                continue
            evicted += 1
            if self._count(block) > 0:
                # Its content is still what it was: the holder's next blocks chain on to it.
                self._map.unmap(block)
                continue
            self._map.forget(block)
            self._unlink(block)
            self._push_head(block)
            if self._storage is not None:
                self._poison(block)
        return evicted

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block. False, and no change, while any block is in use."""
        if self._num_free != self.num_blocks - 1:
            return False
        if self.enable_caching:
            for block in np.flatnonzero(np.asarray(self._map.chain)).tolist():
                self._map.forget(block)
                if self._storage is not None:
                    self._poison(block)
        return True

    # --- argument checks ------------------------------------------------------------------------

    def _checked_ids(self, block_ids: Any) -> np.ndarray:
        return int_array("block_ids", block_ids, 1, self.num_blocks - 1, np.int32)

    def _checked_tokens(self, token_ids: Any, num_blocks: int) -> np.ndarray:
        tokens = token_array("token_ids", token_ids)
        if len(tokens) != num_blocks * BLOCK_SIZE:
            expected = f"{num_blocks * BLOCK_SIZE} token ids ({BLOCK_SIZE} a block)"
            raise ArgumentError("token_ids", expected, len(tokens))
        return tokens

    def _describe_free(self, block: int) -> str:
        if not self.debug:
            return f"block {block}, which is held too few times (SNAPMLA_DEBUG=1 names owners)"
        holders = self._holders.get(block)
        if holders:
            return f"block {block}, held only by {holders}"
        if block in self._last_holder:
            return f"block {block}, already freed by {self._last_holder[block]!r}"
        return f"block {block}, never handed out"

    def _first_overfreed(self, ids: Any, n: int) -> int:
        """Index of the first id freed more often than it is held, or -1; changes nothing."""
        bad = -1
        done = n
        for i in range(n):
            block = ids[i]
            if self._node[block * _FIELDS + _REF] == 0:
                bad = i
                done = i
                break
            self._node[block * _FIELDS + _REF] -= 1
        for i in range(done):
            block = ids[i]
            self._node[block * _FIELDS + _REF] += 1
        return bad

    # --- queue ----------------------------------------------------------------------------------

    def _count(self, block: int) -> int:
        return self._node[block * _FIELDS + _REF]

    def _add_to_count(self, block: int, change: int) -> int:
        self._node[block * _FIELDS + _REF] += change
        return 0

    def _take(self, out: Any, start: int, n: int, owner: Any) -> int:
        """Move n blocks from the head of the queue to out[start:start+n]; n <= num_free."""
        block = self._node[_NEXT]
        for i in range(start, start + n):
            at = block * _FIELDS
            following = self._node[at + _NEXT]
            self._node[at + _REF] = 1
            self._node[at + _NEXT] = -1
            if self.debug:
                self._note_taken(block, owner)
            if self._node[at + _SLOT] != 0:
                self._map.forget(block)
            out[i] = block
            block = following
        self._node[_NEXT] = block
        self._node[block * _FIELDS + _PREV] = 0
        self._num_free -= n
        return 0

    def _hold(self, block: int, owner: Any) -> int:
        at = block * _FIELDS
        if self._node[at + _REF] == 0:
            self._unlink(block)
            self._node[at + _NEXT] = -1
            self._num_free -= 1
        self._node[at + _REF] += 1
        if self.debug:
            self._holders.setdefault(block, []).append(owner)
        return 0

    def _hold_all(self, ids: Any, start: int, stop: int, owner: Any) -> int:
        for i in range(start, stop):
            self._hold(ids[i], owner)
        return 0

    def _release(self, ids: Any, start: int, stop: int, owner: Any) -> int:
        """Give up one hold of ids[start:stop], the last first; all are held."""
        for i in range(stop - 1, start - 1, -1):
            self._release_one(ids[i], owner)
        return 0

    def _release_one(self, block: int, owner: Any) -> int:
        at = block * _FIELDS
        self._node[at + _REF] -= 1
        if self.debug:
            self._note_released(block, owner)
        if self._node[at + _REF] > 0:
            return 0
        self._num_free += 1
        slot = self._node[at + _SLOT]
        if slot != 0 and slot != _UNMAPPED:
            last = self._node[_PREV]
            self._node[last * _FIELDS + _NEXT] = block
            self._node[at + _PREV] = last
            self._node[at + _NEXT] = 0
            self._node[_PREV] = block
            return 0
        if slot != 0:
            self._map.forget(block)  # evicted while it was in use
        self._push_head(block)
        if self._storage is not None:
            self._poison(block)
        return 0

    def _push_head(self, block: int) -> int:
        at = block * _FIELDS
        first = self._node[_NEXT]
        self._node[_NEXT] = block
        self._node[at + _PREV] = 0
        self._node[at + _NEXT] = first
        self._node[first * _FIELDS + _PREV] = block
        return 0

    def _unlink(self, block: int) -> int:
        before = self._node[block * _FIELDS + _PREV]
        after = self._node[block * _FIELDS + _NEXT]
        self._node[before * _FIELDS + _NEXT] = after
        self._node[after * _FIELDS + _PREV] = before
        return 0

    # --- debug mode -----------------------------------------------------------------------------

    def check_free_blocks(self, n: int) -> None:
        """In debug mode with a storage: the next n free blocks must still hold their poison.

        Raises SnapMLAError naming the block and who freed it last, if someone wrote to it since.
        """
        if self._storage is None:
            return
        block = self._node[_NEXT]
        for _ in range(min(n, self._num_free)):
            if self._map.chain[block] == 0 and self._storage.written_blocks([block]):
                self._poison(block)  # so that it is reported once
                owner = self._last_holder.get(block)
                raise SnapMLAError(
                    f"use after free: block {block}, freed by {owner!r}, was written"
                )
            block = self._node[block * _FIELDS + _NEXT]

    def check_held(self, block_ids: Any, owner: Any) -> None:
        """In debug mode: raise ArgumentError unless `owner` holds each block."""
        for block in self._checked_ids(block_ids).tolist() if self.debug else ():
            holders = self._holders.get(block)
            if holders is None:
                raise ArgumentError("block_ids", "blocks in use", self._describe_free(block))
            if owner not in holders:
                got = f"block {block}, held by {holders}"
                raise ArgumentError("block_ids", f"blocks held by {owner!r}", got)

    def _poison(self, block: int) -> int:
        self._storage.poison_blocks([block])
        return 0

    def _note_taken(self, block: int, owner: Any) -> int:
        self._holders[block] = [owner]
        if self._storage is not None and self._map.chain[block] != 0:
            self._poison(block)
        return 0

    def _note_released(self, block: int, owner: Any) -> int:
        holders = self._holders[block]
        if owner in holders:
            holders.remove(owner)
        else:
            holders.pop()
        if not holders:
            del self._holders[block]
            self._last_holder[block] = owner
        return 0

    def debug_state(self) -> dict[str, Any]:
        """Everything a test needs, as plain Python: see pool_state in debug.py."""
        from .debug import pool_state

        return pool_state(self)

    # --- state, for debug.py and snapshot.py ----------------------------------------------------

    def _state_parts(self) -> tuple[dict[str, np.ndarray], PrefixMap]:
        """Writable views of the queue's arrays, and the map."""
        arrays = {
            "ref_count": np.asarray(self._node)[_REF::FIELDS],
            "next": np.asarray(self._node)[_NEXT::FIELDS],
            "prev": np.asarray(self._node)[_PREV::FIELDS],
        }
        return arrays, self._map

    def _debug_maps(self) -> tuple[dict[int, list[Any]], dict[int, Any]]:
        return self._holders, self._last_holder

    def _set_num_free(self, num_free: int) -> None:
        self._num_free = num_free
