"""mla_decode on hostile data: edge lengths, all magnitudes, NaN, sinks, cliffs, bad arguments."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from compare import assert_same_bytes
from decode_tools import (
    BF16_REL,
    COMPILED,
    LN2,
    SOFTMAX_SCALE,
    U24,
    Cached,
    cached,
    decode,
    decode_splits,
    dequantised,
    examples,
    score_bound,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from strategies import EDGE_LENGTHS, PATTERNS, magnitudes, pattern_values, scaled, seeds

from snapmla_rt.config import MAX_CACHE_SEQLEN
from snapmla_rt.errors import ArgumentError
from snapmla_rt.plan import DecodePlan
from snapmla_rt.reference.attention_fp64 import attention_fp64, attention_fp64_p_rounded
from snapmla_rt.reference.mla_decode import mla_decode
from snapmla_rt.reference.plan_decode import plan_decode

F32 = NDArray[np.float32]
# Smallest subnormal, a subnormal, SCALE_MIN, tiny, one, large, and nearly the largest float32.
MAGNITUDES = (1e-45, 1e-38, 2.0**-96, 1e-12, 1.0, 1e18, 3e38)
# A weight is kept in the row sum where its scale is at least 2^-116 of that of the block's largest
# weight times value: below, exp2 flushes what the fused scale asks for (2^-126 / 2^(8 + 2)).
KEPT_RATIO = 2.0**116


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def relative(got: NDArray, exact: NDArray) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - exact) / np.linalg.norm(exact))


def assert_sane(c: Cached, out: NDArray, lse: NDArray, causal: bool = True) -> None:
    """What holds whatever the logits: finite, an average of the values, +inf only where empty.

    Weights are positive and their e4m3 roundings within 2^-4; T is truncated toward zero; the rest,
    weights in e4m3's subnormals included, is far below the 2^-4 that the bound leaves beside it.
    """
    _, kv, _ = dequantised(c)
    got = out.astype(np.float64)
    assert np.isfinite(got).all() and not np.isnan(lse).any()
    _, seq_len_q, _ = c.query[2].shape
    for req, tokens in enumerate(kv):
        for s in range(seq_len_q):
            seen = len(tokens) - (seq_len_q - 1 - s if causal else 0)
            if seen <= 0:
                assert (out[req, s].view(np.uint16) == 0).all()
                assert (lse[req, :, s] == np.inf).all()
            else:
                largest = np.abs(tokens[:seen, :512]).max()
                assert (np.abs(got[req, s]) <= largest * (1 + 2.0**-3) + 2.0**-133).all()
                assert np.isfinite(lse[req, :, s]).all()


# --- lengths ---


@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seq_len_q", [1, 2, 8])
def test_edge_lengths_against_float64(seq_len_q: int, causal: bool, block_n: int) -> None:
    """Lengths around one and two blocks, and below s_q, where the first queries see nothing."""
    seqlens = sorted({*EDGE_LENGTHS, 2, 7, 8, 9})
    q = normal(0, len(seqlens), seq_len_q, 2, 576)
    c = cached(q, [normal(n + 1, n, 576) for n in seqlens])
    for mode in ({"num_splits": 1}, {"num_splits": 2}, {"num_sms": 5}):
        out, lse = decode(c, causal=causal, block_n=block_n, **mode)
        assert_sane(c, out, lse, causal)
        q64, kv, scales = dequantised(c)
        exact, exact_lse = attention_fp64(q64, kv, SOFTMAX_SCALE, causal)
        np.testing.assert_array_equal(lse == np.inf, exact_lse == np.inf)
        seen = lse != np.inf
        # N(0, 1): the largest logit error of the tensor core is about 4e-3 nats (numerics.md, 2)
        assert np.abs(lse[seen] - exact_lse[seen]).max() < 8e-3
        floor, _ = attention_fp64_p_rounded(q64, kv, scales, SOFTMAX_SCALE, causal, block_n=block_n)
        assert relative(out, exact) < 1.05 * np.hypot(relative(floor, exact), BF16_REL)


@pytest.mark.parametrize("heads", [1, 20, 128] if COMPILED else [1, 5])
def test_most_queries_and_a_draft_longer_than_the_context(heads: int) -> None:
    """s_q = 8 with 0..8 tokens: query s sees token t where t <= length - 8 + s."""
    c = cached(normal(1, 9, 8, heads, 576), [normal(n + 2, n, 576) for n in range(9)])
    out, lse = decode(c)
    assert_sane(c, out, lse)
    for length in range(9):
        np.testing.assert_array_equal(np.isfinite(lse[length, 0]), np.arange(8) >= 8 - length)
    # the first query that sees something sees token 0 alone: its value, exactly one weight
    _, kv, _ = dequantised(c)
    for length in range(1, 9):
        first = out[length, 8 - length].astype(np.float64)
        value = np.broadcast_to(kv[length][0, :512], first.shape)
        assert (np.abs(first - value) <= np.abs(value) * (BF16_REL + 8 * U24)).all()


# --- magnitudes ---


def combined(latent: float, rope: float, seed: int, rows: int) -> F32:
    x = normal(seed, rows, 576)
    return np.concatenate([scaled(x[:, :512], latent), scaled(x[:, 512:], rope)], axis=1)


@pytest.mark.parametrize("softmax_scale", [SOFTMAX_SCALE, 1e-30, 1e30])
def test_every_combination_of_magnitudes_is_finite(softmax_scale: float) -> None:
    """49 kinds of query against 49 requests of one kind of token each."""
    kinds = list(product(MAGNITUDES, MAGNITUDES))
    q = np.concatenate([combined(a, b, i, 1) for i, (a, b) in enumerate(kinds)])
    q = q[:: 1 if COMPILED else 4]
    kv = [combined(a, b, 99 + i, 3) for i, (a, b) in enumerate(kinds)]
    c = cached(np.broadcast_to(q, (49, 1, *q.shape)), kv)
    out, lse = decode(c, softmax_scale)
    assert_sane(c, out, lse)


@pytest.mark.parametrize("scale_rounding", ["exact", "pow2"])
@pytest.mark.parametrize("block_n", [64, 128])
def test_all_magnitudes_in_one_context_are_finite(block_n: int, scale_rounding: str) -> None:
    """All 49 kinds of token in the same blocks, shuffled, three times over."""
    kinds = list(product(MAGNITUDES, MAGNITUDES)) * 3
    q = np.concatenate([combined(a, b, i, 1) for i, (a, b) in enumerate(kinds[:49])])
    kv = np.concatenate([combined(a, b, 99 + i, 1) for i, (a, b) in enumerate(kinds)])
    np.random.default_rng(0).shuffle(kv)
    c = cached(q[None, None], [kv], scale_rounding=scale_rounding)
    for splits in (1, 3):
        out, lse = decode(c, block_n=block_n, num_splits=splits)
        assert_sane(c, out, lse)


@given(
    patterns=st.tuples(*[st.sampled_from(PATTERNS)] * 4),
    sizes=st.tuples(*[magnitudes()] * 4),
    seed=seeds(),
    seqlen=st.sampled_from([1, 2, 64, 65, 130]),
    scale_rounding=st.sampled_from(["exact", "pow2"]),
    softmax_scale=st.sampled_from([SOFTMAX_SCALE, 1e-38, 1e-6, 1.0, 3e38, 1e300, 1e-300]),
)
@settings(max_examples=examples(100))
def test_no_finite_input_gives_nan_or_inf(
    patterns: tuple[str, ...],
    sizes: tuple[float, ...],
    seed: int,
    seqlen: int,
    scale_rounding: str,
    softmax_scale: float,
) -> None:
    """Any pattern at any magnitude, for latent and RoPE of q and of the tokens."""
    parts = [
        scaled(pattern_values(patterns[i], rows, width, seed + i), sizes[i])
        for i, (rows, width) in enumerate([(4, 512), (4, 64), (seqlen, 512), (seqlen, 64)])
    ]
    q = np.concatenate(parts[:2], axis=1).reshape(1, 2, 2, 576)
    c = cached(q, [np.concatenate(parts[2:], axis=1)], scale_rounding=scale_rounding)
    out, lse = decode(c, softmax_scale, num_splits=1 + seed % 3)
    assert_sane(c, out, lse)


@pytest.mark.parametrize("rope", [1e-30, 1e-3, 1.0, 1e3, 1e18])
@pytest.mark.parametrize("scale_rounding", ["exact", "pow2"])
def test_zero_latents_leave_plain_rope_attention(rope: float, scale_rounding: str) -> None:
    """q and k latents zero: logits from RoPE alone, output zero, the same lse as float64."""
    q, kv = np.zeros((1, 1, 4, 576), np.float32), np.zeros((100, 576), np.float32)
    q[..., 512:] = scaled(normal(2, 4, 64), 1.0 / min(rope, 1e3))
    kv[:, 512:] = scaled(normal(3, 100, 64), min(rope, 1e3))
    if rope > 1e3:  # both sides large: one token takes all
        q[..., 512:] *= np.float32(rope)
    c = cached(q, [kv], scale_rounding=scale_rounding)
    q64, kv64, _ = dequantised(c)
    out, lse = decode(c)
    assert (out.astype(np.float32) == 0).all()
    _, exact = attention_fp64(q64, kv64, SOFTMAX_SCALE)
    # fp32 roundings of u, R and log2(L), near 96 where the scale is 2^-96, and of the logits
    np.testing.assert_allclose(lse, exact, rtol=8 * U24, atol=128 * 6 * U24)


def test_zero_latent_queries_weigh_ordinary_values_by_rope() -> None:
    """The paper's case: only the RoPE part of q speaks, the values are ordinary."""
    q, kv = normal(4, 1, 1, 8, 576), normal(5, 300, 576)
    q[..., :512] = 0.0
    c = cached(q, [kv])
    q64, kv64, scales = dequantised(c)
    exact, exact_lse = attention_fp64(q64, kv64, SOFTMAX_SCALE)
    floor, _ = attention_fp64_p_rounded(q64, kv64, scales, SOFTMAX_SCALE)
    out, lse = decode(c, num_splits=1)
    assert relative(out, exact) < 1.05 * np.hypot(relative(floor, exact), BF16_REL)
    # no e4m3 product, so logits are exact to fp32 and so is lse
    np.testing.assert_allclose(lse, exact_lse, rtol=8 * U24, atol=64 * U24)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_all_zero_inputs_of_both_signs(sign: float) -> None:
    """Everything zero: equal weights, zero output, lse = ln n."""
    zero = np.float32(0.0) * np.float32(sign)
    c = cached(np.full((1, 1, 2, 576), zero, np.float32), [np.full((130, 576), zero, np.float32)])
    out, lse = decode(c)
    assert (out.astype(np.float32) == 0).all()
    np.testing.assert_allclose(lse, np.log(130.0), rtol=0, atol=128 * 4 * U24)


