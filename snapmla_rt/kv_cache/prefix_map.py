# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, annotation_typing=False
"""PrefixMap: what is known of the blocks' content, and the hash map that finds it.

A cached block knows its digest, its 64 token ids and the *chain id* of its parent. A chain id is
a number given once to a token chain when its last block enters the cache: equal numbers mean
equal chains, and a number never comes back. A lookup finds candidates by digest and accepts one
only if tokens and parent chain are equal, so a colliding digest costs a probe, never a wrong hit.
Blocks with the same chain (two requests computed it at once) hang off the first in a list.

The map is open addressing with linear probing over int32 block ids, at most half full; 0, which
is the null block, marks an empty position. Nothing here is checked: BlockPool and KVCacheManager
are its only callers. Runs as it is, and compiled through `prefix_map.pxd`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..config import BLOCK_SIZE
from .block_hash import DIGEST_WORDS
from .checks import int_view

FIELDS = 4  # int32 fields of a block's node, which BlockPool owns
SLOT = 3  # the one that belongs to the map: table position + 1, or one of these:
UNKNOWN = 0  # nothing known of the content
BEHIND = -1  # in the list behind another block of equal content
UNMAPPED = -2  # content known but evicted from the map, while in use

_FIELDS = FIELDS
_SLOT = SLOT
_UNMAPPED = UNMAPPED
_BLOCK = BLOCK_SIZE  # typed as C ints in the .pxd
_WORDS = DIGEST_WORDS


def _zeros(n: int, dtype: Any) -> Any:
    # calloc'ed: a page costs memory only once it is written to
    return int_view(np.zeros(n, dtype=dtype))


class PrefixMap:
    """Content of the blocks of one pool; `chain[block]` is 0 where none is known."""

    def __init__(self, num_blocks: int, enabled: bool, node: Any) -> None:
        self.node = node  # the pool's array
        self.chain = _zeros(num_blocks, np.int64)
        n = num_blocks if enabled else 0  # without caching, chain stays 0 and guards the rest
        size = 1
        while size < 2 * n:
            size *= 2
        self.table = _zeros(size, np.int32)
        self.mask = size - 1
        self.dup_next = _zeros(n, np.int32)
        self.dup_prev = _zeros(n, np.int32)
        self.parent = _zeros(n, np.int64)  # chain id of the parent; negative: a root
        self.digest = _zeros(n * _WORDS, np.int64)
        self.tokens = _zeros(n * _BLOCK, np.int32)
        self.num_cached = 0
        self.next_chain = 1
        # A root stands for one set of extra keys; it lives while a first block refers to it.
        self.next_root = -1
        self.root_ids: dict[bytes, int] = {}
        self.root_keys: dict[int, bytes] = {}
        self.root_count: dict[int, int] = {}

    def same(self, block: int, words: Any, at: int, tokens: Any, tok_at: int, parent: int) -> bool:
        """Whether a cached block has this digest, these tokens and this parent chain."""
        mine = block * _WORDS
        for k in range(_WORDS):
            if self.digest[mine + k] != words[at + k]:
                return False
        if self.parent[block] != parent:
            return False
        mine = block * _BLOCK
        for k in range(_BLOCK):
            if self.tokens[mine + k] != tokens[tok_at + k]:
                return False
        return True

    def find(self, words: Any, at: int, tokens: Any, tok_at: int, parent: int) -> int:
        """The first block of the list with this content, or 0."""
        i = words[at] & self.mask
        block = self.table[i]
        while block != 0:
            if self.same(block, words, at, tokens, tok_at, parent):
                return block
            i = (i + 1) & self.mask
            block = self.table[i]
        return 0

    def find_prefix(
        self, words: Any, tokens: Any, first: int, count: int, parent: int, out: Any
    ) -> int:
        """Look up blocks first..first+count-1 of a sequence; returns how many hit, in a row.

        words: digests of those blocks only; tokens: the whole sequence; parent: chain id above
        block `first`; out[first + j] receives the j-th hit.
        """
        for j in range(count):
            block = self.find(words, j * _WORDS, tokens, (first + j) * _BLOCK, parent)
            if block == 0:
                return j
            out[first + j] = block
            parent = self.chain[block]
        return count

    def insert(self, block: int, words: Any, at: int, tokens: Any, tok_at: int, parent: int) -> int:
        """Enter a block in use, whose content is known and which is not cached yet."""
        for k in range(_WORDS):
            self.digest[block * _WORDS + k] = words[at + k]
        for k in range(_BLOCK):
            self.tokens[block * _BLOCK + k] = tokens[tok_at + k]
        self.parent[block] = parent
        if parent < 0:
            self.root_count[parent] += 1
        i = words[at] & self.mask
        other = self.table[i]
        while other != 0 and not self.same(other, words, at, tokens, tok_at, parent):
            i = (i + 1) & self.mask
            other = self.table[i]
        if other == 0:
            self.table[i] = block
            self.node[block * _FIELDS + _SLOT] = i + 1
            self.chain[block] = self.next_chain
            self.next_chain += 1
        else:
            after = self.dup_next[other]
            self.dup_next[other] = block
            self.dup_prev[block] = other
            self.dup_next[block] = after
            if after != 0:
                self.dup_prev[after] = block
            self.node[block * _FIELDS + _SLOT] = -1
            self.chain[block] = self.chain[other]
        self.num_cached += 1
        return 0

    def mapped(self, block: int) -> bool:
        """Whether lookups can find this block."""
        slot = self.node[block * _FIELDS + _SLOT]
        return slot != 0 and slot != _UNMAPPED

    def forget(self, block: int) -> int:
        """Drop all that is known of a block's content (something is), as it is about to change."""
        if self.node[block * _FIELDS + _SLOT] != _UNMAPPED:
            self.unmap(block)
        self.node[block * _FIELDS + _SLOT] = 0
        parent = self.parent[block]
        if parent < 0:
            self.drop_root(parent)
        self.chain[block] = 0
        self.parent[block] = 0
        return 0

    def unmap(self, block: int) -> int:
        """Take a cached block out of the map; the next one of its list takes its position."""
        slot = self.node[block * _FIELDS + _SLOT]
        after = self.dup_next[block]
        if slot < 0:
            before = self.dup_prev[block]
            self.dup_next[before] = after
            if after != 0:
                self.dup_prev[after] = before
        elif after != 0:
            self.table[slot - 1] = after
            self.node[after * _FIELDS + _SLOT] = slot
            self.dup_prev[after] = 0
        else:
            self.close_gap(slot - 1)
        self.node[block * _FIELDS + _SLOT] = _UNMAPPED
        self.dup_next[block] = 0
        self.dup_prev[block] = 0
        self.num_cached -= 1
        return 0

    def close_gap(self, hole: int) -> int:
        """Empty one table position, moving later entries up so that every probe still ends."""
        i = hole
        while True:
            i = (i + 1) & self.mask
            block = self.table[i]
            if block == 0:
                break
            home = self.digest[block * _WORDS] & self.mask
            # It may move up unless its home lies between the hole and where it is.
            if ((i - home) & self.mask) >= ((i - hole) & self.mask):
                self.table[hole] = block
                self.node[block * _FIELDS + _SLOT] = hole + 1
                hole = i
        self.table[hole] = 0
        return 0

    def root_of(self, extra: bytes) -> int:
        """Number of a set of extra keys, made if there is none. Follow with _insert."""
        root = self.root_ids.get(extra, 0)
        if root == 0:
            root = self.next_root
            self.next_root -= 1
            self.root_ids[extra] = root
            self.root_keys[root] = extra
            self.root_count[root] = 0
        return root

    def drop_root(self, root: int) -> int:
        self.root_count[root] -= 1
        if self.root_count[root] == 0:
            del self.root_count[root]
            del self.root_ids[self.root_keys.pop(root)]
        return 0

    def digest_of(self, block: int) -> bytes:
        """The digest of a block whose content is known: 32 bytes."""
        words = np.asarray(self.digest[block * _WORDS : (block + 1) * _WORDS])
        return words.astype("<i8", copy=False).tobytes()

    # --- state, for debug.py and snapshot.py ----------------------------------------------------

    def arrays(self) -> dict[str, np.ndarray]:
        """Writable views of the arrays by name."""
        return {
            "chain": np.asarray(self.chain),
            "table": np.asarray(self.table),
            "slot": np.asarray(self.node)[SLOT::FIELDS],
            "dup_next": np.asarray(self.dup_next),
            "dup_prev": np.asarray(self.dup_prev),
            "parent": np.asarray(self.parent),
            "digest": np.asarray(self.digest).reshape(-1, _WORDS),
            "tokens": np.asarray(self.tokens).reshape(-1, _BLOCK),
        }

    def counters(self) -> dict[str, int]:
        """The numbers that a restored map must go on from."""
        return {
            "num_cached": self.num_cached,
            "next_chain": self.next_chain,
            "next_root": self.next_root,
        }

    def roots(self) -> dict[bytes, tuple[int, int]]:
        """Extra keys -> (root number, first blocks that refer to it)."""
        return {key: (root, self.root_count[root]) for key, root in self.root_ids.items()}

    def set_state(
        self, counters: dict[str, int], roots: dict[bytes, tuple[int, int]], heads: list[int]
    ) -> None:
        """Restore counters, roots and the table, from the blocks that head their lists.

        The other arrays are in place already, written through arrays(), slot but for the heads.
        """
        self.num_cached = counters["num_cached"]
        self.next_chain = counters["next_chain"]
        self.next_root = counters["next_root"]
        for key, (root, count) in roots.items():
            self.root_ids[key] = root
            self.root_keys[root] = key
            self.root_count[root] = count
        for head in heads:
            i = self.digest[head * _WORDS] & self.mask
            while self.table[i] != 0:
                i = (i + 1) & self.mask
            self.table[i] = head
            self.node[head * _FIELDS + _SLOT] = i + 1
