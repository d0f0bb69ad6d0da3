"""torch custom operators over the API, for torch.compile and torch.export.

    from snapmla_rt import torch_ops
    ops = torch_ops.register()          # torch.ops.snapmla; imports torch, at most once
    out, lse = ops.mla_decode(...)

Importing this module registers the operators only where torch is loaded already, and never imports
torch. Each operator has a fake implementation (shapes and types without data), runs on CUDA and CPU
tensors as the API does (CPU: the reference), and has no backward: a call whose tensors require a
gradient raises RuntimeError before anything is launched. Eager code without torch.compile calls the
API itself: it takes torch tensors and costs less host time.

Operators and their schemas are `SCHEMAS`; arguments mean what they mean in the API. A plan travels
as its two tensors, so mla_decode repeats the options that fix its cuts (num_splits,
batch_invariant, block_n; batch_invariant True is 2048).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from . import api
from .config import INVARIANT_SPLIT_TOKENS, KV_LORA_RANK, PLAN_FIELDS, QK_ROPE_HEAD_DIM, TILE_M
from .errors import ArgumentError
from .plan import DecodePlan, PlanConfig, plan_config

__all__ = ["NAMESPACE", "SCHEMAS", "register"]

NAMESPACE = "snapmla"

_CACHE = "Tensor ckv_cache, Tensor k_scale_cache, Tensor k_rope_cache"
_CACHE_WRITTEN = "Tensor(a!) ckv_cache, Tensor(b!) k_scale_cache, Tensor(c!) k_rope_cache"
_CUTS = "int? num_splits=None, int batch_invariant=0, int block_n=64"
_DECODE = (
    f"Tensor q_nope, Tensor q_rope, Tensor q_scale, {_CACHE}, Tensor block_table, "
    "Tensor cache_seqlens, Tensor plan_parts, Tensor plan_num_splits, float softmax_scale"
)
SCHEMAS = {
    "append_kv": (
        f"(Tensor kv_c, Tensor k_pe, {_CACHE_WRITTEN}, Tensor slot_mapping, "
        'str scale_rounding="exact") -> ()'
    ),
    "quantize_q": '(Tensor q, str scale_rounding="exact") -> (Tensor, Tensor, Tensor)',
    "prepare": (
        f"(Tensor q, Tensor kv_c, Tensor k_pe, {_CACHE_WRITTEN}, Tensor slot_mapping, "
        'str scale_rounding="exact") -> (Tensor, Tensor, Tensor)'
    ),
    "fetch_dequant": f"({_CACHE}, Tensor slots) -> (Tensor, Tensor)",
    "plan_decode": (
        f"(Tensor cache_seqlens, int num_heads_q, int seq_len_q, {_CUTS}, int? num_sms=None) "
        "-> (Tensor, Tensor)"
    ),
    "mla_decode": f"({_DECODE}, bool causal=True, {_CUTS}) -> (Tensor, Tensor)",
    "mla_decode_out": (
        f"({_DECODE}, Tensor(a!) out, Tensor(b!) lse, Tensor(c!) workspace, bool causal=True, "
        f"{_CUTS}) -> ()"
    ),
    "merge_states": (
        '(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, str lse_base="e") '
        "-> (Tensor, Tensor)"
    ),
}

_lock = threading.Lock()
_library: Any = None


def register() -> Any:
    """Register the operators, once a process, and return torch.ops.snapmla.

    Raises ImportError where torch is not installed.
    """
    global _library
    import torch

    with _lock:
        if _library is None:
            _library = _define(torch)
    return getattr(torch.ops, NAMESPACE)


def _define(torch: Any) -> Any:
    library = torch.library.Library(NAMESPACE, "DEF")
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        body, fake = _BODIES[name], _FAKES[name]
        for key in ("CUDA", "CPU"):
            library.impl(name, body, key)
        library.impl(name, _without_gradient(torch, name), "Autograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return library


def _without_gradient(torch: Any, name: str) -> Callable[..., Any]:
    """What runs where autograd would record: it refuses, or goes on below autograd."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            for given in (*args, *kwargs.values()):
                if isinstance(given, torch.Tensor) and given.requires_grad:
                    raise RuntimeError(
                        f"{NAMESPACE}::{name} has no backward: decoding is inference only; call it "
                        "under torch.no_grad() or with detached tensors"
                    )
        operator = getattr(getattr(torch.ops, NAMESPACE), name).default
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args, **kwargs)

    return checked


