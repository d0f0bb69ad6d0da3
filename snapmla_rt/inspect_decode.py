"""Look inside mla_decode on the GPU: every intermediate of one block, by the reference's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .array import DeviceArray, to_host
from .config import KV_LORA_RANK, TILE_M
from .decode_call import (
    INPUTS,
    Numbers,
    Target,
    checked_call,
    prepare_call,
)
from .errors import ArgumentError
from .host_copy import on_host, upload
from .plan import DecodePlan
from .tensor import TensorView, resolve_stream

__all__ = ["trace_block"]

ROW_FACTORS = ("M", "n", "t", "r", "R")
LANES = 4


@dataclass(frozen=True)
class TraceLayout:
    """Offsets of cuda_src/mla_decode/trace.cuh in floats, for one tile of 64 rows."""

    block_n: int

    @property
    def parts(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """name -> (offset, shape)."""
        shapes: dict[str, tuple[int, ...]] = {
            "S": (TILE_M, self.block_n),
            "e": (TILE_M, self.block_n),
            **dict.fromkeys(ROW_FACTORS, (TILE_M,)),
            "L": (TILE_M, LANES),
            "T": (TILE_M, KV_LORA_RANK),
            "O": (TILE_M, KV_LORA_RANK),
        }
        found, at = {}, 0
        for name, shape in shapes.items():
            found[name] = (at, shape)
            at += int(np.prod(shape))
        return found

    @property
    def floats(self) -> int:
        at, shape = self.parts["O"]
        return at + int(np.prod(shape))


def trace_block(
    q_nope: Any,
    q_rope: Any,
    q_scale: Any,
    ckv_cache: Any,
    k_scale_cache: Any,
    k_rope_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    plan: DecodePlan,
    softmax_scale: float,
    *,
    request: int,
    block: int,
    causal: bool = True,
    stream: Any = None,
) -> dict[str, NDArray[Any]]:
    """Every intermediate of one block of one request, dumped by the debug kernel.

    Arguments as in mla_decode; request and block (in units of the plan's block_n tokens) name the
    block. GPU arrays, or host arrays, which are copied. Waits for the GPU.
    Returns what reference.mla_decode(..., trace=True) has under the same names, for all rows
    (query-major) of the request: S [rows, block_n] scores, M, n, t, r, R [rows], e [rows, block_n]
    weights, P [rows, block_n] their e4m3 codes (rounded here from e: the kernel keeps its codes in
    shared memory, and T shows them), L [rows, 4] row sums of the four lanes, T [rows, 512] the
    block's output, O [rows, 512] the output so far. R, L and O are after the block.
    Raises ArgumentError for a block that the request does not have.
    """
    given = (
        *(q_nope, q_rope, q_scale, ckv_cache, k_scale_cache, k_rope_cache),
        *(block_table, cache_seqlens),
    )
    named, scalars = checked_call(given, plan, softmax_scale, causal, stream)
    on_gpu = named["q_nope"].device_type == "cuda"
    index = named["q_nope"].device_index if on_gpu else 0
    handle = resolve_stream(stream, list(named.values()), index) if on_gpu else 0
    _check_block(named["cache_seqlens"], plan, request, block, handle)
    if not on_gpu:
        named = {name: upload(named[name], index, handle) for name in INPUTS}
        plan = _uploaded(plan, index, handle)
    layout = TraceLayout(plan.config.block_n)
    tiles = plan.config.num_row_tiles
    buffer = _nan_buffer(tiles * layout.floats, index, handle)
    traced = Numbers(scalars.softmax_scale, scalars.causal, (buffer.ptr, request, block))
    call = prepare_call(named, plan, traced, Target(None, None, None, True, stream), handle)
    for launch in call.launches:
        launch()
    rows = plan.config.num_heads_q * plan.config.seq_len_q
    return _read(buffer, layout, tiles, rows, handle)


def _check_block(
    cache_seqlens: TensorView, plan: DecodePlan, request: int, block: int, stream: int
) -> None:
    if not 0 <= request < plan.batch:
        raise ArgumentError("request", f"0..{plan.batch - 1}", request)
    length = int(on_host(cache_seqlens, stream)[request])
    num_blocks = plan.config.num_blocks(length)
    if not 0 <= block < num_blocks:
        expected = f"0..{num_blocks - 1} (request {request} has {length} tokens)"
        raise ArgumentError("block", expected, block)


def _uploaded(plan: DecodePlan, index: int, stream: int) -> DecodePlan:
    from .tensor import view

    parts, num_splits = view(plan.parts, "plan.parts"), view(plan.num_splits, "plan.num_splits")
    return DecodePlan(
        plan.config,
        plan.batch,
        upload(parts, index, stream),
        upload(num_splits, index, stream),
        plan.max_seqlen,
    )


def _nan_buffer(floats: int, index: int, stream: int) -> DeviceArray:
    """Memory in which everything that the kernel does not write is NaN."""
    from .driver.memory import fill

    buffer = DeviceArray((floats,), "float32", index)
    fill(buffer.ptr, 0xFF, buffer.nbytes, index, stream)
    return buffer


def _read(
    buffer: DeviceArray, layout: TraceLayout, tiles: int, num_rows: int, stream: int
) -> dict[str, NDArray[Any]]:
    from .reference.numerics import e4m3_from_f32

    flat = to_host(buffer.view(), stream).reshape(tiles, layout.floats)
    found: dict[str, NDArray[Any]] = {}
    for name, (at, shape) in layout.parts.items():
        whole = flat[:, at : at + int(np.prod(shape))].reshape(tiles * shape[0], *shape[1:])
        found[name] = whole[:num_rows].copy()
    found["P"] = e4m3_from_f32(found["e"])
    return found
