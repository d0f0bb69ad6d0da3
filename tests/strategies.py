"""Hypothesis strategies that go to the edges first.

Values are drawn as float32 and made by construction (never by filtering), so a failing example
shrinks to a short description: a seed, a magnitude, a pattern. Lengths sit on both sides of the
block of 64 and of the 128-token variant; magnitudes run from the smallest float32 subnormal to the
largest finite value; patterns are the shapes of data that break softmax and quantisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

BLOCK = 64
LATENT = 512
ROPE = 64

# Nothing, one token, and both sides of one block, of two blocks and of the 128-token variant.
EDGE_LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129)
# Smallest subnormal, largest subnormal, smallest normal, the SCALE_MIN and ROPE_GUARD regions, 1,
# the e4m3 limits, the paper's RoPE range, half and nearly all of the largest finite float32.
EDGE_MAGNITUDES = (
    *(1e-45, 1.1754942e-38, 1.1754944e-38, 2.0**-105, 2.0**-96, 1e-26, 2.0**-60, 1e-12),
    *(2.0**-9, 1.0, 448.0, 464.0, 1e3, 2.0**60, 1e30, 1.7e38, 3e38),
)
# What bf16 can hold of them: 3e38 rounds to a finite bf16, subnormals below 2^-133 vanish.
PATTERNS = (
    "normal",  # independent N(0, 1)
    "zero",  # all +0
    "negative_zero",  # all -0
    "equal_tokens",  # every token the same: flat attention
    "dominant_token",  # one token 2^10 louder than all others
    "sink",  # first token with a latent 2^-20 of the others
    "saturating",  # every value at +-amax: all codes are +-448
    "scale_ties",  # values half-way between neighbouring e4m3 codes
    "one_hot",  # a single non-zero latent dimension a token
    "wide",  # magnitudes spread over 2^-40 .. 2^40 within a token
)
NON_FINITE = (np.nan, np.inf, -np.inf)


def lengths(max_value: int = 3 * BLOCK + 1, min_value: int = 0) -> st.SearchStrategy[int]:
    """Token counts: an edge two times of three, else anything up to max_value."""
    edges = [n for n in EDGE_LENGTHS if min_value <= n <= max_value]
    anything = st.integers(min_value, max_value)
    return (
        st.one_of(st.sampled_from(edges), st.sampled_from(edges), anything) if edges else anything
    )


def magnitudes(max_value: float = 3e38, min_value: float = 0.0) -> st.SearchStrategy[float]:
    """Positive float32 magnitudes, edges and powers of two first."""
    edges = [m for m in EDGE_MAGNITUDES if min_value <= m <= max_value]
    powers = st.integers(-149, 127).map(lambda e: 2.0**e)
    kept = powers.filter(lambda m: min_value <= m <= max_value)
    return st.one_of(st.sampled_from(edges), kept)


def seeds() -> st.SearchStrategy[int]:
    """Seeds of the bulk of the data; small, so that examples stay short."""
    return st.integers(0, 999)


def pattern_values(pattern: str, num_tokens: int, width: int, seed: int) -> NDArray[np.float32]:
    """[num_tokens, width] float32 of the named pattern, of magnitude about 1."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_tokens, width)).astype(np.float32)
    sign = np.where(x < 0, np.float32(-1), np.float32(1))
    if pattern == "zero":
        x[:] = 0.0
    elif pattern == "negative_zero":
        x[:] = -0.0
    elif pattern == "equal_tokens" and num_tokens:
        x[:] = x[0]
    elif pattern == "dominant_token" and num_tokens:
        x[rng.integers(num_tokens)] *= np.float32(1024)
    elif pattern == "sink" and num_tokens:
        x[0] *= np.float32(2.0**-20)
    elif pattern == "saturating":
        x = sign
    elif pattern == "scale_ties":
        # With an amax of 448 the scale is 1, and (16 + odd)/16 * 2^e lies between two codes.
        odd = 2 * rng.integers(0, 8, x.shape) + 1
        x = sign * np.ldexp(1 + odd / 16, rng.integers(-6, 8, x.shape)).astype(np.float32)
        x[:, :1] = 448.0
    elif pattern == "one_hot":
        keep = rng.integers(width, size=num_tokens)
        x *= np.arange(width) == keep[:, None]
    elif pattern == "wide":
        x = np.ldexp(x, rng.integers(-40, 41, x.shape))
    return x.astype(np.float32)


def scaled(x: NDArray[np.float32], magnitude: float) -> NDArray[np.float32]:
    """x * magnitude held within float32's finite range."""
    limit = float(np.finfo(np.float32).max)
    with np.errstate(over="ignore"):
        return np.clip(x.astype(np.float64) * magnitude, -limit, limit).astype(np.float32)


