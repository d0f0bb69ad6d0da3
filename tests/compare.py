"""Byte comparison with a report a person can read: how many differ, where first, by how much."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_SHOWN = 8


def difference_report(name: str, got: ArrayLike, expected: ArrayLike) -> str | None:
    """None where both arrays have the same shape, dtype and bytes; else a report in words.

    Every bit counts: -0 differs from +0, one NaN from another. Each line of the report shows index,
    value and bits of both sides, and the distance in units of the last place.
    """
    got, expected = np.asarray(got), np.asarray(expected)
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return (
            f"{name}: expected {expected.dtype} {list(expected.shape)}, "
            f"got {got.dtype} {list(got.shape)}"
        )
    got_bits, expected_bits = _bits(got), _bits(expected)
    where = np.argwhere(got_bits != expected_bits)
    if not len(where):
        return None
    distance = _ulps(got_bits, got.dtype), _ulps(expected_bits, expected.dtype)
    lines = [f"{name}: {len(where):,} of {got.size:,} elements differ; the first:"]
    digits = 2 * got.dtype.itemsize
    for index in where[:MAX_SHOWN]:
        at = tuple(index)
        lines.append(
            f"  [{', '.join(map(str, at))}]  got {got[at]!s} (0x{got_bits[at]:0{digits}x})  "
            f"expected {expected[at]!s} (0x{expected_bits[at]:0{digits}x})  "
            f"{int(distance[0][at]) - int(distance[1][at]):+d} ulp"
        )
    lines.append("  distinct indices by axis: " + _spread(where, got.shape))
    return "\n".join(lines)


def assert_same_bytes(name: str, got: ArrayLike, expected: ArrayLike) -> None:
    """Fail with `difference_report` unless both arrays are equal in shape, dtype and every bit."""
    report = difference_report(name, got, expected)
    assert report is None, report


def _bits(x: NDArray) -> NDArray:
    return np.ascontiguousarray(x).view(np.dtype(f"u{x.dtype.itemsize}"))


def _ulps(bits: NDArray, dtype: np.dtype) -> NDArray:
    """Bits as integers ordered like the values, so that a difference counts representable steps."""
    signed = bits.astype(np.int64)
    if dtype.kind in "iub":
        return signed
    sign_bit = 1 << (8 * dtype.itemsize - 1)
    return np.where(signed & sign_bit, sign_bit - signed, signed)


def _spread(where: NDArray, shape: tuple[int, ...]) -> str:
    """Which axes the differences run along: all heads, or one head; all tokens, or the tail."""
    parts = []
    for axis, size in enumerate(shape):
        seen = np.unique(where[:, axis])
        shown = ", ".join(map(str, seen[:6])) + (", ..." if len(seen) > 6 else "")
        parts.append(f"axis {axis}: {len(seen)} of {size} ({shown})")
    return "; ".join(parts)
