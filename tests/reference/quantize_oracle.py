"""The quantisation rule once more, by other means: exact rationals, one value at a time.

Slow and independent of `reference/quantize.py` and of `reference/numerics.py`: it rounds Fractions,
so an error in a float trick of the reference cannot hide in it.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

FLT_MAX = Fraction(2) ** 128 - Fraction(2) ** 104


def round_half_even(x: Fraction) -> int:
    """x >= 0 to an integer, ties to even."""
    whole, rest = divmod(x.numerator, x.denominator)
    twice = 2 * rest
    up = twice > x.denominator or (twice == x.denominator and whole & 1)
    return whole + int(up)


def round_to_format(x: Fraction, precision: int, min_exponent: int) -> Fraction:
    """x >= 0 rounded to `precision` significant bits, subnormal below 2^min_exponent; unbounded."""
    if x == 0:
        return x
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    if Fraction(2) ** exponent > x:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, min_exponent) - precision + 1)
    return round_half_even(x / unit) * unit


def f32(x: Fraction) -> Fraction:
    return round_to_format(x, 24, -126)


def quantize_row(row: NDArray[np.float32], pow2: bool) -> tuple[float, list[float], list[float]]:
    """(scale, 512 dequantisable code values, 64 bf16 values) of one finite row of 576 values.

    Magnitudes only: the caller compares signs. Values at or beyond the bf16 range come as inf.
    """
    exact = [abs(Fraction(float(v))) for v in row]
    amax, rmax = max(exact[:512]), max(exact[512:])
    scale = max(f32(amax / 448), Fraction(1, 2**96), f32(rmax / 2**60))
    if pow2:
        power = Fraction(1, 2**96)
        while power < scale:
            power *= 2
        scale = power
    quotients = [f32(v / scale) for v in exact]
    codes = [min(round_to_format(q, 4, -6), Fraction(448)) for q in quotients[:512]]
    rope = [round_to_format(q, 8, -126) for q in quotients[512:]]
    return float(scale), [float(c) for c in codes], [float(r) for r in rope]
