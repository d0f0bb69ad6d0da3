"""The decode calls: plan_decode once a step, mla_decode once a layer.

Arrays, streams and backends as in `api_data.py`, but host arrays are computed by the reference
unless backend="cuda" is asked for: a cache must not travel with every call. Both calls enqueue on
the stream and return: they never synchronise or copy to the host, and with `out`, `lse` and
`workspace` given they allocate nothing. Both can be captured into a CUDA graph, whose replays read
the lengths, the block table and the plan anew. With $SNAPMLA_DEBUG=1 (read when a call with new
arguments is first seen) the kernels check block ids, bound their waits and poison shared memory:
slower, same bytes.

Repeated calls. A call is prepared once for each set of addresses, shapes and strides; a call with
the same ones only looks it up and launches. Memory is not kept alive by that. bind_mla_decode
leaves out the look-up as well, for arrays that stay where they are.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

from .api_plan import decode_workspace_size, host_stays, plan_decode
from .backend import resolve_backend
from .config import KV_LORA_RANK
from .decode_call import (
    Target,
    checked_call,
    decode_on_host,
    decode_uploaded,
    prepare_call,
)
from .decode_launch import PlanOnDevice, workspace_layout
from .driver.launch import LAST_DEFAULT_STREAM
from .errors import ArgumentError
from .plan import DecodePlan
from .tensor import resolve_stream, stream_handle

__all__ = ["BoundDecode", "bind_mla_decode", "decode_workspace_size", "mla_decode", "plan_decode"]

# --- mla_decode ----------------------------------------------------------------------------------

# Prepared calls by everything that a launch depends on. Only complete, checked calls are in here.
_prepared: dict[Any, tuple[Any, ...]] = {}
_MAX_PREPARED = 1 << 14
_torch_stream: Any = None
_torch_device: Any = None
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_prepared.clear)  # `direct` is not for forked processes


def mla_decode(
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
    causal: bool = True,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
    return_lse: bool = True,
    stream: Any = None,
    backend: str = "auto",
) -> Any:
    """FP8 MLA decode attention over the paged cache: one layer of one step.

    Queries, as quantize_q returns them: q_nope e4m3 [b, s_q, h, 512], q_rope bf16 [b, s_q, h, 64]
    (divided by its scale), q_scale f32 [b, s_q, h]. Cache, as append_kv fills it, in blocks of 64
    tokens: ckv_cache e4m3 [num_blocks, 64, 512], k_scale_cache f32 [num_blocks, 64], k_rope_cache
    bf16 [num_blocks, 64, 64] (divided by the scale); separate arrays or planes of one buffer of
    records: any block stride that is a multiple of 16 bytes, each block contiguous (ckv_cache:
    tokens any multiple of 16 bytes apart). e4m3 may be uint8 and bf16 uint16. block_table int32
    [b, n]: entries past a request's length are not read. cache_seqlens int32 [b]: tokens with the
    s_q new ones, at most 64 n. plan: of plan_decode, from
    these lengths and this h and s_q. softmax_scale: any positive float, on q k before the softmax.
    causal: query s of s_q sees the first cache_seqlens - s_q + s + 1 tokens; False: all.

    Returns (out, lse), or out with return_lse=False: out bf16 [b, s_q, h, 512], lse f32 [b, h, s_q]
    a natural logarithm. A row that sees no token (length 0, or a causal query before the first
    token) gives out 0 and lse +inf. A NaN token makes exactly the rows that see it NaN (out and
    lse). out, lse: contiguous arrays to write instead of new ones. workspace: memory of
    decode_workspace_size bytes for partial results (default: allocated with the caller's library
    when the plan can split); one serves all layers of a stream.

    Preconditions that a GPU call does not check: block ids of used entries within the cache
    (checked with $SNAPMLA_DEBUG=1), lengths within the block table, the plan made from these
    lengths, k_scale_cache of visible tokens at least 2^-96 or NaN (append_kv guarantees it).
    Source: SnapMLA section 3.2; rule and bytes: reference/mla_decode.py. Raises ArgumentError.
    """
    given = (
        *(q_nope, q_rope, q_scale, ckv_cache, k_scale_cache, k_rope_cache),
        *(block_table, cache_seqlens),
    )
    if type(plan) is DecodePlan and backend in ("auto", "cuda"):
        out, lse, workspace, launches = _look_up(
            given, plan, softmax_scale, causal, out, lse, workspace, return_lse, stream
        )
        if launches is not None:
            for launch in launches:
                if launch.direct():
                    launch()
            return (out, lse) if return_lse else out
    target = Target(out, lse, workspace, return_lse, stream)
    results = _mla_decode(given, plan, softmax_scale, causal, target, backend)
    return results if return_lse else results[0]


@dataclass(frozen=True)
class BoundDecode:
    """One mla_decode call with everything fixed: calling it enqueues it again.

    out, lse: the arrays that every call writes. The arrays of the call are kept alive; whatever
    they hold at the time of a call is read. Thread-safe, as far as the caller's arrays are.
    """

    out: Any
    lse: Any
    launches: tuple[Any, ...] = field(repr=False)
    arrays: tuple[Any, ...] = field(repr=False)

    def __call__(self) -> None:
        """Enqueue the call. Raises CudaError for a refused launch."""
        for launch in self.launches:
            launch()


def bind_mla_decode(
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
    causal: bool = True,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
    stream: Any = None,
) -> BoundDecode:
    """mla_decode checked and prepared once, for arrays in GPU memory that do not move.

    Arguments as in mla_decode; nothing is enqueued yet. The stream is fixed with the rest:
    `stream`, or the one that mla_decode would use now. For host code that must be short: a call of
    the result is the launches alone. Raises ArgumentError as mla_decode does, and for host arrays.
    """
    given = (
        *(q_nope, q_rope, q_scale, ckv_cache, k_scale_cache, k_rope_cache),
        *(block_table, cache_seqlens),
    )
    target = Target(out, lse, workspace, True, stream)
    named, scalars = checked_call(given, plan, softmax_scale, causal, stream)
    _, index = resolve_backend("cuda", named)
    if named["q_nope"].device_type != "cuda":
        raise ArgumentError("q_nope", "an array on a GPU", named["q_nope"].device)
    handle = resolve_stream(stream, list(named.values()), index)
    call = prepare_call(named, plan, scalars, target, handle)
    kept = (*given, plan, call.out, call.lse, call.workspace)
    return BoundDecode(call.out, call.lse, call.launches, kept)


# --- mla_decode: repeated calls with torch tensors ------------------------------------------------


def _look_up(
    given: tuple[Any, ...],
    plan: DecodePlan,
    softmax_scale: Any,
    causal: Any,
    out: Any,
    lse: Any,
    workspace: Any,
    return_lse: bool,
    stream: Any,
) -> tuple[Any, Any, Any, tuple[Any, ...] | None]:
    """(out, lse, workspace, launches) of a call with torch tensors that was seen before; launches
    is None for any other call. Missing arrays are allocated where that is all that is missing."""
    planned = plan.on_device
    current_stream = _torch_stream or _raw_stream()
    if planned is None or current_stream is None:
        return out, lse, workspace, None
    try:
        own = out, lse, workspace
        if out is None or (lse is None and return_lse) or workspace is None:
            if stream is not None:
                return *own, None  # memory must come from that stream's pool: the long way
            own = _allocate_torch(given, planned, out, lse, workspace, return_lse)
        if stream is None:
            handle = current_stream(planned.device_index)
        else:
            handle = stream_handle(stream)
        if handle <= LAST_DEFAULT_STREAM and _torch_device() != planned.device_index:
            return *own, None  # a default stream: launched with the device's context pushed
        key = _torch_key(given, planned, softmax_scale, causal, own, handle)
        return *own, _prepared.get(key)
    except (AttributeError, TypeError, IndexError, ValueError):
        return out, lse, workspace, None  # no torch tensors, or an argument that is named later


def _raw_stream() -> Any:
    """torch's function device index -> handle of the current stream, where torch uses CUDA."""
    global _torch_stream, _torch_device
    if _torch_stream is None:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            _torch_device = getattr(torch._C, "_cuda_getDevice", None)
            _torch_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
            if _torch_device is None:
                _torch_stream = None
    return _torch_stream


