"""The data-movement calls: append_kv, quantize_q, prepare, fetch_dequant. One launch each.

Arrays: torch, CuPy, JAX or NumPy; GPU arrays run on their GPU. The calls enqueue on `stream` (see
`tensor.py` for the default), allocate nothing but results that are not given as `out`, do not
synchronise, and can be captured into a CUDA graph after one call outside. NumPy arrays are copied
to and from the GPU for convenience. backend: "auto", "cuda" or "reference" (see `backend.py`); both
give the same bytes. pdl=True lets a launch begin while the kernel before it on the stream ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import data_launch as launch
from .backend import resolve_backend
from .config import (
    APPEND_SCAN_MAX,
    BLOCK_SIZE,
    HEAD_DIM_QK,
    KV_LORA_RANK,
    MAX_ROWS_PER_LAUNCH,
    QK_ROPE_HEAD_DIM,
    check_scale_rounding,
)
from .data_launch import CacheArrays
from .environment import debug_wanted
from .errors import ArgumentError
from .host_copy import Mirrors, deliver, on_host, result_array, upload
from .tensor import BF16, E4M3, F32, INDICES, INPUT_FLOATS, TensorView, expect, resolve_stream
from .workspace import AppendWorkspace, stream_workspace

__all__ = [
    "AppendWorkspace",
    "append_kv",
    "prepare",
    "quantize_q",
    "quantize_q_parts",
]

_FLOATS = (*INPUT_FLOATS, "uint16")
_MAX_SLOTS = 2**31


# --- Arguments ---------------------------------------------------------------------------------


def _cache(ckv: Any, k_scale: Any, k_rope: Any, writable: bool, stream: Any) -> CacheArrays:
    """Check the three planes."""
    dims: dict[str, int] = {}
    options = {"dims": dims, "writable": writable, "stream": stream}
    n, t = "num_blocks", BLOCK_SIZE
    ckv_view = expect(ckv, "ckv_cache", (n, t, KV_LORA_RANK), E4M3, **options)
    scale_view = expect(k_scale, "k_scale_cache", (n, t), F32, contiguous=0, align=4, **options)
    rope_view = expect(k_rope, "k_rope_cache", (n, t, QK_ROPE_HEAD_DIM), BF16, align=2, **options)
    if dims[n] * BLOCK_SIZE >= _MAX_SLOTS:
        raise ArgumentError("ckv_cache", f"fewer than {_MAX_SLOTS // BLOCK_SIZE} blocks", dims[n])
    return CacheArrays(ckv_view, scale_view, rope_view)


def _tokens(
    kv_c: Any, k_pe: Any, slot_mapping: Any, stream: Any
) -> tuple[TensorView, TensorView, TensorView]:
    """Check the new tokens and their slots."""
    dims: dict[str, int] = {}
    latent = expect(kv_c, "kv_c", ("n", KV_LORA_RANK), _FLOATS, dims=dims, stream=stream)
    rope = expect(k_pe, "k_pe", ("n", QK_ROPE_HEAD_DIM), latent.dtype, dims=dims, stream=stream)
    slots = expect(
        slot_mapping, "slot_mapping", ("n",), INDICES, dims=dims, contiguous=0, stream=stream
    )
    return latent, rope, slots


def _query(q: Any, stream: Any) -> tuple[TensorView, TensorView]:
    """Check q [b, s_q, h, 576] and split it."""
    whole = expect(q, "q", (None, None, None, HEAD_DIM_QK), _FLOATS, stream=stream)
    return launch.latent_part(whole), launch.rope_part(whole)


def _query_parts(q_nope: Any, q_rope: Any, stream: Any) -> tuple[TensorView, TensorView]:
    dims: dict[str, int] = {}
    lead = ("b", "s_q", "h")
    nope = expect(q_nope, "q_nope", (*lead, KV_LORA_RANK), _FLOATS, dims=dims, stream=stream)
    rope = expect(q_rope, "q_rope", (*lead, QK_ROPE_HEAD_DIM), nope.dtype, dims=dims, stream=stream)
    return nope, rope


def _check_rows(name: str, rows: int) -> None:
    if rows > MAX_ROWS_PER_LAUNCH:
        raise ArgumentError(name, f"at most {MAX_ROWS_PER_LAUNCH} rows", rows)


def _query_out(
    out: Sequence[Any] | None, nope: TensorView, like: TensorView
) -> tuple[tuple[Any, ...], tuple[TensorView, ...]]:
    """(arrays, views) of q_nope, q_rope, q_scale: the caller's, checked, or new ones."""
    lead = nope.shape[:-1]
    _check_rows("q", int(np.prod(lead, dtype=np.int64)))
    wanted = (
        ("out[0] (q_nope)", (*lead, KV_LORA_RANK), E4M3, 16),
        ("out[1] (q_rope)", (*lead, QK_ROPE_HEAD_DIM), BF16, 16),
        ("out[2] (q_scale)", lead, F32, 4),
    )
    if out is not None and len(out) != 3:
        raise ArgumentError("out", "three arrays (q_nope, q_rope, q_scale)", len(out))
    arrays, views = [], []
    for i, (name, shape, dtypes, align) in enumerate(wanted):
        array, _ = result_array(like, None if out is None else out[i], shape, dtypes[0])
        checked = expect(
            array, name, shape, dtypes, contiguous=len(shape), align=align, writable=True
        )
        arrays.append(array)
        views.append(checked)
    return tuple(arrays), tuple(views)