# --- dominant, equal, tied tokens ---


@pytest.mark.parametrize("seqlen", [1, 64, 65, 200])
@pytest.mark.parametrize("block_n", [64, 128])
def test_equal_tokens_give_that_token(seqlen: int, block_n: int) -> None:
    """Every P is 448, so nothing is rounded but T (14 bits) and the output."""
    c = cached(normal(6, 1, 1, 3, 576), [np.tile(normal(7, 1, 576), (seqlen, 1))])
    _, kv, _ = dequantised(c)
    out, _ = decode(c, block_n=block_n, num_splits=1)
    value = np.broadcast_to(kv[0][0, :512], (3, 512))
    # a chain of up to 4 steps: 33 truncations a step at 2^-13 of what has been summed up
    steps = block_n // 32
    slack = np.abs(value) * (BF16_REL + steps * 34 * 2.0**-13)
    assert (np.abs(out[0, 0].astype(np.float64) - value) <= slack).all()


@pytest.mark.parametrize("where", [0, 63, 64, 129, 199])
def test_one_dominant_token_is_copied(where: int) -> None:
    """All of the probability on one token: its value comes back exactly, rounded to bf16 once."""
    q, kv = np.zeros((1, 1, 2, 576), np.float32), normal(8, 200, 576)
    q[..., 575], kv[:, 575] = 64.0, 0.0
    kv[where, 575] = 64.0  # a logit of 4096 nats at softmax_scale 1
    c = cached(q, [kv])
    _, kv64, _ = dequantised(c)
    out, lse = decode(c, 1.0)
    value = np.broadcast_to(kv64[0][where, :512], (2, 512))
    assert (
        np.abs(out[0, 0].astype(np.float64) - value) <= np.abs(value) * (BF16_REL + 4 * U24)
    ).all()
    q64, kv64, _ = dequantised(c)
    np.testing.assert_allclose(lse, attention_fp64(q64, kv64, 1.0)[1], rtol=8 * U24)