# --- Bodies --------------------------------------------------------------------------------------


def _append_kv(
    kv_c: Any,
    k_pe: Any,
    ckv_cache: Any,
    k_scale_cache: Any,
    k_rope_cache: Any,
    slot_mapping: Any,
    scale_rounding: str = "exact",
) -> None:
    cache = (ckv_cache, k_scale_cache, k_rope_cache)
    api.append_kv(kv_c, k_pe, *cache, slot_mapping, scale_rounding=scale_rounding)


def _quantize_q(q: Any, scale_rounding: str = "exact") -> tuple[Any, Any, Any]:
    return api.quantize_q(q, scale_rounding=scale_rounding)


def _prepare(
    q: Any,
    kv_c: Any,
    k_pe: Any,
    ckv_cache: Any,
    k_scale_cache: Any,
    k_rope_cache: Any,
    slot_mapping: Any,
    scale_rounding: str = "exact",
) -> tuple[Any, Any, Any]:
    cache = (ckv_cache, k_scale_cache, k_rope_cache)
    return api.prepare(q, kv_c, k_pe, *cache, slot_mapping, scale_rounding=scale_rounding)


def _fetch_dequant(
    ckv_cache: Any, k_scale_cache: Any, k_rope_cache: Any, slots: Any
) -> tuple[Any, Any]:
    return api.fetch_dequant(ckv_cache, k_scale_cache, k_rope_cache, slots)


def _plan_decode(
    cache_seqlens: Any,
    num_heads_q: int,
    seq_len_q: int,
    num_splits: int | None = None,
    batch_invariant: int = 0,
    block_n: int = 64,
    num_sms: int | None = None,
) -> tuple[Any, Any]:
    plan = api.plan_decode(
        cache_seqlens,
        num_heads_q,
        seq_len_q,
        num_splits=num_splits,
        batch_invariant=_split_tokens(batch_invariant),
        block_n=block_n,
        num_sms=num_sms,
    )
    return plan.parts, plan.num_splits


def _split_tokens(batch_invariant: int) -> int:
    """True arrives as 1 in a schema's int."""
    return INVARIANT_SPLIT_TOKENS if batch_invariant == 1 else batch_invariant


def _plan_of(
    q_nope: Any,
    parts: Any,
    num_splits_: Any,
    num_splits: int | None,
    batch_invariant: int,
    block_n: int,
) -> DecodePlan:
    """The plan over its two tensors; num_sms matters to them by the number of parts alone."""
    if q_nope.dim() != 4:
        expected = f"shape [b, s_q, h, {KV_LORA_RANK}]"
        raise ArgumentError("q_nope", expected, list(q_nope.shape))
    batch, seq_len_q, heads, _ = q_nope.shape
    if parts.dim() != 2 or parts.shape[0] < 1 or num_splits_.shape[0] != batch + 1:
        got = f"{list(parts.shape)} and {list(num_splits_.shape)}"
        expected = (
            f"[num_parts, {PLAN_FIELDS}] and [{batch + 1}], of plan_decode for {batch} requests"
        )
        raise ArgumentError("plan_parts, plan_num_splits", expected, got)
    tiles = -(-heads * seq_len_q // TILE_M)
    config = plan_config(
        heads,
        seq_len_q,
        num_sms=parts.shape[0] * tiles,
        num_splits=num_splits,
        batch_invariant=_split_tokens(batch_invariant),
        block_n=block_n,
    )
    return DecodePlan(config, batch, parts, num_splits_)


def _mla_decode(
    q_nope: Any,
    q_rope: Any,
    q_scale: Any,
    ckv_cache: Any,
    k_scale_cache: Any,
    k_rope_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    plan_parts: Any,
    plan_num_splits: Any,
    softmax_scale: float,
    causal: bool = True,
    num_splits: int | None = None,
    batch_invariant: int = 0,
    block_n: int = 64,
) -> tuple[Any, Any]:
    plan = _plan_of(q_nope, plan_parts, plan_num_splits, num_splits, batch_invariant, block_n)
    cache = (ckv_cache, k_scale_cache, k_rope_cache, block_table, cache_seqlens)
    return api.mla_decode(q_nope, q_rope, q_scale, *cache, plan, softmax_scale, causal=causal)


def _mla_decode_out(
    q_nope: Any,
    q_rope: Any,
    q_scale: Any,
    ckv_cache: Any,
    k_scale_cache: Any,
    k_rope_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    plan_parts: Any,
    plan_num_splits: Any,
    softmax_scale: float,
    out: Any,
    lse: Any,
    workspace: Any,
    causal: bool = True,
    num_splits: int | None = None,
    batch_invariant: int = 0,
    block_n: int = 64,
) -> None:
    plan = _plan_of(q_nope, plan_parts, plan_num_splits, num_splits, batch_invariant, block_n)
    cache = (ckv_cache, k_scale_cache, k_rope_cache, block_table, cache_seqlens)
    results = {"out": out, "lse": lse, "workspace": workspace}
    api.mla_decode(q_nope, q_rope, q_scale, *cache, plan, softmax_scale, causal=causal, **results)


def _merge_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, lse_base: str = "e"
) -> tuple[Any, Any]:
    return api.merge_states(out_a, lse_a, out_b, lse_b, lse_base=lse_base)


