"""plan_decode, the schedule of a decode step, and the size of the workspace it leads to."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

from .array import new_array
from .backend import resolve_backend
from .config import MAX_CACHE_SEQLEN, PLAN_FIELDS
from .decode_launch import launch_plan, plan_on_device, workspace_layout
from .errors import ArgumentError
from .host_copy import deliver, on_host, upload
from .plan import DecodePlan, PlanConfig, plan_config
from .tensor import TensorView, expect, resolve_stream, same_device

__all__ = ["decode_workspace_size", "plan_decode"]

_MAX_BATCH = 1 << 24


def plan_decode(
    cache_seqlens: Any,
    num_heads_q: int,
    seq_len_q: int,
    *,
    num_splits: int | None = None,
    batch_invariant: bool | int = False,
    block_n: int = 64,
    max_seqlen: int | None = None,
    num_sms: int | None = None,
    out: DecodePlan | None = None,
    stream: Any = None,
    backend: str = "auto",
) -> DecodePlan:
    """Schedule one decode step: which CTA works on which tokens (split-KV). One launch, one warp.

    cache_seqlens: int32 [b], contiguous: tokens of each request with the seq_len_q new ones, 0 to
    2^20; 0 for padding. num_heads_q: 1..128 (any count). seq_len_q: query tokens a request, at
    least 1. num_splits: None, or cut every request into this many equal splits.
    batch_invariant: True cuts every request at multiples of 2,048 tokens (an int: of that many, a
    multiple of 128), so that the bytes of a row depend on nothing but its own request: not on the
    rest of the batch, on padding or on the GPU's SM count. block_n: tokens of a softmax block.
    max_seqlen: no length of the step, or of any replay, is above it; bounds the workspace of plans
    with fixed cuts. num_sms: SMs to schedule for (default: those of cache_seqlens' device, or 132).

    out: a plan whose buffers are filled again instead of new ones, for CUDA graphs: they may be
    larger than this step's batch and parts. The buffers are read by the launches that follow, so
    every step of a stream may use the same. The result is a DecodePlan for this batch: int32 parts
    [num_parts, 8] and num_splits [b + 1] (cumulative: first 0, request i has num_splits[i + 1] -
    num_splits[i] splits), in memory of cache_seqlens' library.

    Lengths outside 0..2^20 are an ArgumentError on the host and must not be given on a GPU.
    Source: SnapMLA appendix; rule: reference/plan_decode.py. Raises ArgumentError.
    """
    seqlens = expect(cache_seqlens, "cache_seqlens", (None,), "int32", align=4, stream=stream)
    if seqlens.shape[0] > _MAX_BATCH:
        raise ArgumentError("cache_seqlens", f"at most {_MAX_BATCH} requests", seqlens.shape[0])
    _check_max_seqlen(max_seqlen)
    kind, device = resolve_backend(host_stays(backend, seqlens), {"cache_seqlens": seqlens})
    if num_sms is None and seqlens.device_type == "cuda" and kind == "cuda":
        from .driver.device import current_num_sms

        num_sms = current_num_sms(device)
    options: dict[str, Any] = {} if num_sms is None else {"num_sms": num_sms}
    options |= {"num_splits": num_splits, "batch_invariant": batch_invariant, "block_n": block_n}
    _check_int("num_heads_q", num_heads_q)
    _check_int("seq_len_q", seq_len_q)
    config = plan_config(num_heads_q, seq_len_q, **options)
    arrays, views = _plan_buffers(config, seqlens, out)
    if seqlens.device_type == "cuda":
        handle = resolve_stream(stream, (seqlens, *views), seqlens.device_index)
    else:
        handle = 0
    if kind == "reference":
        _plan_on_host(seqlens, views, handle, num_heads_q, seq_len_q, options)
    elif seqlens.device_type == "cuda":
        launch_plan(config, seqlens, *views, handle)
    else:
        _plan_uploaded(config, seqlens, views, device)
    plan = _plan_result(config, seqlens.shape[0], arrays, max_seqlen, out)
    if kind == "cuda" and seqlens.device_type == "cuda" and plan.on_device is None:
        planned = plan_on_device(plan, *views, device)
        object.__setattr__(plan, "on_device", planned)  # found once, the rest stays frozen
    return plan


def host_stays(backend: str, first: TensorView) -> str:
    """Host arrays go to the reference unless the kernels are asked for: the copies would cost more
    than a plan does, and a cache must not travel with every call."""
    return "reference" if backend == "auto" and first.device_type == "cpu" else backend


def _check_int(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ArgumentError(name, "an integer", repr(value))


def _check_max_seqlen(max_seqlen: Any) -> None:
    if max_seqlen is None:
        return
    _check_int("max_seqlen", max_seqlen)
    if not 0 <= max_seqlen <= MAX_CACHE_SEQLEN:
        raise ArgumentError("max_seqlen", f"None or 0..{MAX_CACHE_SEQLEN}", max_seqlen)


def _plan_buffers(
    config: PlanConfig, seqlens: TensorView, out: DecodePlan | None
) -> tuple[tuple[Any, Any], tuple[TensorView, TensorView]]:
    """(arrays, views) of parts and num_splits: those of `out`, checked, or new ones."""
    batch = seqlens.shape[0]
    if out is None:
        parts = new_array(seqlens, (config.num_parts, PLAN_FIELDS), "int32")
        num_splits = new_array(seqlens, (batch + 1,), "int32")
    elif isinstance(out, DecodePlan):
        parts, num_splits = out.parts, out.num_splits
    else:
        raise ArgumentError("out", "a DecodePlan, as plan_decode returns", type(out).__name__)
    views = plan_views("out", parts, num_splits, config, batch, writable=True)
    same_device({"cache_seqlens": seqlens, "out.parts": views[0], "out.num_splits": views[1]})
    return (parts, num_splits), views


def plan_views(
    name: str, parts: Any, num_splits: Any, config: PlanConfig, batch: int, writable: bool = False
) -> tuple[TensorView, TensorView]:
    """Views of a plan's buffers, at least as large as this configuration and batch need."""
    options: dict[str, Any] = {"align": 16, "writable": writable}
    lines = expect(parts, f"{name}.parts", (None, PLAN_FIELDS), "int32", contiguous=2, **options)
    ends = expect(num_splits, f"{name}.num_splits", (None,), "int32", align=4, writable=writable)
    if lines.shape[0] < config.num_parts:
        expected = f"at least {config.num_parts} parts of {PLAN_FIELDS}"
        raise ArgumentError(f"{name}.parts", expected, list(lines.shape))
    if ends.shape[0] < batch + 1:
        raise ArgumentError(
            f"{name}.num_splits", f"at least {batch + 1} entries (batch + 1)", list(ends.shape)
        )
    return lines, ends


def _plan_on_host(
    seqlens: TensorView,
    views: tuple[TensorView, TensorView],
    stream: int,
    num_heads_q: int,
    seq_len_q: int,
    options: Mapping[str, Any],
) -> None:
    from .reference.plan_decode import plan_decode as reference

    plan = reference(on_host(seqlens, stream), num_heads_q, seq_len_q, **options)
    for result, target in zip((plan.parts, plan.num_splits), views, strict=True):
        deliver(result, _first(target, len(result)), stream)


def _first(array: TensorView, rows: int) -> TensorView:
    """The first rows of a contiguous array."""
    return TensorView(
        array.ptr,
        (rows, *array.shape[1:]),
        array.strides,
        array.dtype,
        array.device_type,
        array.device_index,
        array.owner[:rows] if array.framework == "numpy" else array.owner,
        array.readonly,
        array.framework,
    )


def _plan_uploaded(
    config: PlanConfig, seqlens: TensorView, views: tuple[TensorView, TensorView], device: int
) -> None:
    """Host lengths, CUDA asked for: through the kernel and back."""
    from .array import to_host

    on_gpu = upload(seqlens, device, 0)
    batch = seqlens.shape[0]
    parts = new_array(on_gpu, (config.num_parts, PLAN_FIELDS), "int32").view()
    num_splits = new_array(on_gpu, (batch + 1,), "int32").view()
    launch_plan(config, on_gpu, parts, num_splits, 0)
    for source, target in zip((parts, num_splits), views, strict=True):
        deliver(to_host(source), _first(target, source.shape[0]), 0)


def _plan_result(
    config: PlanConfig,
    batch: int,
    arrays: tuple[Any, Any],
    max_seqlen: int | None,
    out: DecodePlan | None,
) -> DecodePlan:
    """`out` itself where it says the same, else a plan over the same arrays."""
    plan = DecodePlan(config, batch, *arrays, max_seqlen)
    if out is not None and _numbers(out) == _numbers(plan):
        return out
    return plan


def _numbers(plan: DecodePlan) -> tuple[Any, ...]:
    return plan.config, plan.batch, plan.max_seqlen


# --- Workspace -----------------------------------------------------------------------------------


def decode_workspace_size(
    plan: DecodePlan | PlanConfig, max_batch: int | None = None, max_seqlen: int | None = None
) -> int:
    """Bytes of the `workspace` that mla_decode needs for up to max_batch requests.

    plan: a plan, or the PlanConfig of one. max_batch: default the plan's own. max_seqlen: longest
    request (default: the plan's, else 2^20); it matters for plans with fixed cuts only. A block
    table that is wider than max_seqlen needs a plan made with max_seqlen. One workspace serves all
    layers and steps of a stream; its memory is any contiguous array, 16-byte aligned.
    """
    if not isinstance(plan, (DecodePlan, PlanConfig)):
        raise ArgumentError("plan", "a DecodePlan or PlanConfig", type(plan).__name__)
    config = plan.config if isinstance(plan, DecodePlan) else plan
    if isinstance(plan, DecodePlan):
        max_batch = plan.batch if max_batch is None else max_batch
        max_seqlen = plan.max_seqlen if max_seqlen is None else max_seqlen
    _check_int("max_batch", max_batch)
    _check_max_seqlen(max_seqlen)
    assert max_batch is not None
    if max_batch < 0:
        raise ArgumentError("max_batch", "at least 0", max_batch)
    longest = MAX_CACHE_SEQLEN if max_seqlen is None else max_seqlen
    splits = config.max_total_splits(max_batch, longest)
    return workspace_layout(config, max_batch, splits).nbytes
