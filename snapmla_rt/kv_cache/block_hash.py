"""Chained hash of full cache blocks: the key of the prefix cache.

    digest[-1] = SHA-256(domain || extra keys)
    digest[i]  = SHA-256(digest[i-1] || the block's 64 token ids as little-endian int32)

The extra keys (adapter, salt, tenant: whatever makes equal tokens give other values) enter at the
root and so change every digest of the chain. SHA-256 from the standard library: the same in every
process, on every machine, and as fast here as BLAKE2b, because OpenSSL uses the CPU's own
instructions. The digest only finds a candidate; the pool then compares tokens and parent.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Any

import numpy as np

from ..config import BLOCK_SIZE
from ..errors import ArgumentError

DIGEST_BYTES = 32
DIGEST_WORDS = 4  # the digest as int64 words, the form in which the pool keeps it
BLOCK_TOKEN_BYTES = BLOCK_SIZE * 4
_DOMAIN = b"snapmla_rt prefix cache v1\0"


def encode_extra_keys(extra_keys: Iterable[Any]) -> bytes:
    """The keys as bytes, injectively: a type letter, the length, the value for each.

    extra_keys: a tuple or list of str, int, bytes or None, in an order that matters.
    Raises ArgumentError for other types (their equality would not survive a change of process).
    """
    if isinstance(extra_keys, (str, bytes)) or not isinstance(extra_keys, Iterable):
        raise ArgumentError("extra_keys", "a tuple of str, int, bytes or None", repr(extra_keys))
    parts: list[bytes] = []
    for key in extra_keys:
        kind = type(key)
        if key is None:
            tag, value = b"n", b""
        elif kind is str:
            tag, value = b"s", key.encode("utf-8", "surrogatepass")
        elif kind is int:
            tag, value = b"i", str(key).encode()
        elif kind is bytes:
            tag, value = b"b", key
        else:
            raise ArgumentError("extra_keys", "str, int, bytes or None as each key", repr(key))
        parts.append(tag + len(value).to_bytes(8, "little") + value)
    return b"".join(parts)


def root_digest(extra: bytes) -> bytes:
    """Parent digest of a sequence's first block; `extra` comes from encode_extra_keys."""
    return sha256(_DOMAIN + extra).digest()


def hash_block(parent_digest: bytes, token_bytes: bytes) -> bytes:
    """Digest of one block: 32 bytes. token_bytes: 64 little-endian int32, 256 bytes."""
    return sha256(parent_digest + token_bytes).digest()


def hash_blocks(parent_digest: bytes, token_bytes: bytes, first: int, count: int) -> list[bytes]:
    """Digests of blocks first..first+count-1 of a sequence given as bytes (256 a block)."""
    digests: list[bytes] = []
    for at in range(
        first * BLOCK_TOKEN_BYTES, (first + count) * BLOCK_TOKEN_BYTES, BLOCK_TOKEN_BYTES
    ):
        parent_digest = hash_block(parent_digest, token_bytes[at : at + BLOCK_TOKEN_BYTES])
        digests.append(parent_digest)
    return digests


def hash_sequence(token_ids: Any, extra_keys: Iterable[Any] = ()) -> list[bytes]:
    """Digests of every full block of a token sequence, in order; a partial tail has none."""
    from .checks import token_array

    tokens = token_array("token_ids", token_ids)
    root = root_digest(encode_extra_keys(extra_keys))
    return hash_blocks(root, token_bytes(tokens), 0, len(tokens) // BLOCK_SIZE)


def token_bytes(tokens: np.ndarray) -> bytes:
    """int32 token ids as little-endian bytes, on any machine."""
    return tokens.astype("<i4", copy=False).tobytes()


def digest_words(digests: bytes) -> np.ndarray:
    """One or more digests end to end as native int64 words, 4 each."""
    return np.frombuffer(digests, dtype="<i8").astype(np.int64, copy=False)
