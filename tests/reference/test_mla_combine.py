"""mla_combine: the merge of splits against float64, empty splits, NaN, and its own edge values."""

from __future__ import annotations

import numpy as np
import pytest
from compare import assert_same_bytes
from decode_tools import BF16_REL, EXP2_REL, FTZ, LN2, LOG2_ABS, U24
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from snapmla_rt.errors import ArgumentError
from snapmla_rt.reference.mla_combine import BF16_MAX, hold, mla_combine, natural_lse
from snapmla_rt.reference.numerics import bf16_from_f32, f32_from_bf16

F32 = NDArray[np.float32]
INF = np.float32(np.inf)


def values(seed: int, splits: int, rows: int = 3, magnitude: float = 1.0) -> F32:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((splits, rows, 512)) * magnitude
    return hold(x.astype(np.float32))


def combine_fp64(o: F32, lse2: F32) -> tuple[NDArray, NDArray, NDArray]:
    """out [rows, 512], lse [rows] in nats and the sum of the weighted magnitudes, in float64."""
    lse = lse2.astype(np.float64)
    top = lse.max(axis=0)
    weights = np.exp2(lse - top)
    total = weights.sum(axis=0)
    o64 = o.astype(np.float64)
    out = np.einsum("sr,srd->rd", weights / total, o64)
    return out, (top + np.log2(total)) * LN2, np.einsum("sr,srd->rd", weights / total, np.abs(o64))


@given(
    seed=st.integers(0, 999),
    splits=st.sampled_from([1, 2, 3, 8, 132]),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e3, 1e6]),
    centre=st.sampled_from([0.0, -100.0, 5e3]),
    magnitude=st.sampled_from([1e-38, 1e-3, 1.0, 1e3, 1e37]),
)
def test_against_float64(
    seed: int, splits: int, spread: float, centre: float, magnitude: float
) -> None:
    rng = np.random.default_rng(seed)
    o = values(seed, splits, magnitude=magnitude)
    lse2 = (centre + spread * rng.standard_normal((splits, 3))).astype(np.float32)
    bits, lse = mla_combine(o, lse2)
    out, expected_lse, weighted = combine_fp64(o, lse2)
    # A weight: the difference of two lse2 rounds once (2^-24 of a difference of at most 126, beyond
    # which the weight is 0), exp2, the sum of `splits` weights, rcp, a product; then one fma each.
    weight = 126 * LN2 * U24 + EXP2_REL + (splits + 2) * U24
    bound = weighted * (2 * weight + (splits + 1) * U24) + splits * FTZ * np.abs(o).max()
    bound += np.abs(out) * BF16_REL + 2.0**-134
    assert (np.abs(f32_from_bf16(bits) - out) <= bound * (1 + 1e-6)).all()
    top = np.abs(lse2).max(axis=0).astype(np.float64) + 8  # log2(132) < 8
    lse_bound = LN2 * (weight + LOG2_ABS + 8 * U24 + top * 2 * U24)
    assert (np.abs(lse - expected_lse) <= lse_bound).all()


@given(seed=st.integers(0, 999), splits=st.integers(2, 8), empty=st.integers(1, 7))
def test_splits_that_saw_no_key_change_nothing(seed: int, splits: int, empty: int) -> None:
    """Empty splits (lse2 = -inf, o = 0) at any place, even where another value were left in o."""
    rng = np.random.default_rng(seed)
    o = values(seed, splits)
    lse2 = rng.standard_normal((splits, 3)).astype(np.float32)
    at = rng.integers(0, splits + 1, empty)
    with_empty = mla_combine(np.insert(o, at, 0, axis=0), np.insert(lse2, at, -INF, axis=0))
    for name, got, expected in zip(("out", "lse"), with_empty, mla_combine(o, lse2), strict=True):
        assert_same_bytes(name, got, expected)


def test_one_split_beside_empty_ones_passes_unchanged() -> None:
    """So a request that its mask leaves one split has the bytes of a request with one split."""
    o = values(0, 3)
    lse2 = np.array([[-INF] * 3, [1.25, -7.5, 300.0], [-INF] * 3], np.float32)
    bits, lse = mla_combine(o * np.array([[[0]], [[1]], [[0]]], np.float32), lse2)
    assert_same_bytes("out", bits, bf16_from_f32(o[1]))
    assert_same_bytes("lse", lse, natural_lse(lse2[1]))


