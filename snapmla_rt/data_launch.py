"""From checked views to launches of the data-movement kernels: grids and parameter values.

Nothing here checks arguments, allocates or synchronises; the API does that before.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from . import data_kernels as table
from .config import APPEND_CLAIM_MAX, APPEND_SCAN_MAX, BLOCK_SIZE, KV_LORA_RANK
from .tensor import TensorView
from .workspace import AppendWorkspace

Values = tuple[Any, ...]


@dataclass(frozen=True)
class CacheArrays:
    """The three planes of a cache as views."""

    ckv: TensorView
    k_scale: TensorView
    k_rope: TensorView

    @property
    def num_blocks(self) -> int:
        return self.ckv.shape[0]

    @property
    def num_slots(self) -> int:
        return self.num_blocks * BLOCK_SIZE

    def values(self) -> Values:
        wide = is_aligned(self.ckv, 16) and is_aligned(self.k_rope, 4)
        return (
            self.ckv.ptr,
            self.k_rope.ptr,
            self.k_scale.ptr,
            *self.ckv.strides[:2],
            *self.k_rope.strides[:2],
            *self.k_scale.strides[:2],
            self.num_slots,
            wide,
        )


def is_aligned(view: TensorView, nbytes: int) -> bool:
    """Whether every row (last dimension) of a view starts at a multiple of nbytes."""
    outer = zip(view.shape[:-1], view.strides[:-1], strict=True)
    return view.ptr % nbytes == 0 and all(n == 1 or step % nbytes == 0 for n, step in outer)


def latent_part(q: TensorView) -> TensorView:
    """The first 512 values of each row of [..., 576]."""
    return _part(q, 0, KV_LORA_RANK)


def rope_part(q: TensorView) -> TensorView:
    """The last 64 values of each row of [..., 576]."""
    return _part(q, KV_LORA_RANK, q.shape[-1] - KV_LORA_RANK)


def _part(view: TensorView, start: int, width: int) -> TensorView:
    owner = view.owner
    if view.framework == "numpy":
        owner = owner[..., start : start + width]
    return TensorView(
        view.ptr + start * view.itemsize,
        (*view.shape[:-1], width),
        view.strides,
        view.dtype,
        view.device_type,
        view.device_index,
        owner,
        view.readonly,
        view.framework,
    )


def rows_are_wide(latent: TensorView, rope: TensorView) -> bool:
    """Whether a row can be loaded 16 bytes, and its RoPE two values, at a time."""
    return is_aligned(latent, 16) and is_aligned(rope, 2 * rope.itemsize)


def row_stride(view: TensorView) -> int | None:
    """Bytes from row to row of [b, s, h, width] where one stride leads through all, else None."""
    stride: int | None = None
    for extent, step in reversed(list(zip(view.shape[:-1], view.strides[:-1], strict=True))):
        if extent == 1:
            continue
        if stride is None:
            stride, reach = step, step * extent
        elif step != reach:
            return None
        else:
            reach = step * extent
    return stride or 0


def input_variant(dtype: str) -> str:
    return "bfloat16" if dtype == "uint16" else dtype


@functools.lru_cache(maxsize=256)
def ctas_at_once(name: str, variant: str, device_index: int) -> int:
    """CTAs of a kernel that the GPU holds at the same time, as the kernel is compiled for."""
    from .driver.device import device_info

    return device_info(device_index).num_sms * define(name, variant, "MIN_CTAS")


def define(name: str, variant: str, key: str) -> int:
    """A define of a variant, from the kernel table."""
    from .kernels import TABLE

    return int(dict(TABLE[name].variant(variant).defines)[key])


def long_ctas(num_rows: int, at_once: int) -> int:
    """CTAs for rows that each CTA goes through: all run at once, in as many full rounds as the most
    rows of a CTA ask for."""
    rounds = -(-num_rows // (at_once * table.CTA_ROWS))
    return min(ctas_for(num_rows, 1), at_once * rounds)


def short_ctas(num_rows: int, at_once: int, rows_per_warp: int) -> int:
    """CTAs of rows_per_warp rows a warp; fewer rows each where all can run at once."""
    return max(ctas_for(num_rows, rows_per_warp), min(ctas_for(num_rows, 1), at_once))


def ctas_for(num_rows: int, rows_per_warp: int) -> int:
    return -(-num_rows // (table.WARPS * rows_per_warp))


def shares(num_rows: int, num_ctas: int) -> tuple[int, int]:
    """(rows of a CTA, how many CTAs take one more)."""
    return divmod(num_rows, max(num_ctas, 1))


def query_values(
    nope: TensorView, rope: TensorView, out: tuple[TensorView, ...], pow2: bool, num_ctas: int
) -> Values:
    """QuantizeQParams for that many CTAs."""
    batch, seq_len_q, heads, _ = nope.shape
    flat = row_stride(nope), row_stride(rope)
    is_flat = None not in flat
    nope_steps = (0, 0, flat[0]) if is_flat else nope.strides[:3]
    rope_steps = (0, 0, flat[1]) if is_flat else rope.strides[:3]
    return (
        nope.ptr,
        rope.ptr,
        *(view.ptr for view in out),
        *nope_steps,
        *rope_steps,
        *shares(batch * seq_len_q * heads, num_ctas),
        heads,
        seq_len_q,
        is_flat,
        rows_are_wide(nope, rope),
        pow2,
    )


def append_values(
    kv_c: TensorView,
    k_pe: TensorView,
    cache: CacheArrays,
    slots: TensorView,
    pow2: bool,
    tokens: slice,
    claim: tuple[int, int, int, int] = (0, 0, 0, 0),
    num_ctas: int = 1,
) -> Values:
    """AppendKvParams for the tokens of a slice. claim (of AppendWorkspace) and num_ctas: for that
    variant."""
    first, count = tokens.start, tokens.stop - tokens.start
    return (
        *cache.values(),
        kv_c.ptr + first * kv_c.strides[0],
        k_pe.ptr + first * k_pe.strides[0],
        kv_c.strides[0],
        k_pe.strides[0],
        slots.ptr + first * slots.strides[0],
        slots.strides[0],
        *claim,
        count,
        *shares(count, num_ctas),
        slots.dtype == "int64",
        rows_are_wide(kv_c, k_pe),
        pow2,
    )


def launch_quantize_q(
    nope: TensorView,
    rope: TensorView,
    out: tuple[TensorView, ...],
    pow2: bool,
    stream: int,
    pdl: bool,
) -> None:
    from .kernels import kernel

    variant, device = input_variant(nope.dtype), nope.device_index
    num_rows = nope.shape[0] * nope.shape[1] * nope.shape[2]
    num_ctas = long_ctas(num_rows, ctas_at_once("quantize_q", variant, device))
    values = query_values(nope, rope, out, pow2, num_ctas)
    kernel("quantize_q", variant, device).launch((num_ctas, 1, 1), stream, *values, pdl=pdl)


def launch_append_kv(
    kv_c: TensorView,
    k_pe: TensorView,
    cache: CacheArrays,
    slots: TensorView,
    pow2: bool,
    stream: int,
    pdl: bool,
    workspace: AppendWorkspace | None,
) -> None:
    """One launch; more than APPEND_CLAIM_MAX tokens are several, in order."""
    from .kernels import kernel

    num_tokens, dtype = kv_c.shape[0], input_variant(kv_c.dtype)
    if num_tokens <= APPEND_SCAN_MAX:
        grid = (ctas_for(num_tokens, 1), 1, 1)
        values = append_values(kv_c, k_pe, cache, slots, pow2, slice(0, num_tokens))
        scan = kernel("append_kv", f"{dtype}_scan", kv_c.device_index)
        scan.launch(grid, stream, *values, pdl=pdl)
        return
    assert workspace is not None
    step = min(APPEND_CLAIM_MAX, workspace.num_tokens)
    variant = f"{dtype}_claim"
    claiming = kernel("append_kv", variant, kv_c.device_index)
    at_once = ctas_at_once("append_kv", variant, kv_c.device_index)
    for first in range(0, num_tokens, step):
        part = slice(first, min(first + step, num_tokens))
        count = part.stop - first
        claim = workspace.claim(count)
        num_ctas = long_ctas(count, at_once)
        values = append_values(kv_c, k_pe, cache, slots, pow2, part, claim, num_ctas)
        claiming.launch((num_ctas, 1, 1), stream, *values, pdl=pdl and first == 0)


def launch_prepare(
    kv_c: TensorView,
    k_pe: TensorView,
    cache: CacheArrays,
    slots: TensorView,
    nope: TensorView,
    rope: TensorView,
    out: tuple[TensorView, ...],
    pow2: bool,
    stream: int,
    pdl: bool,
) -> None:
    """append_kv (at most APPEND_SCAN_MAX tokens) and quantize_q in one launch."""
    from .kernels import kernel

    variant, device = input_variant(kv_c.dtype), kv_c.device_index
    num_tokens = kv_c.shape[0]
    append_ctas = ctas_for(num_tokens, 1)
    num_rows = nope.shape[0] * nope.shape[1] * nope.shape[2]
    query_ctas = long_ctas(num_rows, ctas_at_once("prepare", variant, device))
    values = (
        *append_values(kv_c, k_pe, cache, slots, pow2, slice(0, num_tokens)),
        *query_values(nope, rope, out, pow2, query_ctas),
        append_ctas,
    )
    grid = (append_ctas + query_ctas, 1, 1)
    kernel("prepare", variant, device).launch(grid, stream, *values, pdl=pdl)


@dataclass(frozen=True)
class FetchSource:
    """Which tokens to fetch: slots, or block_table with starts and cu_seqlens."""

    slots: TensorView | None = None
    block_table: TensorView | None = None
    starts: TensorView | None = None
    cu_seqlens: TensorView | None = None

    def values(self) -> tuple[Values, Values, bool]:
        """(pointers and strides, batch and max_blocks, whether slots are int64)."""
        if self.slots is not None:
            is_long = self.slots.dtype == "int64"
            return (self.slots.ptr, self.slots.strides[0], 0, 0, 0, 0), (0, 0), is_long
        table_view, starts, ends = self.block_table, self.starts, self.cu_seqlens
        assert table_view is not None and starts is not None and ends is not None
        step = table_view.strides[0] // table_view.itemsize
        pointers = (0, 0, table_view.ptr, step, starts.ptr, ends.ptr)
        return pointers, (table_view.shape[0], table_view.shape[1]), False


def launch_fetch_dequant(
    cache: CacheArrays,
    source: FetchSource,
    kv_c: TensorView,
    k_pe: TensorView,
    stream: int,
    pdl: bool,
) -> None:
    from .kernels import kernel

    num_rows, device = kv_c.shape[0], cache.ckv.device_index
    variant = "slots" if source.slots is not None else "ranges"
    at_once = ctas_at_once("fetch_dequant", variant, device)
    per_warp = define("fetch_dequant", variant, "ROWS_PER_WARP")
    num_ctas = short_ctas(num_rows, at_once, per_warp)
    pointers, sizes, is_long = source.values()
    values = (
        *cache.values(),
        kv_c.ptr,
        k_pe.ptr,
        kv_c.strides[0],
        k_pe.strides[0],
        *pointers,
        *shares(num_rows, num_ctas),
        *sizes,
        is_long,
        is_aligned(kv_c, 16) and is_aligned(k_pe, 4),
    )
    kernel("fetch_dequant", variant, device).launch((num_ctas, 1, 1), stream, *values, pdl=pdl)
