"""Tensor maps (TMA descriptors): checked arguments, 128 bytes out, encoded once each.

A descriptor is a pure function of its arguments, so equal arguments share one; nothing about the
memory behind the address is remembered.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

from ..errors import ArgumentError
from .check import bindings, call
from .device import device_context

TENSOR_MAP_BYTES = 128
# element type -> (driver's name, bytes)
_ELEMENTS = {
    "uint8": ("UINT8", 1),
    "uint16": ("UINT16", 2),
    "uint32": ("UINT32", 4),
    "int32": ("INT32", 4),
    "float16": ("FLOAT16", 2),
    "bfloat16": ("BFLOAT16", 2),
    "float32": ("FLOAT32", 4),
}
_SWIZZLES = {"none": ("NONE", 0), "32B": ("32B", 32), "64B": ("64B", 64), "128B": ("128B", 128)}
_L2_PROMOTIONS = {"none": "NONE", "64B": "L2_64B", "128B": "L2_128B", "256B": "L2_256B"}
_MAX_DIM = 1 << 32
_MAX_STRIDE = 1 << 40
_MAX_BOX = 256


def encode_tiled(
    element: str,
    address: int,
    dims: Sequence[int],
    strides_bytes: Sequence[int],
    box: Sequence[int],
    *,
    swizzle: str = "128B",
    l2_promotion: str = "256B",
    device_index: int = 0,
) -> bytes:
    """The 128-byte descriptor of a tiled tensor map; out-of-bounds elements read as zero.

    element: uint8 (also for e4m3), uint16, uint32, int32, float16, bfloat16 or float32.
    dims: 1 to 5 sizes in elements, innermost first. strides_bytes: one per dimension but the
    innermost, multiples of 16. box: elements a load brings, 1..256 each; its innermost extent is a
    multiple of 16 bytes and no wider than the swizzle. address: 16-byte aligned, global memory.
    device_index: the GPU of the memory. Raises ArgumentError naming the argument; CudaError where
    the driver refuses.
    """
    return _encode(
        element,
        address,
        tuple(dims),
        tuple(strides_bytes),
        tuple(box),
        swizzle,
        l2_promotion,
        device_index,
    )


def _check(
    element: str,
    address: int,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: str,
) -> None:
    rank = len(dims)
    if element not in _ELEMENTS:
        raise ArgumentError("element", f"one of {sorted(_ELEMENTS)}", repr(element))
    if swizzle not in _SWIZZLES:
        raise ArgumentError("swizzle", f"one of {sorted(_SWIZZLES)}", repr(swizzle))
    if not 1 <= rank <= 5:
        raise ArgumentError("dims", "1 to 5 dimensions", dims)
    if len(strides) != rank - 1:
        raise ArgumentError("strides_bytes", f"{rank - 1} strides for {rank} dimensions", strides)
    if len(box) != rank:
        raise ArgumentError("box", f"{rank} extents", box)
    if address <= 0 or address % 16:
        raise ArgumentError("address", "a 16-byte aligned device address", hex(address))
    if not all(1 <= dim <= _MAX_DIM for dim in dims):
        raise ArgumentError("dims", f"sizes from 1 to {_MAX_DIM}", dims)
    if not all(0 < stride < _MAX_STRIDE and stride % 16 == 0 for stride in strides):
        raise ArgumentError("strides_bytes", "multiples of 16 below 2**40", strides)
    if not all(1 <= extent <= _MAX_BOX for extent in box):
        raise ArgumentError("box", f"extents from 1 to {_MAX_BOX}", box)
    inner, span = box[0] * _ELEMENTS[element][1], _SWIZZLES[swizzle][1]
    if inner % 16 or (span and inner > span):
        limit = f" up to {span}" if span else ""
        raise ArgumentError("box", f"an innermost extent of 16-byte multiples{limit}", f"{inner} B")


@functools.lru_cache(maxsize=4096)
def _encode(
    element: str,
    address: int,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: str,
    l2_promotion: str,
    device_index: int,
) -> bytes:
    _check(element, address, dims, strides, box, swizzle)
    if l2_promotion not in _L2_PROMOTIONS:
        raise ArgumentError("l2_promotion", f"one of {sorted(_L2_PROMOTIONS)}", repr(l2_promotion))
    driver = bindings()

    def enum(kind: str, prefix: str, name: str) -> object:
        return getattr(getattr(driver, kind), f"CU_TENSOR_MAP_{prefix}_{name}")

    # The driver checks the address in the current context, so there must be one of that device.
    with device_context(device_index):
        encoded = call(
            "cuTensorMapEncodeTiled",
            enum("CUtensorMapDataType", "DATA_TYPE", _ELEMENTS[element][0]),
            len(dims),
            address,
            [driver.cuuint64_t(dim) for dim in dims],
            [driver.cuuint64_t(stride) for stride in strides],
            [driver.cuuint32_t(extent) for extent in box],
            [driver.cuuint32_t(1) for _ in dims],
            enum("CUtensorMapInterleave", "INTERLEAVE", "NONE"),
            enum("CUtensorMapSwizzle", "SWIZZLE", _SWIZZLES[swizzle][0]),
            enum("CUtensorMapL2promotion", "L2_PROMOTION", _L2_PROMOTIONS[l2_promotion]),
            enum("CUtensorMapFloatOOBfill", "FLOAT_OOB_FILL", "NONE"),
        )
    return ctypes.string_at(int(encoded.getPtr()), TENSOR_MAP_BYTES)