def test_saturating_codes_and_scale_ties() -> None:
    """All codes +-448 (the largest sums of the tensor core), all scales equal."""
    sign = np.where(normal(9, 200, 512) < 0, np.float32(-1), np.float32(1))
    kv = np.concatenate([sign * np.float32(448), normal(10, 200, 64)], axis=1)
    q = normal(11, 1, 1, 4, 576) / 64
    c = cached(q, [kv])
    assert (c.paged[1].ravel()[np.isfinite(c.paged[1].ravel())] == 1.0).all()
    q64, kv64, scales = dequantised(c)
    exact, _ = attention_fp64(q64, kv64, SOFTMAX_SCALE)
    floor, _ = attention_fp64_p_rounded(q64, kv64, scales, SOFTMAX_SCALE)
    out, _ = decode(c, num_splits=1)
    assert relative(out, exact) < 1.05 * np.hypot(relative(floor, exact), BF16_REL)
    # q and k with every code +-448 and equal signs: the largest S there is
    flat = np.full((70, 576), 448.0, np.float32)
    out, lse = decode(cached(flat[None, None, :2], [flat]), 1.0)
    assert (out.astype(np.float32) == 448.0).all()
    ones = np.full((1, 576), 448.0)
    s_exact, s_bound = score_bound(*[ones[:, :512], ones[:, :64]] * 2)
    # truncation toward zero in all 16 steps adds up here: the logit is 0.6 % low, never high
    assert (lse < s_exact + np.log(70)).all() and (lse > s_exact - s_bound).all()


