"""plan_decode: the split-KV schedule of a decode step (mirror of cuda_src/plan_decode.cu).

[L1] blocks_i = ceil(cache_seqlens[i] / block_n); a request costs blocks_i + F, also when empty.
[L2] Without fixed cuts, parts are filled in order, each up to payload = ceil(total / parts) + F:
     a request that fits is taken whole, else the part takes what is left of its payload less F,
     and the next part goes on there. The slack of F keeps equal requests whole. Where the part
     would leave at most remainder_blocks of a request that it takes some of, it takes these as
     well: with more rows than one tile, merging costs more.
[L3] With fixed cuts (batch-invariant or a given number of splits) a request falls into splits of
     blocks_per_split blocks; split j, whose cost starts at x of the total, belongs to part
     floor((2 x + cost) * parts / (2 total)): contiguous, balanced, and no split is cut.
[L4] num_splits is cumulative; num_splits[i + 1] - num_splits[i] >= 1 for every request.

All integers; the CUDA kernel does the same with one warp.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from snapmla_rt.config import MAX_CACHE_SEQLEN, PLAN_FIELDS
from snapmla_rt.errors import ArgumentError
from snapmla_rt.plan import (
    BEGIN_BLOCK,
    BEGIN_REQ,
    BEGIN_SPLIT,
    END_BLOCK,
    END_REQ,
    DecodePlan,
    PlanConfig,
    plan_config,
)


def plan_decode(
    cache_seqlens: ArrayLike,
    num_heads_q: int,
    seq_len_q: int,
    *,
    num_sms: int = 132,
    num_splits: int | None = None,
    batch_invariant: bool | int = False,
    block_n: int = 64,
) -> DecodePlan:
    """Schedule one decode step.

    cache_seqlens: int [batch], tokens of each request, the seq_len_q new ones included; 0 allowed.
    num_heads_q 1..128, seq_len_q >= 1; num_sms: CTAs that run at once (132 on an H200);
    num_splits: None, or the number of equal splits of every request; batch_invariant: cut at fixed
    token positions (see `snapmla_rt.plan.plan_config`); block_n: 64 or 128 tokens.
    Raises ArgumentError for anything else.
    """
    config = plan_config(
        num_heads_q,
        seq_len_q,
        num_sms=num_sms,
        num_splits=num_splits,
        batch_invariant=batch_invariant,
        block_n=block_n,
    )
    seqlens = check_seqlens(cache_seqlens)
    blocks = [config.num_blocks(int(n)) for n in seqlens]  # [L1]
    fill = _fill_fixed_cuts if config.has_fixed_cuts else _fill_balanced
    parts, counts = fill(config, blocks)
    cumulative = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)  # [L4]
    return DecodePlan(config, len(blocks), parts, cumulative)


def check_seqlens(cache_seqlens: ArrayLike, batch: int | None = None) -> NDArray[np.int32]:
    """cache_seqlens as int32 [batch] within 0..2^20, or ArgumentError."""
    array = np.asarray(cache_seqlens)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ArgumentError(
            "cache_seqlens", "an integer array [batch]", f"{array.dtype} {list(array.shape)}"
        )
    if batch is not None and len(array) != batch:
        raise ArgumentError("cache_seqlens", f"[{batch}] (one a request)", list(array.shape))
    if array.size and (array.min() < 0 or array.max() > MAX_CACHE_SEQLEN):
        worst = array.min() if array.min() < 0 else array.max()
        raise ArgumentError("cache_seqlens", f"values in 0..{MAX_CACHE_SEQLEN}", int(worst))
    return array.astype(np.int32)


def _fill_balanced(config: PlanConfig, blocks: list[int]) -> tuple[NDArray[np.int32], list[int]]:
    """[L2] parts filled in order up to the payload, requests cut where a part is full."""
    overhead = config.overhead_blocks
    parts = np.zeros((config.num_parts, PLAN_FIELDS), np.int32)
    counts = [0] * len(blocks)
    total = sum(blocks) + overhead * len(blocks)
    payload = -(-total // config.num_parts) + overhead
    req, block, split = 0, 0, 0
    for part in parts:
        part[BEGIN_REQ], part[BEGIN_BLOCK], part[BEGIN_SPLIT] = req, block, split
        part[END_REQ], part[END_BLOCK] = req - 1, 0
        room = payload
        while req < len(blocks):
            left = blocks[req] - block
            beyond = config.remainder_blocks if room > overhead else 0
            whole = room + beyond >= left + overhead
            taken = left if whole else room - overhead
            if taken < left and taken <= 0:
                break
            part[END_REQ], part[END_BLOCK] = req, block + taken
            counts[req] = split + 1
            room -= taken + overhead
            if taken < left:
                block, split = block + taken, split + 1
                break
            req, block, split = req + 1, 0, 0
    assert req == len(blocks), "the payload holds every request"
    return parts, counts


def _fill_fixed_cuts(config: PlanConfig, blocks: list[int]) -> tuple[NDArray[np.int32], list[int]]:
    """[L3] whole splits dealt to parts by the middle of their cost."""
    overhead, num_parts = config.overhead_blocks, config.num_parts
    parts = np.zeros((num_parts, PLAN_FIELDS), np.int32)
    parts[:, BEGIN_REQ], parts[:, END_REQ] = 0, -1
    counts = [max(-(-n // config.blocks_per_split(n)), 1) for n in blocks]
    total = sum(blocks) + overhead * sum(counts)
    start = 0
    for req, num_blocks in enumerate(blocks):
        length = config.blocks_per_split(num_blocks)
        for split in range(counts[req]):
            begin, end = split * length, min((split + 1) * length, num_blocks)
            cost = end - begin + overhead
            part = parts[(2 * start + cost) * num_parts // (2 * total)]
            if part[END_REQ] < part[BEGIN_REQ]:
                part[BEGIN_REQ], part[BEGIN_BLOCK], part[BEGIN_SPLIT] = req, begin, split
            part[END_REQ], part[END_BLOCK] = req, end
            start += cost
    return parts, counts
