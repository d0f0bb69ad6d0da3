"""The oracle itself, against what a person can check: closed forms, plain loops, ml_dtypes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DecodeCase, decode_cases, lengths, seeds

from snapmla_rt.reference import attention_fp64 as oracle
from snapmla_rt.reference.attention_fp64 import (
    attention_fp64,
    attention_fp64_p_rounded,
    dequantise,
    dequantise_cache,
    e4m3_table,
    round_to_e4m3,
)

EPS = 2.0**-52


def _python_attention(
    q: np.ndarray, kv: np.ndarray, softmax_scale: float, causal: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The definition, one Python float at a time with exact sums (math.fsum)."""
    seq_len_q, heads, _ = q.shape
    out = np.zeros((seq_len_q, heads, 512))
    lse = np.full((heads, seq_len_q), np.inf)
    for i in range(seq_len_q):
        visible = len(kv) - seq_len_q + 1 + i if causal else len(kv)
        for h in range(heads if visible > 0 else 0):
            scores = [
                softmax_scale * math.fsum(a * b for a, b in zip(q[i, h], key, strict=True))
                for key in kv[:visible]
            ]
            top = max(scores)
            weights = [math.exp(s - top) for s in scores]
            total = math.fsum(weights)
            lse[h, i] = top + math.log(total)
            for d in range(512):
                out[i, h, d] = (
                    math.fsum(w * v for w, v in zip(weights, kv[:visible, d], strict=True)) / total
                )
    return out, lse


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_equals_the_definition_summed_exactly(length: int, causal: bool) -> None:
    rng = np.random.default_rng(length)
    q = rng.standard_normal((1, 3, 2, 576))
    kv = rng.standard_normal((length, 576))
    out, lse = attention_fp64(q, [kv], 0.07, causal)
    expected_out, expected_lse = _python_attention(q[0], kv, 0.07, causal)
    # 576 products of about 1: scores are off by at most a few hundred eps, weights by the same
    np.testing.assert_allclose(out[0], expected_out, rtol=0, atol=600 * EPS * 4)
    np.testing.assert_allclose(lse[0], expected_lse, rtol=0, atol=600 * EPS * 4)


@given(length=lengths(min_value=1), seed=seeds(), scale=st.sampled_from([1e-6, 0.07, 1.0]))
def test_equal_tokens_give_that_token_and_the_log_of_their_number(
    length: int, seed: int, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    token = rng.standard_normal(576)
    q = rng.standard_normal((1, 1, 4, 576))
    out, lse = attention_fp64(q, [np.tile(token, (length, 1))], scale)
    np.testing.assert_allclose(out[0, 0], np.tile(token[:512], (4, 1)), rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        lse[0, :, 0], scale * (q[0, 0] @ token) + math.log(length), rtol=0, atol=1e-11
    )


def test_a_zero_query_averages_and_a_loud_token_takes_all() -> None:
    kv = np.random.default_rng(0).standard_normal((130, 576))
    out, _ = attention_fp64(np.zeros((1, 1, 1, 576)), [kv], 1.0)
    np.testing.assert_allclose(out[0, 0, 0], kv[:, :512].mean(axis=0), atol=1e-14)
    q = np.zeros((1, 1, 1, 576))
    q[..., 575] = 1e4  # only the last RoPE dimension speaks
    kv[:, 575] = 0.0
    kv[77, 575] = 1.0
    out, lse = attention_fp64(q, [kv], 1.0)
    np.testing.assert_array_equal(out[0, 0, 0], kv[77, :512])
    assert lse[0, 0, 0] == 1e4


@given(decode_cases(max_batch=3, max_heads=2, max_seq_len_q=8))
@settings(max_examples=30)
def test_padded_and_ragged_agree_and_padding_is_never_read(case: DecodeCase) -> None:
    padded = np.full((len(case.kv), 200, 576), np.nan)
    for row, kv in zip(padded, case.kv, strict=True):
        row[: len(kv)] = kv
    ragged = attention_fp64(case.q, case.kv, case.softmax_scale, case.causal)
    with_lengths = attention_fp64(
        case.q, padded, case.softmax_scale, case.causal, case.cache_seqlens
    )
    for got, expected in zip(with_lengths, ragged, strict=True):
        np.testing.assert_array_equal(got, expected)
    seq_len_q = case.q.shape[1]
    for b, kv in enumerate(case.kv):
        for i in range(seq_len_q):
            visible = len(kv) - (seq_len_q - 1 - i if case.causal else 0)
            assert np.isfinite(ragged[1][b, :, i]).all() == (visible > 0)
            if visible <= 0:
                assert (ragged[0][b, i] == 0).all() and (ragged[1][b, :, i] == np.inf).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dim", [0, 511, 512, 575])
def test_a_non_finite_token_makes_nan_exactly_the_rows_that_see_it(bad: float, dim: int) -> None:
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 3, 2, 576))
    kv = [rng.standard_normal((70, 576)) for _ in range(2)]
    clean = attention_fp64(q, kv, 0.1)
    kv[0][68, dim] = bad  # of 70 tokens with 3 query tokens, rows 1 and 2 see token 68
    out, lse = attention_fp64(q, kv, 0.1)
    assert np.isnan(out[0, 1:]).all() and np.isnan(lse[0, :, 1:]).all()
    np.testing.assert_array_equal(out[0, 0], clean[0][0, 0])
    np.testing.assert_array_equal(out[1], clean[0][1])
    np.testing.assert_array_equal(lse[1], clean[1][1])


