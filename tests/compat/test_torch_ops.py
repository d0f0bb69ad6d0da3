"""The torch operators: shapes without data, tracing, and no gradient. On CPU tensors, by the
reference; skipped without torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from snapmla_rt import api, torch_ops

torch: Any = pytest.importorskip("torch")
ops = torch_ops.register()
api_append: Any = api.append_kv
api_fetch: Any = api.fetch_dequant  # called with the cache as one sequence
SCALE = 576**-0.5
CUTS: tuple[dict[str, Any], ...] = (
    {"num_splits": 2},
    {"batch_invariant": 128},
    {"block_n": 128},
)
CACHE = ("ckv_cache", "k_scale_cache", "k_rope_cache")


def arrays(lengths: tuple[int, ...] = (70, 0, 5), heads: int = 3, seq_len_q: int = 2) -> Any:
    """Everything of a step, as torch CPU tensors."""
    generator = torch.Generator().manual_seed(1)
    batch, blocks = len(lengths), 4
    cache = {
        "ckv_cache": torch.zeros(blocks, 64, 512, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "k_scale_cache": torch.ones(blocks, 64),
        "k_rope_cache": torch.zeros(blocks, 64, 64, dtype=torch.bfloat16),
    }
    tokens = torch.randn(blocks * 64, 576, generator=generator).bfloat16()
    q = torch.randn(batch, seq_len_q, heads, 576, generator=generator).bfloat16()
    return {
        **cache,
        "kv_c": tokens[:, :512],
        "k_pe": tokens[:, 512:],
        "slots": torch.arange(blocks * 64),
        "q": q,
        "block_table": torch.tensor([[1, 2], [7, 7], [3, 9]], dtype=torch.int32),
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32),
    }


def step(a: Any) -> tuple[Any, Any]:
    """A decode step through the operators; the cache is filled in place."""
    cache = [a[name] for name in CACHE]
    ops.append_kv(a["kv_c"], a["k_pe"], *cache, a["slots"])
    query = ops.quantize_q(a["q"])
    _, seq_len_q, heads, _ = a["q"].shape
    parts, num_splits = ops.plan_decode(a["cache_seqlens"], heads, seq_len_q)
    tables = (a["block_table"], a["cache_seqlens"])
    return ops.mla_decode(*query, *cache, *tables, parts, num_splits, SCALE)


def same(got: Any, want: Any) -> bool:
    return all(
        torch.equal(g.contiguous().view(torch.uint8), w.contiguous().view(torch.uint8))
        for g, w in zip(got, want, strict=True)
    )


def through_the_api(a: Any) -> tuple[Any, Any]:
    cache = [a[name] for name in CACHE]
    api_append(a["kv_c"], a["k_pe"], *cache, a["slots"])
    query: Any = api.quantize_q(a["q"])
    plan = api.plan_decode(a["cache_seqlens"], a["q"].shape[2], a["q"].shape[1])
    decode: Any = api.mla_decode
    return decode(*query, *cache, a["block_table"], a["cache_seqlens"], plan, SCALE)


def test_operators_give_the_bytes_of_the_api() -> None:
    one, two = arrays(), arrays()
    want, got = through_the_api(one), step(two)
    assert same(got, want)
    assert same([two[name] for name in CACHE], [one[name] for name in CACHE])
    cache = [one[name] for name in CACHE]
    slots = torch.tensor([0, 5, -1, 200])
    assert same(ops.fetch_dequant(*cache, slots), api_fetch(*cache, slots))
    merged = ops.merge_states(*want, *want)
    assert same(merged, api.merge_states(*want, *want))
    fused = ops.prepare(two["q"], two["kv_c"], two["k_pe"], *cache, two["slots"])
    assert same(fused, ops.quantize_q(two["q"]))


def test_cuts_travel_with_the_call() -> None:
    a = arrays()
    cache = [a[name] for name in CACHE]
    api_append(a["kv_c"], a["k_pe"], *cache, a["slots"])
    query = ops.quantize_q(a["q"])
    tables = (a["block_table"], a["cache_seqlens"])
    decode: Any = api.mla_decode
    for cuts in CUTS:
        parts, ends = ops.plan_decode(a["cache_seqlens"], 3, 2, **cuts)
        got = ops.mla_decode(*query, *cache, *tables, parts, ends, SCALE, **cuts)
        plan: Any = api.plan_decode(a["cache_seqlens"], 3, 2, **cuts)
        assert same(got, decode(*query, *cache, *tables, plan, SCALE))
    with pytest.raises(ValueError, match="plan_parts"):
        ops.mla_decode(*query, *cache, *tables, parts, ends[:-1], SCALE)


def test_results_can_be_given() -> None:
    a = arrays()
    want = step(a)
    cache = [a[name] for name in CACHE]
    query = ops.quantize_q(a["q"])
    parts, ends = ops.plan_decode(a["cache_seqlens"], 3, 2)
    out, lse = torch.empty_like(want[0]), torch.empty_like(want[1])
    room = torch.empty(64, dtype=torch.uint8)  # the reference needs none
    tables = (a["block_table"], a["cache_seqlens"])
    ops.mla_decode_out(*query, *cache, *tables, parts, ends, SCALE, out, lse, room)
    assert same((out, lse), want)


def test_opcheck() -> None:
    """torch's own checks of schemas, fake implementations and registrations. Its comparison of
    arguments cannot take float8, so the codes go in as uint8, and operators that return float8 are
    left out of the check of schemas."""
    a = arrays()
    cache = [a["ckv_cache"].view(torch.uint8), a["k_scale_cache"], a["k_rope_cache"]]
    q_nope, q_rope, q_scale = ops.quantize_q(a["q"])
    query = (q_nope.view(torch.uint8), q_rope, q_scale)
    parts, ends = ops.plan_decode(a["cache_seqlens"], 3, 2)
    decode = (*query, *cache, a["block_table"], a["cache_seqlens"], parts, ends, SCALE)
    out, lse = ops.mla_decode(*decode)
    room = torch.empty(64, dtype=torch.uint8)
    calls: dict[str, tuple[Any, ...]] = {
        "append_kv": (a["kv_c"], a["k_pe"], *cache, a["slots"]),
        "quantize_q": (a["q"],),
        "prepare": (a["q"], a["kv_c"], a["k_pe"], *cache, a["slots"]),
        "fetch_dequant": (*cache, a["slots"]),
        "plan_decode": (a["cache_seqlens"], 3, 2),
        "mla_decode": decode,
        "mla_decode_out": (*decode, out.clone(), lse.clone(), room),
        "merge_states": (out, lse, out, lse),
    }
    assert set(calls) == set(torch_ops.SCHEMAS)
    for name, given in calls.items():
        tests = ["test_faketensor", "test_autograd_registration"]
        tests += ["test_schema"] * (name not in ("quantize_q", "prepare"))
        torch.library.opcheck(getattr(ops, name).default, given, test_utils=tests)


def test_compiled_code_gives_the_same_bytes() -> None:
    """The whole step traced without a graph break; in-place writes to the cache are seen."""
    want_cache, got_cache = arrays(), arrays()
    want = step(want_cache)
    got = torch.compile(step, backend="aot_eager", fullgraph=True)(got_cache)
    assert same(got, want)
    assert same([got_cache[n] for n in CACHE], [want_cache[n] for n in CACHE])


def test_export_sees_the_operators() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Any, cache_seqlens: Any) -> Any:
            q_nope, _, q_scale = torch.ops.snapmla.quantize_q(q)
            parts, ends = torch.ops.snapmla.plan_decode(cache_seqlens, 3, 2)
            return q_nope, q_scale, parts, ends

    a = arrays()
    given = (a["q"], a["cache_seqlens"])
    exported = torch.export.export(Layer(), given)
    targets = [str(node.target) for node in exported.graph.nodes]
    assert "snapmla.quantize_q.default" in targets and "snapmla.plan_decode.default" in targets
    assert same(exported.module()(*given), Layer()(*given))


def test_gradients_are_refused_in_words() -> None:
    a = arrays()
    q = a["q"].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="quantize_q has no backward"):
        ops.quantize_q(q)
    with torch.no_grad():
        assert same(ops.quantize_q(q), ops.quantize_q(a["q"]))
    out = torch.randn(1, 1, 2, 8, requires_grad=True)
    lse = torch.zeros(1, 2, 1)
    with pytest.raises(RuntimeError, match=r"merge_states has no backward.*no_grad"):
        ops.merge_states(out, lse, out, lse)


def test_importing_does_not_import_torch() -> None:
    code = """
import sys
import snapmla_rt.torch_ops, snapmla_rt.compat.flash_mla, snapmla_rt.compat.flash_mla_fp8
assert "torch" not in sys.modules
ops = snapmla_rt.torch_ops.register()
import torch
assert ops is torch.ops.snapmla and snapmla_rt.torch_ops.register() is ops
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
