"""Any decode call: every argument checked, results and workspace found, launches prepared.

`api_decode.mla_decode` comes here for a call that it has not seen before.
"""

from __future__ import annotations

import contextlib
import numbers
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .api_plan import plan_views
from .array import new_array
from .config import BLOCK_SIZE, KV_LORA_RANK, QK_ROPE_HEAD_DIM, DecodeConfig
from .decode_launch import (
    NO_TRACE,
    DecodeArrays,
    PlanOnDevice,
    block_stride,
    decode_launches,
    plan_on_device,
    row_strides,
    workspace_layout,
)
from .environment import debug_wanted
from .errors import ArgumentError
from .host_copy import deliver, on_host, upload
from .plan import DecodePlan
from .tensor import BF16, E4M3, F32, TensorView, expect, same_device, view

_MAX_ROWS = 1 << 28  # query rows of a batch: 32-bit counters of the kernels
_MAX_BLOCK_STRIDE = 1 << 40  # of a tensor map


INPUTS = (
    *("q_nope", "q_rope", "q_scale", "ckv_cache", "k_scale_cache", "k_rope_cache"),
    *("block_table", "cache_seqlens"),
)


@dataclass(frozen=True)
class Target:
    """Where a call's results go: the caller's arrays or None, and the call's stream argument."""

    out: Any
    lse: Any
    workspace: Any
    return_lse: bool
    stream: Any


@dataclass(frozen=True)
class Numbers:
    """The scalars of a call. trace: of decode_launch.decode_launches."""

    softmax_scale: float
    causal: bool
    trace: tuple[int, int, int] = NO_TRACE


@dataclass(frozen=True)
class PreparedCall:
    """The launches of one call and the arrays that it writes; lse and workspace may be None."""

    launches: tuple[Any, ...]
    out: Any
    lse: Any
    workspace: Any


def prepare_call(
    named: Mapping[str, TensorView],
    plan: DecodePlan,
    scalars: Numbers,
    target: Target,
    stream: int,
) -> PreparedCall:
    """A call on GPU arrays: `named` from checked_inputs, `stream` the handle it runs on."""
    planned = _planned(plan, named["q_nope"])
    with _allocating_on(stream, target, named["q_nope"]):
        out, lse = _result_arrays(named["q_nope"], target.out, target.lse, target.return_lse)
        memory = _workspace(target.workspace, planned, named, lse is None)
    views = _result_views((out, lse), named)
    scratch = None if memory is None else view(memory, "workspace")
    launches = _launches(named, views, planned, scratch, scalars, stream)
    return PreparedCall(launches, out, lse, memory)


def decode_on_host(
    named: Mapping[str, TensorView],
    plan: DecodePlan,
    scalars: Numbers,
    target: Target,
    stream: int,
) -> tuple[Any, Any]:
    """(out, lse) by the reference; arrays on a GPU travel, and the host waits for them."""
    from .reference.mla_decode import mla_decode as reference

    results = _result_arrays(named["q_nope"], target.out, target.lse, True)
    views = _result_views(results, named)
    parts, num_splits = plan_views("plan", plan.parts, plan.num_splits, plan.config, plan.batch)
    host_plan = DecodePlan(
        plan.config,
        plan.batch,
        on_host(parts, stream)[: plan.config.num_parts],
        on_host(num_splits, stream)[: plan.batch + 1],
    )
    arrays = [on_host(v, stream) for v in named.values()]
    found = reference(*arrays, host_plan, scalars.softmax_scale, causal=scalars.causal)
    for result, place in zip(found, views, strict=True):
        if place is not None:
            deliver(result, place, stream)
    return results


def decode_uploaded(
    named: Mapping[str, TensorView],
    plan: DecodePlan,
    scalars: Numbers,
    target: Target,
    device: int,
) -> tuple[Any, Any]:
    """(out, lse) of host arrays, CUDA asked for: everything travels there and back."""
    from .array import to_host

    results = _result_arrays(named["q_nope"], target.out, target.lse, True)
    views = _result_views(results, named)
    parts, num_splits = plan_views("plan", plan.parts, plan.num_splits, plan.config, plan.batch)
    on_gpu = {name: upload(v, device, 0) for name, v in named.items()}
    gpu_plan = DecodePlan(
        plan.config,
        plan.batch,
        upload(parts, device, 0),
        upload(num_splits, device, 0),
        plan.max_seqlen,
    )
    call = prepare_call(on_gpu, gpu_plan, scalars, Target(None, None, None, True, None), 0)
    for launch in call.launches:
        launch()
    for result, place in zip((call.out, call.lse), views, strict=True):
        if place is not None:
            deliver(to_host(view(result, "out")), place, 0)
    return results


# --- Arguments -----------------------------------------------------------------------------------


