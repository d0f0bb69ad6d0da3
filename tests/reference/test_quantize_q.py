"""quantize_q and the shared quantisation rule, against exact rationals and against its promises."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from compare import assert_same_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from quantize_oracle import quantize_row
from strategies import (
    NON_FINITE,
    PATTERNS,
    cast_finite,
    float_dtypes,
    magnitudes,
    pattern_values,
    scaled,
    seeds,
    token_arrays,
)

from snapmla_rt.errors import ArgumentError
from snapmla_rt.reference.quantize import next_power_of_two
from snapmla_rt.reference.quantize_q import quantize_q, quantize_q_parts

ROUNDINGS = st.sampled_from(["exact", "pow2"])
NAN_BITS = 0x7FFFFFFF


@st.composite
def rows(draw: st.DrawFn, num_rows: int = 3) -> np.ndarray:
    """[num_rows, 576] float32, latent and RoPE of independent patterns and magnitudes."""
    return np.concatenate([draw(token_arrays(num_rows, w)) for w in (512, 64)], axis=1)


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.dtype.itemsize}")


@settings(max_examples=25)
@given(x=rows(2), dtype=float_dtypes(), mode=ROUNDINGS)
def test_equals_exact_rationals(x: np.ndarray, dtype: np.dtype, mode: str) -> None:
    q = cast_finite(x, dtype)
    nope, rope, scale = quantize_q(q, scale_rounding=mode)
    for i, row in enumerate(q.astype(np.float32)):
        want_scale, want_codes, want_rope = quantize_row(row, mode == "pow2")
        assert float(scale[i]) == want_scale
        assert np.abs(nope[i].astype(np.float32)).tolist() == want_codes
        assert np.abs(rope[i].astype(np.float32)).tolist() == want_rope
        # the sign is kept, of zeros and of values that round to zero too
        assert np.array_equal(np.signbit(nope[i].astype(np.float32)), np.signbit(row[:512]))
        assert np.array_equal(np.signbit(rope[i].astype(np.float32)), np.signbit(row[512:]))


@given(x=rows(), mode=ROUNDINGS)
def test_finite_input_gives_finite_cache(x: np.ndarray, mode: str) -> None:
    nope, rope, scale = quantize_q(x, scale_rounding=mode)
    assert not (bits(nope) & 0x7F == 0x7F).any()  # no NaN code
    assert np.isfinite(scale).all() and (scale >= 2.0**-96).all()
    assert (np.abs(rope.astype(np.float32)) <= 2.0**60).all()
    if mode == "pow2":
        assert (bits(scale) & 0x7FFFFF == 0).all()


@given(x=rows(), mode=ROUNDINGS)
def test_dequantisation_error_bound(x: np.ndarray, mode: str) -> None:
    """Within half a step of e4m3 (2^-4 relative, 2^-10 scales absolute) and of bf16 (2^-8)."""
    nope, rope, scale = quantize_q(x, scale_rounding=mode)
    wide, s = x.astype(np.float64), scale.astype(np.float64)[:, None]
    slack = 1 + 2.0**-20  # the f32 rounding of the quotient and of the scale
    bound = np.maximum(np.abs(wide[:, :512]) * 2.0**-4, s * 2.0**-10) * slack
    assert (np.abs(nope.astype(np.float64) * s - wide[:, :512]) <= bound).all()
    bound = (np.abs(wide[:, 512:]) * 2.0**-8 + s * 2.0**-134) * slack
    assert (np.abs(rope.astype(np.float64) * s - wide[:, 512:]) <= bound).all()


@given(
    x=rows(4),
    dtype=float_dtypes(),
    bad=st.sampled_from(NON_FINITE),
    column=st.integers(0, 575),
    mode=ROUNDINGS,
)
def test_non_finite_row_is_nan_alone(
    x: np.ndarray, dtype: np.dtype, bad: float, column: int, mode: str
) -> None:
    q = cast_finite(x, dtype)
    clean = quantize_q(q, scale_rounding=mode)
    q[2, column] = bad
    nope, rope, scale = quantize_q(q, scale_rounding=mode)
    assert (bits(nope[2]) == 0x7F).all() and (bits(rope[2]) == 0x7FFF).all()
    assert bits(scale)[2] == NAN_BITS
    others = [0, 1, 3]
    for name, a, b in zip(("nope", "rope", "scale"), (nope, rope, scale), clean, strict=True):
        assert_same_bytes(name, a[others], b[others])


@pytest.mark.parametrize("mode", ["exact", "pow2"])
def test_zero_latent_keeps_its_rope(mode: str) -> None:
    q = np.zeros((1, 1, 2, 576), np.float32)
    q[..., 512:] = np.linspace(-1e3, 1e3, 64)
    q[0, 0, 1, :512] = -0.0
    nope, rope, scale = quantize_q(q, scale_rounding=mode)
    assert set(np.unique(bits(nope)[0, 0, 0])) == {0} and set(np.unique(bits(nope)[0, 0, 1])) == {
        0x80
    }
    back = rope.astype(np.float64) * scale[..., None].astype(np.float64)
    assert np.abs(back / q[..., 512:] - 1).max() <= 2.0**-8


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-38, 1e-30, 1.0, 448.0, 464.0, 1e30, 3e38, 3.4e38])
def test_known_magnitudes(amax: float) -> None:
    """The zero-scale fault of six projects: within e4m3's 1/16 or, below the floor, 2^-96/1024."""
    q = np.full((1, 576), np.float32(amax))
    q[:, 512:] = 0
    nope, _, scale = quantize_q(q)
    back = nope.astype(np.float64) * scale.astype(np.float64)[:, None]
    assert (np.abs(back[:, :512] - q[:, :512]) <= max(amax / 16, 2.0**-106)).all()
    if amax >= 448 * 2.0**-96:
        assert (bits(nope)[:, :512] == 0x7E).all()


