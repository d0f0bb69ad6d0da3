"""reference/numerics.py against recorded H200 outputs and against exact rational arithmetic."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapmla_rt.config import LOG2_COEFFS_BITS
from snapmla_rt.errors import ArgumentError
from snapmla_rt.reference import numerics as nm

Vectors = dict[str, np.ndarray]
Function = Callable[[np.ndarray], np.ndarray]

HARDWARE = Path(__file__).resolve().parents[1] / "data" / "hardware"
CHUNK = 1 << 22  # inputs of one recorded hash
NUM_CHUNKS = 1 << 10
# Chunks of the default run: subnormals and +0; the top of (0, 1) and [1, 2); the largest finite
# and inf; -0; negative values around -1; the last NaN.
SAMPLED_CHUNKS = (0, 253, 254, 509, 512, 766, 1023)

PATTERNS = st.integers(0, 2**32 - 1)
# Biased to what breaks rounding: zeros, subnormals, powers of two, halves of an ulp, limits.
EDGE_PATTERNS = st.sampled_from(
    [s | m for s in (0, 1 << 31) for m in (
        0, 1, 2, 0x7FFFFF, 0x800000, 0x800001, 0x33800000, 0x34000000, 0x3F7FFFFF, 0x3F800000,
        0x3F800001, 0x3FFFFFFF, 0x4B000000, 0x4B800000, 0x7F000000, 0x7F7FFFFF, 0x7F800000,
        0x7F800001, 0x7FC00000, 0x7FFFFFFF,
    )]
)  # fmt: skip
BITS = st.one_of(EDGE_PATTERNS, PATTERNS)


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    """The functions silence NumPy by themselves and leave the caller's settings alone."""
    before = np.geterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert np.geterr() == before


@pytest.fixture(scope="module")
def alu() -> dict[str, np.ndarray]:
    with np.load(HARDWARE / "alu_vectors.npz") as data:
        return {name: data[name] for name in data.files}


def f32(bits: object) -> np.ndarray:
    return np.asarray(bits, dtype=np.uint32).view(np.float32)


def bits(x: np.ndarray) -> np.ndarray:
    assert x.dtype == np.float32
    return x.view(np.uint32)


def chunk_patterns(chunk: int) -> np.ndarray:
    return np.arange(chunk * CHUNK, (chunk + 1) * CHUNK, dtype=np.uint64).astype(np.uint32)


def chunk_hash(out: np.ndarray) -> np.uint64:
    weights = 2 * np.arange(out.size, dtype=np.uint64) + 1
    return (out.astype(np.uint64) * weights).sum(dtype=np.uint64)


# --- Conversions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "convert"),
    [("e4m3_transitions", nm.e4m3_from_f32), ("bf16_transitions", nm.bf16_from_f32)],
)
def test_conversion_changes_exactly_at_the_recorded_patterns(
    alu: Vectors, name: str, convert: Function
) -> None:
    start, value = alu[name].T
    last = np.append(start[1:], np.uint32(0)) - np.uint32(1)  # wraps to 0xffffffff
    for patterns in (start, last, start + (last - start) // np.uint32(2)):
        np.testing.assert_array_equal(convert(f32(patterns)), value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "convert"),
    [("e4m3_transitions", nm.e4m3_from_f32), ("bf16_transitions", nm.bf16_from_f32)],
)
def test_conversion_of_every_float32(alu: Vectors, name: str, convert: Function) -> None:
    start, value = alu[name].T
    for chunk in range(NUM_CHUNKS):
        patterns = chunk_patterns(chunk)
        expected = value[np.searchsorted(start, patterns, side="right") - 1]
        assert (convert(f32(patterns)) == expected).all(), f"chunk {chunk}"


