"""DecodePlan: which CTA works on which tokens of which request (the split-KV schedule).

A plan is made once a decode step and serves every layer. It is data only: the reference
(`reference/plan_decode.py`) and the device kernel (`cuda_src/plan_decode.cu`) fill the same
integers, and `mla_decode` and `mla_combine` read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .config import (
    BLOCK_N_CHOICES,
    INVARIANT_SPLIT_TOKENS,
    MAX_NUM_HEADS_Q,
    PLAN_OVERHEAD_BLOCKS,
    PLAN_REMAINDER_BLOCKS,
    TILE_M,
)
from .errors import ArgumentError

# Columns of DecodePlan.parts. A part covers requests begin_req..end_req (both included), from
# block begin_block of the first to block end_block (excluded) of the last; blocks are counted in
# units of block_n tokens. end_req < begin_req means no work. begin_split is the index of the first
# request's first split where splits follow the parts (no fixed cuts).
BEGIN_REQ, BEGIN_BLOCK, END_REQ, END_BLOCK, BEGIN_SPLIT = range(5)


@dataclass(frozen=True)
class PlanConfig:
    """The host-side numbers of a plan; together with cache_seqlens they fix every integer of it.

    num_sms: CTAs that run at once; num_splits: cut every request into at most this many splits of
    equal length (None: cut only where the work is balanced); split_tokens: cut every request at
    multiples of this many tokens (0: no such cuts).
    """

    num_heads_q: int
    seq_len_q: int
    block_n: int = 64
    num_sms: int = 132
    num_splits: int | None = None
    split_tokens: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_heads_q <= MAX_NUM_HEADS_Q:
            raise ArgumentError("num_heads_q", f"1..{MAX_NUM_HEADS_Q}", self.num_heads_q)
        if self.seq_len_q < 1:
            raise ArgumentError("seq_len_q", "at least 1", self.seq_len_q)
        if self.block_n not in BLOCK_N_CHOICES:
            raise ArgumentError("block_n", f"one of {BLOCK_N_CHOICES}", self.block_n)
        if self.num_sms < 1:
            raise ArgumentError("num_sms", "at least 1", self.num_sms)
        if self.num_splits is not None and self.num_splits < 1:
            raise ArgumentError("num_splits", "None or at least 1", self.num_splits)
        if self.split_tokens < 0 or self.split_tokens % max(BLOCK_N_CHOICES):
            raise ArgumentError(
                "split_tokens", f"0 or a multiple of {max(BLOCK_N_CHOICES)}", self.split_tokens
            )
        if self.num_splits is not None and self.split_tokens:
            raise ArgumentError("split_tokens", "0 where num_splits is given", self.split_tokens)

    @property
    def num_row_tiles(self) -> int:
        """CTAs that share a part: tiles of 64 query rows of a request."""
        return -(-self.num_heads_q * self.seq_len_q // TILE_M)

    @property
    def num_parts(self) -> int:
        """Parts of the schedule: the CTAs that run at once over the row tiles, at least one."""
        return max(self.num_sms // self.num_row_tiles, 1)

    @property
    def overhead_blocks(self) -> int:
        """Fixed cost of a request in a part, in blocks of block_n tokens."""
        return -(-PLAN_OVERHEAD_BLOCKS * 64 // self.block_n)

    @property
    def remainder_blocks(self) -> int:
        """The longest remainder of a request that a part takes beyond its payload, in blocks.

        To merge the rows of several tiles costs more than such a remainder (measured on an H200 at
        128 rows: 13 us of 345); those of one tile are merged for less.
        """
        return -(-PLAN_REMAINDER_BLOCKS * 64 // self.block_n) if self.num_row_tiles > 1 else 0

    @property
    def has_fixed_cuts(self) -> bool:
        return self.num_splits is not None or self.split_tokens > 0

    def num_blocks(self, seqlen: int) -> int:
        return -(-seqlen // self.block_n)

    def blocks_per_split(self, num_blocks: int) -> int:
        """Length of a split in blocks under fixed cuts (at least 1); num_blocks without cuts."""
        if self.num_splits is not None:
            return max(-(-num_blocks // self.num_splits), 1)
        if self.split_tokens:
            return self.split_tokens // self.block_n
        return max(num_blocks, 1)

    def max_total_splits(self, max_batch: int, max_seqlen: int) -> int:
        """Upper bound of num_splits[-1]: rows of o_accum that a workspace must hold."""
        if not self.has_fixed_cuts:
            return max_batch + self.num_parts
        blocks = self.num_blocks(max_seqlen)
        if self.num_splits is not None:
            # A shorter request can fall into more splits: 9 blocks in 8 splits are 5 of 2 blocks,
            # 8 blocks are 8 of 1.
            return max_batch * max(min(self.num_splits, blocks), 1)
        return max_batch * max(-(-blocks // self.blocks_per_split(blocks)), 1)


def plan_config(
    num_heads_q: int,
    seq_len_q: int,
    *,
    num_sms: int = 132,
    num_splits: int | None = None,
    batch_invariant: bool | int = False,
    block_n: int = 64,
) -> PlanConfig:
    """PlanConfig from the arguments of `plan_decode`.

    batch_invariant: True cuts every request at multiples of INVARIANT_SPLIT_TOKENS tokens, an int
    at multiples of that many, so that a row's bytes depend on nothing but its own request.
    """
    split_tokens = int(batch_invariant)
    if batch_invariant is True:
        split_tokens = INVARIANT_SPLIT_TOKENS
    unit = max(BLOCK_N_CHOICES)
    if split_tokens < 0 or split_tokens % unit:
        expected = f"False, True or a positive multiple of {unit} tokens"
        raise ArgumentError("batch_invariant", expected, batch_invariant)
    if num_splits is not None and split_tokens:
        raise ArgumentError("batch_invariant", "False where num_splits is given", batch_invariant)
    return PlanConfig(num_heads_q, seq_len_q, block_n, num_sms, num_splits, split_tokens)


@dataclass(frozen=True)
class DecodePlan:
    """The schedule of one decode step.

    parts: int32 [num_parts, 8], columns BEGIN_REQ.. above; num_splits: int32 [batch + 1],
    cumulative: request i owns the splits num_splits[i] .. num_splits[i + 1] - 1, and one split
    means that its output is final. Arrays are NumPy on the reference backend and device buffers
    on CUDA, where they may be larger than the batch. max_seqlen: no length of the step is above it
    (None: MAX_CACHE_SEQLEN); it bounds the workspace of plans with fixed cuts.
    """

    config: PlanConfig
    batch: int
    parts: Any
    num_splits: Any
    max_seqlen: int | None = None
    # What launches need of the buffers, found at the plan's first use (decode_launch.PlanOnDevice).
    on_device: Any = field(default=None, repr=False, compare=False)
