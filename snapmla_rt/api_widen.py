"""widen_per_tensor: what mla_decode needs beside an FP8 cache that has one scale for everything."""

from __future__ import annotations

from typing import Any

from . import dropin_kernels as table
from .api_plan import host_stays
from .backend import resolve_backend
from .config import BLOCK_SIZE, HEAD_DIM_QK, MAX_ROWS_PER_LAUNCH, QK_ROPE_HEAD_DIM
from .errors import ArgumentError
from .host_copy import Mirrors, on_host
from .tensor import BF16, E4M3, F32, TensorView, expect, resolve_stream

__all__ = ["widen_per_tensor"]


def widen_per_tensor(
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    descale_k: Any,
    k_rope: Any,
    k_scale: Any,
    *,
    query: tuple[Any, Any, Any, Any] | None = None,
    backend: str = "auto",
    stream: Any = None,
    pdl: bool = False,
) -> None:
    """Fill the arrays that mla_decode takes beside a cache of 576 e4m3 codes a token.

    k_cache: e4m3 or uint8 [num_blocks, 64, 576], the RoPE quantised too; last dimension contiguous,
    other strides multiples of 16 bytes. block_table int32 [b, n], cache_seqlens int32 [b], as in
    mla_decode; entries past a length are not read. descale_k: float32 [1], the scale of every code.
    k_rope: bf16 [num_blocks, 64, 64], contiguous: filled for the blocks that a request sees, the
    rest keeps what it held. k_scale: float32 [64]: descale_k, 64 times. query: (q e4m3
    [b, s_q, h, 576], descale_q float32 [1], q_rope bf16 [b, s_q, h, 64], q_scale float32
    [b, s_q, h]): the last two are filled.

    Then mla_decode takes k_cache[..., :512], k_scale as one line for all blocks (block stride 0)
    and k_rope. Cost, beside the decode: 64 bytes read and 128 written a visible token, once a call.
    Rule and bytes: reference/widen_per_tensor.py. Raises ArgumentError.
    """
    named = _inputs(k_cache, block_table, cache_seqlens, descale_k, k_rope, k_scale, stream)
    if query is not None:
        named |= _query(query, named["block_table"].shape[0], stream)
    cache = named["k_cache"]
    kind, device = resolve_backend(host_stays(backend, cache), named)
    if kind == "reference":
        on_gpu = cache.device_type == "cuda"
        handle = resolve_stream(stream, list(named.values()), cache.device_index) if on_gpu else 0
        _widen_on_host(named, handle)
        return
    if cache.device_type != "cuda":
        raise ArgumentError("backend", "'reference' or 'auto' for host arrays", repr(backend))
    handle = resolve_stream(stream, list(named.values()), device)
    _launch(named, handle, pdl)


def _inputs(
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    descale_k: Any,
    k_rope: Any,
    k_scale: Any,
    stream: Any,
) -> dict[str, TensorView]:
    dims: dict[str, int] = {}
    n, t = "num_blocks", BLOCK_SIZE
    options: dict[str, Any] = {"dims": dims, "stream": stream}
    cache = expect(k_cache, "k_cache", (n, t, HEAD_DIM_QK), E4M3, align=16, **options)
    writes: dict[str, Any] = {**options, "writable": True, "align": 16}
    rope_shape = (n, t, QK_ROPE_HEAD_DIM)
    return {
        "k_cache": cache,
        "block_table": expect(block_table, "block_table", ("b", None), "int32", align=4, **options),
        "cache_seqlens": expect(
            cache_seqlens, "cache_seqlens", ("b",), "int32", align=4, **options
        ),
        "descale_k": expect(descale_k, "descale_k", (1,), F32, align=4, **options),
        "k_rope": expect(k_rope, "k_rope", rope_shape, BF16, contiguous=3, **writes),
        "k_scale": expect(k_scale, "k_scale", (t,), F32, **writes),
    }


def _query(query: tuple[Any, Any, Any, Any], batch: int, stream: Any) -> dict[str, TensorView]:
    q, descale_q, q_rope, q_scale = query
    dims: dict[str, int] = {}
    s, h = "s_q", "h"
    options: dict[str, Any] = {"dims": dims, "stream": stream}
    writes: dict[str, Any] = {**options, "writable": True}
    found = {
        "q": expect(q, "q", (batch, s, h, HEAD_DIM_QK), E4M3, align=16, **options),
        "descale_q": expect(descale_q, "descale_q", (1,), F32, align=4, **options),
        "q_rope": expect(
            q_rope,
            "q_rope",
            (batch, s, h, QK_ROPE_HEAD_DIM),
            BF16,
            contiguous=4,
            align=16,
            **writes,
        ),
        "q_scale": expect(q_scale, "q_scale", (batch, s, h), F32, contiguous=3, align=4, **writes),
    }
    if found["q_scale"].size > MAX_ROWS_PER_LAUNCH:
        raise ArgumentError("q", f"at most {MAX_ROWS_PER_LAUNCH} rows", found["q_scale"].size)
    return found


def _launch(named: dict[str, TensorView], stream: int, pdl: bool) -> None:
    from .kernels import kernel

    cache, block_table = named["k_cache"], named["block_table"]
    batch, max_blocks = block_table.shape
    if batch == 0:
        return
    # All requests together keep the GPU busy; a CTA whose request has no block for it ends at once.
    per_request = max(1, min(max_blocks, -(-table.WIDEN_CTAS // batch)))
    q = named.get("q")
    num_rows = named["q_scale"].size if q is not None else 0
    _, seq_len_q, heads, _ = q.shape if q is not None else (0, 1, 1, 0)
    names = ("q", "q_rope", "q_scale", "descale_q")
    queries = [named[name].ptr if q is not None else 0 for name in names]
    values = (
        *(named[name].ptr for name in ("k_cache", "k_rope", "k_scale", "descale_k")),
        *(block_table.ptr, named["cache_seqlens"].ptr),
        *queries,
        *cache.strides[:2],
        block_table.strides[0] // block_table.itemsize,
        *(q.strides[:3] if q is not None else (0, 0, 0)),
        *(cache.shape[0], max_blocks, per_request, batch * per_request),
        *(num_rows, max(heads, 1), max(seq_len_q, 1)),
    )
    grid = (batch * per_request + -(-num_rows // table.WIDEN_QUERY_ROWS), 1, 1)
    kernel("widen_per_tensor", "", cache.device_index).launch(grid, stream, *values, pdl=pdl)


def _widen_on_host(named: dict[str, TensorView], stream: int) -> None:
    from .reference.widen_per_tensor import rope_bits
    from .reference.widen_per_tensor import widen_per_tensor as reference

    names = ("k_cache", "block_table", "cache_seqlens", "descale_k")
    inputs = [on_host(named[name], stream) for name in names]
    written = Mirrors([named["k_rope"], named["k_scale"]], stream)
    reference(*inputs, *written.arrays)
    written.write_back()
    if "q" in named:
        query = Mirrors([named["q_rope"], named["q_scale"]], stream)
        bits = rope_bits(on_host(named["q"], stream))
        query.arrays[0][...] = bits.view(query.arrays[0].dtype)
        query.arrays[1][...] = on_host(named["descale_q"], stream)[0]
        query.write_back()