def checked_inputs(given: tuple[Any, ...], stream: Any) -> dict[str, TensorView]:
    """Views of the eight inputs by name, every shape, dtype and stride checked."""
    q_nope, q_rope, q_scale, ckv, k_scale, k_rope, block_table, cache_seqlens = given
    dims: dict[str, int] = {}
    b, s, h, n, t = "b", "s_q", "h", "num_blocks", BLOCK_SIZE
    options: dict[str, Any] = {"dims": dims, "stream": stream}
    ckv_view = view(ckv, "ckv_cache", stream)
    if ckv_view.ndim == 3 and ckv_view.shape[1] != BLOCK_SIZE:
        expected = f"block_size must be {BLOCK_SIZE}: [num_blocks, {BLOCK_SIZE}, {KV_LORA_RANK}]"
        raise ArgumentError("ckv_cache", expected, list(ckv_view.shape))
    views = {
        "q_nope": expect(q_nope, "q_nope", (b, s, h, KV_LORA_RANK), E4M3, align=16, **options),
        "q_rope": expect(q_rope, "q_rope", (b, s, h, QK_ROPE_HEAD_DIM), BF16, align=16, **options),
        "q_scale": expect(q_scale, "q_scale", (b, s, h), F32, contiguous=3, align=4, **options),
        "ckv_cache": expect(ckv_view, "ckv_cache", (n, t, KV_LORA_RANK), E4M3, align=16, **options),
        "k_scale_cache": expect(k_scale, "k_scale_cache", (n, t), F32, align=16, **options),
        "k_rope_cache": expect(
            k_rope,
            "k_rope_cache",
            (n, t, QK_ROPE_HEAD_DIM),
            BF16,
            contiguous=2,
            align=16,
            **options,
        ),
        "block_table": expect(block_table, "block_table", (b, None), "int32", align=4, **options),
        "cache_seqlens": expect(cache_seqlens, "cache_seqlens", (b,), "int32", align=4, **options),
    }
    for name in ("q_nope", "q_rope"):
        if views[name].size and row_strides(views[name]) is None:
            got = f"strides {views[name].strides} (bytes)"
            raise ArgumentError(name, "heads and query tokens that form one run of rows", got)
    _check_cache(views)
    return views


def checked_call(
    given: tuple[Any, ...], plan: Any, softmax_scale: Any, causal: Any, stream: Any
) -> tuple[dict[str, TensorView], Numbers]:
    """Views of the eight inputs by name and the scalars, all of a call checked but its results."""
    named = checked_inputs(given, stream)
    batch, seq_len_q, heads = named["q_scale"].shape
    check_plan(plan, batch, heads, seq_len_q)
    return named, check_numbers(plan, softmax_scale, causal)


def _check_cache(views: Mapping[str, TensorView]) -> None:
    if views["ckv_cache"].shape[0] == 0:
        raise ArgumentError("ckv_cache", "at least one block", list(views["ckv_cache"].shape))
    if views["ckv_cache"].shape[0] >= 1 << 31:
        raise ArgumentError("ckv_cache", "fewer than 2^31 blocks", list(views["ckv_cache"].shape))
    for name in ("ckv_cache", "k_scale_cache", "k_rope_cache"):
        plane = views[name]
        if name == "k_scale_cache" and plane.strides[0] == 0:
            continue  # one line of scales that serves every block
        least = plane.strides[1] * plane.shape[1]
        if not least <= block_stride(plane) < _MAX_BLOCK_STRIDE:
            expected = f"a block stride of {least} to 2^40 - 16 bytes"
            raise ArgumentError(name, expected, f"strides {plane.strides} (bytes)")


def check_plan(plan: Any, batch: int, num_heads_q: int, seq_len_q: int) -> None:
    if not isinstance(plan, DecodePlan):
        raise ArgumentError("plan", "a DecodePlan, as plan_decode returns", type(plan).__name__)
    made_for = (plan.config.num_heads_q, plan.config.seq_len_q, plan.batch)
    wanted = (num_heads_q, seq_len_q, batch)
    if made_for != wanted:
        expected = f"made for (num_heads_q, seq_len_q, batch) = {wanted}"
        raise ArgumentError("plan", expected, made_for)


def check_numbers(plan: DecodePlan, softmax_scale: Any, causal: Any) -> Numbers:
    """The scalars of a call with this plan."""
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, numbers.Real):
        raise ArgumentError("softmax_scale", "a positive finite float", repr(softmax_scale))
    if not isinstance(causal, (bool, np.bool_)):
        raise ArgumentError("causal", "True or False", repr(causal))
    heads, seq_len_q = plan.config.num_heads_q, plan.config.seq_len_q
    config = DecodeConfig(heads, seq_len_q, float(softmax_scale), bool(causal), plan.config.block_n)
    if config.num_rows * max(plan.batch, 1) > _MAX_ROWS:
        expected = f"at most {_MAX_ROWS} query rows (b x s_q x h)"
        raise ArgumentError("q_nope", expected, config.num_rows * plan.batch)
    return Numbers(config.softmax_scale, config.causal)