def test_every_e4m3_code_has_the_hardware_value(alu: Vectors) -> None:
    """cvt.rn.f16x2.e4m3x2 of all 65,536 pairs; e4m3 is a subset of f16."""
    pairs = np.arange(1 << 16, dtype=np.uint16)
    recorded = alu["f16x2_from_e4m3x2"].view(np.float16).reshape(-1, 2).astype(np.float32)
    codes = np.stack([pairs & 0xFF, pairs >> 8], axis=1).astype(np.uint8)
    values = nm.f32_from_e4m3(codes)
    nan = (codes & 0x7F) == 0x7F
    assert (bits(values)[nan] == nm.NAN_BITS).all() and np.isnan(recorded[nan]).all()
    np.testing.assert_array_equal(bits(values)[~nan], bits(recorded)[~nan])


def test_every_e4m3_code_survives_a_round_trip() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = np.where(codes == 0xFF, 0x7F, codes)
    np.testing.assert_array_equal(nm.e4m3_from_f32(nm.f32_from_e4m3(codes)), expected)
    as_ml_dtypes = codes.view(ml_dtypes.float8_e4m3fn)
    assert (bits(nm.f32_from_e4m3(as_ml_dtypes)) == bits(nm.f32_from_e4m3(codes))).all()


def test_every_bf16_survives_a_round_trip() -> None:
    codes = np.arange(1 << 16, dtype=np.uint16)
    nan = (codes & 0x7FFF) > 0x7F80
    values = nm.f32_from_bf16(codes)
    assert (bits(values)[nan] == nm.NAN_BITS).all()
    assert (bits(values)[~nan] == codes[~nan].astype(np.uint32) << 16).all()
    np.testing.assert_array_equal(nm.bf16_from_f32(values), np.where(nan, 0x7FFF, codes))
    assert (bits(nm.f32_from_bf16(codes.view(ml_dtypes.bfloat16))) == bits(values)).all()


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (448.0, 0x7E), (464.0, 0x7E), (464.00003, 0x7E), (3e38, 0x7E), (np.inf, 0x7E),
        (-465.0, 0xFE), (-np.inf, 0xFE), (np.nan, 0x7F), (0.0, 0x00), (-0.0, 0x80),
        (2.0**-10, 0x00), (-(2.0**-10), 0x80), (2.0**-10 * 1.0000001, 0x01), (-1e-45, 0x80),
        (3 * 2.0**-10, 0x02), (2.0**-6, 0x08), (1.0625, 0x38), (1.1875, 0x3A),
    ],
)  # fmt: skip
def test_e4m3_saturates_and_rounds_ties_to_even(x: float, code: int) -> None:
    assert nm.e4m3_from_f32(np.float32(x)) == code


# --- exp2 and reciprocal -------------------------------------------------------------------------


def test_exp2_equals_the_recorded_samples(alu: Vectors) -> None:
    for x, y in (("ex2_x", "ex2_y"), ("ex2_special_x", "ex2_special_y")):
        np.testing.assert_array_equal(bits(nm.exp2_mufu(f32(alu[x]))), alu[y])


@pytest.mark.parametrize(
    ("name", "function"), [("ex2_chunk_hash", nm.exp2_mufu), ("rcp_rn_chunk_hash", nm.rcp_rn)]
)
@pytest.mark.parametrize(
    "chunks",
    [SAMPLED_CHUNKS, pytest.param(range(NUM_CHUNKS), marks=pytest.mark.slow)],
    ids=["sampled", "all"],
)
def test_hashes_of_consecutive_inputs(
    alu: Vectors, name: str, function: Function, chunks: Iterable[int]
) -> None:
    wrong = [
        chunk
        for chunk in chunks
        if chunk_hash(bits(function(f32(chunk_patterns(chunk))))) != alu[name][chunk]
    ]
    assert wrong == []


def test_exp2_of_integers_is_exact_and_flushes() -> None:
    n = np.arange(-300, 300)
    expected = np.where(n < -126, 0.0, np.where(n > 127, np.inf, 2.0 ** n.clip(-200, 200)))
    np.testing.assert_array_equal(nm.exp2_mufu(n.astype(np.float32)), expected.astype(np.float32))