def _checked_mode(checked: bool | None) -> bool:
    """`checked`, by default whether $SNAPMLA_DEBUG is set."""
    return debug_wanted() if checked is None else checked


def _check_slots(name: str, slots: TensorView, num_slots: int, stream: int) -> None:
    """Raise ArgumentError for a slot beyond the cache (checked mode: waits for the stream)."""
    if slots.device_type == "cuda":
        from .driver.memory import is_capturing

        if is_capturing(stream, slots.device_index):
            raise ArgumentError("checked", "False while the stream is captured", True)
    values = on_host(slots, stream)
    beyond = np.flatnonzero(values >= num_slots)
    if beyond.size:
        index = int(beyond[0])
        got = f"slot {int(values[index])} at index {index}"
        raise ArgumentError(name, f"slots below {num_slots} (negative: none)", got)


def _uploaded(views: Sequence[TensorView], device: int, stream: int) -> list[TensorView]:
    return [upload(v, device, stream) for v in views]


# --- quantize_q --------------------------------------------------------------------------------


def quantize_q(
    q: Any,
    *,
    scale_rounding: str = "exact",
    out: Sequence[Any] | None = None,
    backend: str = "auto",
    stream: Any = None,
    pdl: bool = False,
) -> tuple[Any, Any, Any]:
    """Quantise queries: one scale per token and head, RoPE divided by it.

    q: bf16 (or uint16 bits), float16 or float32 [b, s_q, h, 576], last dimension contiguous, any
    other strides. Returns (or fills `out` with) q_nope e4m3 [b, s_q, h, 512], q_rope bf16
    [b, s_q, h, 64], q_scale float32 [b, s_q, h]; `out` arrays are contiguous and 16-byte aligned.
    scale_rounding: "exact" or "pow2"; rule and cost: reference/quantize.py and quantize_q.py.
    Raises ArgumentError for wrong shapes, dtypes, strides or devices.
    """
    nope, rope = _query(q, stream)
    return _quantize_q(nope, rope, {"q": nope}, scale_rounding, out, backend, stream, pdl)


def quantize_q_parts(
    q_nope: Any,
    q_rope: Any,
    *,
    scale_rounding: str = "exact",
    out: Sequence[Any] | None = None,
    backend: str = "auto",
    stream: Any = None,
    pdl: bool = False,
) -> tuple[Any, Any, Any]:
    """`quantize_q` for queries in two arrays: q_nope [b, s_q, h, 512], q_rope [b, s_q, h, 64]."""
    nope, rope = _query_parts(q_nope, q_rope, stream)
    named = {"q_nope": nope, "q_rope": rope}
    return _quantize_q(nope, rope, named, scale_rounding, out, backend, stream, pdl)


def _quantize_q(
    nope: TensorView,
    rope: TensorView,
    named: dict[str, TensorView],
    scale_rounding: str,
    out: Sequence[Any] | None,
    backend: str,
    stream: Any,
    pdl: bool,
) -> tuple[Any, Any, Any]:
    check_scale_rounding(scale_rounding)
    like = next(iter(named.values()))
    arrays, views = _query_out(out, nope, like)
    kind, device = resolve_backend(backend, {**named, **_named("out", views)})
    handle = (
        resolve_stream(stream, [*named.values(), *views], max(device, 0)) if _on_gpu(like) else 0
    )
    if kind == "reference":
        from .reference.quantize_q import quantize_q_parts as reference

        parts = on_host(nope, handle), on_host(rope, handle)
        results: Any = reference(*parts, scale_rounding=scale_rounding)
        for result, target in zip(results, views, strict=True):
            deliver(result, target, handle)
    elif _on_gpu(like):
        launch.launch_quantize_q(nope, rope, views, scale_rounding == "pow2", handle, pdl)
    else:
        nope, rope = _uploaded((nope, rope), device, 0)
        _, device_out = _query_out(None, nope, _device_like(device))
        launch.launch_quantize_q(nope, rope, device_out, scale_rounding == "pow2", 0, False)
        _download(device_out, views)
    return arrays[0], arrays[1], arrays[2]


