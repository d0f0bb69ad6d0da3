"""Which compiled variant of mla_decode serves which shape, and the grids: the one place of choice.

A variant is chosen by the query rows of a request (num_heads_q x seq_len_q) and by the plan's
block_n. Its choice changes no byte of the result: all variants of a block_n compute the same.
"""

from __future__ import annotations

from .decode_kernels import COMBINE_CTAS_PER_SM, DECODE_ROWS, decode_variant_name
from .errors import ArgumentError

# block_n -> rows of a tile that variants compute, ascending; the last one serves everything above.
ROWS_BY_BLOCK_N: dict[int, tuple[int, ...]] = {64: DECODE_ROWS}

COMBINE_ITEMS_PER_ROW = 4  # at most: 128 dims each


def decode_rows(num_rows: int, block_n: int) -> int:
    """Query rows that the chosen variant computes for requests of num_rows rows.

    Raises ArgumentError where no kernel has this block_n.
    """
    choices = ROWS_BY_BLOCK_N.get(block_n)
    if choices is None:
        expected = f"one of {sorted(ROWS_BY_BLOCK_N)} on a GPU (block_n of plan_decode)"
        raise ArgumentError("plan", expected, f"block_n {block_n}")
    return next((rows for rows in choices if num_rows <= rows), choices[-1])


def decode_variant(num_rows: int, block_n: int, *, debug: bool = False, trace: bool = False) -> str:
    """Name of the mla_decode variant for requests of num_rows query rows."""
    return decode_variant_name(decode_rows(num_rows, block_n), debug=debug, trace=trace)


def combine_ctas(num_sms: int, batch: int, num_rows: int) -> int:
    """CTAs of mla_combine: one an item, at most what the GPU holds at once."""
    return min(num_sms * COMBINE_CTAS_PER_SM, batch * num_rows * COMBINE_ITEMS_PER_ROW)
