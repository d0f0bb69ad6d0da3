"""Textbook attention in float64: the oracle that every stage is measured against.

Independent on purpose: this file imports nothing of the package, builds its own e4m3 table from
the definition of the format, and knows neither tiles nor scales except where the baseline
`attention_fp64_p_rounded` asks for them. A mistake in the shared arithmetic cannot hide here.

For query token i of s_q, head h and a request of n tokens (bottom-right causal mask):

    s[j]  = softmax_scale * sum_d q[i, h, d] * kv[j, d]     d < 576, j < n - s_q + 1 + i
    lse   = ln sum_j exp(s[j])                              natural logarithm
    out   = sum_j exp(s[j] - lse) * kv[j, :512]             the value is the latent of the key

A row without a visible key has out 0 and lse +inf. A token that holds NaN or an infinity makes
every row that sees it NaN, and no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

LATENT = 512
ROPE = 64
WIDTH = LATENT + ROPE
E4M3_MAX = 448.0

F64 = NDArray[np.float64]

_ROW_CHUNK_BYTES = 256 << 20  # score rows held at once: 256 MiB of float64
_TOKEN_CHUNK = 8192  # keys converted to float64 at once


def e4m3_table() -> F64:
    """The 256 values of e4m3 (the "fn" variant of OCP 8-bit floating point: no infinities).

    Sign, 4 exponent bits of bias 7, 3 mantissa bits; exponent 0 is subnormal (mantissa x 2^-9);
    only codes 0x7f and 0xff are NaN, so the largest finite value is 1.75 x 2^8 = 448.
    """
    code = np.arange(256)
    exponent = (code >> 3) & 15
    mantissa = (code & 7).astype(np.float64)
    magnitude = np.where(
        exponent == 0,
        np.ldexp(mantissa, -9),
        np.ldexp(1.0 + mantissa / 8.0, exponent - 7),
    )
    magnitude[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code & 0x80, -magnitude, magnitude)


def round_to_e4m3(x: ArrayLike) -> F64:
    """float64 -> the nearest e4m3 value as float64: ties to even, saturating at +-448, NaN kept."""
    x = np.asarray(x, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        _, exponent = np.frexp(x)  # |x| = m * 2^exponent, m in [0.5, 1): 4 significant bits
        step = np.ldexp(1.0, np.maximum(exponent - 1, -6) - 3)
        return np.clip(np.rint(x / step) * step, -E4M3_MAX, E4M3_MAX)


def as_f64(x: ArrayLike) -> F64:
    """Any float array as float64, exactly; uint16 arrays are read as the bits of bfloat16."""
    x = np.asarray(x)
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64, copy=False)


def dequantise(codes: ArrayLike, scale: ArrayLike, rope: ArrayLike) -> F64:
    """Quantised q or cached tokens -> what they stand for, in float64 without any rounding.

    codes: [..., 512] e4m3 (ml_dtypes or its codes as uint8); scale: [...] float; rope: [..., 64]
    bf16, divided by the scale. Returns [..., 576] float64 = (codes, rope) * scale.
    """
    bits = np.ascontiguousarray(codes).view(np.uint8)
    factor = as_f64(scale)[..., None]
    return np.concatenate([e4m3_table()[bits] * factor, as_f64(rope) * factor], axis=-1)


def dequantise_cache(
    ckv_cache: NDArray, k_scale_cache: NDArray, k_rope_cache: NDArray, slots: ArrayLike
) -> F64:
    """Tokens of a paged cache in the order of `slots` (block * block_size + offset).

    ckv_cache: [num_blocks, block_size, 512]; k_scale_cache: [num_blocks, block_size];
    k_rope_cache: [num_blocks, block_size, 64]. Returns [len(slots), 576] float64.
    """
    block, offset = np.divmod(np.asarray(slots), k_scale_cache.shape[1])
    return dequantise(
        ckv_cache[block, offset], k_scale_cache[block, offset], k_rope_cache[block, offset]
    )


def attention_fp64(
    q: ArrayLike,
    kv: Sequence[ArrayLike] | ArrayLike,
    softmax_scale: float,
    causal: bool = True,
    cache_seqlens: ArrayLike | None = None,
) -> tuple[F64, F64]:
    """Attention of every request in float64, as the module's docstring defines it.

    q: [b, s_q, h, 576]; kv: a sequence of b arrays [tokens, 576], or one padded array
    [b, max_tokens, 576] with cache_seqlens [b] (what lies beyond a length is never read).
    Returns out [b, s_q, h, 512] and lse [b, h, s_q] (natural logarithm), both float64.
    """
    return _attend(q, kv, None, softmax_scale, causal, cache_seqlens, 0)


def attention_fp64_p_rounded(
    q: ArrayLike,
    kv: Sequence[ArrayLike] | ArrayLike,
    k_scale: Sequence[ArrayLike] | ArrayLike,
    softmax_scale: float,
    causal: bool = True,
    cache_seqlens: ArrayLike | None = None,
    block_n: int = 64,
) -> tuple[F64, F64]:
    """The error floor of the scheme: float64 attention whose only change is that P is rounded.

    P' = P * k_scale (the token's scale fused into its weight, so that the value operand is the
    token's code) is rounded to e4m3 per row and block of `block_n` tokens, with the scale
    amax / 448 of that row and block; the row sum is taken from the unrounded P.

    Arguments and results as `attention_fp64`, with k_scale [tokens] of each request (a sequence
    or [b, max_tokens]). The q and kv given here are normally the dequantised ones.
    """
    return _attend(q, kv, k_scale, softmax_scale, causal, cache_seqlens, block_n)


def _attend(
    q: ArrayLike,
    kv: Sequence[ArrayLike] | ArrayLike,
    k_scale: Sequence[ArrayLike] | ArrayLike | None,
    softmax_scale: float,
    causal: bool,
    cache_seqlens: ArrayLike | None,
    block_n: int,
) -> tuple[F64, F64]:
    q64 = as_f64(q)
    batch, seq_len_q, num_heads, width = q64.shape
    if width != WIDTH or len(kv) != batch:  # type: ignore[arg-type]
        raise ValueError(f"q: expected [b, s_q, h, {WIDTH}] and b requests of kv, got {q64.shape}")
    out = np.zeros((batch, seq_len_q, num_heads, LATENT))
    lse = np.full((batch, num_heads, seq_len_q), np.inf)
    for b in range(batch):
        tokens = np.asarray(kv[b])  # type: ignore[index]
        length = len(tokens) if cache_seqlens is None else int(np.asarray(cache_seqlens)[b])
        scales = None if k_scale is None else as_f64(k_scale[b])[:length]  # type: ignore[index]
        for i in range(seq_len_q):
            visible = length - seq_len_q + 1 + i if causal else length
            if visible <= 0:
                continue
            for heads in _row_chunks(num_heads, visible):
                out[b, i, heads], lse[b, heads, i] = _attend_rows(
                    q64[b, i, heads],
                    tokens[:visible],
                    None if scales is None else scales[:visible],
                    softmax_scale,
                    block_n,
                )
    return out, lse


def _row_chunks(num_rows: int, num_tokens: int) -> Iterator[slice]:
    size = max(1, _ROW_CHUNK_BYTES // (8 * num_tokens))
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))


def _attend_rows(
    q: F64, tokens: NDArray, k_scale: F64 | None, softmax_scale: float, block_n: int
) -> tuple[F64, F64]:
    """Rows q [r, 576] over all of tokens [n, 576]: out [r, 512], lse [r]."""
    scores = np.empty((len(q), len(tokens)))
    chunk = _TOKEN_CHUNK - _TOKEN_CHUNK % max(block_n, 1)
    spans = [slice(s, min(s + chunk, len(tokens))) for s in range(0, len(tokens), chunk)]
    with np.errstate(invalid="ignore", over="ignore"):
        for span in spans:
            keys = as_f64(tokens[span])
            scores[:, span] = (q @ keys.T) * softmax_scale
            scores[:, span][:, ~np.isfinite(keys).all(axis=1)] = np.nan
        top = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - top)
        row_sum = weights.sum(axis=1, keepdims=True)
        out = np.zeros((len(q), LATENT))
        for span in spans:
            values = as_f64(tokens[span])[:, :LATENT]
            if k_scale is None:
                out += weights[:, span] @ values
            else:
                out += _rounded_pv(weights[:, span], values, k_scale[span], block_n)
        return out / row_sum, (top + np.log(row_sum))[:, 0]


def _rounded_pv(weights: F64, values: F64, k_scale: F64, block_n: int) -> F64:
    """sum of round(P') * (value / k_scale) over whole blocks of block_n tokens."""
    out = np.zeros((len(weights), LATENT))
    for start in range(0, weights.shape[1], block_n):
        block = slice(start, start + block_n)
        fused = weights[:, block] * k_scale[block]
        p_scale = fused.max(axis=1, keepdims=True) / E4M3_MAX
        # a row whose weights all vanish in this block adds nothing: any scale does
        rounded = round_to_e4m3(fused / np.where(p_scale == 0.0, 1.0, p_scale))
        out += (rounded * p_scale) @ (values[block] / k_scale[block, None])
    return out