def test_one_loud_product_among_many_small_ones() -> None:
    """448 * 448 beside many 0.01s: what the 13-bit window drops stays within its own bound, and a
    token's small products are not lost where no loud one hides them."""
    q, kv = np.full((1, 1, 1, 576), 0.01, np.float32), np.full((2, 576), 0.01, np.float32)
    q[..., 0], kv[0, 0] = 448.0, 448.0
    c = cached(q, [kv])
    q64, kv64, _ = dequantised(c)
    _, lse = decode(c, 1e-5)
    _, exact_lse = attention_fp64(q64, kv64, 1e-5)
    np.testing.assert_allclose(lse, exact_lse, atol=448.0**2 * 1e-5 * 2.0**-13 * 34)


# --- sinks and cliffs ---


@pytest.mark.parametrize("ratio", [2.0**-20, 2.0**-60, 2.0**-100])
@pytest.mark.parametrize("place", [0, 40, 70, 299])
@pytest.mark.parametrize("block_n", [64, 128])
def test_a_sink_with_a_tiny_scale_keeps_its_weight(ratio: float, place: int, block_n: int) -> None:
    """One token with a latent `ratio` of the others' and over 90 % of the probability.

    Its value hardly adds to the output, but its weight is most of the row sum: losing it, or
    rounding it as P is rounded (2^-4), would scale the whole output. lse shows the row sum.
    """
    loud = np.float32(2.0**20 if ratio < 2.0**-80 else 1.0)  # so that 2^-96 is not in the way
    q, kv = normal(12, 1, 1, 8, 576) * np.float32(0.1), normal(13, 300, 576)
    q[..., :512] /= loud
    kv[:, :512] *= loud
    kv[place, :512] *= np.float32(ratio)
    # RoPE is for the sink alone: 9 nats, from a key small enough not to lift the token's scale
    key = min(1.0, float(np.abs(kv[place, :512]).max()) * 2.0**50)
    q[..., 512:], kv[:, 512:] = 0.0, 0.0
    q[..., 575], kv[place, 575] = 9.0 / SOFTMAX_SCALE / key, key
    c = cached(q, [kv])
    q64, kv64, scales = dequantised(c)
    sink_scale = scales[0][place] / np.median(scales[0])
    assert ratio / 4 < sink_scale < ratio * 4
    exact, exact_lse = attention_fp64(q64, kv64, SOFTMAX_SCALE)
    probability = np.exp(q64[0, 0] @ kv64[0][place] * SOFTMAX_SCALE - exact_lse[0, :, 0])
    assert (probability > 0.9).all()
    out, lse = decode(c, block_n=block_n, num_splits=1)
    # logits of about 9 nats with |lk| up to 100 in log2 units: a few roundings of u and R
    np.testing.assert_allclose(lse, exact_lse, rtol=0, atol=8 * 128 * U24 + 2e-4)
    floor, _ = attention_fp64_p_rounded(q64, kv64, scales, SOFTMAX_SCALE, block_n=block_n)
    assert relative(out, exact) < 1.05 * np.hypot(relative(floor, exact), BF16_REL)
    for splits in (2, 5):
        _, split_lse = decode(c, block_n=block_n, num_splits=splits)
        np.testing.assert_allclose(split_lse, exact_lse, rtol=0, atol=8 * 128 * U24 + 2e-4)