def _planned(plan: DecodePlan, like: TensorView) -> PlanOnDevice:
    """The plan's buffers, on the device of the arrays."""
    planned: PlanOnDevice | None = plan.on_device
    if planned is not None and planned.device_index == like.device_index:
        return planned
    parts, num_splits = plan_views("plan", plan.parts, plan.num_splits, plan.config, plan.batch)
    same_device({"q_nope": like, "plan.parts": parts, "plan.num_splits": num_splits})
    planned = plan_on_device(plan, parts, num_splits, like.device_index)
    object.__setattr__(plan, "on_device", planned)  # found once, the rest of the plan is frozen
    return planned


# --- Results -------------------------------------------------------------------------------------


def _allocating_on(handle: int, target: Target, like: TensorView) -> Any:
    """Within this, torch allocates for the stream of the call, which an explicit `stream` may have
    made another one than torch's current."""
    torch = sys.modules.get("torch")
    given = target.out is not None and target.lse is not None and target.workspace is not None
    if target.stream is None or given or like.framework != "torch" or torch is None:
        return contextlib.nullcontext()
    chosen = torch.cuda.ExternalStream(handle, device=like.owner.device)
    return torch.cuda.stream(chosen)


def _result_arrays(like: TensorView, out: Any, lse: Any, need_lse: bool) -> tuple[Any, Any]:
    batch, seq_len_q, heads = like.shape[:3]
    if out is None:
        out = new_array(like, (batch, seq_len_q, heads, KV_LORA_RANK), "bfloat16")
    if lse is None and need_lse:
        lse = new_array(like, (batch, heads, seq_len_q), "float32")
    return out, lse


def _result_views(
    results: tuple[Any, Any], named: Mapping[str, TensorView]
) -> tuple[TensorView, TensorView | None]:
    like = named["q_nope"]
    batch, seq_len_q, heads = like.shape[:3]
    options: dict[str, Any] = {"align": 16, "writable": True}
    shape = (batch, seq_len_q, heads, KV_LORA_RANK)
    out = expect(results[0], "out", shape, BF16, contiguous=4, **options)
    placed = {"q_nope": like, "out": out}
    lse = None
    if results[1] is not None:
        lse = expect(
            results[1],
            "lse",
            (batch, heads, seq_len_q),
            F32,
            contiguous=3,
            align=4,
            writable=True,
        )
        placed["lse"] = lse
    same_device(placed)
    return out, lse


def _workspace(
    given: Any, planned: PlanOnDevice, named: Mapping[str, TensorView], with_lse: bool
) -> Any:
    """The caller's memory, checked, or new memory, or None where none is needed."""
    splits = planned.max_splits(named["block_table"].shape[1])
    nbytes = workspace_layout(planned.config, planned.batch, splits, with_lse=with_lse).nbytes
    if given is None:
        return new_array(named["q_nope"], (nbytes,), "uint8") if nbytes else None
    memory = view(given, "workspace")
    same_device({"q_nope": named["q_nope"], "workspace": memory})
    if not memory.is_contiguous or memory.readonly or memory.ptr % 16:
        raise ArgumentError("workspace", "contiguous, writable, 16-byte aligned memory", memory)
    if memory.nbytes < nbytes:
        longest = min(planned.max_seqlen, named["block_table"].shape[1] * BLOCK_SIZE)
        expected = (
            f"at least {nbytes} bytes (decode_workspace_size(plan, {planned.batch}, {longest}))"
        )
        raise ArgumentError("workspace", expected, memory.nbytes)
    return given


def _launches(
    named: Mapping[str, TensorView],
    views: tuple[TensorView, TensorView | None],
    planned: PlanOnDevice,
    scratch: TensorView | None,
    scalars: Numbers,
    stream: int,
) -> tuple[Any, ...]:
    """The launches of a checked call; none for an empty batch."""
    if planned.batch == 0:
        return ()
    out, lse = views
    address = 0 if scratch is None else scratch.ptr
    if lse is None:
        assert scratch is not None
        splits = planned.max_splits(named["block_table"].shape[1])
        at = address + workspace_layout(planned.config, planned.batch, splits).lse
        lse = TensorView(at, (), (), "float32", "cuda", scratch.device_index, scratch.owner)
    return decode_launches(
        DecodeArrays(*(named[name] for name in INPUTS), out, lse),  # type: ignore[call-arg]
        planned,
        address,
        scalars.softmax_scale,
        scalars.causal,
        stream,
        debug=debug_wanted(),
        trace=scalars.trace,
    )