def test_all_codes_are_reached() -> None:
    """Every finite e4m3 value, times a scale, comes back as its own code."""
    codes = np.arange(256, dtype=np.uint8)
    finite = codes[(codes & 0x7F) != 0x7F]
    values = finite.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    row = np.zeros(576, np.float32)
    row[: values.size] = values
    for factor in np.ldexp(np.float32(1.0), np.arange(-96, 119)).astype(np.float32):
        nope, _, scale = quantize_q((row * factor)[None])
        assert scale[0] == factor
        assert np.array_equal(bits(nope)[0, : values.size], finite)


def test_ties_go_to_even() -> None:
    row = np.zeros((1, 576), np.float32)
    row[0, :6] = (448.0, 17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10)  # scale 1, then half-way values
    nope, _, scale = quantize_q(row)
    assert scale[0] == 1.0
    assert nope[0, :6].astype(float).tolist() == [448, 16, 20, -16, 0, 2 * 2.0**-9]


@given(x=rows(6), dtype=float_dtypes(), mode=ROUNDINGS)
def test_parts_strides_and_bits_forms_agree(x: np.ndarray, dtype: np.dtype, mode: str) -> None:
    q = cast_finite(x, dtype).reshape(2, 1, 3, 576)
    whole = quantize_q(q, scale_rounding=mode)
    assert [a.shape for a in whole] == [(2, 1, 3, 512), (2, 1, 3, 64), (2, 1, 3)]
    wide = np.full((3, 2, 1, 700), 77, dtype)  # transposed and padded
    wide[..., 9:585] = q.transpose(2, 0, 1, 3)
    view = wide[..., 9:585].transpose(1, 2, 0, 3)
    forms = [
        quantize_q(view, scale_rounding=mode),
        quantize_q_parts(view[..., :512], view[..., 512:], scale_rounding=mode),
    ]
    if dtype == ml_dtypes.bfloat16:
        forms.append(quantize_q(q.view(np.uint16), scale_rounding=mode))
    for form in forms:
        for name, a, b in zip(("nope", "rope", "scale"), form, whole, strict=True):
            assert_same_bytes(name, a, b)


@given(exponent=st.integers(-126, 126), mantissa=st.integers(0, 2**23 - 1))
def test_next_power_of_two(exponent: int, mantissa: int) -> None:
    x = np.float32(np.ldexp(1 + mantissa / 2**23, exponent))
    want = 2.0 ** (exponent + (mantissa > 0))
    assert float(next_power_of_two(np.array([x]))[0]) == want


@given(mode=ROUNDINGS, seed=seeds(), magnitude=magnitudes(), pattern=st.sampled_from(PATTERNS))
def test_rows_are_independent(mode: str, seed: int, magnitude: float, pattern: str) -> None:
    """A row's bytes do not depend on the rows beside it (nor on the reference's chunks of 128)."""
    x = scaled(pattern_values(pattern, 200, 576, seed), magnitude)
    whole = quantize_q(x, scale_rounding=mode)
    for i in (0, 127, 128, 199):
        alone = quantize_q(x[i : i + 1], scale_rounding=mode)
        for a, b in zip(alone, whole, strict=True):
            assert_same_bytes("row", a[0], b[i])


def test_cost_of_the_roundings() -> None:
    """The figures in quantize_q_parts' docstring, to within 3 %."""
    rng = np.random.default_rng(7)
    n = 2048
    data = {
        "normal": (rng.standard_normal((n, 512)), rng.standard_normal((n, 64))),
        "paper": (
            np.clip(rng.normal(0, 2.5, (n, 512)), -10, 10),
            np.clip(8 * rng.standard_t(3, (n, 64)), -1000, 1000),
        ),
    }
    for latent, rope in data.values():
        parts = latent.astype(ml_dtypes.bfloat16), rope.astype(ml_dtypes.bfloat16)
        error = {}
        for mode in ("exact", "pow2"):
            *quantized, scale = quantize_q_parts(*parts, scale_rounding=mode)
            s = scale.astype(np.float64)[:, None]
            error[mode] = [
                np.linalg.norm(a.astype(np.float64) * s - x.astype(np.float64))
                / np.linalg.norm(x.astype(np.float64))
                for a, x in zip(quantized, parts, strict=True)
            ]
        assert error["exact"] == pytest.approx([2.63e-2, 1.66e-3], rel=0.03)
        assert error["pow2"][0] == pytest.approx(2.66e-2, rel=0.03)
        assert error["pow2"][1] == 0


def test_empty() -> None:
    nope, rope, scale = quantize_q(np.zeros((0, 1, 16, 576), np.float16))
    assert (nope.shape, rope.shape, scale.shape) == ((0, 1, 16, 512), (0, 1, 16, 64), (0, 1, 16))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: quantize_q(np.zeros((1, 1, 1, 575), np.float32)), "q"),
        (lambda: quantize_q(np.float32(1)), "q"),
        (lambda: quantize_q(np.zeros((1, 576), np.float64)), "q"),
        (lambda: quantize_q(np.zeros((1, 576), np.float32), scale_rounding="up"), "scale_rounding"),
        (
            lambda: quantize_q_parts(np.zeros((2, 512), np.float32), np.zeros((3, 64), np.float32)),
            "q_rope",
        ),
    ],
)
def test_bad_input_is_named(call, name: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ArgumentError) as error:
        call()
    assert error.value.name == name