def _torch_key(
    given: tuple[Any, ...],
    planned: PlanOnDevice,
    softmax_scale: Any,
    causal: Any,
    own: tuple[Any, ...],
    stream: int,
) -> tuple[Any, ...]:
    """Everything that the launches depend on. An address belongs to one device of the process."""
    a, b, c, d, e, f, g, h = given
    out, lse, workspace = own
    # Written out flat: this is most of what a repeated call costs.
    # fmt: off
    return (
        planned, stream, softmax_scale, causal,
        a.data_ptr(), a.shape, a.dtype, a.is_contiguous() or a.stride(),
        b.data_ptr(), b.shape, b.dtype, b.is_contiguous() or b.stride(),
        c.data_ptr(), c.shape, c.dtype, c.is_contiguous() or c.stride(),
        d.data_ptr(), d.shape, d.dtype, d.is_contiguous() or d.stride(),
        e.data_ptr(), e.shape, e.dtype, e.is_contiguous() or e.stride(),
        f.data_ptr(), f.shape, f.dtype, f.is_contiguous() or f.stride(),
        g.data_ptr(), g.shape, g.dtype, g.is_contiguous() or g.stride(),
        h.data_ptr(), h.shape, h.dtype, h.is_contiguous() or h.stride(),
        out.data_ptr(), out.shape, out.dtype, out.is_contiguous() or out.stride(),
        None if lse is None else (lse.data_ptr(), lse.shape, lse.dtype, lse.is_contiguous()),
        None if workspace is None else (workspace.data_ptr(), workspace.nbytes),
    )
    # fmt: on


