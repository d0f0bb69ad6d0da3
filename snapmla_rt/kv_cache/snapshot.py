"""The manager's state as bytes, and back: magic, length, JSON header, arrays, SHA-256.

Free of pickle, so reading foreign bytes runs nothing; checked by digest, then by the pool's own
invariants. Only what is there is written: the free queue, the counts above 0, the content of
blocks that have any. The hash table's positions are not state: they are made anew.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from ..config import BLOCK_SIZE
from ..errors import ArgumentError, SnapMLAError
from .block_hash import DIGEST_WORDS
from .debug import check_manager, pool_state
from .prefix_map import BEHIND, UNMAPPED
from .request_blocks import RequestBlocks

_MAGIC = b"SNAPMLA-KV-1\n\0\0\0"
_DIGEST_BYTES = 32
# name -> (little-endian type, shape after the first axis)
_ARRAYS: dict[str, tuple[str, tuple[int, ...]]] = {
    "queue": ("<i4", ()),
    "held": ("<i4", ()),
    "held_count": ("<i4", ()),
    "known": ("<i4", ()),
    "chain": ("<i8", ()),
    "parent": ("<i8", ()),
    "digest": ("<i8", (DIGEST_WORDS,)),
    "tokens": ("<i4", (BLOCK_SIZE,)),
    "list_sizes": ("<i4", ()),
    "list_members": ("<i4", ()),
    "request_blocks": ("<i4", ()),
    "request_tails": ("<i4", ()),
}


def dump(pool: Any, requests: dict[Any, RequestBlocks]) -> bytes:
    """The state of a pool and its requests; the caller holds the lock."""
    arrays, content = pool._state_parts()
    known = content.arrays()
    state = pool_state(pool)
    ids = np.flatnonzero(known["chain"])
    held = np.flatnonzero(arrays["ref_count"])
    full = {name: known[name][ids] for name in ("chain",)}
    for name in ("parent", "digest", "tokens"):
        full[name] = known[name][ids] if len(ids) else known[name][:0]
    lists = state["hash_map"]
    states = list(requests.values())
    none = [np.empty(0, dtype=np.int32)]
    data = {
        "queue": np.array(state["free_queue"], dtype=np.int32),
        "held": held,
        "held_count": arrays["ref_count"][held],
        "known": ids,
        **full,
        "list_sizes": np.array([len(blocks) for blocks in lists], dtype=np.int32),
        "list_members": np.array([b for blocks in lists for b in blocks], dtype=np.int32),
        "request_blocks": np.concatenate([s.block_ids() for s in states] or none),
        "request_tails": np.concatenate([s.tail_ids() for s in states] or none),
    }
    header = {
        "block_size": BLOCK_SIZE,
        "num_blocks": pool.num_blocks,
        "enable_caching": bool(pool.enable_caching),
        "counters": content.counters(),
        "roots": [[key.hex(), root, count] for key, (root, count) in content.roots().items()],
        "requests": [_request_header(s, pool.enable_caching) for s in states],
        "lengths": {name: len(data[name]) for name in _ARRAYS},
    }
    text = json.dumps(header, sort_keys=True).encode()
    parts = [_MAGIC, len(text).to_bytes(8, "little"), text]
    parts += [data[name].astype(kind).tobytes() for name, (kind, _) in _ARRAYS.items()]
    body = b"".join(parts)
    return body + hashlib.sha256(body).digest()


def _request_header(state: RequestBlocks, caching: bool) -> dict[str, Any]:
    return {
        "request": state.request,
        "extra": state.extra.hex(),
        "digest": state.digest_hex() if caching else "",
        "num_blocks": state.num_blocks,
        "num_tokens": state.num_tokens,
        "num_committed": state.num_committed,
    }


def _parse(data: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Header and arrays of bytes whose digest is right; else ArgumentError."""
    expected = "the bytes of a snapshot of this version"
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise ArgumentError("data", expected, type(data).__name__)
    raw = bytes(data)
    start = len(_MAGIC) + 8
    if not raw.startswith(_MAGIC) or len(raw) < start + _DIGEST_BYTES:
        raise ArgumentError("data", expected, f"{len(raw)} other bytes")
    body, digest = raw[:-_DIGEST_BYTES], raw[-_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        raise ArgumentError("data", expected, "a damaged or cut snapshot")
    length = int.from_bytes(body[len(_MAGIC) : start], "little")
    header = json.loads(body[start : start + length])
    if header["block_size"] != BLOCK_SIZE:
        raise ArgumentError("data", f"blocks of {BLOCK_SIZE} tokens", header["block_size"])
    at = start + length
    arrays = {}
    for name, (kind, shape) in _ARRAYS.items():
        count = header["lengths"][name] * int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(body, dtype=kind, count=count, offset=at)
        arrays[name] = array.reshape(-1, *shape)
        at += array.nbytes
    return header, arrays


def load(cls: Any, data: Any, debug: bool | None, storage: Any) -> Any:
    """A manager of class `cls` in the state that dump wrote."""
    header, arrays = _parse(data)
    manager = cls(
        header["num_blocks"],
        enable_caching=header["enable_caching"],
        debug=debug,
    )
    _fill_pool(manager.pool, header, arrays)
    states = []
    blocks_at = tails_at = 0
    for entry in header["requests"]:
        n, tail = entry["num_blocks"], entry["num_committed"] % BLOCK_SIZE
        state = RequestBlocks(
            entry["request"], bytes.fromhex(entry["extra"]), bytes.fromhex(entry["digest"]), n
        )
        state.load(
            arrays["request_blocks"][blocks_at : blocks_at + n],
            arrays["request_tails"][tails_at : tails_at + tail],
            entry["num_tokens"],
            entry["num_committed"],
        )
        blocks_at += n
        tails_at += tail
        states.append(state)
        if manager.pool.debug:
            for block in state.block_ids().tolist():
                manager.pool._debug_maps()[0].setdefault(block, []).append(state.request)
    manager._adopt(states)
    try:
        check_manager(manager)
    except SnapMLAError as error:
        raise ArgumentError("data", "a consistent snapshot", str(error)) from None
    if storage is not None:
        manager.pool._attach(storage)  # last: it poisons what is free and not cached
    return manager


def _fill_pool(pool: Any, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    queue_arrays, content = pool._state_parts()
    known = content.arrays()
    queue_arrays["ref_count"][arrays["held"]] = arrays["held_count"]
    queue_arrays["next"][:] = -1
    order = np.concatenate([[0], arrays["queue"], [0]]).astype(np.int32)
    queue_arrays["next"][order[:-1]] = order[1:]
    queue_arrays["prev"][order[1:]] = order[:-1]
    pool._set_num_free(len(arrays["queue"]))
    ids = arrays["known"]
    known["chain"][ids] = arrays["chain"]
    known["slot"][ids] = UNMAPPED
    if len(ids):
        for name in ("parent", "digest", "tokens"):
            known[name][ids] = arrays[name]
    heads = []
    at = 0
    for size in arrays["list_sizes"].tolist():
        members = arrays["list_members"][at : at + size]
        at += size
        heads.append(int(members[0]))
        known["slot"][members] = BEHIND
        known["dup_next"][members[:-1]] = members[1:]
        known["dup_prev"][members[1:]] = members[:-1]
    roots = {bytes.fromhex(key): (root, count) for key, root, count in header["roots"]}
    content.set_state(header["counters"], roots, heads)
