"""What the cache manager's calls return."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class PrefixHit(NamedTuple):
    """What get_computed_blocks found. Pass it to allocate_slots, which checks that it still holds.

    block_ids int32 [n]: the cached blocks; num_tokens: n * 64, less than the sequence's length;
    chain_ids int64 [n]: what each block held when it was found; the rest is for the manager.
    """

    block_ids: np.ndarray
    num_tokens: int
    chain_ids: np.ndarray
    extra: bytes
    digest: bytes
    pool: Any


class SlotAllocation(NamedTuple):
    """block_ids int32 [n]: blocks the request gained; copies int32 [m, 2]: (source, target)
    blocks to copy on the device before the request's next write."""

    block_ids: np.ndarray
    copies: np.ndarray


class StepAllocation(NamedTuple):
    """slot_mapping int64 [tokens]: a view of the table's `slots`, row after row; copies int32
    [m, 2] as in SlotAllocation. The table's arrays are up to date."""

    slot_mapping: np.ndarray
    copies: np.ndarray


NO_COPIES = np.empty((0, 2), dtype=np.int32)
NO_COPIES.flags.writeable = False
NO_BLOCKS = np.empty(0, dtype=np.int32)
NO_BLOCKS.flags.writeable = False


def copy_array(pairs: list[int]) -> np.ndarray:
    return np.array(pairs, dtype=np.int32).reshape(-1, 2) if pairs else NO_COPIES
