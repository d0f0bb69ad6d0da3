"""Arrays brought to the host for the reference and results taken back: the slow, convenient path.

Used where the reference backend gets arrays of a framework, or the CUDA backend gets NumPy arrays.
Nothing here is called when a framework's GPU arrays go to the kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from .array import new_array, numpy_dtype, to_device, to_host
from .tensor import TensorView, view

__all__ = ["Mirrors", "deliver", "on_host", "upload"]


def on_host(tensor: TensorView, stream: int) -> np.ndarray:
    """A NumPy array of the view: NumPy's own without a copy, else a copy (waits for `stream`)."""
    return tensor.owner if tensor.framework == "numpy" else to_host(tensor, stream)


def upload(tensor: TensorView, device_index: int, stream: int) -> TensorView:
    """A view on GPU `device_index`: the same one if it is there, else a copy."""
    if tensor.device_type == "cuda":
        return tensor
    return to_device(on_host(tensor, stream), device_index, stream).view()


def deliver(result: np.ndarray, target: TensorView, stream: int) -> None:
    """Copy a host result into a contiguous array anywhere; waits."""
    _write(target.ptr, np.ascontiguousarray(result), target, stream)


def _write(address: int, source: np.ndarray, place: TensorView, stream: int) -> None:
    if source.nbytes == 0:
        return
    data = source.__array_interface__["data"][0]
    if place.device_type == "cpu":
        ctypes.memmove(address, data, source.nbytes)
        return
    from .driver.memory import copy_to_device, synchronize

    copy_to_device(address, data, source.nbytes, place.device_index, stream)
    synchronize(stream, place.device_index)


class Mirrors:
    """Host copies of arrays that the reference changes in place, written back at the end.

    arrays: one ndarray per view, with the view's strides. NumPy's own arrays are used as they are.
    Views whose memory is interleaved (the planes of one buffer of records) share one copy, so that
    writing one plane back cannot undo another.
    """

    def __init__(self, views: Sequence[TensorView], stream: int) -> None:
        self._stream = stream
        self._spans: list[tuple[int, np.ndarray, TensorView]] = []
        self.arrays: list[np.ndarray] = [np.empty(0)] * len(views)
        pending: list[tuple[int, int, list[int]]] = []  # start, end, indices of views
        order = sorted(range(len(views)), key=lambda i: views[i].ptr)
        for i in order:
            if views[i].framework == "numpy":
                self.arrays[i] = views[i].owner
                continue
            start, end = views[i].ptr, views[i].ptr + _span(views[i])
            if pending and start < pending[-1][1]:
                first, last, members = pending[-1]
                pending[-1] = (first, max(last, end), [*members, i])
            else:
                pending.append((start, end, [i]))
        for start, end, members in pending:
            self._load(start, end, [(i, views[i]) for i in members])

    def _load(self, start: int, end: int, members: list[tuple[int, TensorView]]) -> None:
        like = members[0][1]
        span = TensorView(start, (end - start,), (1,), "uint8", like.device_type, like.device_index)
        raw = to_host(span, self._stream)
        self._spans.append((start, raw, like))
        for i, v in members:
            dtype = numpy_dtype(v.dtype)
            self.arrays[i] = np.ndarray(v.shape, dtype, raw, v.ptr - start, v.strides)

    def write_back(self) -> None:
        """Copy everything back to where it came from; waits."""
        for start, raw, like in self._spans:
            _write(start, raw, like, self._stream)


def _span(tensor: TensorView) -> int:
    if tensor.size == 0:
        return 0
    steps = zip(tensor.shape, tensor.strides, strict=True)
    return tensor.itemsize + sum((extent - 1) * step for extent, step in steps)


def result_array(
    like: TensorView, out: Any, shape: Sequence[int], dtype: str
) -> tuple[Any, TensorView]:
    """(`out` or a new array of `like`'s library, its view)."""
    array = new_array(like, shape, dtype) if out is None else out
    return array, view(array, "out")
