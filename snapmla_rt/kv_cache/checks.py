"""Argument checks shared by the cache manager: each names the argument, the wish and what came."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from .. import environment
from ..errors import ArgumentError, OutOfBlocksError

TOKEN_ID_LIMIT = 1 << 31  # token ids are int32 and not negative
SHORTAGE_CHOICES = ("none", "raise")


def check_count(name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as an int in low..high (no upper end if None), else ArgumentError."""
    if type(value) is int and value >= low and (high is None or value <= high):
        return value  # the usual case, in which no message is needed
    expected = f"an integer >= {low}" if high is None else f"an integer in {low}..{high}"
    if isinstance(value, (bool, np.bool_)):
        raise ArgumentError(name, expected, repr(value))
    try:
        count = operator.index(value)
    except TypeError:
        raise ArgumentError(name, expected, repr(value)) from None
    if count < low or (high is not None and count > high):
        raise ArgumentError(name, expected, count)
    return count


def int_array(name: str, values: Any, low: int, high: int, dtype: Any) -> np.ndarray:
    """`values` as a contiguous 1-D array of `dtype`, every entry in low..high, else ArgumentError.

    A fresh copy or the caller's own array where it already fits; it is only read.
    """
    expected = f"a 1-D sequence of integers in {low}..{high}"
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(name, expected, type(values).__name__) from None
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, dtype=dtype)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ArgumentError(name, expected, f"shape {array.shape}, dtype {array.dtype}")
    smallest, largest = int(array.min()), int(array.max())
    if smallest < low or largest > high:
        raise ArgumentError(name, expected, smallest if smallest < low else largest)
    return np.ascontiguousarray(array, dtype=dtype)


def int_view(array: Any) -> Any:
    """A memoryview of an integer array: its items are Python ints where the code is uncompiled."""
    return memoryview(array)


def token_array(name: str, token_ids: Any) -> np.ndarray:
    """Token ids as a contiguous int32 array [n], each in 0..2**31-1."""
    return int_array(name, token_ids, 0, TOKEN_ID_LIMIT - 1, np.int32)


def check_request(name: str, request: Any) -> Any:
    """A request id: exactly `str` or `int`, so that looking it up runs no foreign code."""
    if type(request) is not str and type(request) is not int:
        raise ArgumentError(name, "a request id of type str or int", repr(request))
    return request


def must_raise(on_shortage: Any) -> bool:
    """True for "raise", False for "none"."""
    if on_shortage == "none":
        return False
    if on_shortage not in SHORTAGE_CHOICES:
        raise ArgumentError("on_shortage", f"one of {SHORTAGE_CHOICES}", repr(on_shortage))
    return bool(on_shortage == "raise")


def debug_wanted(debug: bool | None) -> bool:
    """The argument if given, else whether SNAPMLA_DEBUG is set to something other than 0."""
    return environment.debug_wanted() if debug is None else bool(debug)


def never_fits(request: Any, total: int, num_blocks: int) -> OutOfBlocksError:
    """The error for a request that the empty pool could not hold."""
    return OutOfBlocksError(
        f"request {request!r}: {total} blocks wanted, the whole pool has {num_blocks - 1};"
        " it can never fit"
    )
