"""Stage merge_states: attention over two disjoint parts of the keys as attention over both.

Mirror: ``cuda_src/merge_states.cu``. For decode context parallelism, where each rank holds a part
of every request's tokens, and for a prefix that requests share. Steps, fp32 round to nearest:

    [M1] a side is empty where its lse is +inf or -inf (FlashMLA says +inf, FlashInfer -inf); both
         empty: out 0, lse +inf
    [M2] one empty: the other side's out and lse pass, unchanged
    [M3] top = max of both lse; w = exp2((lse - top) * log2 e) of each side
    [M4] total = w_a + w_b; weight = w * rcp(total) of each side
    [M5] o = weight_a * o_a + weight_b * o_b: two products, one sum, so that the sides may be
         swapped without changing a byte; held within the finite range of out's type
    [M6] lse = top + log2(total) * ln 2

An lse that is NaN is not empty: the row becomes NaN.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from snapmla_rt.config import LN2, LOG2E, check_lse_base
from snapmla_rt.errors import ArgumentError

from .mla_combine import BF16_MAX
from .numerics import bf16_from_f32, canonical_nan, exp2_mufu, log2_soft, rcp_rn

__all__ = ["merge_states"]

F32 = NDArray[np.float32]
_FLT_MAX = np.finfo(np.float32).max
_ONE = np.float32(1)


def merge_states(
    out_a: ArrayLike,
    lse_a: ArrayLike,
    out_b: ArrayLike,
    lse_b: ArrayLike,
    *,
    out_dtype: Any = None,
    lse_base: str = "e",
) -> tuple[NDArray[Any], F32]:
    """Merge two partial results.

    out_a, out_b: bf16 (or its bits as uint16) or float32 [b, s_q, h, d], the normalised outputs of
    attention over two disjoint sets of keys; lse_a, lse_b: float32 [b, h, s_q], their log-sum-exp.
    out_dtype: of the result; default: the type that both have, else float32. lse_base: "e" for
    natural logarithms (this package, FlashMLA), "2" for base 2 (FlashInfer); the result has the
    same. Returns out [b, s_q, h, d], lse float32 [b, h, s_q]. Raises ArgumentError.
    """
    check_lse_base(lse_base)
    values_a, kind_a = _values("out_a", out_a)
    values_b, kind_b = _values("out_b", out_b)
    if values_a.shape != values_b.shape:
        raise ArgumentError("out_b", f"shape {list(values_a.shape)} as out_a", list(values_b.shape))
    shape = (values_a.shape[0], values_a.shape[2], values_a.shape[1])
    lses = [_lse(name, x, shape) for name, x in (("lse_a", lse_a), ("lse_b", lse_b))]
    kind = np.dtype(out_dtype) if out_dtype is not None else kind_a
    if out_dtype is None and kind_a != kind_b:
        kind = np.dtype(np.float32)
    limit = np.float32(_FLT_MAX) if kind == np.float32 else BF16_MAX
    out, lse = _merge(values_a, lses[0], values_b, lses[1], limit, lse_base)
    if kind == np.float32:
        return out, lse
    return bf16_from_f32(out).view(ml_dtypes.bfloat16), lse


@np.errstate(all="ignore")
def _merge(
    out_a: F32, lse_a: F32, out_b: F32, lse_b: F32, limit: np.float32, lse_base: str
) -> tuple[F32, F32]:
    natural = lse_base == "e"
    to_log2 = np.float32(LOG2E) if natural else _ONE
    from_log2 = np.float32(LN2) if natural else _ONE
    empty_a, empty_b = np.isinf(lse_a), np.isinf(lse_b)  # [M1]
    top = np.fmax(lse_a, lse_b)  # [M3]
    w_a = exp2_mufu((lse_a - top) * to_log2)
    w_b = exp2_mufu((lse_b - top) * to_log2)
    total = w_a + w_b  # [M4]
    inverse = rcp_rn(total)
    weight_a, weight_b = _per_row(w_a * inverse), _per_row(w_b * inverse)
    total_out = weight_a * out_a + weight_b * out_b  # [M5]
    held = np.where(total_out > limit, limit, np.where(total_out < -limit, -limit, total_out))
    merged = canonical_nan(held.astype(np.float32))
    lse = canonical_nan(top + log2_soft(total) * from_log2)  # [M6]
    none_a, none_b = _per_row(empty_a), _per_row(empty_b)
    out = np.where(none_a, out_b, np.where(none_b, out_a, merged))  # [M2]
    lse = np.where(empty_a, lse_b, np.where(empty_b, lse_a, lse))
    out = np.where(none_a & none_b, np.float32(0), out)  # [M1]
    lse = np.where(empty_a & empty_b, np.float32(np.inf), lse)
    return out.astype(np.float32), lse.astype(np.float32)


def _per_row(x: NDArray[Any]) -> NDArray[Any]:
    """[b, h, s_q] as [b, s_q, h, 1]."""
    return x.transpose(0, 2, 1)[..., None]


def _values(name: str, x: ArrayLike) -> tuple[F32, np.dtype[Any]]:
    """The array as float32, exactly, and its type."""
    array = np.asarray(x)
    if array.ndim != 4:
        raise ArgumentError(name, "shape [b, s_q, h, d]", list(array.shape))
    if array.dtype in (np.uint16, ml_dtypes.bfloat16):
        # The bits moved up, as the kernel widens: a NaN that passes keeps its own.
        wide = array.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32), np.dtype(ml_dtypes.bfloat16)
    if array.dtype != np.float32:
        raise ArgumentError(name, "dtype bfloat16 or float32", array.dtype)
    return array, array.dtype


def _lse(name: str, x: ArrayLike, shape: tuple[int, ...]) -> F32:
    array = np.asarray(x)
    if array.dtype != np.float32 or array.shape != shape:
        expected = f"float32 {list(shape)} ([b, h, s_q])"
        raise ArgumentError(name, expected, f"{array.dtype} {list(array.shape)}")
    return array
