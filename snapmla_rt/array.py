"""Arrays of our own on a GPU, and copies between them and NumPy.

For NumPy callers (a convenience: allocation and copies every call), for results where the caller's
library is not known, and for tests. Framework callers never come here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ._dlpack import contiguous_strides
from .errors import ArgumentError
from .tensor import ITEMSIZE, LEGACY_STREAM, TensorView

_TYPESTR = {"bool": "|b1", "float8_e4m3fn": "|u1", "bfloat16": "<u2"}


def numpy_dtype(dtype: str) -> np.dtype:
    """The NumPy dtype of a dtype name; e4m3 and bf16 are ml_dtypes types."""
    own = getattr(ml_dtypes, dtype, None)
    return np.dtype(own) if own is not None else np.dtype(dtype)


class DeviceArray:
    """A C-contiguous array in memory of our own on GPU `device_index`, not initialised.

    Frameworks take it through `__cuda_array_interface__` (e4m3 as uint8, bf16 as uint16).
    """

    def __init__(self, shape: Sequence[int], dtype: str, device_index: int = 0) -> None:
        from .driver.memory import DeviceBuffer

        if dtype not in ITEMSIZE:
            raise ArgumentError("dtype", f"one of {sorted(ITEMSIZE)}", repr(dtype))
        self.shape = tuple(int(extent) for extent in shape)
        self.dtype = dtype
        self.device_index = device_index
        count = int(np.prod(self.shape, dtype=np.int64))
        self.nbytes = count * ITEMSIZE[dtype]
        self._buffer = DeviceBuffer(self.nbytes, device_index)
        self.ptr = self._buffer.ptr

    def view(self) -> TensorView:
        """A view that keeps this array alive."""
        strides = contiguous_strides(self.shape, ITEMSIZE[self.dtype])
        return TensorView(
            self.ptr, self.shape, strides, self.dtype, "cuda", self.device_index, self
        )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        typestr = _TYPESTR.get(self.dtype)
        return {
            "shape": self.shape,
            "typestr": typestr or np.dtype(self.dtype).str,
            "data": (self.ptr, False),
            "strides": None,
            "version": 3,
        }

    def numpy(self, stream: int = LEGACY_STREAM) -> np.ndarray:
        """A copy on the host, after everything enqueued on `stream` (waits for it)."""
        return to_host(self.view(), stream)


def to_device(array: np.ndarray, device_index: int = 0, stream: int = LEGACY_STREAM) -> DeviceArray:
    """A copy of a NumPy array (any strides) on GPU `device_index`; done when this returns."""
    from .driver.memory import copy_to_device, synchronize

    source = np.ascontiguousarray(array).reshape(array.shape)
    result = DeviceArray(source.shape, source.dtype.name, device_index)
    address = source.__array_interface__["data"][0]
    copy_to_device(result.ptr, address, result.nbytes, device_index, stream)
    synchronize(stream, device_index)  # `source` may be a temporary
    return result


def to_host(tensor: TensorView, stream: int = LEGACY_STREAM) -> np.ndarray:
    """A NumPy copy of a view on a GPU or the host, after the work enqueued on `stream`.

    Any non-negative strides: the spanned memory is copied and the elements picked on the host.
    """
    dtype = numpy_dtype(tensor.dtype)
    if tensor.size == 0:
        return np.empty(tensor.shape, dtype)
    pairs = zip(tensor.shape, tensor.strides, strict=True)
    span = tensor.itemsize + sum((extent - 1) * stride for extent, stride in pairs)
    raw = np.empty(span, np.uint8)
    address = raw.__array_interface__["data"][0]
    if tensor.device_type == "cpu":
        import ctypes

        ctypes.memmove(address, tensor.ptr, span)
    else:
        from .driver.memory import copy_to_host, synchronize

        copy_to_host(address, tensor.ptr, span, tensor.device_index, stream)
        synchronize(stream, tensor.device_index)
    return np.ndarray(tensor.shape, dtype, raw, 0, tensor.strides).copy()


def copy_into(source: TensorView, target: np.ndarray, stream: int = LEGACY_STREAM) -> None:
    """Copy a result on a GPU into the caller's NumPy array of the same shape; waits for it."""
    if source.shape != target.shape:
        raise ArgumentError("out", f"shape {list(source.shape)}", list(target.shape))
    target[...] = to_host(source, stream).view(target.dtype)


def new_array(like: TensorView, shape: Sequence[int], dtype: str) -> Any:
    """An uninitialised array of `like`'s library on its device: where a result goes.

    torch and CuPy arrays for theirs (CuPy: uint8 and uint16 for e4m3 and bf16), NumPy for NumPy,
    a DeviceArray for the rest.
    """
    shape = tuple(int(extent) for extent in shape)
    module = sys.modules.get(like.framework)
    if like.framework == "torch" and module is not None:
        kind = getattr(module, dtype)
        return module.empty(shape, dtype=kind, device=like.owner.device)
    if like.framework == "cupy" and module is not None:
        bits = {"float8_e4m3fn": "uint8", "bfloat16": "uint16"}.get(dtype, dtype)
        with module.cuda.Device(like.device_index):
            return module.empty(shape, dtype=bits)
    if like.device_type == "cpu":
        return np.empty(shape, numpy_dtype(dtype))
    return DeviceArray(shape, dtype, like.device_index)
