"""Which compiled variant of mla_decode serves which shape, and the grids: the one place of choice.

A variant is chosen by the query rows of a request (num_heads_q x seq_len_q) and by the plan's
block_n. The choice changes no byte of the result: all variants of a block_n compute the same.
"""

from __future__ import annotations

from .decode_kernels import COMBINE_CTAS_PER_SM, DECODE_SMEM, decode_variant_name
from .errors import ArgumentError

COMBINE_CTAS_PER_ROW = 8  # at most: two warps' items of 32 dims each

# block_n -> query rows of a tile that a variant computes
VARIANTS = {n: [rows for rows, block_n in DECODE_SMEM if block_n == n] for _, n in DECODE_SMEM}


def decode_variant(num_rows: int, block_n: int, *, debug: bool = False, trace: bool = False) -> str:
    """Name of the mla_decode variant for requests of num_rows query rows: the narrowest that holds
    them, else the widest, which takes them tile by tile.

    Raises ArgumentError where no kernel has this block_n.
    """
    choices = VARIANTS.get(block_n)
    if choices is None:
        expected = f"block_n of {sorted(VARIANTS)} on a GPU"
        raise ArgumentError("plan", expected, f"block_n {block_n}")
    rows = min((r for r in choices if num_rows <= r), default=max(choices))
    return decode_variant_name(rows, block_n, debug=debug or trace, trace=trace)


def combine_ctas(num_sms: int, batch: int, num_rows: int) -> int:
    """CTAs of mla_combine: as many as the most splits can use, at most what the GPU holds at once.

    How many splits a request has is decided on the GPU; few splits leave CTAs without work.
    """
    return min(num_sms * COMBINE_CTAS_PER_SM, batch * num_rows * COMBINE_CTAS_PER_ROW)
