"""The schedule as FlashMLA's callers carry it: two tensors, or one object filled at its first use.

The tensors are those of DecodePlan: tile_scheduler_metadata int32 [num_sm_parts, 8], opaque, and
num_splits int32 [b + 1], cumulative. What the parts say depends on the lengths and on num_sm_parts
alone, not on how query rows are divided into tokens and heads; num_sm_parts depends on the GPU and
on the number of query rows, not on b. So both can be copied into larger buffers that were made
once, as callers that replay CUDA graphs do.
"""

from __future__ import annotations

import numbers
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..api_plan import plan_decode
from ..config import PLAN_FIELDS, TILE_M
from ..decode_launch import plan_on_device
from ..errors import ArgumentError
from ..host_copy import on_host
from ..plan import END_REQ, DecodePlan, PlanConfig
from ..tensor import TensorView, expect, resolve_stream, same_device, view
from ._arrays import is_torch, refuse

SPARSE_HINT = (
    "None: sparse attention is not supported here. Keep FlashMLA's sparse kernels for it, or "
    "decode densely over block_table"
)

_MAX_PLANS = 1024
_plans: dict[Any, DecodePlan] = {}


@dataclass
class FlashMLASchedMeta:
    """A schedule that is filled at its first use (FlashMLA's form since 2026).

    It may serve the calls of one step. Every call must have the same batch, query tokens, heads and
    causal flag; other ones are an ArgumentError. It is filled again where the lengths are another
    tensor than at its filling, or were changed by torch since, and inside another CUDA graph
    capture. Lengths that a kernel changed behind torch's back, or that were changed in inference
    mode, where torch does not count, are not noticed: make a new object a step, as FlashMLA asks
    for. Keep it alive as long as a graph that used it.
    """

    plan: DecodePlan | None = None
    made_for: tuple[Any, ...] | None = None
    lengths: Any = None
    capture: int = 0


def make_metadata(
    cache_seqlens: Any,
    num_q_tokens_per_head_k: Any,
    num_heads_k: Any = 1,
    topk: Any = None,
) -> tuple[Any, Any]:
    """(tile_scheduler_metadata, num_splits) for these lengths: one launch."""
    refuse("topk", topk, SPARSE_HINT)
    if num_heads_k != 1:
        raise ArgumentError("num_heads_k", "1 (MLA has one key head)", num_heads_k)
    if isinstance(num_q_tokens_per_head_k, bool) or not isinstance(
        num_q_tokens_per_head_k, numbers.Integral
    ):
        expected = "an integer (s_q * h_q // h_kv)"
        raise ArgumentError("num_q_tokens_per_head_k", expected, repr(num_q_tokens_per_head_k))
    if num_q_tokens_per_head_k < 1:
        raise ArgumentError("num_q_tokens_per_head_k", "at least 1", num_q_tokens_per_head_k)
    plan = plan_decode(cache_seqlens, 1, int(num_q_tokens_per_head_k))
    version = _version(plan.parts)
    if version is not None:
        plan.parts._snapmla_made_for = (plan.batch, version)
    return plan.parts, plan.num_splits


def _version(tensor: Any) -> int | None:
    """How often torch has changed a tensor in place, or None where nobody counts."""
    try:
        return tensor._version
    except (AttributeError, RuntimeError):  # no torch tensor; one of inference mode
        return None


def plan_of(
    metadata: Any, num_splits: Any, batch: int, seq_len_q: int, num_heads_q: int
) -> DecodePlan:
    """The DecodePlan over a caller's two tensors, which may be larger than this batch.

    Raises ArgumentError for tensors that cannot be the metadata of this call: too few entries, or
    as get_mla_metadata returned them for another batch. Of tensors that were filled otherwise only
    the caller knows what they hold.
    """
    made_for = getattr(metadata, "_snapmla_made_for", None)
    if made_for is not None and made_for[0] != batch:
        untouched = made_for[1] == _version(metadata)
        if untouched and not _torch_is_capturing():
            expected = f"get_mla_metadata for the {batch} requests of q"
            raise ArgumentError("tile_scheduler_metadata", expected, f"one for {made_for[0]}")
    key = _key(metadata, num_splits, batch, seq_len_q, num_heads_q)
    plan = _plans.get(key) if key is not None else None
    if plan is None:
        plan = _checked_plan(metadata, num_splits, batch, seq_len_q, num_heads_q)
        if key is not None and plan.on_device is not None:
            if len(_plans) >= _MAX_PLANS:
                _plans.clear()
            _plans[key] = plan
    return plan