def _named(prefix: str, views: Sequence[TensorView]) -> dict[str, TensorView]:
    return {f"{prefix}[{i}]": v for i, v in enumerate(views)}


def _on_gpu(tensor: TensorView) -> bool:
    return tensor.device_type == "cuda"


def _device_like(device: int) -> TensorView:
    """A view that stands for "memory of our own on this GPU" in new_array."""
    return TensorView(0, (), (), "uint8", "cuda", device)


def _download(sources: Sequence[TensorView], targets: Sequence[TensorView]) -> None:
    from .array import to_host

    for source, target in zip(sources, targets, strict=True):
        deliver(to_host(source), target, 0)


# --- append_kv ---------------------------------------------------------------------------------


def append_kv(
    kv_c: Any,
    k_pe: Any,
    ckv_cache: Any,
    k_scale_cache: Any,
    k_rope_cache: Any,
    slot_mapping: Any,
    *,
    scale_rounding: str = "exact",
    backend: str = "auto",
    stream: Any = None,
    checked: bool | None = None,
    workspace: AppendWorkspace | None = None,
    pdl: bool = False,
) -> None:
    """Quantise n new tokens and write them straight into their slots of the paged cache.

    kv_c: latents [n, 512], k_pe: rotated keys [n, 64], of one type: bf16 (or uint16 bits), float16
    or float32; last dimension contiguous. ckv_cache: e4m3 or uint8 [num_blocks, 64, 512],
    k_scale_cache: float32 [num_blocks, 64], k_rope_cache: bf16 or uint16 [num_blocks, 64, 64]; any
    strides with a contiguous last dimension, so both storage layouts. slot_mapping: int32 or int64
    [n], slot = block * 64 + offset; a negative slot skips its token. Of tokens that share a slot
    the last one is written, whole.
    A slot beyond the cache skips its token too; with checked=True (default: $SNAPMLA_DEBUG) it is
    an ArgumentError naming slot and index before anything is written, at the price of a copy of
    slot_mapping to the host. workspace: see AppendWorkspace; only for two streams appending more
    than 2,048 tokens at the same time from replayed graphs.
    Rule and errors otherwise as in reference/append_kv.py. Raises ArgumentError.
    """
    check_scale_rounding(scale_rounding)
    cache = _cache(ckv_cache, k_scale_cache, k_rope_cache, True, stream)
    tokens = _tokens(kv_c, k_pe, slot_mapping, stream)
    kind, device, handle = _place_append(tokens, cache, {}, backend, stream)
    if kind == "reference" or _checked_mode(checked):
        _check_slots("slot_mapping", tokens[2], cache.num_slots, handle)
    if kind == "reference":
        _append_on_host(tokens, cache, scale_rounding, handle)
    elif _on_gpu(cache.ckv):
        pow2 = scale_rounding == "pow2"
        workspace = _workspace(workspace, device, handle, cache, tokens[0].shape[0])
        launch.launch_append_kv(*tokens[:2], cache, tokens[2], pow2, handle, pdl, workspace)
    else:
        _append_uploaded(tokens, cache, scale_rounding, device)


def _place_append(
    tokens: Sequence[TensorView],
    cache: CacheArrays,
    more: dict[str, TensorView],
    backend: str,
    stream: Any,
) -> tuple[str, int, int]:
    """(backend, device, stream handle) of a call that writes into the cache."""
    names = ("kv_c", "k_pe", "slot_mapping")
    planes = {
        "ckv_cache": cache.ckv,
        "k_scale_cache": cache.k_scale,
        "k_rope_cache": cache.k_rope,
    }
    views = {**planes, **dict(zip(names, tokens, strict=True)), **more}
    if backend == "auto" and cache.ckv.device_type == "cpu":
        backend = "reference"  # sending a whole cache to the GPU and back would be slower
    kind, device = resolve_backend(backend, views)
    on_gpu = _on_gpu(cache.ckv)
    index = cache.ckv.device_index if on_gpu else max(device, 0)
    handle = resolve_stream(stream, list(views.values()), index) if on_gpu else 0
    return kind, index, handle