# --- Shapes and types ----------------------------------------------------------------------------


def _no_result(*args: Any, **kwargs: Any) -> None:
    return None


def _query_like(q: Any) -> tuple[Any, Any, Any]:
    torch = sys.modules["torch"]
    lead = q.shape[:-1]
    return (
        q.new_empty((*lead, KV_LORA_RANK), dtype=torch.float8_e4m3fn),
        q.new_empty((*lead, QK_ROPE_HEAD_DIM), dtype=torch.bfloat16),
        q.new_empty(lead, dtype=torch.float32),
    )


def _fake_quantize_q(q: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
    return _query_like(q)


def _fake_fetch(ckv_cache: Any, k_scale: Any, k_rope: Any, slots: Any) -> tuple[Any, Any]:
    kind = sys.modules["torch"].bfloat16
    rows = slots.shape[0]
    latent = ckv_cache.new_empty((rows, KV_LORA_RANK), dtype=kind)
    return latent, ckv_cache.new_empty((rows, QK_ROPE_HEAD_DIM), dtype=kind)


def _fake_plan(
    cache_seqlens: Any,
    num_heads_q: int,
    seq_len_q: int,
    num_splits: int | None = None,
    batch_invariant: int = 0,
    block_n: int = 64,
    num_sms: int | None = None,
) -> tuple[Any, Any]:
    if num_sms is None:
        num_sms = _num_sms(cache_seqlens.device)
    num_parts = PlanConfig(num_heads_q, seq_len_q, num_sms=num_sms).num_parts
    kind = sys.modules["torch"].int32
    parts = cache_seqlens.new_empty((num_parts, PLAN_FIELDS), dtype=kind)
    return parts, cache_seqlens.new_empty((cache_seqlens.shape[0] + 1,), dtype=kind)


def _num_sms(device: Any) -> int:
    if device.type != "cuda":
        return PlanConfig(1, 1).num_sms
    from .driver.device import current_num_sms

    return current_num_sms(device.index or 0)


def _fake_decode(q_nope: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    torch = sys.modules["torch"]
    batch, seq_len_q, heads, _ = q_nope.shape
    shape = (batch, seq_len_q, heads, KV_LORA_RANK)
    lse_shape = (batch, heads, seq_len_q)
    out = q_nope.new_empty(shape, dtype=torch.bfloat16)
    return out, q_nope.new_empty(lse_shape, dtype=torch.float32)


def _fake_merge(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, lse_base: str = "e"
) -> tuple[Any, Any]:
    torch = sys.modules["torch"]
    kind = torch.float32
    if torch.float32 not in (out_a.dtype, out_b.dtype):
        kind = torch.bfloat16
    out = out_a.new_empty(out_a.shape, dtype=kind)
    return out, lse_a.new_empty(lse_a.shape, dtype=torch.float32)


_BODIES: dict[str, Callable[..., Any]] = {
    "append_kv": _append_kv,
    "quantize_q": _quantize_q,
    "prepare": _prepare,
    "fetch_dequant": _fetch_dequant,
    "plan_decode": _plan_decode,
    "mla_decode": _mla_decode,
    "mla_decode_out": _mla_decode_out,
    "merge_states": _merge_states,
}
_FAKES: dict[str, Callable[..., Any]] = {
    "append_kv": _no_result,
    "quantize_q": _fake_quantize_q,
    "prepare": _fake_quantize_q,
    "fetch_dequant": _fake_fetch,
    "plan_decode": _fake_plan,
    "mla_decode": _fake_decode,
    "mla_decode_out": _no_result,
    "merge_states": _fake_merge,
}

if "torch" in sys.modules:
    register()