def _torch_is_capturing() -> bool:
    """Within a capture nothing runs yet: the caller can still fill the metadata."""
    cuda = sys.modules["torch"].cuda
    return cuda.is_initialized() and cuda.is_current_stream_capturing()


def _key(metadata: Any, num_splits: Any, *numbers_: int) -> tuple[Any, ...] | None:
    if not (is_torch(metadata) and is_torch(num_splits)):
        return None
    tensors = ((t.data_ptr(), t.shape, t.dtype, t.stride()) for t in (metadata, num_splits))
    return (*tensors, metadata.device, *numbers_)


def _checked_plan(
    metadata: Any, num_splits: Any, batch: int, seq_len_q: int, num_heads_q: int
) -> DecodePlan:
    name = "tile_scheduler_metadata"
    parts = expect(metadata, name, (None, PLAN_FIELDS), "int32", contiguous=2, align=16)
    ends = expect(num_splits, "num_splits", (None,), "int32", align=4)
    if parts.shape[0] == 0:
        raise ArgumentError(name, "at least one part", list(parts.shape))
    if ends.shape[0] < batch + 1:
        expected = f"at least {batch + 1} entries (b + 1, cumulative)"
        raise ArgumentError("num_splits", expected, list(ends.shape))
    same_device({name: parts, "num_splits": ends})
    tiles = -(-num_heads_q * seq_len_q // TILE_M)
    config = PlanConfig(num_heads_q, seq_len_q, num_sms=parts.shape[0] * tiles)
    if parts.device_type != "cuda":
        _check_values(parts, ends, batch)
        return DecodePlan(config, batch, metadata, num_splits)
    # The arrays are left out: a plan that is kept here must not keep the caller's memory alive.
    plan = DecodePlan(config, batch, None, None)
    planned = plan_on_device(plan, parts, ends, parts.device_index)
    object.__setattr__(plan, "on_device", planned)
    return plan


def _check_values(parts: TensorView, ends: TensorView, batch: int) -> None:
    """What only the host can look at."""
    last = on_host(parts, 0)[:, END_REQ]
    if last.max(initial=-1) >= batch:
        expected = f"parts of the {batch} requests of q"
        raise ArgumentError("tile_scheduler_metadata", expected, f"request {int(last.max())}")
    counts = on_host(ends, 0)[: batch + 1]
    if counts[0] != 0 or (np.diff(counts) < 0).any():
        raise ArgumentError("num_splits", "cumulative numbers from 0", counts.tolist())


# --- The object ----------------------------------------------------------------------------------


def plan_of_object(
    meta: FlashMLASchedMeta, cache_seqlens: Any, seq_len_q: int, num_heads_q: int, causal: bool
) -> DecodePlan:
    """The plan of the object, filled where it has to be."""
    lengths = view(cache_seqlens, "cache_seqlens")
    made_for = (tuple(lengths.shape), seq_len_q, num_heads_q, causal, lengths.device)
    if meta.made_for is not None and meta.made_for != made_for:
        names = "(shape of cache_seqlens, s_q, h_q, causal, device)"
        expected = f"an object for {names} = {made_for}; get_mla_metadata() makes a new one"
        raise ArgumentError("tile_scheduler_metadata", expected, meta.made_for)
    state = _state(cache_seqlens, lengths)
    capture = _current_capture(lengths)
    if meta.plan is None or state is None or (meta.lengths, meta.capture) != (state, capture):
        meta.plan = plan_decode(cache_seqlens, num_heads_q, seq_len_q, out=meta.plan)
        meta.made_for, meta.lengths, meta.capture = made_for, state, capture
    return meta.plan


def _state(cache_seqlens: Any, lengths: TensorView) -> Any:
    """What changes when the lengths do, as far as anybody can tell (torch does not count changes in
    inference mode: there FlashMLA's rule stands that an object is of one step's lengths); None:
    plan again."""
    if lengths.device_type != "cuda":
        return None  # a plan costs no launch there
    return lengths.ptr, _version(cache_seqlens)


def _current_capture(lengths: TensorView) -> int:
    """Number of the CUDA graph capture that a call with these lengths would join, or 0."""
    if lengths.device_type != "cuda":
        return 0
    torch = sys.modules.get("torch")
    if lengths.framework == "torch" and torch is not None:
        here = torch.cuda.current_device() == lengths.device_index
        if here and not torch.cuda.is_current_stream_capturing():
            return 0
    from ..driver.memory import capture_id

    index = lengths.device_index
    return capture_id(resolve_stream(None, [lengths], index), index)