def cliff(
    levels: list[float], block_n: int, splits: int
) -> tuple[NDArray, NDArray, NDArray, float]:
    """Blocks whose tokens all have the logit levels[k] (nats) and one-hot values.

    Block k's tokens have the value 1 in dimension k and 0 elsewhere (an exact code and scale),
    so P is 448 everywhere, nothing in P or T is rounded, and output k is the weight of block k.
    Returns (outputs f64 [blocks], weights f64 [blocks], lse error, largest logit in log2 units).
    """
    q = np.zeros((1, 1, 1, 576), np.float32)
    q[..., 512] = 1.0
    kv = np.zeros((len(levels) * block_n, 576), np.float32)
    for k, level in enumerate(levels):
        tokens = slice(k * block_n, (k + 1) * block_n)
        kv[tokens, k] = 1.0
        kv[tokens, 512] = level
    c = cached(q, [kv], scale_rounding="pow2")  # logits exact
    parts = decode_splits(c, 1.0, block_n=block_n, num_splits=splits)
    lse2 = parts.lse_accum.astype(np.float64)[:, 0]
    share = np.exp2(lse2 - lse2.max())
    total = lse2.max() + np.log2(share.sum())
    out = np.einsum("s,sd->d", share / share.sum(), parts.o_accum[:, 0].astype(np.float64))
    q64, kv64, _ = dequantised(c)
    exact, exact_lse = attention_fp64(q64, kv64, 1.0)
    n = len(levels)
    error = np.abs(total * LN2 - exact_lse.ravel())
    return out[:n], exact[0, 0, 0, :n], error, float(np.abs(kv64[0][:, 512]).max()) / LN2 + 16


CLIFFS = {
    "falling by 100 nats and rising again": [0, -100, -200, -300, -200, -100, 0, -100, 0],
    "rising by 100 nats and falling again": [0, 100, 200, 300, 200, 100, 0],
    "a sink, then ever lower": [700, 600, 500, 400, 300, 200, 100, 0],
    "ever higher": [0, 100, 200, 300, 400, 500, 600, 700],
    "to the edge of what counts": [0, -16.5, 0, -8, -16.5, -4],
    "around the lazy threshold of 8 / log2(e) nats": [0, 5.5, 5.546875, 11, 16.625, 0, 5.5],
    "one jump of 50,000 nats up and back": [0, 49920, 0, 49920],
}


@pytest.mark.parametrize("levels", CLIFFS.values(), ids=CLIFFS.keys())
@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_logits_that_fall_and_rise_lose_nothing(
    levels: list[float], block_n: int, splits: int
) -> None:
    check_cliff(levels, block_n, splits)