@st.composite
def token_arrays(
    draw: st.DrawFn, num_tokens: int, width: int, max_magnitude: float = 3e38
) -> NDArray[np.float32]:
    """[num_tokens, width] float32, finite: a pattern at a magnitude."""
    x = pattern_values(draw(st.sampled_from(PATTERNS)), num_tokens, width, draw(seeds()))
    return scaled(x, draw(magnitudes(max_magnitude)))


def float_dtypes() -> st.SearchStrategy[np.dtype]:
    """The input types the faces accept: bfloat16, float16, float32."""
    return st.sampled_from(
        [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)]
    )


def cast_finite(x: NDArray[np.float32], dtype: np.dtype) -> NDArray:
    """x in `dtype`, clipped to its largest finite value."""
    limit = np.float32(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -limit, limit).astype(dtype)


@dataclass(frozen=True)
class DecodeCase:
    """One unquantised decode problem.

    q: [b, s_q, h, 576] f32; kv: per request [cache_seqlens[b], 576] f32; block_table [b, max]
    int32, shuffled, with the blocks of all requests disjoint; num_blocks includes unused ones.
    """

    q: NDArray[np.float32]
    kv: list[NDArray[np.float32]]
    cache_seqlens: NDArray[np.int32]
    block_table: NDArray[np.int32]
    num_blocks: int
    softmax_scale: float
    causal: bool


@st.composite
def decode_cases(
    draw: st.DrawFn,
    max_batch: int = 3,
    max_heads: int = 128,
    max_seq_len_q: int = 8,
    max_length: int = 3 * BLOCK + 1,
    max_magnitude: float = 1e3,
) -> DecodeCase:
    """Ragged batches with lengths at block edges, shuffled tables and hostile magnitudes.

    max_magnitude is 1e3 by default (the paper's RoPE range), where a comparison against float64 is
    meaningful; ask for 3e38 to test that nothing overflows.
    """
    batch = draw(st.integers(1, max_batch))
    heads = draw(st.sampled_from([h for h in (1, 2, 16, 64, 65, 128) if h <= max_heads]))
    seq_len_q = draw(st.sampled_from([s for s in (1, 2, 3, 8) if s <= max_seq_len_q]))
    seqlens = np.array([draw(lengths(max_length)) for _ in range(batch)], np.int32)
    kv = [
        np.concatenate(
            [
                draw(token_arrays(int(n), LATENT, max_magnitude)),
                draw(token_arrays(int(n), ROPE, max_magnitude)),
            ],
            axis=1,
        )
        for n in seqlens
    ]
    rng = np.random.default_rng(draw(seeds()))
    q = rng.standard_normal((batch, seq_len_q, heads, LATENT + ROPE)).astype(np.float32)
    q = scaled(q, draw(magnitudes(max_magnitude)))
    block_table, num_blocks = shuffled_block_table(seqlens, rng)
    return DecodeCase(
        q, kv, seqlens, block_table, num_blocks, draw(softmax_scales()), draw(st.booleans())
    )


def softmax_scales() -> st.SearchStrategy[float]:
    """DeepSeek's 192^-0.5 and its YaRN value, 576^-0.5, 1, and a near-flat one."""
    return st.sampled_from([192**-0.5, 0.1352337788608801, 576**-0.5, 1.0, 1e-6])


def shuffled_block_table(
    cache_seqlens: NDArray[np.int32], rng: np.random.Generator, spare_blocks: int = 3
) -> tuple[NDArray[np.int32], int]:
    """Disjoint, shuffled blocks for each request: block_table [b, max_blocks] int32, num_blocks.

    Unused table entries are 0 here; `poison.poison_block_table` makes them absurd.
    """
    counts = -(-cache_seqlens // BLOCK)
    num_blocks = int(counts.sum()) + spare_blocks
    order = rng.permutation(num_blocks).astype(np.int32)
    table = np.zeros((len(counts), max(1, int(counts.max(initial=0)))), np.int32)
    start = 0
    for row, count in zip(table, counts, strict=True):
        row[:count] = order[start : start + count]
        start += count
    return table, num_blocks


def slots_of(block_table_row: NDArray[np.int32], num_tokens: int) -> NDArray[np.int64]:
    """Slots (block * 64 + offset) of the first num_tokens tokens of one request."""
    token = np.arange(num_tokens)
    return block_table_row[token // BLOCK].astype(np.int64) * BLOCK + token % BLOCK
