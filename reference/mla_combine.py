"""mla_combine: merge the splits of a request (mirror of cuda_src/mla_combine.cu).

Per query row, over its splits in ascending order, fp32 and round to nearest throughout:
[C1] top = max of lse2 (NaN does not win); all splits empty: out 0, lse +inf.
[C2] w_s = exp2(lse2_s - top), total = sum of w_s from +0.
[C3] a_s = w_s * rcp(total); acc = fma(a_s, o_s, acc) from +0: weights at most 1, so no overflow.
[C4] out = bf16(hold(acc)); lse = (top + log2(total)) * ln 2, a natural logarithm.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from snapmla_rt.config import KV_LORA_RANK, LN2
from snapmla_rt.errors import ArgumentError

from .numerics import bf16_from_f32, canonical_nan, exp2_mufu, fma, log2_soft, rcp_rn

# Largest finite bf16: outputs are held within it, so that no finite input yields inf.
BF16_MAX = np.uint32(0x7F7F0000).view(np.float32)


def hold(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """x within the finite bf16 range, NaN kept."""
    return np.where(x > BF16_MAX, BF16_MAX, np.where(x < -BF16_MAX, -BF16_MAX, x))


def natural_lse(lse2: NDArray[np.float32]) -> NDArray[np.float32]:
    """lse in nats from log2 units; a row that saw no key (-inf) becomes +inf."""
    lse = np.where(np.isneginf(lse2), np.float32(np.inf), lse2 * np.float32(LN2))
    return canonical_nan(lse.astype(np.float32))


def mla_combine(
    o_accum: NDArray[np.float32], lse_accum: NDArray[np.float32]
) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
    """Merge splits: o_accum f32 [splits, rows, 512], lse_accum f32 [splits, rows] (log2 units,
    -inf where a split shows the row no key) -> out bf16 bits [rows, 512], lse f32 [rows] (nats).
    Raises ArgumentError for other arrays.
    """
    _check(np.asarray(o_accum), np.asarray(lse_accum))
    with np.errstate(all="ignore"):
        top = np.fmax.reduce(lse_accum, axis=0)  # [C1]
        empty = np.asarray(np.isneginf(lse_accum).all(axis=0))
        weights = exp2_mufu(lse_accum - np.where(empty, np.float32(0), top))  # [C2]
        total = np.zeros_like(top)
        for weight in weights:
            total = total + weight
        inverse = rcp_rn(total)
        acc = np.zeros(o_accum.shape[1:], np.float32)
        for weight, o_split in zip(weights, o_accum, strict=True):  # [C3]
            acc = fma((weight * inverse)[:, None], o_split, acc)
        acc = np.where(empty[:, None], np.float32(0), acc)
        lse2 = np.where(empty, np.float32(-np.inf), top + log2_soft(total))
        return bf16_from_f32(hold(acc)), natural_lse(lse2)  # [C4]


def _check(o_accum: NDArray[np.float32], lse_accum: NDArray[np.float32]) -> None:
    if lse_accum.dtype != np.float32 or lse_accum.ndim != 2 or not len(lse_accum):
        got = f"{lse_accum.dtype} {list(lse_accum.shape)}"
        raise ArgumentError("lse_accum", "float32 [splits, rows], at least one split", got)
    shape = (*lse_accum.shape, KV_LORA_RANK)
    if o_accum.dtype != np.float32 or o_accum.shape != shape:
        got = f"{o_accum.dtype} {list(o_accum.shape)}"
        raise ArgumentError("o_accum", f"float32 {list(shape)}", got)