def check_cliff(levels: list[float], block_n: int, splits: int) -> None:
    """Every block's weight, within fp32 of its logit: nothing above 2^-24 is lost.

    A weight's relative error is ln 2 times the error of u, R and lse2 (each at most half a unit at
    the size of the logit), and a few units for MUFU, sums and the reciprocal.
    """
    out, weights, lse_error, largest = cliff(levels, block_n, splits)
    slack = 6 * LN2 * U24 * largest + (4 * len(levels) + 16) * 2 * U24
    assert (np.abs(out - weights) <= weights * slack + 2.0**-24 * U24).all()
    assert (out[weights > 2.0**-24] > 0).all()
    assert lse_error.max() <= slack


@given(
    steps=st.lists(
        st.sampled_from([0, 3, -3, 5.5, -5.5, 5.5625, 8, -8, 16, -16, 100, -100, 1000, -1000]),
        min_size=1,
        max_size=10,
    ),
    block_n=st.sampled_from([64, 128]),
    splits=st.integers(1, 8),
)
@settings(max_examples=examples(60))
def test_any_staircase_of_logits(steps: list[float], block_n: int, splits: int) -> None:
    # every level is a multiple of 1/16 held to what bf16 represents: the logit is then exact
    levels = np.cumsum(steps).astype(np.float32)
    bits = (levels.view(np.uint32) >> 16) << 16
    check_cliff([float(x) for x in bits.astype(np.uint32).view(np.float32)], block_n, splits)


@pytest.mark.parametrize(("ratio_log2", "kept"), [(-110, True), (-140, False)])
def test_the_limit_of_fused_scales(ratio_log2: int, kept: bool) -> None:
    """Where the scales of two tokens differ by more than 2^116, the smaller one's weight is lost.

    P = weight * scale is one exp2 (the paper's fusion), which flushes below 2^-126. Latents of 1e9
    beside an all-zero token are the first to get there. Stated so that nobody relies on more.
    """
    assert (2.0**ratio_log2 > 1 / KEPT_RATIO) is kept
    q, kv = np.zeros((1, 1, 1, 576), np.float32), np.zeros((65, 576), np.float32)
    kv[:64, :512] = 2.0 ** (8 - 96 - ratio_log2)  # scale 2^(-96 - ratio) * 256 / 448
    _, lse = decode(cached(q, [kv]), num_splits=1)  # token 64 is zero: scale 2^-96
    expected = np.log(65.0 if kept else 64.0)
    np.testing.assert_allclose(lse, expected, rtol=0, atol=8 * 128 * U24)


# --- NaN ---


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dim", [0, 511, 512, 575])
def test_a_non_finite_token_makes_nan_exactly_the_rows_that_see_it(bad: float, dim: int) -> None:
    """Token 68 of 70 with 3 queries: rows 1 and 2 see it, row 0 and the other request do not."""
    q, kv = normal(14, 2, 3, 2, 576), [normal(15, 70, 576), normal(16, 70, 576)]
    clean, clean_lse = decode(cached(q, kv))
    kv[0][68, dim] = bad
    c = cached(q, kv)
    for mode in ({}, {"num_splits": 2}, {"block_n": 128}, {"batch_invariant": True}):
        expected = clean, clean_lse
        if mode:
            kv_clean = [np.array(x) for x in kv]
            kv_clean[0][68] = normal(15, 70, 576)[68]
            expected = decode(cached(q, kv_clean), **mode)
        out, lse = decode(c, **mode)
        assert (out[0, 1:].view(np.uint16) == 0x7FFF).all()
        assert (np.ascontiguousarray(lse[0, :, 1:]).view(np.uint32) == 0x7FFFFFFF).all()
        assert_same_bytes("row 0 out", out[0, 0], expected[0][0, 0])
        assert_same_bytes("row 0 lse", lse[0, :, 0], expected[1][0, :, 0])
        assert_same_bytes("request 1 out", out[1], expected[0][1])
        assert_same_bytes("request 1 lse", lse[1], expected[1][1])


