"""plan_decode and mla_decode without a GPU: the reference backend, every wrong argument, sizes, and
the host side of a GPU call against a stand-in driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import assert_same_bytes
from decode_cases import DecodeSpec, build

from snapmla_rt import ArgumentError, DecodePlan, decode_workspace_size, mla_decode, plan_decode
from snapmla_rt.config import MAX_CACHE_SEQLEN
from snapmla_rt.plan import PlanConfig, plan_config
from snapmla_rt.reference.mla_decode import mla_decode as reference_decode
from snapmla_rt.reference.plan_decode import plan_decode as reference_plan

SCALE = 576**-0.5
ROOT = Path(__file__).resolve().parents[1]


def small(**changes: Any) -> DecodeSpec:
    values: dict[str, Any] = {"seed": 3, "num_heads_q": 3, "seq_len_q": 2, "lengths": (70, 0, 5)}
    return DecodeSpec(**{**values, **changes})


def arguments(**changes: Any) -> dict[str, Any]:
    """The arguments of a good call by name, some replaced."""
    case = build(small())
    names = ("q_nope", "q_rope", "q_scale", "ckv_cache", "k_scale_cache", "k_rope_cache")
    named: dict[str, Any] = dict(zip(names, (*case.query, *case.paged), strict=True))
    named |= {"block_table": case.block_table, "cache_seqlens": case.cache_seqlens}
    named |= {"plan": plan_decode(case.cache_seqlens, 3, 2), "softmax_scale": SCALE}
    return {**named, **changes}


# --- The reference backend -----------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["separate", "record", "strided"])
@pytest.mark.parametrize("causal", [True, False])
def test_host_arrays_give_the_reference(layout: str, causal: bool) -> None:
    case = build(small(layout=layout, causal=causal))
    plan = plan_decode(case.cache_seqlens, 3, 2)
    want_plan = reference_plan(case.cache_seqlens, 3, 2)
    assert_same_bytes("parts", plan.parts, want_plan.parts)
    assert_same_bytes("num_splits", plan.num_splits, want_plan.num_splits)
    arguments = (*case.query, *case.paged, case.block_table, case.cache_seqlens)
    out, lse = mla_decode(*arguments, plan, SCALE, causal=causal)
    want_out, want_lse = reference_decode(*arguments, want_plan, SCALE, causal=causal)
    assert out.dtype == ml_dtypes.bfloat16 and lse.dtype == np.float32
    assert_same_bytes("out", out, want_out)
    assert_same_bytes("lse", lse, want_lse)
    only = mla_decode(*arguments, plan, SCALE, causal=causal, return_lse=False)
    assert_same_bytes("out alone", only, want_out)


def test_results_go_where_they_are_told() -> None:
    out, lse = np.zeros((3, 2, 3, 512), np.uint16), np.zeros((3, 3, 2), np.float32)
    want_out, want_lse = mla_decode(**arguments())
    got = mla_decode(**arguments(out=out, lse=lse))
    assert got[0] is out and got[1] is lse
    assert_same_bytes("out", out, want_out.view(np.uint16))
    assert_same_bytes("lse", lse, want_lse)


def test_raw_codes_are_accepted() -> None:
    want, _ = mla_decode(**arguments())
    raw = {
        name: np.asarray(array).view(np.uint8 if "ckv" in name or "nope" in name else np.uint16)
        for name, array in arguments().items()
        if name in ("q_nope", "q_rope", "ckv_cache", "k_rope_cache")
    }
    assert_same_bytes("out", mla_decode(**arguments(**raw))[0], want)


def test_plan_buffers_may_be_larger() -> None:
    """One pair of buffers, sized for the largest batch and the most parts, serves every step."""
    lengths = np.array([70, 0, 5], np.int32)
    room = DecodePlan(
        PlanConfig(1, 1), 64, np.full((200, 8), -9, np.int32), np.full(65, -9, np.int32)
    )
    plan = plan_decode(lengths, 3, 2, out=room)
    assert plan.batch == 3 and plan.parts is room.parts and plan.num_splits is room.num_splits
    want = reference_plan(lengths, 3, 2)
    assert_same_bytes("parts", plan.parts[: plan.config.num_parts], want.parts)
    assert_same_bytes("num_splits", plan.num_splits[:4], want.num_splits)
    assert (plan.parts[plan.config.num_parts :] == -9).all() and (plan.num_splits[4:] == -9).all()
    assert_same_bytes("out", mla_decode(**arguments(plan=plan))[0], mla_decode(**arguments())[0])
    assert plan_decode(lengths, 3, 2, out=plan) is plan, "the same step again is the same plan"
    assert plan_decode(lengths[:2], 3, 2, out=plan).batch == 2


def test_an_empty_batch() -> None:
    plan = plan_decode(np.zeros(0, np.int32), 3, 2)
    empty = {
        "q_nope": np.zeros((0, 2, 3, 512), np.uint8),
        "q_rope": np.zeros((0, 2, 3, 64), np.uint16),
        "q_scale": np.zeros((0, 2, 3), np.float32),
        "block_table": np.zeros((0, 4), np.int32),
        "cache_seqlens": np.zeros(0, np.int32),
    }
    out, lse = mla_decode(**arguments(plan=plan, **empty))
    assert out.shape == (0, 2, 3, 512) and lse.shape == (0, 3, 2)


# --- Wrong arguments -----------------------------------------------------------------------------


def change(name: str, edit: Any) -> dict[str, Any]:
    return {name: edit(arguments()[name])}


def other_plan(lengths: tuple[int, ...] = (70, 0, 5), heads: int = 3, seq_len_q: int = 2) -> Any:
    return {"plan": plan_decode(np.array(lengths, np.int32), heads, seq_len_q)}


WRONG = {
    "q_nope 3-D": ("q_nope", lambda: change("q_nope", lambda x: x[0])),
    "q_nope width": ("q_nope", lambda: change("q_nope", lambda x: x[..., :448])),
    "q_nope dtype": ("q_nope", lambda: change("q_nope", lambda x: x.view(np.int8))),
    "q_nope list": ("q_nope", lambda: change("q_nope", lambda x: x.tolist())),
    "q_nope heads apart": (
        "q_nope",
        lambda: change("q_nope", lambda x: np.repeat(x, 2, axis=1)[:, ::2]),
    ),
    "q_rope heads": ("q_rope", lambda: change("q_rope", lambda x: x[:, :, :2])),
    "q_rope dtype": ("q_rope", lambda: change("q_rope", lambda x: x.astype(np.float32))),
    "q_scale shape": ("q_scale", lambda: change("q_scale", lambda x: x.transpose(0, 2, 1))),
    "q_scale dtype": ("q_scale", lambda: change("q_scale", lambda x: x.astype(np.float64))),
    "block size": (
        "ckv_cache",
        lambda: change("ckv_cache", lambda x: x[: len(x) // 2 * 2].reshape(-1, 128, 512)),
    ),
    "ckv dtype": ("ckv_cache", lambda: change("ckv_cache", lambda x: x.view(np.int8))),
    "ckv without blocks": (
        "ckv_cache",
        lambda: {
            name: arguments()[name][:0] for name in ("ckv_cache", "k_scale_cache", "k_rope_cache")
        },
    ),
    "ckv token stride": (
        "ckv_cache",
        lambda: change("ckv_cache", lambda x: np.zeros((*x.shape[:2], 520), np.uint8)[..., :512]),
    ),
    "ckv overlapping blocks": (
        "ckv_cache",
        lambda: change("ckv_cache", lambda x: np.broadcast_to(x[:1], x.shape)),
    ),
    "k_scale blocks": ("k_scale_cache", lambda: change("k_scale_cache", lambda x: x[:-1])),
    "k_scale dtype": (
        "k_scale_cache",
        lambda: change("k_scale_cache", lambda x: x.astype(np.float16)),
    ),
    "k_rope width": ("k_rope_cache", lambda: change("k_rope_cache", lambda x: x[..., :32])),
    "table 1-D": ("block_table", lambda: change("block_table", lambda x: x[0])),
    "table batch": ("block_table", lambda: change("block_table", lambda x: x[:2])),
    "table dtype": ("block_table", lambda: change("block_table", lambda x: x.astype(np.int64))),
    "seqlens dtype": (
        "cache_seqlens",
        lambda: change("cache_seqlens", lambda x: x.astype(np.int64)),
    ),
    "seqlens batch": ("cache_seqlens", lambda: change("cache_seqlens", lambda x: x[:2])),
    "seqlens 2-D": ("cache_seqlens", lambda: change("cache_seqlens", lambda x: x[None])),
    "plan of another batch": ("plan", lambda: other_plan((70, 0))),
    "plan of other heads": ("plan", lambda: other_plan(heads=4)),
    "plan of another s_q": ("plan", lambda: other_plan(seq_len_q=1)),
    "plan of other lengths": ("plan", lambda: other_plan((70, 0, 500))),
    "plan of another kind": ("plan", lambda: {"plan": (1, 2)}),
    "plan buffers cut": (
        "plan.num_splits",
        lambda: {
            "plan": DecodePlan(
                plan_config(3, 2), 3, arguments()["plan"].parts, np.zeros(3, np.int32)
            )
        },
    ),
    "scale 0": ("softmax_scale", lambda: {"softmax_scale": 0.0}),
    "scale negative": ("softmax_scale", lambda: {"softmax_scale": -1.0}),
    "scale NaN": ("softmax_scale", lambda: {"softmax_scale": float("nan")}),
    "scale inf": ("softmax_scale", lambda: {"softmax_scale": float("inf")}),
    "scale text": ("softmax_scale", lambda: {"softmax_scale": "1"}),
    "scale bool": ("softmax_scale", lambda: {"softmax_scale": True}),
    "scale array": ("softmax_scale", lambda: {"softmax_scale": np.ones(1)}),
    "causal": ("causal", lambda: {"causal": 2}),
    "out shape": ("out", lambda: {"out": np.zeros((3, 3, 2, 512), np.uint16)}),
    "out dtype": ("out", lambda: {"out": np.zeros((3, 2, 3, 512), np.float32)}),
    "out strided": ("out", lambda: {"out": np.zeros((3, 2, 3, 1024), np.uint16)[..., ::2]}),
    "out read-only": (
        "out",
        lambda: {"out": np.broadcast_to(np.zeros(512, np.uint16), (3, 2, 3, 512))},
    ),
    "lse shape": ("lse", lambda: {"lse": np.zeros((3, 2, 3), np.float32)}),
    "lse dtype": ("lse", lambda: {"lse": np.zeros((3, 3, 2), np.float64)}),
    "backend": ("backend", lambda: {"backend": "gpu"}),
}


@pytest.mark.parametrize("what", WRONG)
def test_every_wrong_argument_is_named(what: str) -> None:
    name, changes = WRONG[what]
    with pytest.raises(ArgumentError) as caught:
        mla_decode(**arguments(**changes()))
    assert caught.value.name == name, str(caught.value)
    assert isinstance(caught.value, ValueError) and "expected" in str(caught.value)


def test_the_block_size_is_said() -> None:
    with pytest.raises(ArgumentError, match="block_size must be 64"):
        mla_decode(**arguments(**WRONG["block size"][1]()))


WRONG_PLAN: dict[str, list[dict[str, Any]]] = {
    "cache_seqlens": [
        {"cache_seqlens": np.zeros((2, 2), np.int32)},
        {"cache_seqlens": np.zeros(2, np.int64)},
        {"cache_seqlens": np.array([-1], np.int32)},
        {"cache_seqlens": np.array([MAX_CACHE_SEQLEN + 1], np.int32)},
        {"cache_seqlens": [1, 2]},
    ],
    "num_heads_q": [{"num_heads_q": 0}, {"num_heads_q": 129}, {"num_heads_q": 1.5}],
    "seq_len_q": [{"seq_len_q": 0}, {"seq_len_q": True}],
    "num_splits": [{"num_splits": 0}],
    "batch_invariant": [{"batch_invariant": 100}, {"batch_invariant": True, "num_splits": 2}],
    "block_n": [{"block_n": 32}],
    "max_seqlen": [{"max_seqlen": -1}, {"max_seqlen": 1.5}, {"max_seqlen": 1 << 21}],
    "num_sms": [{"num_sms": 0}],
    "out": [{"out": (1, 2)}],
    "out.parts": [
        {"out": DecodePlan(PlanConfig(1, 1), 2, np.zeros((9, 8), np.int32), np.zeros(9, np.int32))}
    ],
    "out.num_splits": [
        {
            "out": DecodePlan(
                PlanConfig(1, 1), 2, np.zeros((132, 8), np.int32), np.zeros(2, np.int32)
            )
        }
    ],
    "backend": [{"backend": "gpu"}],
}


@pytest.mark.parametrize(
    ("name", "changes"), [(name, c) for name, changes in WRONG_PLAN.items() for c in changes]
)
def test_every_wrong_argument_of_plan_decode_is_named(name: str, changes: dict[str, Any]) -> None:
    good: dict[str, Any] = {"cache_seqlens": np.array([3, 4], np.int32), "num_heads_q": 1}
    with pytest.raises(ArgumentError) as caught:
        plan_decode(**{**good, "seq_len_q": 1, **changes})
    assert caught.value.name == name, str(caught.value)


# --- Sizes ---------------------------------------------------------------------------------------


def test_workspace_size() -> None:
    """Exactly what the layout needs: partial outputs and their lse, plus an lse for calls that
    return none; nothing but that for plans that cannot split."""
    rows = 16 * 2
    balanced = plan_config(16, 2)
    splits = 5 + balanced.num_parts
    assert decode_workspace_size(balanced, 5) == splits * rows * (2048 + 4) + 5 * rows * 4
    unsplit = plan_config(16, 2, num_splits=1)
    assert decode_workspace_size(unsplit, 5) == 5 * rows * 4
    fixed = plan_config(16, 2, num_splits=3)
    assert decode_workspace_size(fixed, 5) == 15 * rows * (2048 + 4) + 5 * rows * 4
    invariant = plan_config(16, 2, batch_invariant=True)
    wanted = 5 * 4 * rows * (2048 + 4) + 5 * rows * 4
    assert decode_workspace_size(invariant, 5, 8192) == wanted
    plan = plan_decode(np.zeros(5, np.int32), 16, 2, batch_invariant=True, max_seqlen=8192)
    assert decode_workspace_size(plan) == wanted, "the plan knows its batch and longest request"
    assert decode_workspace_size(plan, 7, 2048) == 7 * rows * 4
    for arguments, name in (
        ((None, 5), "plan"),
        ((balanced, None), "max_batch"),
        ((balanced, -1), "max_batch"),
        ((balanced, 5, -1), "max_seqlen"),
    ):
        with pytest.raises(ArgumentError) as caught:
            decode_workspace_size(*arguments)  # type: ignore[arg-type]
        assert caught.value.name == name


def test_workspace_covers_every_plan() -> None:
    """Fuzzed lengths never need more splits than the size was computed for."""
    rng = np.random.default_rng(5)
    modes: list[dict[str, Any]] = [{}, {"num_splits": 4}, {"batch_invariant": 128}]
    for _ in range(60):
        batch, longest = int(rng.integers(1, 40)), int(rng.integers(1, 3000))
        lengths = rng.integers(0, longest + 1, batch).astype(np.int32)
        heads, seq_len_q = int(rng.integers(1, 129)), int(rng.integers(1, 5))
        for mode in modes:
            plan = plan_decode(lengths, heads, seq_len_q, **mode)
            most = plan.config.max_total_splits(batch, longest)
            assert plan.num_splits[-1] <= most, (lengths, mode)
