"""The KV cache quantisers of the paper's Table 3, DeepSeek-V3.2's and ours, through one attention.

    name          latent (512 values a token)              RoPE (64 values a token)
    snapmla       per token: the rule of quantize.py       kept: bf16, divided by the latent's scale
    snapmla_pow2  the same, scale a power of two           the same, nothing lost by the division
    A             per token, one scale for all 576         e4m3 with that scale
    A_split       per token                                e4m3 with a scale of its own
    B             per tensor, static scale 1.0             kept: bf16
    C             per tensor, dynamic                      kept: bf16
    D             blocks of 64 tokens x 64 channels        kept: bf16
    D_1x128       1 token x 128 channels (V3.2's cache)    kept: bf16

Table 3 says of A only that both parts are quantised per token. One scale for the whole token is the
quantiser that does not know of RoPE ("RoPE-unaware"); A_split is the kinder reading. Scales are
amax / 448 in float32, at least 2^-96; codes are e4m3 of the correctly rounded quotient, saturating.

Every configuration goes through `attend`, in float64, with the same queries: quantised per token
and head as SnapMLA does. Float64 and not the bit-exact decode, because only the latter's own cache
format has a kernel; so what differs between two configurations is their cache and nothing else, and
what the kernel's arithmetic adds is measured apart (`snapmla audit`: accumulator). With
`round_p=True` P is rounded to e4m3 per row and block of 64 tokens, the value's scale fused into it
where it varies within the block, as the paper's section 3.2.2 has it.

`attend` shares no code with `attention_fp64.py`, the oracle that the tests hold it against.
Sources: SnapMLA, section 3.1.1, Table 3 and Appendix G.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from snapmla_rt.config import FP8_MAX, KV_LORA_RANK, QK_ROPE_HEAD_DIM, SCALE_MIN
from snapmla_rt.errors import ArgumentError

from .numerics import F32, bf16_from_f32, e4m3_from_f32, f32_from_bf16, f32_from_e4m3
from .quantize import f32_input, quantize_rows

__all__ = ["CONFIGS", "QuantConfig", "QuantizedKV", "attend", "quantize_kv", "quantize_queries"]

F64 = NDArray[np.float64]

BLOCK_TOKENS = 64  # of config D, and of the blocks that P is rounded in
_ROW_CHUNK_BYTES = 128 << 20  # score rows held at once


@dataclass(frozen=True)
class QuantizedKV:
    """A quantised cache as what it stands for.

    latent float64 [n, 512], rope float64 [n, 64]: dequantised without rounding. value_scale float64
    [n, groups]: the scale of each token's value in each of `groups` equal ranges of channels.
    saturated: latent and RoPE values beyond +-448 scales, which come back smaller than they were;
    underflow: non-zero values whose code is zero.
    """

    latent: F64
    rope: F64
    value_scale: F64
    saturated: int
    underflow: int


@dataclass(frozen=True)
class QuantConfig:
    """One row of the table above."""

    name: str
    title: str
    latent: str  # how the latent is quantised, in words
    rope: str
    quantize: Callable[[F32, F32], QuantizedKV]


def _codes(x: F32, scale: F32) -> tuple[F64, int, int]:
    """x / scale in e4m3, times the scale; values that saturate; values that vanish."""
    with np.errstate(over="ignore"):
        quotient = x / scale
    kept = f32_from_e4m3(e4m3_from_f32(quotient))
    # 464 is half way to the next value that e4m3 would have: rounding alone takes less to 448
    saturated = int(np.count_nonzero(np.abs(quotient) > 464.0))
    underflow = int(np.count_nonzero((kept == 0) & (x != 0)))
    return kept.astype(np.float64) * scale.astype(np.float64), saturated, underflow


def _scale_of(amax: F32) -> F32:
    scale: F32 = np.maximum(amax / np.float32(FP8_MAX), np.float32(SCALE_MIN))
    return scale


def _bf16(x: F32) -> F64:
    return f32_from_bf16(bf16_from_f32(x)).astype(np.float64)


def _snapmla(rounding: str) -> Callable[[F32, F32], QuantizedKV]:
    def quantize(latent: F32, rope: F32) -> QuantizedKV:
        codes, rope_bits, scale = quantize_rows(latent, rope, scale_rounding=rounding)
        scale64 = scale.astype(np.float64)[:, None]
        values = f32_from_e4m3(codes)
        lost = int(np.count_nonzero((values == 0) & (latent != 0)))
        return QuantizedKV(
            values.astype(np.float64) * scale64,
            f32_from_bf16(rope_bits).astype(np.float64) * scale64,
            scale64,
            0,  # the scale is the token's own maximum over 448
            lost,
        )

    return quantize


def _config_a(latent: F32, rope: F32) -> QuantizedKV:
    both = np.concatenate([latent, rope], axis=1)
    scale = _scale_of(np.abs(both).max(axis=1, keepdims=True, initial=0))
    values, saturated, underflow = _codes(both, scale)
    return QuantizedKV(
        values[:, :KV_LORA_RANK],
        values[:, KV_LORA_RANK:],
        scale.astype(np.float64),
        saturated,
        underflow,
    )


def _config_a_split(latent: F32, rope: F32) -> QuantizedKV:
    scale = _scale_of(np.abs(latent).max(axis=1, keepdims=True, initial=0))
    rope_scale = _scale_of(np.abs(rope).max(axis=1, keepdims=True, initial=0))
    values, saturated, underflow = _codes(latent, scale)
    rotated, rope_saturated, rope_underflow = _codes(rope, rope_scale)
    return QuantizedKV(
        values,
        rotated,
        scale.astype(np.float64),
        saturated + rope_saturated,
        underflow + rope_underflow,
    )


def _per_tensor(latent: F32, rope: F32, scale: F32) -> QuantizedKV:
    values, saturated, underflow = _codes(latent, scale)
    scales = np.full((len(latent), 1), scale, np.float64)
    return QuantizedKV(values, _bf16(rope), scales, saturated, underflow)


def _config_b(latent: F32, rope: F32) -> QuantizedKV:
    return _per_tensor(latent, rope, np.float32(1.0))  # type: ignore[arg-type]


def _config_c(latent: F32, rope: F32) -> QuantizedKV:
    return _per_tensor(latent, rope, _scale_of(np.abs(latent).max(initial=0)))


def _blocks(tokens: int, channels: int) -> Callable[[F32, F32], QuantizedKV]:
    def quantize(latent: F32, rope: F32) -> QuantizedKV:
        n, groups = len(latent), KV_LORA_RANK // channels
        padded = np.zeros((-(-n // tokens) * tokens, KV_LORA_RANK), np.float32)
        padded[:n] = np.abs(latent)
        amax = padded.reshape(-1, tokens, groups, channels).max(axis=(1, 3))
        scale = np.repeat(_scale_of(amax), tokens, axis=0)[:n]
        values, saturated, underflow = _codes(latent, np.repeat(scale, channels, axis=1))
        return QuantizedKV(values, _bf16(rope), scale.astype(np.float64), saturated, underflow)

    return quantize


CONFIGS: dict[str, QuantConfig] = {
    config.name: config
    for config in (
        QuantConfig("snapmla", "SnapMLA", "per token", "kept", _snapmla("exact")),
        QuantConfig("snapmla_pow2", "SnapMLA pow2", "per token", "kept", _snapmla("pow2")),
        QuantConfig("A", "A: RoPE in FP8 too", "per token, one scale", "per token", _config_a),
        QuantConfig("A_split", "A, RoPE own scale", "per token", "per token", _config_a_split),
        QuantConfig("B", "B: per tensor, 1.0", "per tensor, static 1.0", "kept", _config_b),
        QuantConfig("C", "C: per tensor", "per tensor, dynamic", "kept", _config_c),
        QuantConfig("D", "D: 64 x 64 blocks", "64 x 64 blocks", "kept", _blocks(BLOCK_TOKENS, 64)),
        QuantConfig("D_1x128", "D: 1 x 128 (V3.2)", "1 x 128 blocks", "kept", _blocks(1, 128)),
    )
}


def quantize_kv(config: str, kv_c: ArrayLike, k_pe: ArrayLike) -> QuantizedKV:
    """The cache of `config` for latents kv_c [n, 512] and rotated keys k_pe [n, 64].

    bf16 (or its bits as uint16), float16 or float32, finite. Raises ArgumentError.
    """
    if config not in CONFIGS:
        raise ArgumentError("config", f"one of {', '.join(CONFIGS)}", repr(config))
    latent, rope = f32_input("kv_c", kv_c, KV_LORA_RANK), f32_input("k_pe", k_pe, QK_ROPE_HEAD_DIM)
    if latent.ndim != 2 or rope.shape[:-1] != latent.shape[:-1]:
        expected = f"[n, {KV_LORA_RANK}] and [n, {QK_ROPE_HEAD_DIM}]"
        raise ArgumentError("kv_c, k_pe", expected, f"{list(latent.shape)}, {list(rope.shape)}")
    return CONFIGS[config].quantize(latent, rope)


def quantize_queries(q: ArrayLike, scale_rounding: str = "exact") -> tuple[F64, F64]:
    """Queries [r, 576] through the rule of quantize_q: latent [r, 512] and RoPE [r, 64], float64,
    as what their codes stand for."""
    wide = f32_input("q", q, KV_LORA_RANK + QK_ROPE_HEAD_DIM)
    latent, rope = wide[:, :KV_LORA_RANK], wide[:, KV_LORA_RANK:]
    codes, rope_bits, scale = quantize_rows(latent, rope, scale_rounding=scale_rounding)
    scale64 = scale.astype(np.float64)[:, None]
    return f32_from_e4m3(codes) * scale64, f32_from_bf16(rope_bits) * scale64


def attend(
    q: F64,
    keys: F64,
    values: F64,
    softmax_scale: float,
    limits: NDArray[np.int64] | None = None,
    value_scale: F64 | None = None,
) -> tuple[F64, F64]:
    """Float64 attention of rows q [r, 576] over keys [n, 576] and values [n, 512].

    limits [r]: how many of the n tokens each row sees, at least one (default: all). value_scale
    [n, groups], positive: P times it is rounded to e4m3 per row, group of channels and block of 64
    tokens, scaled to the block's maximum; the row sum stays unrounded. None: P is not rounded.
    Returns out [r, 512] and lse [r] in nats.
    """
    out, lse = np.empty((len(q), values.shape[1])), np.empty(len(q))
    size = max(1, _ROW_CHUNK_BYTES // (8 * max(len(keys), 1)))
    for start in range(0, len(q), size):
        rows = slice(start, start + size)
        scores = (q[rows] @ keys.T) * softmax_scale
        if limits is not None:
            scores[np.arange(len(keys)) >= limits[rows, None]] = -np.inf
        top = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=1, keepdims=True)
        mixed = weights @ values if value_scale is None else _rounded(weights, values, value_scale)
        out[rows], lse[rows] = mixed / total, (top + np.log(total))[:, 0]
    return out, lse


def _rounded(weights: F64, values: F64, value_scale: F64) -> F64:
    """P V with P' = P * scale rounded per row, channel group and block."""
    if _constant_in_blocks(value_scale):
        return _rounded_p(weights) @ values  # a block's common factor moves no rounding
    width = values.shape[1] // value_scale.shape[1]
    out = np.empty((len(weights), values.shape[1]))
    for group in range(value_scale.shape[1]):
        channels = slice(group * width, (group + 1) * width)
        scale = value_scale[:, group]
        out[:, channels] = _rounded_p(weights * scale) @ (values[:, channels] / scale[:, None])
    return out


def _constant_in_blocks(value_scale: F64) -> bool:
    first = np.repeat(value_scale[::BLOCK_TOKENS], BLOCK_TOKENS, axis=0)[: len(value_scale)]
    return bool((value_scale == first).all())


def _rounded_p(fused: F64) -> F64:
    """[r, n], each row rounded to e4m3 per block of 64 tokens."""
    rows, n = fused.shape
    blocks = -(-n // BLOCK_TOKENS)
    padded = np.zeros((rows, blocks * BLOCK_TOKENS))
    padded[:, :n] = fused
    tiles = padded.reshape(rows, blocks, BLOCK_TOKENS)
    scale = tiles.max(axis=2, keepdims=True) / FP8_MAX
    scale[scale == 0.0] = 1.0  # a block without weight adds nothing, whatever its scale
    # float32 carries the quotient: it moves a value across a rounding boundary of e4m3 (4 bits)
    # only where it lies within 2^-24 of one
    kept = f32_from_e4m3(e4m3_from_f32((tiles / scale).astype(np.float32)))
    return (kept * scale).reshape(rows, -1)[:, :n]
