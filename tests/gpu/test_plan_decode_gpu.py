"""The schedule kernel gives the reference's integers, for every batch, mode and buffer size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compare import assert_same_bytes
from decode_gpu import filled, put

from snapmla_rt import api
from snapmla_rt.array import to_host
from snapmla_rt.config import MAX_CACHE_SEQLEN
from snapmla_rt.plan import DecodePlan, PlanConfig
from snapmla_rt.reference.plan_decode import plan_decode as reference_plan

MODES: tuple[dict[str, Any], ...] = (
    {},
    {"num_splits": 1},
    {"num_splits": 3},
    {"num_splits": 64},
    {"batch_invariant": 128},
    {"batch_invariant": True},
    {"block_n": 128},
    {"block_n": 128, "num_splits": 5},
    {"block_n": 128, "batch_invariant": 256},
)


def check(lengths: np.ndarray, heads: int, seq_len_q: int, **options: Any) -> None:
    """Kernel against reference, in buffers full of 0xA5 that are larger than needed."""
    options = {"num_sms": 132, **options}
    want = reference_plan(lengths, heads, seq_len_q, **options)
    parts = filled((want.config.num_parts + 3, 8), "int32", 0xA5)
    num_splits = filled((len(lengths) + 7,), "int32", 0xA5)
    room = DecodePlan(PlanConfig(1, 1), 0, parts, num_splits)
    plan = api.plan_decode(put(lengths.astype(np.int32)), heads, seq_len_q, out=room, **options)
    assert plan.config == want.config and plan.batch == len(lengths)
    got_parts, got_splits = to_host(parts), to_host(num_splits)
    named = f"{options} of {len(lengths)} lengths {lengths[:8]}"
    assert_same_bytes(f"parts {named}", got_parts[: len(want.parts)], want.parts)
    assert_same_bytes(f"num_splits {named}", got_splits[: len(lengths) + 1], want.num_splits)
    beyond = np.uint32(0xA5A5A5A5).view(np.int32)
    assert (got_parts[len(want.parts) :] == beyond).all(), "written beyond num_parts"
    assert (got_splits[len(lengths) + 1 :] == beyond).all(), "written beyond the batch"


def lengths_of(rng: np.random.Generator, kind: int, batch: int) -> np.ndarray:
    """Equal, ragged, mostly empty, one long among short, edges of blocks, and the longest."""
    if kind == 0:
        return np.full(batch, rng.integers(0, 9000))
    if kind == 1:
        return rng.integers(0, 9000, batch)
    if kind == 2:
        return np.where(rng.random(batch) < 0.9, 0, rng.integers(0, 5000, batch))
    if kind == 3:
        lengths = rng.integers(0, 200, batch)
        lengths[rng.integers(batch)] = rng.integers(0, MAX_CACHE_SEQLEN + 1)
        return lengths
    if kind == 4:
        return 64 * rng.integers(0, 40, batch) + rng.integers(-1, 2, batch).clip(0)
    return np.minimum(1 << rng.integers(0, 21, batch), MAX_CACHE_SEQLEN)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_fuzzed_lengths(mode: dict[str, Any]) -> None:
    rng = np.random.default_rng(len(str(mode)))
    for turn in range(60):
        batch = int(rng.choice([1, 2, 31, 32, 33, 64, 127, 132, 500, 2000]))
        heads, seq_len_q = int(rng.integers(1, 129)), int(rng.choice([1, 2, 4, 300]))
        num_sms = int(rng.choice([132, 132, 1, 2, 78, 131, 400]))
        lengths = lengths_of(rng, turn % 6, batch)
        if mode.get("batch_invariant") == 128 and lengths.sum() > 4_000_000:
            lengths = lengths // 16  # the reference's loop is over splits
        check(lengths, heads, seq_len_q, num_sms=num_sms, **mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("batch", [1, 7, 132, 133, 1000])
def test_all_zero(batch: int, mode: dict[str, Any]) -> None:
    check(np.zeros(batch, np.int64), 64, 1, **mode)


@pytest.mark.parametrize("batch", [4095, 4096, 4097, 12000])
def test_large_batches(batch: int) -> None:
    """Nothing is kept per request on the SM, so there is no limit near what others have."""
    rng = np.random.default_rng(batch)
    check(rng.integers(0, 300, batch), 16, 1)
    check(rng.integers(0, 300, batch), 16, 1, num_splits=2)


def test_an_empty_batch() -> None:
    check(np.zeros(0, np.int64), 16, 1)


def test_new_buffers_follow_the_device() -> None:
    """Without `out` the plan is made for the GPU's own SM count."""
    from snapmla_rt.driver.device import device_info

    plan = api.plan_decode(put(np.array([100, 7], np.int32)), 128, 2)
    want = reference_plan([100, 7], 128, 2, num_sms=device_info(0).num_sms)
    assert plan.config == want.config
    assert_same_bytes("parts", plan.parts.numpy(), want.parts)
    assert_same_bytes("num_splits", plan.num_splits.numpy(), want.num_splits)