def test_row_and_token_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    q = rng.standard_normal((1, 1, 5, 576))
    kv = rng.standard_normal((700, 576))
    scale = np.abs(kv[:, :512]).max(axis=1) / 448
    whole = attention_fp64(q, [kv], 0.1), attention_fp64_p_rounded(q, [kv], [scale], 0.1)
    monkeypatch.setattr(oracle, "_TOKEN_CHUNK", 200)  # not a multiple of the block: it must align
    monkeypatch.setattr(oracle, "_ROW_CHUNK_BYTES", 2 * 700 * 8)
    parts = attention_fp64(q, [kv], 0.1), attention_fp64_p_rounded(q, [kv], [scale], 0.1)
    for got, expected in zip(parts, whole, strict=True):
        np.testing.assert_allclose(got[0], expected[0], rtol=0, atol=1e-13)
        np.testing.assert_allclose(got[1], expected[1], rtol=0, atol=1e-13)


def test_131072_tokens_fit_in_memory() -> None:
    """A context of 128k with several heads: equal tokens make the answer known."""
    token = np.random.default_rng(3).standard_normal(576).astype(ml_dtypes.bfloat16)
    kv = np.broadcast_to(token, (131072, 576))
    out, lse = attention_fp64(np.ones((1, 1, 4, 576)), [kv], 1e-3)
    np.testing.assert_allclose(out[0, 0, 3], token[:512].astype(np.float64), atol=1e-10)
    expected = 1e-3 * token.astype(np.float64).sum() + math.log(131072)
    np.testing.assert_allclose(lse[0, 3, 0], expected, atol=1e-10)


def test_magnitudes_of_the_largest_float32_stay_finite() -> None:
    kv = np.full((3, 576), 3e38)
    kv[1] = 1e-45
    out, lse = attention_fp64(np.full((1, 1, 1, 576), 3e38), [kv], 192**-0.5)
    assert np.isfinite(out).all() and np.isfinite(lse).all()
    np.testing.assert_allclose(out[0, 0, 0], 3e38)


# --- e4m3 ---------------------------------------------------------------------------------------


def test_the_table_is_the_format() -> None:
    expected = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    table = e4m3_table()
    np.testing.assert_array_equal(table, expected)  # NaN where NaN
    assert np.signbit(table[0x80]) and table[0x7E] == 448.0 and table[1] == 2.0**-9


def test_rounding_at_every_code_midpoint_and_beside_it() -> None:
    values = e4m3_table()[:0x7F]  # the non-negative finite codes, ascending
    middle = (values[:-1] + values[1:]) / 2
    even = np.where(np.arange(len(middle)) % 2 == 0, values[:-1], values[1:])
    for sign in (1.0, -1.0):
        np.testing.assert_array_equal(round_to_e4m3(sign * values), sign * values)
        np.testing.assert_array_equal(round_to_e4m3(sign * middle), sign * even)
        below, above = np.nextafter(middle, 0), np.nextafter(middle, 1e9)
        np.testing.assert_array_equal(round_to_e4m3(sign * below), sign * values[:-1])
        np.testing.assert_array_equal(round_to_e4m3(sign * above), sign * values[1:])
    np.testing.assert_array_equal(
        round_to_e4m3([464.0, 465.0, 1e300, -np.inf, 1e-320]), [448, 448, 448, -448, 0]
    )
    assert np.isnan(round_to_e4m3(np.nan))