def _workspace(
    given: AppendWorkspace | None, device: int, stream: int, cache: CacheArrays, num_tokens: int
) -> AppendWorkspace | None:
    """The workspace that an append of so many tokens needs, or None."""
    if num_tokens <= APPEND_SCAN_MAX:
        return None
    from .config import APPEND_CLAIM_MAX

    if given is None:
        return stream_workspace(device, stream, cache.num_slots, min(num_tokens, APPEND_CLAIM_MAX))
    if given.device_index != device or given.num_slots < cache.num_slots:
        expected = f"one for cuda:{device} and at least {cache.num_slots} slots"
        got = f"cuda:{given.device_index}, {given.num_slots} slots"
        raise ArgumentError("workspace", expected, got)
    return given


def _append_on_host(
    tokens: Sequence[TensorView], cache: CacheArrays, scale_rounding: str, stream: int
) -> None:
    from .reference.append_kv import append_kv as reference

    latent, rope, slots = (on_host(v, stream) for v in tokens)
    mirrors = Mirrors((cache.ckv, cache.k_scale, cache.k_rope), stream)
    reference(latent, rope, *mirrors.arrays, slots, scale_rounding=scale_rounding)
    mirrors.write_back()


def _append_uploaded(
    tokens: Sequence[TensorView], cache: CacheArrays, scale_rounding: str, device: int
) -> None:
    """NumPy arrays, CUDA asked for: the whole cache travels both ways."""
    latent, rope, slots = _uploaded(tokens, device, 0)
    mirrors = Mirrors((cache.ckv, cache.k_scale, cache.k_rope), 0)
    from .array import to_device, to_host

    planes = [to_device(array, device).view() for array in mirrors.arrays]
    on_device = CacheArrays(*planes)
    workspace = _workspace(None, device, 0, on_device, latent.shape[0])
    pow2 = scale_rounding == "pow2"
    launch.launch_append_kv(latent, rope, on_device, slots, pow2, 0, False, workspace)
    for array, plane in zip(mirrors.arrays, planes, strict=True):
        array[...] = to_host(plane).view(array.dtype)
    mirrors.write_back()


# --- prepare -----------------------------------------------------------------------------------


def prepare(
    q: Any,
    kv_c: Any,
    k_pe: Any,
    ckv_cache: Any,
    k_scale_cache: Any,
    k_rope_cache: Any,
    slot_mapping: Any,
    *,
    scale_rounding: str = "exact",
    out: Sequence[Any] | None = None,
    backend: str = "auto",
    stream: Any = None,
    checked: bool | None = None,
    pdl: bool = False,
) -> tuple[Any, Any, Any]:
    """A decode step's preparation in one launch: append_kv of the new tokens, quantize_q of q.

    Arguments, result and errors as in those two. Where one launch cannot do it (more than 2,048
    tokens, or q and kv_c of different types) it takes two.
    """
    check_scale_rounding(scale_rounding)
    nope, rope = _query(q, stream)
    cache = _cache(ckv_cache, k_scale_cache, k_rope_cache, True, stream)
    tokens = _tokens(kv_c, k_pe, slot_mapping, stream)
    kind, _, handle = _place_append(tokens, cache, {"q": nope}, backend, stream)
    one_launch = (
        kind == "cuda"
        and _on_gpu(cache.ckv)
        and tokens[0].shape[0] <= APPEND_SCAN_MAX
        and launch.input_variant(tokens[0].dtype) == launch.input_variant(nope.dtype)
    )
    if not one_launch:
        options: dict[str, Any] = {"scale_rounding": scale_rounding, "backend": backend}
        planes = (ckv_cache, k_scale_cache, k_rope_cache)
        if kind == "reference" or _checked_mode(checked):
            _check_slots("slot_mapping", tokens[2], cache.num_slots, handle)
        query = quantize_q(q, out=out, stream=stream, pdl=pdl, **options)
        append_kv(kv_c, k_pe, *planes, slot_mapping, checked=False, stream=stream, **options)
        return query
    arrays, views = _query_out(out, nope, nope)
    if _checked_mode(checked):
        _check_slots("slot_mapping", tokens[2], cache.num_slots, handle)
    pow2 = scale_rounding == "pow2"
    launch.launch_prepare(*tokens[:2], cache, tokens[2], nope, rope, views, pow2, handle, pdl)
    return arrays[0], arrays[1], arrays[2]