@pytest.mark.parametrize("token", [0, 63, 64, 66, 67, 68, 69])
@pytest.mark.parametrize("mode", [{"num_splits": 1}, {"num_splits": 2}, {"block_n": 128}])
def test_a_nan_token_at_any_place_under_the_causal_mask(token: int, mode: dict[str, Any]) -> None:
    """70 tokens, 4 queries: query s sees tokens 0..66 + s. Blind rows keep every bit, also where
    the NaN token is one of the block's masked tokens that they share with rows that see it."""
    q, kv = normal(17, 1, 4, 3, 576), normal(18, 70, 576)
    clean = decode(cached(q, [kv]), **mode)
    kv[token, 5] = np.nan
    out, lse = decode(cached(q, [kv]), **mode)
    sees = token <= 66 + np.arange(4)
    assert np.isnan(out[0, sees].astype(np.float32)).all() and np.isnan(lse[0][:, sees]).all()
    assert_same_bytes("out", out[0, ~sees], clean[0][0, ~sees])
    assert_same_bytes("lse", lse[0][:, ~sees], clean[1][0][:, ~sees])


def test_only_nan_tokens_and_a_nan_query_without_keys() -> None:
    """A block of NaN tokens only has no maximum, yet its rows are NaN; a NaN query that sees no key
    is an empty row all the same."""
    q = normal(19, 2, 1, 2, 576)
    q[1] = np.nan
    kv = [np.full((64, 576), np.nan, np.float32), np.zeros((0, 576), np.float32)]
    out, lse = decode(cached(q, kv))
    assert np.isnan(out[0].astype(np.float32)).all() and np.isnan(lse[0]).all()
    assert (out[1].view(np.uint16) == 0).all() and (lse[1] == np.inf).all()
    # after a good block, and before one
    for order in ((0, 1), (1, 0)):
        blocks = [normal(20, 64, 576), kv[0]]
        c = cached(q[:1], [np.concatenate([blocks[i] for i in order])])
        for splits in (1, 2):
            out, lse = decode(c, num_splits=splits)
            assert np.isnan(out.astype(np.float32)).all() and np.isnan(lse).all()


# --- arguments ---


def call(c: Cached, **change: Any) -> Any:
    names = ("q_nope", "q_rope", "q_scale", "ckv_cache", "k_scale_cache", "k_rope_cache")
    arguments = dict(zip(names, (*c.query, *c.paged), strict=True))
    arguments |= {"block_table": c.block_table, "cache_seqlens": c.cache_seqlens}
    arguments |= {"softmax_scale": SOFTMAX_SCALE}
    arguments["plan"] = plan_decode(c.cache_seqlens, c.query[2].shape[2], c.query[2].shape[1])
    return mla_decode(**{**arguments, **change})


def problem() -> Cached:
    return cached(normal(21, 2, 1, 4, 576), [normal(22, 70, 576), normal(23, 10, 576)])


C = problem()
TABLE = C.block_table