def test_a_row_that_no_split_saw_is_zero_with_infinite_lse() -> None:
    o, lse2 = values(1, 4), np.zeros((4, 3), np.float32)
    lse2[:, 1] = -INF
    bits, lse = mla_combine(o, lse2)
    assert (bits[1] == 0).all() and lse[1] == np.inf
    others = mla_combine(o[:, [0, 2]], lse2[:, [0, 2]])
    assert_same_bytes("out", bits[[0, 2]], others[0])
    assert_same_bytes("lse", lse[[0, 2]], others[1])


@pytest.mark.parametrize("others", [0.0, -np.inf, 2.0**100])
def test_a_nan_split_makes_its_row_nan_and_no_other(others: float) -> None:
    o, lse2 = values(2, 4), np.full((4, 3), others, np.float32)
    clean = mla_combine(o, lse2)
    o[2, 1], lse2[2, 1] = np.nan, np.nan
    bits, lse = mla_combine(o, lse2)
    assert (bits[1] == 0x7FFF).all() and lse[1:2].view(np.uint32)[0] == 0x7FFFFFFF
    assert_same_bytes("out", bits[[0, 2]], clean[0][[0, 2]])
    assert_same_bytes("lse", lse[[0, 2]], clean[1][[0, 2]])


@pytest.mark.parametrize("lse2", [-(2.0**100), -150.0, 0.0, 2.0**100])
def test_largest_values_and_logits_stay_finite(lse2: float) -> None:
    """132 equal weights may sum to a little over 1: the result is held at the largest bf16."""
    o = np.full((132, 1, 512), BF16_MAX, np.float32)
    bits, lse = mla_combine(o, np.full((132, 1), lse2, np.float32))
    assert (bits >= 0x7F7E).all() and (bits <= 0x7F7F).all()
    assert np.isfinite(lse).all()
    bits, lse = mla_combine(-o, np.full((132, 1), lse2, np.float32))
    assert (bits >= 0xFF7E).all() and (bits <= 0xFF7F).all()


def test_lse_is_a_natural_logarithm() -> None:
    """Two shards whose row sums are 2 and 8 merge to 10 (log2 units inside, nats outside)."""
    o = np.stack([np.full((1, 512), 1.0), np.full((1, 512), 2.0)]).astype(np.float32)
    bits, lse = mla_combine(o, np.array([[1.0], [3.0]], np.float32))
    np.testing.assert_allclose(lse, np.log(10.0), rtol=2 * U24)
    np.testing.assert_allclose(f32_from_bf16(bits), 1.8, rtol=BF16_REL)


def test_order_of_the_splits_is_part_of_the_bytes_but_stays_close() -> None:
    o, lse2 = values(3, 8), np.random.default_rng(3).standard_normal((8, 3)).astype(np.float32)
    forward, backward = mla_combine(o, lse2), mla_combine(o[::-1], lse2[::-1])
    weighted = combine_fp64(o, lse2)[2]
    close = 2 * (8 + 8 + 2) * U24 * weighted + 2 * BF16_REL * np.abs(f32_from_bf16(forward[0]))
    assert (np.abs(f32_from_bf16(forward[0]) - f32_from_bf16(backward[0])) <= close).all()


@pytest.mark.parametrize(
    ("name", "o_shape", "lse_shape", "dtype"),
    [
        ("lse_accum", (2, 3, 512), (2,), np.float32),
        ("lse_accum", (0, 3, 512), (0, 3), np.float32),
        ("lse_accum", (2, 3, 512), (2, 3), np.float64),
        ("o_accum", (2, 4, 512), (2, 3), np.float32),
        ("o_accum", (3, 3, 512), (2, 3), np.float32),
        ("o_accum", (2, 3, 576), (2, 3), np.float32),
    ],
)
def test_bad_arguments_are_named(
    name: str, o_shape: tuple[int, ...], lse_shape: tuple[int, ...], dtype: type
) -> None:
    with pytest.raises(ArgumentError) as caught:
        mla_combine(np.zeros(o_shape, np.float32), np.zeros(lse_shape, dtype))
    assert caught.value.name == name
    with pytest.raises(ArgumentError) as caught:
        mla_combine(np.zeros((2, 3, 512)), np.zeros((2, 3), np.float32))
    assert caught.value.name == "o_accum"