@pytest.mark.parametrize("as_bits", [True, False])
def test_dequantise_is_exact_and_takes_codes_or_values(as_bits: bool) -> None:
    rng = np.random.default_rng(4)
    codes = np.resize(np.arange(256, dtype=np.uint8), (3, 512))
    rope = rng.standard_normal((3, 64)).astype(ml_dtypes.bfloat16)
    scale = np.array([2.0**-96, 0.1, 3e30], np.float32)
    got = (
        dequantise(codes, scale, rope.view(np.uint16))
        if as_bits
        else dequantise(codes.view(ml_dtypes.float8_e4m3fn), scale, rope)
    )
    for token in range(3):
        factor = float(scale[token])
        np.testing.assert_array_equal(got[token, :512], e4m3_table()[codes[token]] * factor)
        np.testing.assert_array_equal(got[token, 512:], rope[token].astype(np.float64) * factor)


def test_dequantise_cache_follows_the_slots() -> None:
    rng = np.random.default_rng(5)
    ckv = rng.integers(0, 127, (4, 64, 512), dtype=np.uint8)
    scale = rng.random((4, 64), dtype=np.float32)
    rope = rng.standard_normal((4, 64, 64)).astype(ml_dtypes.bfloat16)
    got = dequantise_cache(ckv, scale, rope, [255, 0, 64 + 63])
    for row, (block, offset) in zip(got, [(3, 63), (0, 0), (1, 63)], strict=True):
        expected = dequantise(ckv[block, offset], scale[block, offset], rope[block, offset])
        np.testing.assert_array_equal(row, expected)


# --- the baseline: P rounded per row and block ---------------------------------------------------


def test_weights_that_e4m3_holds_are_not_changed() -> None:
    """Equal tokens: every P' is the block's maximum, 448 after scaling, so nothing is rounded."""
    kv = np.tile(np.random.default_rng(6).standard_normal(576), (100, 1))
    q = np.random.default_rng(7).standard_normal((1, 1, 2, 576))
    exact = attention_fp64(q, [kv], 0.1)
    rounded = attention_fp64_p_rounded(q, [kv], [np.full(100, 0.01)], 0.1)
    np.testing.assert_allclose(rounded[0], exact[0], rtol=0, atol=1e-13)
    np.testing.assert_array_equal(rounded[1], exact[1])


@given(seed=seeds(), length=lengths(min_value=1), block_n=st.sampled_from([64, 128]))
def test_the_error_stays_within_the_format(seed: int, length: int, block_n: int) -> None:
    """A weight is off by at most 2^-4 of itself, or by half a subnormal step of its block."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((1, 1, 3, 576)) * rng.choice([0.1, 1.0, 5.0])
    kv = rng.standard_normal((length, 576)) * np.exp2(rng.uniform(-3, 3, (length, 1)))
    scale = np.abs(kv[:, :512]).max(axis=1) / 448
    out, lse = attention_fp64_p_rounded(q, [kv], [scale], 0.1, block_n=block_n)
    exact, exact_lse = attention_fp64(q, [kv], 0.1)
    np.testing.assert_array_equal(lse, exact_lse)  # the row sum is the unrounded one
    weights = np.exp(q[0, 0] @ kv.T * 0.1 - exact_lse[0])
    bound = np.zeros((3, 512))
    for start in range(0, length, block_n):
        block = slice(start, start + block_n)
        p_scale = (weights[:, block] * scale[block]).max(axis=1, keepdims=True) / 448
        off = np.maximum(weights[:, block] * 2.0**-4, p_scale * 2.0**-10 / scale[block])
        bound += off @ np.abs(kv[block, :512])
    assert (np.abs(out[0, 0] - exact[0, 0]) <= bound * (1 + 1e-9) + 1e-300).all()


def test_it_rounds_per_block_and_sees_the_scale() -> None:
    """A P' of 100.3 beside the 448 of another token becomes 104; alone in its block it stays."""
    q = np.zeros((1, 1, 1, 576))
    kv = np.zeros((65, 576))
    kv[0, 0], kv[1, 1], kv[64, 2] = 1.0, 1.0, 1.0
    scale = np.full(65, 1e-30)
    scale[0], scale[1], scale[64] = 448.0, 100.3, 100.3
    out, _ = attention_fp64_p_rounded(q, [kv], [scale], 1.0)
    # equal weights 1/65; token 1 shares a block with the 448 of token 0, token 64 is alone
    expected = np.array([1.0, 104.0 / 100.3, 1.0]) / 65
    np.testing.assert_allclose(out[0, 0, 0, :3], expected, rtol=1e-13)
    # as the 128-token variant both share the block
    out, _ = attention_fp64_p_rounded(q, [kv], [scale], 1.0, block_n=128)
    np.testing.assert_allclose(out[0, 0, 0, 2], 104.0 / 100.3 / 65, rtol=1e-13)


def test_wrong_width_is_refused() -> None:
    with pytest.raises(ValueError, match="576"):
        attention_fp64(np.zeros((1, 1, 1, 512)), [np.zeros((3, 576))], 1.0)
