"""Reading a DLPack capsule with ctypes: address, shape, strides, dtype, device.

The capsule is kept unconsumed as the view's owner: its destructor then calls the producer's
deleter when the view goes away.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

KIND_CPU, KIND_CUDA, KIND_CUDA_HOST, KIND_CUDA_MANAGED = 1, 2, 3, 13
_DEVICE_TYPES = {
    KIND_CPU: "cpu",
    KIND_CUDA: "cuda",
    KIND_CUDA_HOST: "cpu",
    KIND_CUDA_MANAGED: "cuda",
}
# (type code, bits) -> dtype name; the fp8 codes are those of DLPack 1.1
_DTYPES = {
    (0, 8): "int8",
    (0, 16): "int16",
    (0, 32): "int32",
    (0, 64): "int64",
    (1, 8): "uint8",
    (1, 16): "uint16",
    (1, 32): "uint32",
    (1, 64): "uint64",
    (2, 16): "float16",
    (2, 32): "float32",
    (2, 64): "float64",
    (4, 16): "bfloat16",
    (6, 8): "bool",
    (10, 8): "float8_e4m3fn",
    (11, 8): "float8_e4m3fnuz",
    (12, 8): "float8_e5m2",
}


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    """DLTensor, with which DLManagedTensor begins."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Unpacked(NamedTuple):
    """What a capsule says; strides in bytes, dtype "code C, B bits" where it has no name."""

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device_type: str
    device_index: int


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Byte strides of a C-contiguous array."""
    strides, step = [], itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def unpack(capsule: Any) -> Unpacked:
    """Read an unversioned DLPack capsule. Raises ValueError for another kind of capsule."""
    tensor = _Tensor.from_address(_get_pointer(capsule, b"dltensor"))
    bits, lanes = tensor.dtype.bits, tensor.dtype.lanes
    itemsize = bits * lanes // 8
    dtype = _DTYPES.get((tensor.dtype.code, bits)) if lanes == 1 else None
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    strides = (
        tuple(tensor.strides[axis] * itemsize for axis in range(tensor.ndim))
        if tensor.strides
        else contiguous_strides(shape, itemsize)
    )
    return Unpacked(
        ptr=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        strides=strides,
        dtype=dtype or f"DLPack code {tensor.dtype.code}, {bits} bits, {lanes} lanes",
        device_type=_DEVICE_TYPES.get(tensor.device.kind, f"DLPack device {tensor.device.kind}"),
        device_index=tensor.device.index if tensor.device.kind in (2, 13) else 0,
    )