def test_exp2_error_is_within_the_stated_bound() -> None:
    """Every fraction of 23 bits on both sides of zero, where only the mantissa varies."""
    x = 1 + np.arange(1 << 23, dtype=np.float32) / np.float32(1 << 23)
    for value in (x, -x):
        relative = nm.exp2_mufu(value) / np.exp2(value.astype(np.float64)) - 1
        assert np.abs(relative).max() <= 1.46e-7


# --- log2 --------------------------------------------------------------------------------------


def test_log2_error() -> None:
    """5.2e-8 within [sqrt(1/2), sqrt(2)); elsewhere at most 3.5e-8 beside the last rounding."""
    near = np.linspace(math.sqrt(0.5), math.sqrt(2), 1 << 20).astype(np.float32)
    error = np.abs(nm.log2_soft(near) - np.log2(near.astype(np.float64)))
    assert error.max() <= 5.2e-8
    x = f32(np.random.default_rng(5).integers(1, 0x7F800000, 1 << 20, dtype=np.uint32))
    result = nm.log2_soft(x)
    error = np.abs(result - np.log2(x.astype(np.float64)))
    assert (error - np.spacing(np.abs(result)) / 2).max() <= 3.5e-8


def test_log2_is_exact_at_every_power_of_two() -> None:
    n = np.arange(-149, 128)
    x = np.ldexp(np.float64(1), n).astype(np.float32)
    np.testing.assert_array_equal(nm.log2_soft(x), n.astype(np.float32))


def test_log2_never_decreases_around_the_seams() -> None:
    """At each seam sqrt(1/2) * 2^e the exponent and the sign of f change together."""
    for e in (-126, -20, 0, 1, 60, 127):
        seam = 0x3F3504F3 + (e << 23)
        result = nm.log2_soft(f32(np.arange(seam - 2000, min(seam + 2000, 0x7F800000))))
        assert (np.diff(result) >= 0).all()


def test_log2_of_specials() -> None:
    x = f32([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x80000001, 0xBF800000])
    expected = [0xFF800000, 0xFF800000, 0x7F800000] + [nm.NAN_BITS] * 5
    np.testing.assert_array_equal(bits(nm.log2_soft(x)), np.array(expected, np.uint32))


@given(BITS.filter(lambda b: 0 < b < 0x7F800000))
def test_log2_is_its_written_definition(pattern: int) -> None:
    """Operation by operation with exact rational fma: what the CUDA side has to do."""
    x, shift = f32(pattern), 0
    if x < 2.0**-126:
        x, shift = x * np.float32(2.0**24), 24
    word = int(x.view(np.uint32))
    e = (word - 0x3F3504F3) >> 23
    f = float(f32(word - (e << 23))) - 1.0
    p = float(f32(LOG2_COEFFS_BITS[-1]))
    for coefficient in LOG2_COEFFS_BITS[-2::-1]:
        p = exact_f32(Fraction(p) * Fraction(f) + Fraction(float(f32(coefficient))))
    expected = exact_f32(Fraction(f) * Fraction(p) + (e - shift))
    assert float(nm.log2_soft(f32(pattern))) == expected


# --- fma, subtraction, NaN ---------------------------------------------------------------------


