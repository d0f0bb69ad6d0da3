"""The one quantisation rule of the project: a row of 512 latent and 64 RoPE values and its scale.

Mirror: ``cuda_src/common/quantize.cuh``. ``quantize_q`` applies it to every query token and head,
``append_kv`` to every token that enters the cache. Steps, all fp32 round to nearest even:

    [Q1] amax = max|latent|, rmax = max|rope|; any NaN or infinity among the 576 values marks the
         row: scale NaN (0x7fffffff), every code 0x7f, every RoPE value 0x7fff
    [Q2] scale = max(amax / 448, 2^-96, rmax * 2^-60); "pow2": rounded up to a power of two
    [Q3] code  = e4m3(latent / scale), correctly rounded quotient, then nearest even, saturating
    [Q4] rope' = bf16(rope / scale), correctly rounded quotient, then nearest even

Why the two floors of [Q2]: 2^-96 keeps 1 / scale, which weighs the row sum of the decode kernel,
far from overflow; rmax * 2^-60 keeps the pre-scaled RoPE below 2^60 where the latent is tiny or
zero. So no finite input gives NaN or infinity, and an all-zero latent attends by its RoPE alone.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from snapmla_rt.config import (
    FP8_MAX,
    KV_LORA_RANK,
    QK_ROPE_HEAD_DIM,
    ROPE_GUARD,
    SCALE_MIN,
    check_scale_rounding,
)
from snapmla_rt.errors import ArgumentError

from .numerics import BF16_NAN, E4M3_NAN, F32, NAN_BITS, bf16_from_f32, e4m3_from_f32, from_bits

__all__ = ["Quantized", "f32_input", "next_power_of_two", "quantize_rows", "row_scale"]

_ABS = np.uint32(0x7FFFFFFF)
_INF_BITS = np.uint32(0x7F800000)
# Rows handled at once: 128 x 576 float32 stay in the second-level cache.
_ROWS = 128

Quantized = tuple[NDArray[np.uint8], NDArray[np.uint16], F32]


def f32_input(name: str, x: ArrayLike, *tail: int) -> F32:
    """A bf16, float16 or float32 array [..., *tail] converted exactly to float32.

    uint16 is taken as bf16 bits. Other dtypes and other trailing sizes raise ArgumentError.
    """
    array = np.asarray(x)
    if array.ndim < len(tail) or array.shape[array.ndim - len(tail) :] != tail:
        raise ArgumentError(name, f"shape [..., {', '.join(map(str, tail))}]", list(array.shape))
    if array.dtype == np.uint16:
        array = array.view(ml_dtypes.bfloat16)
    if array.dtype not in (np.float32, np.float16, ml_dtypes.bfloat16):
        raise ArgumentError(name, "dtype bfloat16, float16 or float32", array.dtype)
    return array.astype(np.float32, copy=False)


def _max_abs_bits(x: F32) -> NDArray[np.uint32]:
    """Largest |x| of each row as float32 bits: the order of the bits is the order of magnitudes,
    with infinity above every finite value and NaN above infinity."""
    bits: NDArray[np.uint32] = (np.ascontiguousarray(x).view(np.uint32) & _ABS).max(axis=-1)
    return bits


def next_power_of_two(x: F32) -> F32:
    """The smallest power of two that is not below the positive normal float32 `x`."""
    bits = x.view(np.uint32)
    up = (bits + np.uint32(0x007FFFFF)) & np.uint32(0xFF800000)
    return from_bits(up)


def row_scale(amax: F32, rmax: F32, scale_rounding: str) -> F32:
    """[Q2] the scale of rows whose largest magnitudes are `amax` (latent) and `rmax` (RoPE)."""
    scale = np.maximum(amax / np.float32(FP8_MAX), np.float32(SCALE_MIN))
    scale = np.maximum(scale, rmax * np.float32(ROPE_GUARD))
    return next_power_of_two(scale) if scale_rounding == "pow2" else scale


@np.errstate(all="ignore")
def _quantize_block(latent: F32, rope: F32, scale_rounding: str) -> Quantized:
    """The rule on a few rows: latent [n, 512], rope [n, 64]."""
    amax_bits, rmax_bits = _max_abs_bits(latent), _max_abs_bits(rope)  # [Q1]
    hostile = np.maximum(amax_bits, rmax_bits) >= _INF_BITS
    scale = row_scale(from_bits(amax_bits), from_bits(rmax_bits), scale_rounding)  # [Q2]
    codes = e4m3_from_f32(latent / scale[:, None])  # [Q3]
    rope_bits = bf16_from_f32(rope / scale[:, None])  # [Q4]
    if hostile.any():
        scale = np.where(hostile, from_bits(NAN_BITS), scale)
        codes[hostile] = E4M3_NAN
        rope_bits[hostile] = BF16_NAN
    return codes, rope_bits, scale


def quantize_rows(latent: F32, rope: F32, *, scale_rounding: str = "exact") -> Quantized:
    """Quantise rows: latent float32 [n, 512], rope float32 [n, 64].

    Returns e4m3 codes uint8 [n, 512], bf16 bits uint16 [n, 64], scales float32 [n].
    """
    check_scale_rounding(scale_rounding)
    num_rows = latent.shape[0]
    codes = np.empty((num_rows, KV_LORA_RANK), np.uint8)
    rope_bits = np.empty((num_rows, QK_ROPE_HEAD_DIM), np.uint16)
    scale = np.empty(num_rows, np.float32)
    for start in range(0, num_rows, _ROWS):
        rows = slice(start, start + _ROWS)
        block: Any = _quantize_block(latent[rows], rope[rows], scale_rounding)
        codes[rows], rope_bits[rows], scale[rows] = block
    return codes, rope_bits, scale
