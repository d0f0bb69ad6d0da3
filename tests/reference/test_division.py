"""The kernels' quotient for e4m3 codes: a corrected product instead of a division.

common/quantize.cuh computes q = x * rcp, r = q * scale - x, q - r * rcp, where the reference
divides. The two may differ only where a quotient lies next to a point half-way between two codes;
there they are compared, for every mantissa of the scale with -m slow.

For inputs of 16 bits it is shorter still, and equals the division in every bit: 1 / scale as a sum
hi + lo, x * hi + (x * lo) with one rounding at the end. All pairs of significands are tried.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from snapmla_rt.reference.numerics import e4m3_from_f32, fma, rcp_rn

F32 = NDArray[np.float32]


LOW_448 = float.fromhex("-0x1.b6db6ep-34")  # 1 / 448 less its nearest float32


def half_way_significands() -> F32:
    """The points half-way between e4m3 values, scaled to [1, 2): 4 bits and a half of significand
    in the normal range, 1 to 3 and a half bits in the subnormal range."""
    odd = np.arange(1, 32, 2, dtype=np.float32)
    return np.unique(odd / np.exp2(np.floor(np.log2(odd))).astype(np.float32))


def corrected_quotient(x: F32, scale: F32) -> F32:
    rcp = rcp_rn(scale)
    q = x * rcp
    remainder = fma(q, scale, -x)
    return fma(remainder, -rcp, q)


def differences(mantissas: NDArray[np.uint32], reach: int) -> int:
    """Quotients that differ, for scales in [1, 2) and x within `reach` ulp of a half-way point."""
    scale = (mantissas | np.uint32(0x3F800000)).view(np.float32)
    count = 0
    for middle in half_way_significands():
        nearest = (scale * middle).view(np.int32)
        for step in range(-reach, reach + 1):
            x = (nearest + np.int32(step)).view(np.float32)
            got, want = corrected_quotient(x, scale), x / scale
            count += int(np.count_nonzero(got.view(np.uint32) != want.view(np.uint32)))
    return count


def test_sixteen_half_way_points() -> None:
    assert half_way_significands().size == 16


def test_some_scales() -> None:
    """The ends, the neighbours of 2 where 1 - scale * rcp is largest, and random ones."""
    random = np.random.default_rng(0).integers(0, 1 << 23, 1500, dtype=np.uint32)
    ends = np.arange(200, dtype=np.uint32)
    mantissas = np.concatenate([ends, np.uint32((1 << 23) - 1) - ends, random])
    assert differences(mantissas, reach=6) == 0


@pytest.mark.slow
def test_every_scale() -> None:
    """All 2^23 mantissas; 4 ulp either side, since neither quotient is off by 2."""
    for start in range(0, 1 << 23, 1 << 18):
        mantissas = np.arange(start, start + (1 << 18), dtype=np.uint32)
        assert differences(mantissas, reach=4) == 0


def test_whole_range_gives_the_same_codes() -> None:
    """Any exponents a scale may have (2^-96 to 2^119, lifted by 2^32 below 2^-92 as the kernel
    does), any quotient up to 448, zeros of both signs and subnormal x."""
    rng = np.random.default_rng(1)
    n = 1 << 18
    bits = rng.integers(0, 1 << 23, n, dtype=np.uint32)
    exponent = rng.integers(-96, 119, n)
    exponent[: n // 4] = rng.integers(-96, -88, n // 4)
    scale = ((exponent + 127).astype(np.uint32) << np.uint32(23) | bits).view(np.float32)
    ratio = np.ldexp(rng.uniform(-1, 1, n), rng.integers(-14, 10, n)).clip(-448, 448)
    x = (scale.astype(np.float64) * ratio).astype(np.float32)
    x[::97], x[1::97], x[2::97] = 0.0, -0.0, -1e-45
    x = np.where(np.abs(x) <= 448 * scale, x, 448 * scale)
    lift = np.where(scale < 2.0**-92, np.float32(2.0**32), np.float32(1))
    with np.errstate(all="ignore"):
        got = e4m3_from_f32(corrected_quotient(x * lift, scale * lift))
        want = e4m3_from_f32(x / scale)
    assert np.array_equal(got, want)


def sums_of_reciprocals(scale: F32) -> list[tuple[F32, F32]]:
    """The kernel's hi and lo for each value that a reciprocal within 1 ulp may have."""
    sums = []
    for below in range(1, 5):  # it subtracts 2 ulp; one more where ulps change their size
        hi = (rcp_rn(scale).view(np.uint32) - np.uint32(below)).view(np.float32)
        sums.append((hi, fma(-scale, hi, np.float32(1)) * hi))
    return sums


def significands(bits: int) -> F32:
    """All of `bits` bits, the leading one among them, in [1, 2)."""
    steps = np.float32(1 << (bits - 1))
    return np.arange(steps, 2 * steps, dtype=np.float32) / steps


@pytest.mark.parametrize("bits", [8, 11], ids=["bfloat16", "float16"])
def test_short_quotient_of_16_bit_inputs_is_the_division(bits: int) -> None:
    """Scales that are amax / 448, and the powers of two of scale_rounding="pow2"."""
    x = significands(bits)[:, None]
    for scale in (significands(bits) / np.float32(448), np.array([0.5, 1.0, 2.0], np.float32)):
        for hi, lo in sums_of_reciprocals(scale):
            assert (lo > 0).all()  # so -0 keeps its sign
            got = fma(x, hi, x * lo)
            assert np.array_equal(got.view(np.uint32), (x / scale).view(np.uint32))


@pytest.mark.parametrize("x", [0.0, 2.0**-133, 2.0**-126, 2.0**-80, 2.0**-30])
def test_short_quotient_keeps_the_sign_of_small_values(x: float) -> None:
    """Where products underflow the code is a zero in any case, but of which sign?"""
    scale = np.exp2(np.arange(-69, 53, dtype=np.float32)) * np.float32(1.3)
    for value in np.array([x, -x], np.float32):
        for hi, lo in sums_of_reciprocals(scale):
            with np.errstate(all="ignore"):
                got, want = fma(value, hi, value * lo), value / scale
            assert np.array_equal(np.signbit(got), np.signbit(want))
            assert np.array_equal(e4m3_from_f32(got), e4m3_from_f32(want))


def test_scale_from_amax_is_the_division() -> None:
    """amax / 448 by the two parts of 1 / 448, for every significand of 24 bits."""
    for start in range(0, 1 << 23, 1 << 20):
        mantissas = np.arange(start, start + (1 << 20), dtype=np.uint32)
        amax = (mantissas | np.uint32(0x3F800000)).view(np.float32)
        got = fma(amax, np.float32(1) / np.float32(448), amax * np.float32(LOW_448))
        assert np.array_equal(got, amax / np.float32(448))
