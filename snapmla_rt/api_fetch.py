"""fetch_dequant: tokens gathered from the paged cache and dequantised, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import data_launch as launch
from .api_data import _cache, _check_rows, _check_slots, _checked_mode, _device_like, _on_gpu
from .backend import resolve_backend
from .config import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from .data_launch import CacheArrays, FetchSource
from .errors import ArgumentError
from .host_copy import on_host, result_array, upload
from .tensor import BF16, INDICES, TensorView, expect, resolve_stream

__all__ = ["fetch_dequant", "fetch_dequant_ranges"]

Fetched = tuple[Any, Any]


def fetch_dequant(
    ckv_cache: Any,
    k_scale_cache: Any,
    k_rope_cache: Any,
    slots: Any,
    *,
    out: Any = None,
    concatenate: bool = False,
    backend: str = "auto",
    stream: Any = None,
    checked: bool | None = None,
    pdl: bool = False,
) -> Any:
    """Gather tokens by slot and dequantise them to bf16 while loading.

    ckv_cache e4m3 or uint8 [num_blocks, 64, 512], k_scale_cache float32 [num_blocks, 64],
    k_rope_cache bf16 or uint16 [num_blocks, 64, 64]; any strides with a contiguous last dimension.
    slots: int32 or int64 [n]. Returns (kv_c [n, 512], k_pe [n, 64]), both bf16 and un-scaled, or
    one array [n, 576] with concatenate=True; `out`: such arrays of the caller's, filled instead.
    A negative slot gives zeros; one beyond the cache too, or ArgumentError with checked=True
    (default: $SNAPMLA_DEBUG), which copies `slots` to the host.
    Rule: reference/fetch_dequant.py. Raises ArgumentError for wrong shapes, dtypes or devices.
    """
    cache = _cache(ckv_cache, k_scale_cache, k_rope_cache, False, stream)
    wanted = expect(slots, "slots", (None,), INDICES, contiguous=0, stream=stream)
    source = FetchSource(slots=wanted)
    options = (out, concatenate, backend, stream, pdl)
    return _fetch(cache, source, {"slots": wanted}, wanted.shape[0], checked, *options)


def fetch_dequant_ranges(
    ckv_cache: Any,
    k_scale_cache: Any,
    k_rope_cache: Any,
    block_table: Any,
    starts: Any,
    cu_seqlens: Any,
    *,
    num_tokens: int | None = None,
    out: Any = None,
    concatenate: bool = False,
    backend: str = "auto",
    stream: Any = None,
    pdl: bool = False,
) -> Any:
    """Gather one token range per request, the ranges one after another; else as `fetch_dequant`.

    block_table int32 [b, max_blocks], starts int32 [b] (first token of each range), cu_seqlens
    int32 [b + 1] (running sum of the lengths, first 0). num_tokens: cu_seqlens[-1], which the host
    must know for GPU arrays unless `out` is given; rows after it are zeros. Table entries outside
    the ranges are never read; ranges and blocks outside the table or the cache give zeros on the
    GPU and ArgumentError in the reference.
    """
    cache = _cache(ckv_cache, k_scale_cache, k_rope_cache, False, stream)
    dims: dict[str, int] = {}
    table = expect(block_table, "block_table", ("b", None), "int32", dims=dims, stream=stream)
    first = expect(starts, "starts", ("b",), "int32", dims=dims, stream=stream)
    ends = expect(cu_seqlens, "cu_seqlens", (dims["b"] + 1,), "int32", stream=stream)
    named = {"block_table": table, "starts": first, "cu_seqlens": ends}
    rows = _num_rows(num_tokens, ends, out)
    source = FetchSource(block_table=table, starts=first, cu_seqlens=ends)
    return _fetch(cache, source, named, rows, False, out, concatenate, backend, stream, pdl)


def _num_rows(num_tokens: int | None, ends: TensorView, out: Any) -> int:
    """Rows of the result: as told, of `out`, or the last of cu_seqlens where it is on the host."""
    if num_tokens is not None:
        if not isinstance(num_tokens, int) or num_tokens < 0:
            raise ArgumentError("num_tokens", "a count", num_tokens)
        return num_tokens
    if out is not None:
        return int((out[0] if isinstance(out, (tuple, list)) else out).shape[0])
    if ends.device_type == "cpu":
        return int(on_host(ends, 0)[-1])
    raise ArgumentError("num_tokens", "cu_seqlens[-1] (or `out`) for arrays on a GPU", None)


def _fetch_out(
    out: Any, concatenate: bool, rows: int, like: TensorView
) -> tuple[Any, tuple[TensorView, TensorView]]:
    """(the array or pair to return, views of the latent and RoPE parts)."""
    _check_rows("num_tokens", rows)
    if concatenate:
        whole, _ = result_array(like, out, (rows, HEAD_DIM_QK), BF16[0])
        checked = expect(whole, "out", (rows, HEAD_DIM_QK), BF16, align=2, writable=True)
        return whole, (launch.latent_part(checked), launch.rope_part(checked))
    if out is not None and (not isinstance(out, (tuple, list)) or len(out) != 2):
        raise ArgumentError("out", "two arrays (kv_c, k_pe), or concatenate=True", type(out))
    arrays, views = [], []
    for i, width in enumerate((KV_LORA_RANK, QK_ROPE_HEAD_DIM)):
        array, _ = result_array(like, None if out is None else out[i], (rows, width), BF16[0])
        arrays.append(array)
        views.append(expect(array, f"out[{i}]", (rows, width), BF16, align=2, writable=True))
    return tuple(arrays), (views[0], views[1])


def _fetch(
    cache: CacheArrays,
    source: FetchSource,
    named: dict[str, TensorView],
    rows: int,
    checked: bool | None,
    out: Any,
    concatenate: bool,
    backend: str,
    stream: Any,
    pdl: bool,
) -> Any:
    result, views = _fetch_out(out, concatenate, rows, cache.ckv)
    planes = {
        "ckv_cache": cache.ckv,
        "k_scale_cache": cache.k_scale,
        "k_rope_cache": cache.k_rope,
    }
    everything = {**planes, **named, "out": views[0], "out[1]": views[1]}
    kind, device = resolve_backend(backend, everything)
    on_gpu = _on_gpu(cache.ckv)
    index = cache.ckv.device_index if on_gpu else max(device, 0)
    handle = resolve_stream(stream, list(everything.values()), index) if on_gpu else 0
    if source.slots is not None and (kind == "reference" or _checked_mode(checked)):
        _check_slots("slots", source.slots, cache.num_slots, handle)
    if kind == "reference":
        _deliver_rows(_fetch_on_host(cache, source, rows, handle), views, handle)
    elif on_gpu:
        launch.launch_fetch_dequant(cache, source, *views, handle, pdl)
    else:
        _fetch_uploaded(cache, source, rows, views, index)
    return result


def _fetch_on_host(
    cache: CacheArrays, source: FetchSource, rows: int, stream: int
) -> tuple[np.ndarray, np.ndarray]:
    from .reference import fetch_dequant as reference

    planes = [on_host(v, stream) for v in (cache.ckv, cache.k_scale, cache.k_rope)]
    if source.slots is not None:
        return reference.fetch_dequant(*planes, on_host(source.slots, stream))
    parts = (source.block_table, source.starts, source.cu_seqlens)
    arrays = [on_host(v, stream) for v in parts if v is not None]
    total = int(arrays[2][-1])
    if total > rows:
        raise ArgumentError("num_tokens", f"cu_seqlens[-1] = {total}", rows)
    found = reference.fetch_dequant_ranges(*planes, *arrays)
    pad = ((0, rows - total), (0, 0))
    kv_c, k_pe = (np.pad(part.view(np.uint16), pad).view(part.dtype) for part in found)
    return kv_c, k_pe


def _deliver_rows(parts: Sequence[np.ndarray], views: Sequence[TensorView], stream: int) -> None:
    """Host rows into the result, whose rows may have gaps (a concatenated one has)."""
    from .host_copy import Mirrors

    mirrors = Mirrors(views, stream)
    for target, part in zip(mirrors.arrays, parts, strict=True):
        target[...] = part.view(target.dtype)
    mirrors.write_back()


def _fetch_uploaded(
    cache: CacheArrays, source: FetchSource, rows: int, views: Sequence[TensorView], device: int
) -> None:
    """NumPy arrays, CUDA asked for: the whole cache is sent to the GPU."""
    from .array import to_host

    def send(v: TensorView | None) -> TensorView | None:
        return None if v is None else upload(v, device, 0)

    planes = [upload(v, device, 0) for v in (cache.ckv, cache.k_scale, cache.k_rope)]
    moved = FetchSource(
        send(source.slots), send(source.block_table), send(source.starts), send(source.cu_seqlens)
    )
    _, found = _fetch_out(None, False, rows, _device_like(device))
    launch.launch_fetch_dequant(CacheArrays(*planes), moved, *found, 0, False)
    _deliver_rows([to_host(v) for v in found], views, 0)