def table_with(row: int, column: int, value: int) -> NDArray[np.int32]:
    table = TABLE.copy()
    table[row, column] = value
    return table


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "q_nope dtype": ("q_nope", {"q_nope": C.query[0].astype(np.float32)}),
    "q_nope rank": ("q_nope", {"q_nope": C.query[0][0]}),
    "q_nope width": ("q_nope", {"q_nope": C.query[0][..., :511]}),
    "q_rope dtype": ("q_rope", {"q_rope": C.query[1].astype(np.float16)}),
    "q_rope width": ("q_rope", {"q_rope": C.query[1][..., :63]}),
    "q_rope heads": ("q_rope", {"q_rope": C.query[1][:, :, :3]}),
    "q_scale dtype": ("q_scale", {"q_scale": C.query[2].astype(np.float64)}),
    "q_scale rank": ("q_scale", {"q_scale": C.query[2][..., None]}),
    "q_scale heads": ("q_scale", {"q_scale": C.query[2][:, :, :3]}),
    "ckv_cache dtype": ("ckv_cache", {"ckv_cache": C.paged[0].view(np.int8)}),
    "ckv_cache page size": ("ckv_cache", {"ckv_cache": C.paged[0][:, :32]}),
    "k_scale_cache dtype": ("k_scale_cache", {"k_scale_cache": C.paged[1].view(np.int32)}),
    "k_scale_cache blocks": ("k_scale_cache", {"k_scale_cache": C.paged[1][:-1]}),
    "k_rope_cache width": ("k_rope_cache", {"k_rope_cache": C.paged[2][..., :32]}),
    "k_rope_cache kind": ("k_rope_cache", {"k_rope_cache": [1, 2]}),
    "block_table rank": ("block_table", {"block_table": TABLE[0]}),
    "block_table dtype": ("block_table", {"block_table": TABLE.astype(np.float32)}),
    "block_table batch": ("block_table", {"block_table": TABLE[:1]}),
    "block_table narrow": ("block_table", {"block_table": TABLE[:, :1]}),
    "block_table negative": ("block_table", {"block_table": table_with(0, 1, -1)}),
    "block_table beyond": ("block_table", {"block_table": table_with(1, 0, len(C.paged[0]))}),
    "cache_seqlens batch": ("cache_seqlens", {"cache_seqlens": C.cache_seqlens[:1]}),
    "cache_seqlens dtype": ("cache_seqlens", {"cache_seqlens": C.cache_seqlens.astype(float)}),
    "cache_seqlens negative": ("cache_seqlens", {"cache_seqlens": np.array([70, -1])}),
    "cache_seqlens huge": (
        "cache_seqlens",
        {"cache_seqlens": np.array([70, MAX_CACHE_SEQLEN + 1])},
    ),
    "plan kind": ("plan", {"plan": None}),
    "plan heads": ("plan", {"plan": plan_decode(C.cache_seqlens, 5, 1)}),
    "plan queries": ("plan", {"plan": plan_decode(C.cache_seqlens, 4, 2)}),
    "plan batch": ("plan", {"plan": plan_decode(C.cache_seqlens[:1], 4, 1)}),
    "plan of shorter lengths": ("plan", {"plan": plan_decode([60, 10], 4, 1)}),
    "plan of longer lengths": ("plan", {"plan": plan_decode([130, 10], 4, 1)}),
    "plan of longer lengths, cut": ("plan", {"plan": plan_decode([500, 10], 4, 1, num_splits=3)}),
    "softmax_scale zero": ("softmax_scale", {"softmax_scale": 0.0}),
    "softmax_scale negative": ("softmax_scale", {"softmax_scale": -1.0}),
    "softmax_scale nan": ("softmax_scale", {"softmax_scale": float("nan")}),
    "softmax_scale inf": ("softmax_scale", {"softmax_scale": float("inf")}),
}


@pytest.mark.parametrize(("name", "change"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_named(name: str, change: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError) as caught:
        call(C, **change)
    assert caught.value.name == name


@pytest.mark.parametrize(
    ("name", "shape"),
    [("num_heads_q", (1, 1, 129)), ("num_heads_q", (1, 1, 0)), ("seq_len_q", (1, 0, 4))],
)
def test_numbers_of_heads_and_queries_out_of_range(name: str, shape: tuple[int, ...]) -> None:
    query = (
        np.zeros((*shape, 512), np.uint8),
        np.zeros((*shape, 64), np.uint16),
        np.ones(shape, np.float32),
    )
    plan = plan_decode(C.cache_seqlens[:1], 4, 1)
    with pytest.raises(ArgumentError) as caught:
        mla_decode(*query, *C.paged, TABLE[:1], C.cache_seqlens[:1], plan, 1.0)
    assert caught.value.name == name


def test_a_plan_of_the_same_number_of_blocks_serves_other_lengths() -> None:
    """A plan depends on blocks only: within a block a step's plan serves the next steps too."""
    plan = plan_decode([65, 1], 4, 1)
    assert isinstance(plan, DecodePlan)
    for name, got, expected in zip(("out", "lse"), call(C, plan=plan), call(C), strict=True):
        assert_same_bytes(name, got, expected)


def test_no_requests_and_no_pages() -> None:
    empty = C.requests([])
    out, lse = decode(empty)
    assert out.shape == (0, 1, 4, 512) and lse.shape == (0, 4, 1)
    none = replace(
        C.requests([0]),
        paged=tuple(x[:0] for x in C.paged),
        cache_seqlens=np.zeros(1, np.int32),
    )
    out, lse = decode(none)
    assert (out.view(np.uint16) == 0).all() and (lse == np.inf).all()
