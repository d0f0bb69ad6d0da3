"""Views of callers' arrays in the shapes of this package's own calls; nothing is copied.

The arrays stay those of the caller's library, so that repeated calls with torch tensors find their
prepared launches.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from ..array import new_array, numpy_dtype
from ..config import (
    BLOCK_SIZE,
    KV_LORA_RANK,
    QK_ROPE_HEAD_DIM,
    RECORD_BYTES,
    RECORD_ROPE_OFFSET,
    RECORD_SCALE_OFFSET,
)
from ..errors import ArgumentError
from ..tensor import TensorView, view

ALIGNMENT = 16


def describe(value: Any) -> str:
    """A value for an error message, without reading an array's data."""
    shape = getattr(value, "shape", None)
    if shape is None:
        return repr(value)
    return f"{getattr(value, 'dtype', '')} {list(shape)}"


def refuse(name: str, value: Any, expected: str) -> None:
    """ArgumentError for an argument that asks for something this package does not do."""
    if value is not None and value is not False:
        raise ArgumentError(name, expected, describe(value))


def refuse_grad(name: str, array: Any) -> None:
    """ArgumentError for a tensor that autograd would have to go through."""
    if getattr(array, "requires_grad", False) and sys.modules["torch"].is_grad_enabled():
        expected = "a tensor without gradient (decoding is inference only: torch.no_grad())"
        raise ArgumentError(name, expected, "one that requires grad")


def is_torch(array: Any) -> bool:
    return hasattr(array, "data_ptr") and hasattr(array, "element_size")


def reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    """The same memory in another shape; torch refuses where that would need a copy."""
    return array.view(shape) if is_torch(array) else array.reshape(shape)


def as_dtype(array: Any, dtype: str) -> Any:
    """The same bytes as another type; the last dimension grows or shrinks."""
    if is_torch(array):
        return array.view(getattr(sys.modules["torch"], dtype))
    if isinstance(array, np.ndarray):
        return array.view(numpy_dtype(dtype))
    return array.view({"float8_e4m3fn": "uint8", "bfloat16": "uint16"}.get(dtype, dtype))


def with_blocks(array: Any, name: str, width: int | None) -> Any:
    """Slots [N, 1, width] as blocks [N / 64, 64, width]; width None: [N, 1, 1] as [N / 64, 64]."""
    shape = tuple(array.shape)
    last = 1 if width is None else width
    if len(shape) != 3 or shape[1:] != (1, last):
        raise ArgumentError(name, f"shape [N, 1, {last}] (one row a slot)", list(shape))
    if shape[0] % BLOCK_SIZE:
        expected = f"a number of slots in multiples of {BLOCK_SIZE} (the page size)"
        raise ArgumentError(name, expected, shape[0])
    blocks = (shape[0] // BLOCK_SIZE, BLOCK_SIZE)
    if width is None:
        return reshaped(array[:, 0, 0], blocks)
    return reshaped(array[:, 0], (*blocks, width))


def one_head(array: Any, name: str, width: int | None) -> Any:
    """Pages [n, 64, 1, width] (or [n, 64, width]) as [n, 64, width]; width None: [n, 64, 1, 1] (or
    [n, 64, 1], [n, 64]) as [n, 64]."""
    shape = tuple(array.shape)
    last = 1 if width is None else width
    if len(shape) >= 2 and shape[1] != BLOCK_SIZE:
        raise ArgumentError(name, f"page_block_size must be {BLOCK_SIZE}", list(shape))
    if len(shape) == 4 and shape[2] != 1:
        raise ArgumentError(name, "one key head (h_kv 1)", list(shape))
    if len(shape) == 4 and shape[3] == last:
        return array[:, :, 0, 0] if width is None else array[:, :, 0]
    if len(shape) == 3 and shape[2] == last:
        return array[:, :, 0] if width is None else array
    if len(shape) == 2 and width is None:
        return array
    raise ArgumentError(name, f"shape [num_blocks, {BLOCK_SIZE}, 1, {last}]", list(shape))


def record_planes(array: Any) -> tuple[Any, Any, Any]:
    """uint8 [n, 64, 1, 644], each page one record, as (ckv, k_scale, k_rope)."""
    num_blocks = array.shape[0]
    records = reshaped(array[:, :, 0], (num_blocks, RECORD_BYTES))
    ckv = records[:, :RECORD_ROPE_OFFSET]
    rope = as_dtype(records[:, RECORD_ROPE_OFFSET:RECORD_SCALE_OFFSET], "bfloat16")
    scale = as_dtype(records[:, RECORD_SCALE_OFFSET:], "float32")
    return (
        reshaped(ckv, (num_blocks, BLOCK_SIZE, KV_LORA_RANK)),
        scale,
        reshaped(rope, (num_blocks, BLOCK_SIZE, QK_ROPE_HEAD_DIM)),
    )


def repeated_line(line: Any, num_blocks: int) -> Any:
    """float32 [64] as [num_blocks, 64] whose rows are all the same memory."""
    if is_torch(line):
        return line.expand(num_blocks, BLOCK_SIZE)
    library = sys.modules.get(type(line).__module__.partition(".")[0])
    if hasattr(library, "broadcast_to"):
        return library.broadcast_to(line, (num_blocks, BLOCK_SIZE))  # type: ignore[union-attr]
    one = view(line, "k_scale")
    shape, strides = (num_blocks, BLOCK_SIZE), (0, one.itemsize)
    return TensorView(one.ptr, shape, strides, one.dtype, one.device_type, one.device_index, one)


# --- Memory --------------------------------------------------------------------------------------

Piece = tuple[tuple[int, ...], str]  # shape, dtype
_BYTES = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4, "uint8": 1}


def _data_bytes(piece: Piece) -> int:
    shape, dtype = piece
    return _BYTES[dtype] * math.prod(shape)


def piece_bytes(piece: Piece) -> int:
    """Bytes that a piece takes in a workspace."""
    return -(-_data_bytes(piece) // ALIGNMENT) * ALIGNMENT


def take(workspace: Any, like: TensorView, pieces: list[Piece]) -> tuple[list[Any], Any]:
    """(an array for each piece, what is left of the workspace).

    Without a workspace every piece is new memory of `like`'s library, and nothing is left. Raises
    ArgumentError for a workspace that is no contiguous, aligned uint8 [n] or too short.
    """
    if workspace is None:
        return [new_array(like, *piece) for piece in pieces], None
    memory = view(workspace, "workspace")
    if memory.ndim != 1 or memory.dtype != "uint8" or not memory.is_contiguous:
        raise ArgumentError("workspace", "contiguous uint8 [n]", describe(workspace))
    if memory.ptr % ALIGNMENT:
        raise ArgumentError("workspace", f"aligned to {ALIGNMENT} bytes", hex(memory.ptr))
    needed = sum(piece_bytes(piece) for piece in pieces)
    if memory.nbytes < needed:
        expected = f"at least {needed} bytes before the decode's own (get_workspace_size)"
        raise ArgumentError("workspace", expected, memory.nbytes)
    arrays, at = [], 0
    for piece in pieces:
        shape, dtype = piece
        part = workspace[at : at + _data_bytes(piece)]
        arrays.append(reshaped(as_dtype(part, dtype), shape))
        at += piece_bytes(piece)
    return arrays, workspace[at:]