def _allocate_torch(
    given: tuple[Any, ...],
    planned: PlanOnDevice,
    out: Any,
    lse: Any,
    workspace: Any,
    return_lse: bool,
) -> tuple[Any, Any, Any]:
    """The arrays that the caller left out; on the current stream, as the launches are."""
    q_nope, _, q_scale = given[:3]
    batch, seq_len_q, heads, _ = q_nope.shape
    if not q_nope.is_cuda:
        raise TypeError("host tensors take the long way")
    torch = sys.modules["torch"]
    if out is None:
        shape = (batch, seq_len_q, heads, KV_LORA_RANK)
        out = torch.empty(shape, dtype=torch.bfloat16, device=q_nope.device)
    if lse is None and return_lse:
        lse = q_scale.new_empty((batch, heads, seq_len_q), dtype=torch.float32)
    if workspace is None:
        splits = planned.max_splits(given[6].shape[1])
        layout = workspace_layout(planned.config, planned.batch, splits, with_lse=not return_lse)
        if layout.nbytes:
            workspace = q_scale.new_empty(layout.nbytes, dtype=torch.uint8)
    return out, lse, workspace


# --- Any call ------------------------------------------------------------------------------------


def _mla_decode(
    given: tuple[Any, ...],
    plan: DecodePlan,
    softmax_scale: Any,
    causal: Any,
    target: Target,
    backend: str,
) -> tuple[Any, Any]:
    named, scalars = checked_call(given, plan, softmax_scale, causal, target.stream)
    kind, device = resolve_backend(host_stays(backend, named["q_nope"]), named)
    if named["q_nope"].device_type != "cuda":
        if kind == "reference":
            return decode_on_host(named, plan, scalars, target, 0)
        return decode_uploaded(named, plan, scalars, target, device)
    index = named["q_nope"].device_index
    handle = resolve_stream(target.stream, list(named.values()), index)
    if kind == "reference":
        return decode_on_host(named, plan, scalars, target, handle)
    call = prepare_call(named, plan, scalars, target, handle)
    own = (call.out, call.lse, call.workspace)
    arrays = (*given, *(array for array in own if array is not None))
    if all(hasattr(a, "data_ptr") and hasattr(a, "is_contiguous") for a in arrays):
        key = _torch_key(given, plan.on_device, softmax_scale, causal, own, handle)
        _remember(key, call.launches)
    for launch in call.launches:
        launch()
    return call.out, call.lse


def _remember(key: tuple[Any, ...], launches: tuple[Any, ...]) -> None:
    if len(_prepared) >= _MAX_PREPARED:
        for old in list(_prepared)[: _MAX_PREPARED // 2]:  # the oldest half
            _prepared.pop(old, None)
    _prepared[key] = launches