def exact_f32(value: Fraction, up: bool = False) -> float:
    """The float32 nearest to a rational (ties to even), or the next one above it: the oracle."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - 23, -149)
    quotient = value / unit
    rounded = math.ceil(quotient) if up else round(quotient)  # round() takes ties to even
    result = rounded * unit
    if abs(result) >= Fraction(2) ** 128:
        return -float(f32(0x7F7FFFFF)) if up and result < 0 else math.copysign(math.inf, result)
    return float(result)


def assert_same_value(actual: np.ndarray, expected: float) -> None:
    assert actual.dtype == np.float32
    assert float(actual) == expected, f"{actual!r} {expected!r}"


@settings(max_examples=400)
@given(BITS, BITS, BITS)
def test_fma_rounds_once(a: int, b: int, c: int) -> None:
    x, y, z = (float(f32(v)) for v in (a, b, c))
    result = nm.fma(f32(a), f32(b), f32(c))
    if all(map(math.isfinite, (x, y, z))):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        assert_same_value(result, exact_f32(exact))
        if exact == 0:
            # IEEE: -0 only where product and addend are both -0.
            product_sign = math.copysign(1, x) * math.copysign(1, y)
            negative = product_sign < 0 and math.copysign(1, z) < 0
            if x == 0 or y == 0:
                assert bool(np.signbit(result)) == negative
    else:
        with np.errstate(all="ignore"):
            expected = np.float64(x) * y + z  # no rounding decides where an input is special
        if np.isnan(expected):
            assert result.view(np.uint32) == nm.NAN_BITS
        else:
            assert float(result) == expected


@settings(max_examples=300)
@given(
    st.integers(0x3F800000, 0x3FFFFFFF),
    st.integers(0x3F800000, 0x3FFFFFFF),
    st.integers(-60, 60),
    st.integers(0, 0x7FFFFF),
    st.booleans(),
    st.integers(-148, 0),
)
def test_fma_where_double_rounding_would_show(
    a: int, b: int, gap: int, mantissa: int, negative: bool, scale: int
) -> None:
    """Addends far above, below and at the product, results down into the subnormals."""
    x = math.ldexp(float(f32(a)), scale)
    z = math.ldexp(float(f32(0x3F800000 | mantissa)), max(scale + gap, -149))
    x32, y32, z32 = np.float32(x), f32(b), np.float32(-z if negative else z)
    exact = Fraction(float(x32)) * Fraction(float(y32)) + Fraction(float(z32))
    assert_same_value(nm.fma(x32, y32, z32), exact_f32(exact))


def test_fma_at_a_tie_that_float64_alone_gets_wrong() -> None:
    """1 + 2^-24 + 2^-80 rounds up; a float64 sum drops the 2^-80 and then ties to even."""
    a, b, c = np.float32(2.0**-40), np.float32(2.0**-40), np.float32(1.0)
    c_tie = np.float32(1 + 2.0**-23)
    assert nm.fma(np.float32(1.0), np.float32(2.0**-24), c_tie) == np.float32(1 + 2.0**-22)
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24: a tie, moved by an addend too small for float64.
    x = np.float32(1 + 2.0**-12)
    assert nm.fma(x, x, np.float32(0)) == np.float32(1 + 2.0**-11)
    assert nm.fma(x, x, np.float32(2.0**-90)) == np.float32(1 + 2.0**-11 + 2.0**-23)
    assert nm.fma(x, x, np.float32(-(2.0**-90))) == np.float32(1 + 2.0**-11)
    assert nm.fma(a, b, c) == 1.0


@pytest.mark.parametrize(
    "shape", [(), (0, 3), (1, 100_000), (3, 70_000), (2, 3, 40_000), (65_537,)]
)
def test_fma_chunks_do_not_show(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(9)
    a, b, c = (rng.standard_normal(shape).astype(np.float32) for _ in range(3))
    result = nm.fma(a, b, c)
    assert result.shape == shape
    # float64 fma of these is right but for ties broken by bits below 2^-53: none in this data.
    expected = (a.astype(np.float64) * b + c).astype(np.float32)
    np.testing.assert_array_equal(result, expected)
    row = c[..., :1] if shape else c
    np.testing.assert_array_equal(nm.fma(a, b, row), nm.fma(a, b, np.broadcast_to(row, shape)))


@settings(max_examples=300)
@given(BITS, BITS)
def test_sub_ru_rounds_up(a: int, b: int) -> None:
    x, y = float(f32(a)), float(f32(b))
    result = nm.sub_ru(f32(a), f32(b))
    if math.isfinite(x) and math.isfinite(y):
        exact = Fraction(x) - Fraction(y)
        assert_same_value(result, exact_f32(exact, up=True))
        if exact == 0 and x != 0:
            assert not np.signbit(result)
    elif math.isnan(x - y):
        assert result.view(np.uint32) == nm.NAN_BITS
    else:
        assert float(result) == x - y


@settings(max_examples=200)
@given(st.integers(0, 0x7FFFFF), st.integers(0, 0x7FFFFF), st.integers(0, 120), st.booleans())
def test_sub_ru_with_every_gap_of_exponents(m: int, n: int, gap: int, negative: bool) -> None:
    a = float(f32(0x3F800000 | m))
    b = math.ldexp(float(f32(0x3F800000 | n)), -gap)
    x, y = (-a, -b) if negative else (a, b)
    exact = Fraction(x) - Fraction(y)
    assert_same_value(nm.sub_ru(np.float32(x), np.float32(y)), exact_f32(exact, up=True))


def test_sub_ru_at_the_ends_of_the_range() -> None:
    largest = f32(0x7F7FFFFF)
    assert nm.sub_ru(-largest, largest) == -largest
    assert nm.sub_ru(largest, -f32(1)) == np.inf
    assert nm.sub_ru(-largest, f32(1)) == -largest
    assert nm.sub_ru(f32(0x80000000), f32(0)).view(np.uint32) == 0x80000000


def test_every_nan_becomes_the_one_the_hardware_returns() -> None:
    x = f32([0x7F800001, 0xFF800001, 0x7FC00000, 0xFFFFFFFF, 0x7FFFFFFF])
    for result in (
        nm.canonical_nan(x),
        nm.fma(x, np.float32(1), np.float32(0)),
        nm.fma(np.float32(1), np.float32(1), x),
        nm.rcp_rn(x),
        nm.sub_ru(x, np.float32(1)),
        nm.exp2_mufu(x),
        nm.log2_soft(x),
    ):
        assert (bits(result) == nm.NAN_BITS).all()
    other = f32([0, 0x80000000, 1, 0x7F800000, 0xFF800000, 0x3F800000])
    np.testing.assert_array_equal(bits(nm.canonical_nan(other)), bits(other))
    assert bits(x)[0] == 0x7F800001  # the input is untouched


# --- Arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [nm.e4m3_from_f32, nm.bf16_from_f32, nm.exp2_mufu, nm.log2_soft, nm.rcp_rn, nm.canonical_nan],
)
def test_other_dtypes_are_refused_by_name(function: Function) -> None:
    """A float64 would be rounded silently, and then once more."""
    with pytest.raises(ArgumentError, match=r"x: expected dtype float32, got float64"):
        function(np.zeros(3))


def test_codes_of_another_type_are_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match=r"codes: expected dtype float8_e4m3fn .* uint8"):
        nm.f32_from_e4m3(np.zeros(3, np.int8))
    with pytest.raises(ArgumentError, match=r"bits: expected dtype bfloat16 .* uint16"):
        nm.f32_from_bf16(np.zeros(3, np.float16))


@pytest.mark.parametrize("function", [nm.exp2_mufu, nm.log2_soft, nm.rcp_rn, nm.bf16_from_f32])
def test_shapes_and_strides_do_not_matter(function: Function) -> None:
    x = np.abs(np.random.default_rng(3).standard_normal((6, 5, 7)).astype(np.float32)) + 1
    flat = function(x.reshape(-1)).reshape(x.shape)
    np.testing.assert_array_equal(function(x), flat)
    np.testing.assert_array_equal(function(x[::2, :, ::-1]), flat[::2, :, ::-1])
    assert function(x[:0]).shape == (0, 5, 7)
    assert np.shape(function(x[0, 0, 0])) == ()
