"""merge_states: two partial attention results as one, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import dropin_kernels as table
from .api_plan import host_stays
from .array import new_array
from .backend import resolve_backend
from .config import LN2, LOG2E, MAX_ROWS_PER_LAUNCH, check_lse_base
from .errors import ArgumentError
from .host_copy import Mirrors, on_host, upload
from .tensor import BF16, F32, TensorView, expect, resolve_stream, view

__all__ = ["merge_states"]

_OUT_TYPES = ("bfloat16", "float32")
_PER_LOAD = 8  # values that a lane takes at once


def merge_states(
    out_a: Any,
    lse_a: Any,
    out_b: Any,
    lse_b: Any,
    *,
    out: Any = None,
    lse: Any = None,
    out_dtype: str | None = None,
    lse_base: str = "e",
    backend: str = "auto",
    stream: Any = None,
    pdl: bool = False,
) -> tuple[Any, Any]:
    """Merge attention over two disjoint sets of keys into attention over both: for decode context
    parallelism, and for prefixes that requests share.

    out_a, out_b: bf16 (or uint16 bits) or float32 [b, s_q, h, d] with d a multiple of 8, rows
    contiguous and on a GPU 16-byte aligned, other strides free; lse_a, lse_b: float32 [b, h, s_q],
    any strides: what mla_decode returns for each set. Or, without a batch dimension, [n, h, d] and
    [h, n]. Returns (or fills) out and lse of the same shapes; both may be given, also as the inputs
    of one side. out_dtype: "bfloat16" or "float32" (default: that of `out`, else the type that both
    sides have, else float32). lse_base: "e", natural logarithms, as this package and FlashMLA give
    them, or "2", as FlashInfer gives them; inputs and result have the same.

    A side whose lse is +inf or -inf has seen no key and is the neutral element: the other side
    passes unchanged. Both empty: out 0, lse +inf. The sides may be swapped without changing a byte.
    An lse that is NaN makes its row NaN. More than two sides: merge the results. Rule and bytes:
    reference/merge_states.py. Enqueues one launch and never synchronises; with out and lse given
    it allocates nothing. Raises ArgumentError.
    """
    check_lse_base(lse_base)
    sides = _inputs(out_a, lse_a, out_b, lse_b, stream)
    wanted = _result_type(sides, out, out_dtype)
    first_out, first_lse = sides["out_a"], sides["lse_a"]
    if out is None:
        out = new_array(first_out, first_out.shape, wanted)
    if lse is None:
        lse = new_array(first_out, first_lse.shape, "float32")
    results = {
        "out": _expect_out(out, "out", first_out.shape, _names(wanted), writable=True),
        "lse": expect(
            lse, "lse", first_lse.shape, F32, contiguous=0, align=4, writable=True, stream=stream
        ),
    }
    named = {**sides, **results}
    kind, device = resolve_backend(host_stays(backend, first_out), named)
    on_gpu = first_out.device_type == "cuda"
    handle = resolve_stream(stream, list(named.values()), device) if on_gpu else 0
    if kind == "reference":
        _merge_on_host(sides, results, wanted, lse_base, handle)
    elif on_gpu:
        _launch(list(sides.values()), list(results.values()), lse_base, handle, pdl)
    else:
        _merge_uploaded(sides, results, wanted, lse_base, device)
    return out, lse


def _inputs(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, stream: Any) -> dict[str, TensorView]:
    """Views of the four inputs by name; shapes agree."""
    first = view(out_a, "out_a", stream)
    if first.ndim not in (3, 4):
        raise ArgumentError("out_a", "shape [b, s_q, h, d] or [n, h, d]", list(first.shape))
    if first.shape[-1] % _PER_LOAD or not first.shape[-1]:
        raise ArgumentError("out_a", f"a last dimension in multiples of {_PER_LOAD}", first.shape)
    *batch, seq_len_q, heads, _ = first.shape
    rows = seq_len_q * heads * (batch[0] if batch else 1)
    if rows > MAX_ROWS_PER_LAUNCH:
        raise ArgumentError("out_a", f"at most {MAX_ROWS_PER_LAUNCH} rows", rows)
    lse_shape = (*batch, heads, seq_len_q)
    both = (*BF16, *F32)
    options: dict[str, Any] = {"contiguous": 0, "align": 4, "stream": stream}
    return {
        "out_a": _expect_out(first, "out_a", first.shape, both),
        "lse_a": expect(lse_a, "lse_a", lse_shape, F32, **options),
        "out_b": _expect_out(view(out_b, "out_b", stream), "out_b", first.shape, both),
        "lse_b": expect(lse_b, "lse_b", lse_shape, F32, **options),
    }


def _expect_out(
    array: Any, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...], writable: bool = False
) -> TensorView:
    found = view(array, name)
    align = 16 if found.device_type == "cuda" else 1
    return expect(found, name, shape, dtypes, align=align, writable=writable)


def _names(dtype: str) -> tuple[str, ...]:
    return F32 if dtype == "float32" else BF16


def _is_f32(tensor: TensorView) -> bool:
    return tensor.dtype == "float32"


def _result_type(sides: dict[str, TensorView], out: Any, out_dtype: str | None) -> str:
    if out_dtype is not None and out_dtype not in _OUT_TYPES:
        raise ArgumentError("out_dtype", f"None or one of {_OUT_TYPES}", repr(out_dtype))
    if out_dtype is None and out is not None:
        return "float32" if _is_f32(view(out, "out")) else "bfloat16"
    kinds = {_is_f32(sides["out_a"]), _is_f32(sides["out_b"])}
    return out_dtype or ("bfloat16" if kinds == {False} else "float32")


# --- Kernel --------------------------------------------------------------------------------------


def _state_values(out: TensorView, lse: TensorView) -> tuple[Any, ...]:
    """StateParams. Without a batch dimension its stride is never multiplied by anything but 0."""
    out_strides = (0, *out.strides)[-4:-1]
    per_request, per_head, per_token = (0, *lse.strides)[-3:]
    return (out.ptr, lse.ptr, *out_strides, per_request, per_token, per_head, int(_is_f32(out)))


def _launch(
    sides: Sequence[TensorView],
    results: Sequence[TensorView],
    lse_base: str,
    stream: int,
    pdl: bool,
) -> None:
    from .kernels import kernel

    out = results[0]
    *batch, seq_len_q, heads, width = out.shape
    num_rows = seq_len_q * heads * (batch[0] if batch else 1)
    if num_rows == 0:
        return
    values = (
        *_state_values(sides[0], sides[1]),
        *_state_values(sides[2], sides[3]),
        *_state_values(results[0], results[1]),
        *(num_rows, heads, seq_len_q, width),
        *((LOG2E, LN2) if lse_base == "e" else (1.0, 1.0)),
    )
    grid = (-(-num_rows // table.MERGE_ROWS), 1, 1)
    kernel("merge_states", "", out.device_index).launch(grid, stream, *values, pdl=pdl)


# --- Host ----------------------------------------------------------------------------------------


def _merge_on_host(
    sides: dict[str, TensorView],
    results: dict[str, TensorView],
    out_dtype: str,
    lse_base: str,
    stream: int,
) -> None:
    from .array import numpy_dtype
    from .reference.merge_states import merge_states as reference

    arrays = [on_host(tensor, stream) for tensor in sides.values()]
    flat = sides["out_a"].ndim == 3
    if flat:
        arrays = [array[None] for array in arrays]
    found: Any = reference(*arrays, out_dtype=numpy_dtype(out_dtype), lse_base=lse_base)
    _deliver([part[0] if flat else part for part in found], results, stream)


def _merge_uploaded(
    sides: dict[str, TensorView],
    results: dict[str, TensorView],
    out_dtype: str,
    lse_base: str,
    device: int,
) -> None:
    """Host arrays, CUDA asked for: there and back."""
    from .array import DeviceArray, to_host

    moved = [upload(tensor, device, 0) for tensor in sides.values()]
    kinds = (out_dtype, "float32")
    places = [
        DeviceArray(tensor.shape, kind, device).view()
        for tensor, kind in zip(results.values(), kinds, strict=True)
    ]
    _launch(moved, places, lse_base, 0, False)
    _deliver([to_host(place) for place in places], results, 0)


def _deliver(found: Sequence[Any], results: dict[str, TensorView], stream: int) -> None:
    """Host results into the caller's arrays, of any strides."""
    mirrors = Mirrors(list(results.values()), stream)
    for target, part in zip(mirrors.arrays, found, strict=True):
        target[...] = part.view(target.dtype)
    mirrors.write_back()
