"""A decode step's preparation: append_kv of the new tokens and quantize_q of their queries.

Mirror: ``cuda_src/prepare.cu``, which does both in one launch. The two do not depend on each other.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import ArrayLike

from .append_kv import append_kv
from .quantize_q import QuantizedQuery, quantize_q

__all__ = ["prepare"]


def prepare(
    q: ArrayLike,
    kv_c: ArrayLike,
    k_pe: ArrayLike,
    ckv_cache: Any,
    k_scale_cache: Any,
    k_rope_cache: Any,
    slot_mapping: ArrayLike,
    *,
    scale_rounding: str = "exact",
) -> QuantizedQuery:
    """append_kv(kv_c, k_pe, caches, slot_mapping), then quantize_q(q); returns the latter's result.

    Arguments and errors as in those two; q is checked first, so a bad q leaves the cache alone.
    """
    query = quantize_q(q, scale_rounding=scale_rounding)
    append_kv(
        kv_c,
        k_pe,
        ckv_cache,
        k_scale_cache,
        k_rope_cache,
        slot_mapping,
        scale_rounding=scale_rounding,
    )
    return query
