"""A pool's state as plain Python, and the invariants it must keep: for tests and for restore."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ..errors import SnapMLAError
from .prefix_map import BEHIND, UNKNOWN, UNMAPPED


def _queue(following: np.ndarray, limit: int) -> list[int]:
    order: list[int] = []
    block = int(following[0])
    while block != 0 and len(order) <= limit:
        order.append(block)
        block = int(following[block])
    return order


def pool_state(pool: Any) -> dict[str, Any]:
    """What the pool holds, as plain Python.

    ref_counts: list by block id; free_queue: ids, next victim first; hashed: block id ->
    (digest, token ids, parent chain id, chain id) of every cached block; hash_map: the map's
    lists of blocks with equal content, first one first; roots: extra keys -> (root, count);
    holders, last_holder: debug mode's owners, else empty.
    """
    arrays, content = pool._state_parts()
    known = content.arrays()
    slot, after = known["slot"], known["dup_next"]
    hashed = {}
    for block in np.flatnonzero((slot != UNKNOWN) & (slot != UNMAPPED)).tolist():
        hashed[block] = (
            known["digest"][block].astype("<i8").tobytes(),
            tuple(known["tokens"][block].tolist()),
            int(known["parent"][block]),
            int(known["chain"][block]),
        )
    lists = []
    for head in known["table"][np.flatnonzero(known["table"])].tolist():
        members = [head]
        while after[members[-1]] != 0 and len(members) <= pool.num_blocks:
            members.append(int(after[members[-1]]))
        lists.append(members)
    holders, last_holder = pool._debug_maps()
    return {
        "num_blocks": pool.num_blocks,
        "num_free": pool.num_free_blocks,
        "num_cached": pool.num_cached_blocks,
        "ref_counts": arrays["ref_count"].tolist(),
        "free_queue": _queue(arrays["next"], pool.num_blocks),
        "hashed": hashed,
        "hash_map": sorted(lists),
        "known": {b: int(known["chain"][b]) for b in np.flatnonzero(known["chain"]).tolist()},
        "roots": content.roots(),
        "holders": {block: list(owners) for block, owners in holders.items()},
        "last_holder": dict(last_holder),
    }


def request_state(state: Any) -> dict[str, Any]:
    """What a request holds, as plain Python."""
    return {
        "block_ids": state.block_ids().tolist(),
        "num_tokens": state.num_tokens,
        "num_committed": state.num_committed,
        "tail": state.tail_ids().tolist(),
        "extra": state.extra,
    }


def check_pool(pool: Any) -> None:
    """Raise SnapMLAError naming the first broken invariant of the pool, if any is broken."""
    arrays, content = pool._state_parts()
    state = pool_state(pool)
    refs = arrays["ref_count"]
    queue = state["free_queue"]
    _demand(len(queue) == len(set(queue)) == state["num_free"], "queue length equals num_free")
    _demand(0 not in queue and refs[0] == 0, "the null block is never free and never held")
    free = np.flatnonzero(refs == 0)[1:].tolist()
    _demand(sorted(queue) == free, "in the queue exactly when the count is 0")
    order = [0, *queue, 0]
    ends = all(
        arrays["next"][a] == b and arrays["prev"][b] == a for a, b in itertools.pairwise(order)
    )
    _demand(ends, "queue links agree both ways")
    _demand(bool(np.all(arrays["next"][refs > 0] == -1)), "held blocks are not linked")
    _check_map(state, content)


def _check_map(state: dict[str, Any], content: Any) -> None:
    known = content.arrays()
    members = [block for blocks in state["hash_map"] for block in blocks]
    _demand(sorted(members) == sorted(state["hashed"]), "map and blocks agree both ways")
    _demand(len(members) == state["num_cached"], "num_cached counts the map")
    for blocks in state["hash_map"]:
        entries = {state["hashed"][block] for block in blocks}
        _demand(len(entries) == 1, "blocks of one list have equal content")
        position = int(known["slot"][blocks[0]]) - 1
        _demand(position >= 0 and known["table"][position] == blocks[0], "head and table agree")
        _demand(all(known["slot"][block] == BEHIND for block in blocks[1:]), "others are behind it")
        home = int(known["digest"][blocks[0]][0]) & (len(known["table"]) - 1)
        while home != position:
            _demand(known["table"][home] != 0, "every entry is reachable from its home")
            home = (home + 1) & (len(known["table"]) - 1)
    chains = [state["hashed"][blocks[0]][3] for blocks in state["hash_map"]]
    _demand(len(chains) == len(set(chains)) and 0 not in chains, "one chain id a content")
    _demand(bool(np.all((known["slot"] != 0) == (known["chain"] != 0))), "slot and chain agree")
    for block in state["free_queue"]:
        _demand((block in state["known"]) == (block in state["hashed"]), "free and known: cached")
    counts: dict[int, int] = {}
    for block in state["known"]:
        parent = int(known["parent"][block])
        if parent < 0:
            counts[parent] = counts.get(parent, 0) + 1
    kept = dict(state["roots"].values())
    _demand(counts == kept, "each root counts its first blocks")


def check_manager(manager: Any) -> None:
    """check_pool, and: every block's count equals the requests that hold it."""
    check_pool(manager.pool)
    state = manager.debug_state()
    counts = [0] * state["num_blocks"]
    for request in state["requests"].values():
        for block in request["block_ids"]:
            counts[block] += 1
    _demand(counts == state["ref_counts"], "counts equal holders")


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise SnapMLAError(f"the block pool breaks an invariant: {what}")
