"""Scenes for the order of Algorithm 1: two blocks of 64 tokens whose scales or logits lie apart.

Pairs of blocks, the last with its logits moved by `gap` nats and its value scales by 2^log2_ratio.
Errors are taken over the second warpgroup's channels, |out - exact| / sum of weight * |value|, so
that rounding P to e4m3 alone cannot exceed 2^-4. Used by tools/report.py and the tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from snapmla_rt.config import DecodeConfig
from snapmla_rt.reference.mla_decode import Tokens, decode_split, finish_split
from snapmla_rt.reference.numerics import bf16_from_f32, f32_from_bf16, log2_soft, rcp_rn
from snapmla_rt.reference.ordered_pipeline import Pipeline, ordered_pipeline

DIMS = 512
RIGHT = slice(DIMS // 2, None)
F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Scene:
    """scores [r, n] (each a bf16 number times the token's scale), codes [n, 512], scales [n]."""

    scores: NDArray[np.float32]
    rope: NDArray[np.uint16]
    codes: NDArray[np.uint8]
    scale: NDArray[np.float32]

    @property
    def values(self) -> F64:
        return self.codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * self.scale[:, None]

    def weights(self) -> F64:
        s = self.scores.astype(np.float64)
        w = np.exp(s - s.max(axis=1, keepdims=True))
        return w / w.sum(axis=1, keepdims=True)

    def error(self, out: NDArray[np.float32], part: slice = RIGHT) -> float:
        """Largest error of a row, as the module defines it; infinite where the output is not."""
        weights, values = self.weights(), self.values[:, part]
        size = weights @ np.linalg.norm(values, axis=1)
        error = np.linalg.norm(out[:, part].astype(np.float64) - weights @ values, axis=1) / size
        return float(np.where(np.isfinite(error), error, np.inf).max())

    def pipeline(self, **options: Any) -> NDArray[np.float32]:
        return ordered_pipeline(self.scores, self.codes, self.scale, Pipeline(**options)).out

    def mla_decode(self) -> NDArray[np.float32]:
        """The same scores and values through the real decode: one RoPE dim holds a row's scores."""
        rows, n = self.scores.shape
        one_hot = np.eye(64, dtype=np.float32)[:rows]
        query = (np.zeros((rows, DIMS), np.uint8), bf16_from_f32(one_hot), np.ones(rows, "f4"))
        rope = np.zeros((n, 64), np.uint16)
        rope[:, :rows] = self.rope
        tokens = Tokens(
            self.codes.reshape(-1, 64, DIMS),
            rope.reshape(-1, 64, 64),
            self.scale.reshape(-1, 64),
            log2_soft(self.scale).reshape(-1, 64),
            rcp_rn(self.scale).reshape(-1, 64),
        )
        config = DecodeConfig(rows, 1, 1.0)
        return finish_split(decode_split(query, tokens, np.full(rows, n), config, 0))[0]


def scene(
    gap: float = 0.0,
    log2_ratio: float = 0.0,
    *,
    pairs: int = 1,
    silent: bool = False,
    loudness: float = 0.3,
    seed: int = 0,
    rows: int = 4,
) -> Scene:
    """Random scores and values; gap and log2_ratio hold for the last block. silent: its values are
    zero in the second warpgroup's channels, so that these show what became of block 0."""
    rng = np.random.default_rng(seed)
    n = 128 * pairs
    scale = np.exp(loudness * rng.standard_normal(n)).astype(np.float32)
    scale[-64:] *= np.float32(2.0**log2_ratio)
    scores = rng.standard_normal((rows, n)).astype(np.float32)
    scores[:, -64:] += np.float32(gap)
    rope = bf16_from_f32((scores / scale).T)
    exact = (f32_from_bf16(rope) * scale[:, None]).T
    values = np.clip(100 * rng.standard_normal((n, DIMS)), -448, 448)
    if silent:
        values[-64:, RIGHT] = 0
    codes = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return Scene(np.ascontiguousarray(exact), rope, codes, scale)


# --- accumulation against context length --------------------------------------------------------

# Mean signed relative error of sums of K values mean + sd * N(0, 1) in e4m3, recorded on an H200:
# cuBLAS with fast accumulation, scale 0.0145 (its P is 1), and a decode kernel that accumulates in
# place, whose own scale, and with it the place of every truncation, was not recorded.
CUBLAS = {1024: -1.968e-4, 2048: -1.211e-3, 4096: -7.214e-3, 8192: -3.032e-2, 16384: -8.423e-2}
CUBLAS[32768] = -2.010e-1
KERNEL = {2048: -1.267e-3, 4096: -7.730e-3, 8192: -2.954e-2, 16384: -8.464e-2, 32768: -2.095e-1}
CONTEXTS = tuple(CUBLAS)


def drift(accumulation: str, mean: float = 0.5, sd: float = 1.0) -> dict[int, float]:
    """Mean signed relative error of flat attention over the first tokens, by context length."""
    n, scale = max(CONTEXTS), np.float32(0.0145)
    draws = np.random.default_rng(0).standard_normal((n, 4 * DIMS), np.float32)
    values = ((mean + sd * draws) / scale).astype(ml_dtypes.float8_e4m3fn)
    result = ordered_pipeline(
        np.zeros((1, n), np.float32),
        values.view(np.uint8),
        np.full(n, scale),
        Pipeline(accumulation=accumulation, static=True),
        CONTEXTS,
    )
    exact = {c: values[:c].astype(np.float64).mean(axis=0) * scale for c in CONTEXTS}
    return {c: float(np.mean((result.prefixes[c][0] - exact[c]) / exact[c])) for c in CONTEXTS}
